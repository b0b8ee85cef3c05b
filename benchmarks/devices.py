"""Two processes on the devices of one machine instead of one: a study of 24 runs, and a single run.

    python benchmarks/devices.py --device cuda --data-folder DATA --out devices.json
    python benchmarks/devices.py --device cuda --devices cuda:0,cuda:1 --data-folder DATA   # on two GPUs
    python benchmarks/devices.py --device cuda --only single --model vgg16 --rounds 5 --data-folder DATA
    python benchmarks/devices.py --tiny                                # a trial on a CPU with digits, without CIFAR-10

The study is that of experiments/cifar10.toml (four algorithms, two splits, three seeds), with fewer rounds. Each way is
a process of its own, from its start to its end, after one round of each that compiles kernels:

- one stack: all runs in one process, on the first device;
- stacks in turn: the stacks of the two processes, one after the other in one process;
- processes: one process for each of `--devices`, as `fedgg compare --device` does. Its stacks have the sizes of "stacks
  in turn", so that all models must have the same bits; those of "one stack" differ by rounding.

The single run is one of FedAvg, on the first device and with its clients spread over `--devices` by the engine
`devices`, in turns. `--model` and other settings (`--set local.epochs=1`) change it, not the study.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from conditions import add_common_options, conditions, present_device, save_results, table
from safetensors.torch import load_file

from fedgg.cluster.runners import runner_of
from fedgg.errors import UserError
from fedgg.lab.config import Experiment
from fedgg.lab.observer import Observer
from fedgg.lab.parallel_runs import run_stack
from fedgg.lab.run_processes import Job, stacks_of
from fedgg.lab.runner import run
from fedgg.lab.study import Study, load_study, run_study

STUDY = Path(__file__).parents[1] / "experiments" / "cifar10.toml"
WAYS = ("one stack", "stacks in turn", "processes")
ON_ONE, SPREAD = "one device", "spread"
TINY = {
    "data.source": "digits",
    "data.augment": "none",
    "split.clients": 4,
    "model.name": "linear",
    "local.epochs": 1,
    "engine.name": "stacked",
}


def study_of(options: argparse.Namespace) -> Study:
    study = load_study(STUDY)
    changes: dict[str, Any] = {"rounds": options.rounds, "server.checkpoint_every": None}
    changes |= {"engine.device": options.first, "engine.precision": options.precision}
    return replace(study, base=study.base.changed(changes | (TINY if options.tiny else {})))


def single_of(options: argparse.Namespace, way: str) -> Experiment:
    study = study_of(options)
    settings = dict(word.split("=", 1) for word in options.set)
    changes = {"engine.device": options.first if way == ON_ONE else options.devices, "engine.name": "auto"}
    if options.model is not None:
        changes["model.name"] = options.model
    return study.experiment(study.reference, study.seeds[0]).changed({**changes, **settings})


def run_part(way: str, out: Path, options: argparse.Namespace) -> None:
    """One way in this process."""
    if way in (ON_ONE, SPREAD):
        run(single_of(options, way), out=out, data_folder=options.data_folder)
        return
    study, devices = study_of(options), options.devices.split(",")

    def in_turn(jobs: list[Job], observer: Observer) -> None:
        for stack in stacks_of(jobs, len(devices)):
            run_stack(stack, observer)

    runners = {
        "one stack": None,
        "stacks in turn": in_turn,
        "processes": runner_of(options.devices, out, processes=None),
    }
    run_study(study, out, observer=Observer(), data_folder=options.data_folder, runner=runners[way])


def timed(way: str, out: Path, rounds: int, words: Sequence[str]) -> float:
    """Seconds of a process that computes this way."""
    started = time.perf_counter()
    call = [sys.executable, __file__, *words, "--rounds", str(rounds), "--part", way, "--folder", str(out)]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{way}: {done.stderr.strip().splitlines()[-1]}")
    return round(time.perf_counter() - started, 2)


def rounds_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def differences(folder: Path, other: Path) -> dict[str, Any]:
    """Between two folders of the same run: bits, the models' numbers, and the accuracy of any round in points."""
    a, b = (load_file(one / "model.safetensors") for one in (folder, other))
    accuracies = zip(rounds_in(folder), rounds_in(other), strict=True)
    return {
        "same_bits": (folder / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes(),
        "weights": max(float((a[name].double() - b[name].double()).abs().max()) for name in a),
        "accuracy_points": round(max(100 * abs(x["test_accuracy"] - y["test_accuracy"]) for x, y in accuracies), 3),
        "final_points": round(
            100 * abs(rounds_in(folder)[-1]["test_accuracy"] - rounds_in(other)[-1]["test_accuracy"]), 3
        ),
    }


def round_seconds(folder: Path) -> float:
    """Of training, the median of the rounds after the first."""
    seconds = [one["seconds"]["train"] for one in rounds_in(folder)]
    return statistics.median(seconds[1:] or seconds)


def measured_study(options: argparse.Namespace, words: Sequence[str], root: Path) -> dict[str, Any]:
    for way in WAYS:
        timed(way, root / "first" / way, 1, words)
    seconds = {way: timed(way, root / way, options.rounds, words) for way in WAYS}
    runs = [file.parent.relative_to(root / WAYS[0]) for file in sorted((root / WAYS[0]).glob("*/seed-*/summary.json"))]
    compared = {
        way: {str(place): differences(root / way / place, root / "processes" / place) for place in runs}
        for way in WAYS[:2]
    }
    return {"runs": len(runs), "seconds": seconds, "to_processes": compared}


def measured_single_run(options: argparse.Namespace, words: Sequence[str], root: Path) -> dict[str, Any]:
    folders: dict[str, list[Path]] = {ON_ONE: [], SPREAD: []}
    whole: dict[str, list[float]] = {ON_ONE: [], SPREAD: []}
    for way in folders:
        timed(way, root / "first" / way, 1, words)
    for turn in range(options.turns):
        for way, some in folders.items():
            some.append(root / f"{way} {turn}")
            whole[way].append(timed(way, some[-1], options.rounds, words))
    engines = {way: json.loads((some[0] / "versions.json").read_text())["engine"] for way, some in folders.items()}
    return {
        "seconds": whole,
        "round_seconds": {way: list(map(round_seconds, some)) for way, some in folders.items()},
        "engines": {way: f"{engine['name']}: {engine['reason']}" for way, engine in engines.items()},
        "difference": differences(folders[ON_ONE][0], folders[SPREAD][0]),
        "repeats_bit_for_bit": all(differences(folders[SPREAD][0], one)["same_bits"] for one in folders[SPREAD]),
    }


def show_study(study: dict[str, Any]) -> None:
    rows = []
    for way, seconds in study["seconds"].items():
        runs = study["to_processes"].get(way, {}).values()
        same = f"{sum(one['same_bits'] for one in runs)} of {len(runs)}" if runs else "-"
        most = [f"{max(one[key] for one in runs):.3g}" if runs else "-" for key in ("final_points", "accuracy_points")]
        rows.append([way, f"{seconds:.1f}", same, *most])
    head = ["study", "seconds", "same bits as processes", "largest difference at the end, points", "of any round"]
    print(table(head, rows), "\n")
    for place, one in study["to_processes"]["one stack"].items():
        print(f"{place}: one stack and processes differ by {one['accuracy_points']} points at most")


def show_single_run(single: dict[str, Any]) -> None:
    rows = []
    for way, times in single["round_seconds"].items():
        whole = statistics.median(single["seconds"][way])
        rows.append([way, f"{whole:.1f}", f"{statistics.median(times):.4f}", single["engines"][way]])
    print(table(["single run", "seconds", "of training in a round, median", "engine"], rows))
    print(
        f"spread: {single['difference']['accuracy_points']} points from one device in any round, weights differ by "
        f"{single['difference']['weights']:.3g}; the same bits again: {single['repeats_bit_for_bit']}"
    )


PARTS = {"study": (measured_study, show_study), "single": (measured_single_run, show_single_run)}


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_options(parser)
    parser.add_argument("--devices", help="one for each process (default: cuda:0,cuda:0; on a CPU cpu,cpu)")
    parser.add_argument("--data-folder", type=Path, help="with the files of CIFAR-10")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--precision", help="fp32, tf32 or bf16 (default: bf16; on a CPU fp32)")
    parser.add_argument("--turns", type=int, default=2, help="single runs of each kind")
    parser.add_argument("--model", help="of the single run, for instance vgg16 (default: that of the study)")
    parser.add_argument("--set", action="append", default=[], help="a setting of the single run, as KEY=VALUE")
    parser.add_argument("--only", choices=list(PARTS), help="the study or the single run alone")
    parser.add_argument("--tiny", action="store_true", help="a linear model on digits, as a test")
    parser.add_argument("--part", choices=[*WAYS, ON_ONE, SPREAD], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    on_gpu = options.device == "cuda"
    options.devices = options.devices or ("cuda:0,cuda:0" if on_gpu else "cpu,cpu")
    options.first = options.devices.split(",")[0]
    options.precision = options.precision or ("bf16" if on_gpu else "fp32")
    if options.tiny and options.part is None:
        options.rounds = min(options.rounds, 3)
    return options


def main(words: Sequence[str] | None = None) -> None:
    options = parsed(words)
    if options.part is not None:
        run_part(options.part, options.folder, options)
        return
    present_device(options.device)
    content: dict[str, Any] = {"conditions": conditions(options.device, options.commit)}
    content |= {"devices": options.devices, "precision": options.precision, "rounds": options.rounds}
    content |= {"model": options.model, "set": options.set}
    with tempfile.TemporaryDirectory(prefix="fedgg-devices-") as root:
        for name, (measure, show) in PARTS.items():
            if options.only in (None, name):
                content[name] = measure(options, list(sys.argv[1:] if words is None else words), Path(root) / name)
                save_results(content, options.out)
                show(content[name])


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
