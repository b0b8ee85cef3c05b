"""The cost of a round for growing cohorts and populations: seconds and peak memory, checkpoints included.

    python benchmarks/growth.py --out growth            # about ten minutes on two idle cores; Linux only
    python benchmarks/growth.py --out growth --draw     # only the figure, from growth/growth.json

Each point is measured in a new process and a new run folder, with a checkpoint after every round, unless the one before
is still being written. All points are measured once per repeat, in random order, so that a busy minute of the machine
does not affect a single point only. Each client has four examples for every population, so that the work of a client is
always the same.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

ALGORITHMS = ("fedavg", "fedgg", "scaffold")
COHORTS = (10, 100, 1_000)  # of a population of 1,000
POPULATIONS = (100, 1_000, 10_000, 100_000)  # with a cohort of 50
EXAMPLES_PER_CLIENT = 4
FEATURES, HIDDEN, CLASSES = 32, 128, 10
TEST_EXAMPLES = 2_000
MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Point:
    """One point of the figure."""

    algorithm: str
    population: int
    cohort: int


def points(algorithms: list[str]) -> list[Point]:
    by_cohort = [Point(name, 1_000, cohort) for cohort in COHORTS for name in algorithms]
    return by_cohort + [Point(name, population, 50) for population in POPULATIONS for name in algorithms]


# In the process of one point ------------------------------------------------------------------------------------------


def run_point(point: Point, engine: str, warm_up: int, rounds: int, folder: Path) -> dict[str, Any]:
    """A whole run, with the time at which each of its rounds ended, checkpoint included."""
    import numpy as np
    import torch

    from fedgg.lab.config import Experiment
    from fedgg.lab.observer import Observer
    from fedgg.lab.runner import run

    torch.set_num_threads(1)
    numbers = np.random.default_rng(0)
    x = numbers.standard_normal((EXAMPLES_PER_CLIENT * max(POPULATIONS), FEATURES), dtype=np.float32)
    y = numbers.integers(0, CLASSES, len(x))
    used = EXAMPLES_PER_CLIENT * point.population
    # The run copies its examples. The other examples are copied here, so that examples take the same memory at every
    # point and differences are due to the library.
    ballast = x[used:].copy()
    experiment = Experiment(
        rounds=warm_up + rounds,
        split={"scheme": "iid", "clients": point.population, "min_examples": EXAMPLES_PER_CLIENT},
        model={"name": "mlp", "hidden": HIDDEN},
        algorithm={"name": point.algorithm},
        local={"epochs": 1, "batch": EXAMPLES_PER_CLIENT},
        server={"cohort": point.cohort, "checkpoint_every": 1},
        engine={"name": engine},
    )
    marks, work, build_peak = list[float](), list[float](), list[int]()

    class Timing(Observer):
        def on_start(self, run: str, rounds_done: int, rounds: int) -> None:
            build_peak.append(peak_memory(os.getpid()))
            reset_peak_memory()
            print("built", flush=True)
            self.mark()

        def on_round(self, run: str, record: dict[str, Any]) -> None:
            self.mark()

        def mark(self) -> None:
            marks.append(time.perf_counter())
            work.append(time.process_time())

    reset_peak_memory()
    began = time.perf_counter()
    data = (x[:used], y[:used], x[:TEST_EXAMPLES], y[:TEST_EXAMPLES])
    run(experiment, data=data, out=folder, observer=Timing())
    del ballast
    return {
        "build_seconds": marks[0] - began,
        "round_seconds": statistics.median(after - before for before, after in pairwise(marks[warm_up:])),
        "round_processor_seconds": statistics.median(after - before for before, after in pairwise(work[warm_up:])),
        "build_peak_mb": build_peak[0] / MEGABYTE,
        "peak_mb": peak_memory(os.getpid()) / MEGABYTE,
        "folder_mb": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / MEGABYTE,
    }


# In the process that measures -----------------------------------------------------------------------------------------


def measure(point: Point, engine: str, warm_up: int, rounds: int) -> dict[str, Any]:
    """One point in a new process; memory is the total of this process and its descendants."""
    folder = Path(tempfile.mkdtemp(prefix="fedgg-growth-"))
    arguments = json.dumps({"point": asdict(point), "engine": engine, "warm_up": warm_up, "rounds": rounds})
    command = [sys.executable, str(Path(__file__).resolve()), "--point", arguments, "--out", str(folder / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    peak = 0
    try:
        assert process.stdout is not None
        process.stdout.readline()
        while process.poll() is None:
            tree = process_tree(process.pid)
            if len(tree) > 1:  # a single process reports its exact peak itself
                peak = max(peak, sum(map(resident_memory, tree)))
            time.sleep(0.02)
        output, _ = process.communicate()
    finally:
        process.kill()
        shutil.rmtree(folder, ignore_errors=True)
    if process.returncode:
        raise SystemExit(f"{point} failed")
    measured = json.loads(output.splitlines()[-1])
    return {**asdict(point), **measured, "peak_mb": max(measured["peak_mb"], peak / MEGABYTE)}


def process_tree(root: int) -> list[int]:
    """A process and its descendants."""
    processes = [root]
    for process in processes:  # grows during the loop
        for children in Path(f"/proc/{process}/task").glob("*/children"):
            with suppress(OSError):
                processes += map(int, children.read_text().split())
    return processes


def resident_memory(process: int) -> int:
    """Current memory in bytes."""
    return _status(process, "VmRSS:")


def peak_memory(process: int) -> int:
    """The peak memory of this process since the last reset, in bytes."""
    return _status(process, "VmHWM:")


def reset_peak_memory() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _status(process: int, key: str) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith(key):
                return 1024 * int(line.split()[1])
    return 0


def conditions(engine: str, warm_up: int, rounds: int, repeats: int) -> dict[str, Any]:
    from importlib.metadata import version

    def git(*words: str) -> str:
        home = Path(__file__).parent
        return subprocess.run(["git", *words], cwd=home, capture_output=True, text=True).stdout.strip()

    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "machine": {
            "cpu": cpu[0].partition(":")[2].strip() if cpu else platform.processor(),
            "cores": os.cpu_count(),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
            "load_before": os.getloadavg()[0],
        },
        "commit": git("rev-parse", "--short", "HEAD") + ("-changed" if git("status", "--porcelain", "src") else ""),
        "versions": {name: version(name) for name in ("torch", "numpy")} | {"python": platform.python_version()},
        "engine": engine,
        "model": f"MLP {FEATURES}-{HIDDEN}-{CLASSES}, fp32",
        "data": f"generated, {EXAMPLES_PER_CLIENT} examples of {FEATURES} numbers a client, one local step",
        "each round": "a test on 2,000 examples and a checkpoint included",
        "warm_up": warm_up,
        "rounds": rounds,
        "repeats": repeats,
    }


def measure_all(
    algorithms: list[str], engine: str, warm_up: int, rounds: int, repeats: int
) -> Iterator[dict[str, Any]]:
    """Yields the results so far after each repeat."""
    settings = conditions(engine, warm_up, rounds, repeats)
    order, results = points(algorithms), []
    for repeat in range(repeats):
        random.Random(repeat).shuffle(order)
        for number, point in enumerate(order):
            result = measure(point, engine, warm_up, rounds)
            results.append(result)
            print(
                f"{repeat + 1}/{repeats} {number + 1:2}/{len(order)} {point.algorithm:9} {point.cohort:5} of "
                f"{point.population:7,}: {1000 * result['round_seconds']:7.1f} ms per round "
                f"({1000 * result['round_processor_seconds']:7.1f} of CPU time), peak {result['peak_mb']:4.0f} MB; "
                f"build {result['build_seconds']:.2f} s {result['build_peak_mb']:.0f} MB, "
                f"folder {result['folder_mb']:.0f} MB",
                flush=True,
            )
        yield {"conditions": settings | {"repeats": repeat + 1}, "measured": results}


# The figure -----------------------------------------------------------------------------------------------------------


CLOCKS = {"wall": ("round_seconds", "seconds per round"), "processor": ("round_processor_seconds", "CPU s per round")}


def draw(content: dict[str, Any], folder: Path, clock: str) -> None:
    from fedgg.report.figure_style import COLOURS, LINE_STYLES, blank, save, styled

    rows, settings = content["measured"], content["conditions"]
    titles = {"fedavg": "FedAvg", "fedgg": "FedGG", "scaffold": "SCAFFOLD"}
    measured = {row["algorithm"] for row in rows}
    seconds, seconds_label = CLOCKS[clock]

    def panel(axes: Any, key: str, along: str, label: str) -> None:
        chosen = [row for row in rows if (row["population"] == 1_000 if along == "cohort" else row["cohort"] == 50)]
        chosen = [row for row in chosen if along == "population" or row["cohort"] in COHORTS]
        for position, name in enumerate(ALGORITHMS):
            if name not in measured:
                continue
            style = {"color": COLOURS[position], "linestyle": LINE_STYLES[position]}
            of_algorithm = [row for row in chosen if row["algorithm"] == name]
            x, y = [row[along] for row in of_algorithm], [row[key] for row in of_algorithm]
            places = sorted(set(x))
            minimum = [min(value for at, value in zip(x, y, strict=True) if at == place) for place in places]
            axes.plot(places, minimum, marker="o", markersize=3.5, label=titles[name], **style)
            axes.plot(x, y, ".", color=COLOURS[position], alpha=0.35)
        axes.set_xscale("log")
        axes.set_xticks(sorted({row[along] for row in chosen}), [f"{n:,}" for n in sorted({r[along] for r in chosen})])
        axes.minorticks_off()
        axes.set_xlabel("clients a round, of 1,000" if along == "cohort" else "clients in all, 50 a round")
        axes.set_ylabel(label)
        axes.grid(axis="y")
        if key == seconds and along == "cohort":
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(
                lambda value, _: f"{value:g}"
            )  # not 10^-1: the figure style has no mathematical notation
            places = [min(COHORTS), max(COHORTS)]
            floor = min(row[key] for row in chosen if row[along] == places[1])
            guide = [0.7 * floor * place / places[1] for place in places]
            axes.plot(places, guide, color="#999999", linewidth=0.8, label="proportional")
        else:
            axes.set_ylim(0, 1.25 * max(row[key] for row in chosen))

    @styled
    def figure() -> Any:
        drawn = blank(8.0, 5.6)
        (a, b), (c, d) = drawn.subplots(2, 2)
        panel(a, seconds, "cohort", seconds_label)
        panel(b, seconds, "population", seconds_label)
        panel(c, "peak_mb", "cohort", "peak memory, MB")
        panel(d, "peak_mb", "population", "peak memory, MB")
        a.legend(loc="upper left")
        machine = settings["machine"]
        drawn.suptitle(
            f"One round, checkpoint included: {settings['model']}, engine {settings['engine']}, {machine['cores']} "
            f"cores, torch {settings['versions']['torch']}, commit {settings['commit']}\ndots: runs "
            f"({settings['repeats']} per point), each the median of {settings['rounds']} rounds; line: the minimum; "
            f"memory: the process with torch and data",
            x=0.01,
            ha="left",
            fontsize=8,
            color="#555555",
        )
        return drawn

    for kind in ("png", "svg"):
        save(figure(), folder / f"growth.{kind}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for growth.json, growth.png, growth.svg")
    parser.add_argument("--engine", default="fused", help="engine.name of the experiments (default: fused)")
    parser.add_argument("--algorithm", action="append", choices=ALGORITHMS, help="only this one; may be repeated")
    parser.add_argument("--rounds", type=int, default=12, help="rounds that are measured (default: 12)")
    parser.add_argument("--warm-up", type=int, default=3, help="rounds before them (default: 3)")
    parser.add_argument("--repeats", type=int, default=5, help="processes for each point (default: 5)")
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="the time in the figure; `processor` excludes waiting for the disk and for other programs, "
        "and is that of the main process only (default: wall; growth.json has both)",
    )
    parser.add_argument("--draw", action="store_true", help="only draw the figure from growth.json in the folder")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.point:
        arguments = json.loads(options.point)
        print(json.dumps(run_point(Point(**arguments.pop("point")), **arguments, folder=options.out)))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "growth.json"
    if not options.draw:
        algorithms = options.algorithm or list(ALGORITHMS)
        for content in measure_all(algorithms, options.engine, options.warm_up, options.rounds, options.repeats):
            path.write_text(json.dumps(content, indent=1) + "\n")
    draw(json.loads(path.read_text()), options.out, options.clock)


if __name__ == "__main__":
    main()
