"""One of fedgg's engines, named on the command line as JSON, for instance '{"name": "loop"}'."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from fedgg.bench.bench_kit import MODELS, DriverConnection, device, members_of, raw, settings_of, start_of
from fedgg.core.evaluation import evaluate
from fedgg.data.user_arrays import KEYS, from_arrays
from fedgg.lab.build import Federation, build
from fedgg.lab.config import Experiment
from fedgg.lab.engine_setup import arithmetic, build_engine
from fedgg.lab.one_round import State, begin
from fedgg.lab.runner import play_round

NEVER = 1_000_000  # rounds; the driver ends the run


def main() -> None:
    driver, federation = DriverConnection(), federation_of({"device": str(device()), **json.loads(sys.argv[1])})
    with arithmetic(federation.experiment), ExitStack() as stack:
        engine: Any = build_engine(federation.choice, federation.experiment.engine)
        if hasattr(engine, "__enter__"):  # engines that start processes end them with this block
            engine = stack.enter_context(engine)
        elif hasattr(engine, "close"):
            stack.callback(engine.close)
        state = [begin(federation)]
        driver.ready()
        while driver.round_wanted(lambda: score(federation, state[0])):
            state[0], _ = play_round(federation, state[0], engine)
            driver.done()


def federation_of(engine: dict[str, Any]) -> Federation:
    """The workload as an experiment; its clients replace those of the split, which fedgg has no scheme for."""
    arrays = raw()
    settings, members = settings_of(arrays), members_of(arrays)
    experiment = Experiment(
        rounds=NEVER,
        split={"scheme": "iid", "clients": len(members)},
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
    module = MODELS[settings.model]()
    module.load_state_dict(start_of(arrays))
    x_train, y_train, x_test, y_test = (arrays[name] for name in KEYS)
    dataset = from_arrays(x_train, y_train, x_test, y_test)
    federation = build(experiment, model=module, data=dataset)
    return replace(federation, feed=replace(federation.feed, clients=tuple(members)))


def score(federation: Federation, state: State) -> float:
    return evaluate(federation.net, state.server.w, state.server.buffers, federation.feed.test_chunks()).values[
        "accuracy"
    ]


if __name__ == "__main__":
    main()
