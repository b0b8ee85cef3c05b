"""`fedgg tune`: search for settings of several algorithms, with the same number of trials for each."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from fedgg.cli import options
from fedgg.cli.options import called_as
from fedgg.cli.progress import processes_for
from fedgg.cli.terminal import Heartbeat, counted, described, note, print_table, progress, say
from fedgg.errors import UserError
from fedgg.lab.observer import Observer
from fedgg.registry import nearest


def tune(
    file: Annotated[
        Path | None, typer.Argument(help="A TOML file of a search; without one, the study of `fedgg compare`.")
    ] = None,
    algorithm: Annotated[
        list[str] | None,
        typer.Option(help="[LABEL@]NAME[:KEY=VALUE,...]; repeat it. What it sets is not searched."),
    ] = None,
    space: Annotated[
        list[str] | None,
        typer.Option(help="KEY=LOW..HIGH, KEY=LOW..HIGH:log or KEY=VALUE,VALUE; LABEL@KEY=... is for one algorithm."),
    ] = None,
    trials: Annotated[int | None, typer.Option(help="Trials of each algorithm; 20 by default.", min=1)] = None,
    sampler: Annotated[str | None, typer.Option(help="tpe or random.")] = None,
    pruner: Annotated[str | None, typer.Option(help="median, hyperband or none.")] = None,
    window: Annotated[
        int | None, typer.Option(help="A score is the mean of this many last evaluations; 1 by default.", min=1)
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds of every trial, as 0,1,2 or 0-4; 0 by default.")] = None,
    fresh_seeds: Annotated[
        str | None, typer.Option(help="Seeds of the final study; by default the three after those of the trials.")
    ] = None,
    data: options.DataOption = None,
    model: options.ModelOption = None,
    clients: options.ClientsOption = None,
    beta: options.BetaOption = None,
    rounds: options.RoundsOption = None,
    device: options.DeviceOption = None,
    settings: options.SetOption = None,
    jobs: Annotated[
        int | None, typer.Option(help="Processes that train the clients of a trial; one for each core.", min=1)
    ] = None,
    on: options.OnOption = None,
    resources: options.ResourcesOption = None,
    data_folder: options.DataFolderOption = None,
    out: options.OutOption = None,
    trust: options.TrustOption = None,
) -> None:
    """Search for the settings of several algorithms by Optuna, with the same number of trials for each.

    Trials are scored on the examples that clients hold out (data.holdout; 0.2 where it is not set), after every round,
    so that bad ones are pruned; the test set is not evaluated. The result is a study file with the best settings and
    seeds that no trial had, for `fedgg compare`. Called again, it keeps finished trials and runs those that are
    missing. Without `--space`, the learning rate and the settings for which an algorithm declares a range are searched.

    Examples:

    - `fedgg tune --algorithm fedavg --algorithm fedprox --algorithm fedgg --trials 20 --out runs/tuned`
    - `fedgg tune --space local.lr=0.001..1:log --space FedGG@algorithm.mu=0.01,0.1,1 --rounds 20`
    - `fedgg tune my-search.toml --pruner hyperband`
    - `fedgg tune my-search.toml --on ray:auto --out runs/tuned`
    - `fedgg compare runs/tuned/winners.toml`
    """
    from fedgg.cluster.runners import trials_runner_of
    from fedgg.lab.search_space import HOLDOUT, Search, read_search, spaces
    from fedgg.lab.study import Study, demo_study
    from fedgg.lab.tuning import NOTHING_GIVEN, STUDY, run_search
    from fedgg.tune_settings import TuningResult

    options.trust_all(trust)
    changed = options.changes(
        data=data, model=model, clients=clients, beta=beta, rounds=rounds, device=device, settings=settings
    )
    base, file_space, choices = read_search(file) if file else (demo_study(), {}, {})
    variants = options.variants(algorithm) if algorithm else base.variants
    trial_seeds = options.seeds(seeds) if seeds else base.seeds if file else (0,)
    choices |= {"trials": trials} if trials else {}
    choices |= {"sampler": sampler} if sampler else {}
    choices |= {"pruner": pruner} if pruner else {}
    choices |= {"window": window} if window else {}
    choices |= {"fresh_seeds": options.seeds(fresh_seeds)} if fresh_seeds else {}
    reference = next(iter(variants)) if algorithm else base.reference
    if any(key.startswith("personal.") for key in changed) and not base.base.data.holdout:
        changed = {"data.holdout": HOLDOUT, **changed}  # personal models are scored on what clients hold out
    study = Study(base.base.changed(changed), variants, trial_seeds, reference)
    chosen = Search(study, spaces(_merged(file_space, _space(space or [], variants)), variants), **choices)
    folder = out or Path("runs") / f"{file.stem if file else 'tune'}-{chosen.hash()[:6]}"
    seeds_shown = f"seed{'s' if len(study.seeds) > 1 else ''} {', '.join(map(str, study.seeds))}"
    of_each = f"{counted(chosen.trials, 'trial')} of each of {counted(len(study.variants), 'algorithm')}"
    say(f"{described(study.base)}, {seeds_shown}; {of_each}")
    processes = jobs or processes_for(study.base.engine.device)
    labels = tuple(chosen.space)
    trials_runner = trials_runner_of(on, labels, NOTHING_GIVEN, data_folder, processes=jobs, resources=resources)
    with progress() as bar:
        try:
            trials_run = run_search(
                chosen,
                folder,
                observer=SearchProgress(bar, chosen.trials * len(study.variants)),
                processes=processes,
                data_folder=data_folder,
                command=called_as(),
                trials_runner=trials_runner,
            )
        except KeyboardInterrupt:
            bar.stop()
            note("stopped; run the same command again to continue: finished trials are kept")
            raise typer.Exit(130) from None
    result = TuningResult(folder, chosen, trials_run)
    print_table(result.table, numbers=False)
    say(result.write_figure())
    say(f"all trials: {folder / 'trials.jsonl'}")
    say(f"to run the best settings with seeds that no trial had: fedgg compare {folder / STUDY}")


def _merged(of_file: dict[str, Any], of_command: dict[str, Any]) -> dict[str, Any]:
    """Keys of the command line take precedence, also within the table of a label."""
    merged = dict(of_file)
    for key, value in of_command.items():
        is_table = isinstance(value, dict) and "low" not in value
        merged[key] = {**of_file.get(key, {}), **value} if is_table else value
    return merged


def _space(texts: list[str], labels: Collection[str]) -> dict[str, Any]:
    """`--space` as the table [space] of a file; `labels` of the algorithms, which may be typed in any case."""
    space: dict[str, Any] = {}
    for text in texts:
        where, equals, values = text.partition("=")
        label, at, key = where.rpartition("@")
        if not equals or not key.strip() or not values.strip():
            raise UserError(f"--space {text!r} is not of the form KEY=LOW..HIGH or KEY=VALUE,VALUE")
        if at and label.lower() not in map(str.lower, labels):
            raise UserError(f"--space {text}: there is no algorithm {label!r}{nearest(label, labels)}")
        place = space.setdefault(label, {}) if at else space
        if key in place:
            raise UserError(f"--space {where} is named twice")
        low, dots, high = values.partition("..")
        high, colon, log = high.partition(":")
        if dots and log in ("", "log"):
            place[key] = {"low": options.parsed(low), "high": options.parsed(high), "log": bool(colon)}
        else:
            place[key] = [options.parsed(value.strip()) for value in options.split_values(values)]
    return space


class SearchProgress(Observer):
    """One progress bar for all trials."""

    def __init__(self, bar: Progress, trials: int):
        self.bar, self.heartbeat, self.rounds = bar, Heartbeat(), 0
        self.task = bar.add_task(counted(trials, "trial"), total=trials, news="", within="")

    def on_start(self, run: str, rounds_done: int, rounds: int) -> None:
        """Also of trials that an earlier call has finished."""
        self.rounds = rounds
        self.bar.update(self.task, within=run, advance=1 if rounds_done == rounds else 0)

    def on_round(self, run: str, record: dict[str, Any]) -> None:
        self.heartbeat(f"{run}: round {record['round']} of {self.rounds}")
        self.bar.update(self.task, within=f"{run}: round {record['round']} of {self.rounds}")

    def on_notice(self, run: str, message: str) -> None:
        """After every trial, and with an empty `run` about the search."""
        if not run:
            note(message)
            return
        self.heartbeat(f"{run}: {message}")
        self.bar.update(self.task, advance=1, news=f"{run}: {message}", within="")
