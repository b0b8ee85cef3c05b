"""fedgg itself, with the engine named on the command line as JSON, for instance '{"name": "loop"}'."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from fedgg.bench.kit.bench_kit import Line, cnn, device, members_of, raw, settings_of, start_of
from fedgg.core.evaluate import evaluate
from fedgg.data.arrays import KEYS, from_arrays
from fedgg.lab.build import build
from fedgg.lab.config import Experiment
from fedgg.lab.federation import Federation
from fedgg.lab.runner import make_engine
from fedgg.lab.state import State, begin, play_round
from fedgg.lab.torch_settings import arithmetic

NEVER = 1_000_000  # rounds: the driver says when it is over


def main() -> None:
    line, federation = Line(), federation_of({"device": str(device()), **json.loads(sys.argv[1])})
    with arithmetic(federation.experiment), ExitStack() as stack:
        engine: Any = make_engine(federation)
        if hasattr(engine, "__enter__"):  # engines with processes of their own end with this block
            engine = stack.enter_context(engine)
        elif hasattr(engine, "close"):
            stack.callback(engine.close)
        now = [begin(federation)]
        line.ready()
        while line.round_wanted(lambda: score(federation, now[0])):
            now[0], _ = play_round(federation, now[0], engine)
            line.done()


def federation_of(engine: dict[str, Any]) -> Federation:
    """The workload as an experiment. Its split is no scheme of fedgg's, so that the clients are put in afterwards."""
    arrays = raw()
    settings, members = settings_of(arrays), members_of(arrays)
    experiment = Experiment(
        rounds=NEVER,
        split={"scheme": "iid", "clients": len(members)},
        model={"name": "cnn"},
        algorithm={"name": "fedavg"},
        local={
            "epochs": settings.epochs,
            "batch": settings.batch,
            "lr": settings.lr,
            "momentum": settings.momentum,
        },
        server={"evaluate_every": NEVER, "checkpoint_every": NEVER},
        engine=engine,
    )
    module = cnn()
    module.load_state_dict(start_of(arrays))
    x_train, y_train, x_test, y_test = (arrays[name] for name in KEYS)
    dataset = from_arrays(x_train, y_train, x_test, y_test)
    federation = build(experiment, model=module, data=dataset)
    return replace(federation, feed=replace(federation.feed, clients=tuple(members)))


def score(federation: Federation, state: State) -> float:
    return evaluate(federation.net, state.server.w, state.server.buffers, federation.feed.test_chunks()).accuracy


if __name__ == "__main__":
    main()
