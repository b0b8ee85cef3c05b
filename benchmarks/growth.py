"""What a round costs as the cohort and the population grow: seconds and peak memory, checkpoints included.

    python benchmarks/growth.py --out growth            # some ten minutes on two quiet cores; Linux only
    python benchmarks/growth.py --out growth --draw     # the figure again, from growth/growth.json

Every point is measured in a fresh process, in a run folder of its own, with a checkpoint after every round. Points are
measured in turn, and all of them again for every repeat, so that a busy minute of the machine does not hit one of them
alone. Clients hold four examples each whatever the population, so that they do the same work everywhere.
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


def play(point: Point, engine: str, warm_up: int, rounds: int, folder: Path) -> dict[str, Any]:
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
    held = EXAMPLES_PER_CLIENT * point.population
    # The run copies the examples it is given. What it is not given is copied here, so that there are as many bytes of
    # examples in memory at every point, and what differs is what the library needs besides.
    ballast = x[held:].copy()
    experiment = Experiment(
        rounds=warm_up + rounds,
        split={"scheme": "iid", "clients": point.population, "min_examples": EXAMPLES_PER_CLIENT},
        model={"name": "mlp", "hidden": HIDDEN},
        algorithm={"name": point.algorithm},
        local={"epochs": 1, "batch": EXAMPLES_PER_CLIENT},
        server={"cohort": point.cohort},
        engine={"name": engine},
    )
    marks, work, build_peak = list[float](), list[float](), list[int]()

    class Timing(Observer):
        def on_start(self, run: str, rounds_done: int, rounds: int) -> None:
            build_peak.append(highest(os.getpid()))
            forget_highest()
            print("built", flush=True)
            self.mark()

        def on_round(self, run: str, record: dict[str, Any]) -> None:
            self.mark()

        def mark(self) -> None:
            marks.append(time.perf_counter())
            work.append(time.process_time())

    forget_highest()
    began = time.perf_counter()
    data = (x[:held], y[:held], x[:TEST_EXAMPLES], y[:TEST_EXAMPLES])
    run(experiment, data=data, out=folder, observer=Timing())
    del ballast
    return {
        "build_seconds": marks[0] - began,
        "round_seconds": statistics.median(after - before for before, after in pairwise(marks[warm_up:])),
        "round_processor_seconds": statistics.median(after - before for before, after in pairwise(work[warm_up:])),
        "build_peak_mb": build_peak[0] / MEGABYTE,
        "peak_mb": highest(os.getpid()) / MEGABYTE,
        "folder_mb": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / MEGABYTE,
    }


# In the process that measures -----------------------------------------------------------------------------------------


def measure(point: Point, engine: str, warm_up: int, rounds: int) -> dict[str, Any]:
    """One point in a process of its own; memory is that of the process and of all it started."""
    folder = Path(tempfile.mkdtemp(prefix="fedgg-growth-"))
    asked = json.dumps({"point": asdict(point), "engine": engine, "warm_up": warm_up, "rounds": rounds})
    words = [sys.executable, str(Path(__file__).resolve()), "--point", asked, "--out", str(folder / "run")]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    peak = 0
    try:
        assert process.stdout is not None
        process.stdout.readline()
        while process.poll() is None:
            tree = family(process.pid)
            if len(tree) > 1:  # a single one counts its own, and no glance from outside can miss its highest
                peak = max(peak, sum(map(resident, tree)))
            time.sleep(0.02)
        told, _ = process.communicate()
    finally:
        process.kill()
        shutil.rmtree(folder, ignore_errors=True)
    if process.returncode:
        raise SystemExit(f"{point} failed")
    measured = json.loads(told.splitlines()[-1])
    return {**asdict(point), **measured, "peak_mb": max(measured["peak_mb"], peak / MEGABYTE)}


def family(root: int) -> list[int]:
    """A process and all that descend from it."""
    found = [root]
    for process in found:
        for children in Path(f"/proc/{process}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, children.read_text().split())
    return found


def resident(process: int) -> int:
    """Bytes in memory now."""
    return _status(process, "VmRSS:")


def highest(process: int) -> int:
    """The peak memory of this process since the last reset, in bytes."""
    return _status(process, "VmHWM:")


def forget_highest() -> None:
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
    told = conditions(engine, warm_up, rounds, repeats)
    wanted, found = points(algorithms), []
    for repeat in range(repeats):
        random.Random(repeat).shuffle(wanted)
        for number, point in enumerate(wanted):
            found.append(measure(point, engine, warm_up, rounds))
            one = found[-1]
            print(
                f"{repeat + 1}/{repeats} {number + 1:2}/{len(wanted)} {point.algorithm:9} {point.cohort:5} of "
                f"{point.population:7,}: {1000 * one['round_seconds']:7.1f} ms a round "
                f"({1000 * one['round_processor_seconds']:7.1f} of the processor), {one['peak_mb']:4.0f} MB at most; "
                f"build {one['build_seconds']:.2f} s {one['build_peak_mb']:.0f} MB, folder {one['folder_mb']:.0f} MB",
                flush=True,
            )
        yield {"conditions": told | {"repeats": repeat + 1}, "measured": found}


# The figure -----------------------------------------------------------------------------------------------------------


CLOCKS = {"wall": ("round_seconds", "seconds a round"), "processor": ("round_processor_seconds", "processor s a round")}


def draw(content: dict[str, Any], folder: Path, clock: str) -> None:
    from fedgg.report.figure_style import COLOURS, LINE_STYLES, blank, save, styled

    rows, told = content["measured"], content["conditions"]
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
            own = [row for row in chosen if row["algorithm"] == name]
            places = sorted({row[along] for row in own})
            least = [min(row[key] for row in own if row[along] == place) for place in places]
            axes.plot(places, least, marker="o", markersize=3.5, label=titles[name], **style)
            axes.plot([row[along] for row in own], [row[key] for row in own], ".", color=COLOURS[position], alpha=0.35)
        axes.set_xscale("log")
        axes.set_xticks(sorted({row[along] for row in chosen}), [f"{n:,}" for n in sorted({r[along] for r in chosen})])
        axes.minorticks_off()
        axes.set_xlabel("clients a round, of 1,000" if along == "cohort" else "clients in all, 50 a round")
        axes.set_ylabel(label)
        axes.grid(axis="y")
        if key == seconds and along == "cohort":
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")  # the house style sets no mathematics
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
        machine = told["machine"]
        drawn.suptitle(
            f"One round, checkpoint included: {told['model']}, engine {told['engine']}, {machine['cores']} cores, "
            f"torch {told['versions']['torch']}, commit {told['commit']}\ndots: runs ({told['repeats']} a point), "
            f"each the median of {told['rounds']} rounds; line: the least; memory: the process with torch and data",
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
        help="what the figure shows; `processor` leaves out waiting for the disk and for others on a busy machine, "
        "and sees one process only (default: wall; growth.json has both)",
    )
    parser.add_argument("--draw", action="store_true", help="measure nothing, draw what lies in the folder")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.point:
        asked = json.loads(chosen.point)
        print(json.dumps(play(Point(**asked.pop("point")), **asked, folder=chosen.out)))
        return
    chosen.out.mkdir(parents=True, exist_ok=True)
    path = chosen.out / "growth.json"
    if not chosen.draw:
        algorithms = chosen.algorithm or list(ALGORITHMS)
        for content in measure_all(algorithms, chosen.engine, chosen.warm_up, chosen.rounds, chosen.repeats):
            path.write_text(json.dumps(content, indent=1) + "\n")
    draw(json.loads(path.read_text()), chosen.out, chosen.clock)


if __name__ == "__main__":
    main()
