"""What Ray costs a study of short runs: the same runs with `--jobs N` and with `--on ray:local --jobs N`, in turns.

    python benchmarks/ray_overhead.py --out ray-overhead.json         # 200 runs of about a second
    python benchmarks/ray_overhead.py --tiny                          # a trial: four runs of a fraction of one

FedAvg and three other algorithms on digits with a linear model. The number of rounds is chosen so that a run takes
`--seconds` of one core here. A study is a command of its own, from its start to its tables: Ray's start and end are
part of it. The memory of the command's own process is read every half a second while runs are at work, and its mean
over each tenth of them recorded.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conditions import conditions, save_results, table

from fedgg.errors import UserError

ALGORITHMS = ("fedavg", "fedprox", "scaffold", "fedgg")
WAYS = {"local": (), "ray": ("--on", "ray:local")}
LOOK_EVERY = 0.5  # seconds


def command(seeds: int, rounds: int, jobs: int, out: Path, *more: str) -> list[str]:
    named = [word for name in ALGORITHMS for word in ("--algorithm", name)]
    settings = ["--model", "linear", "--seeds", f"0-{seeds - 1}", "--rounds", str(rounds), "--jobs", str(jobs)]
    return [sys.executable, "-m", "fedgg", "compare", *named, *settings, "--out", str(out), *more]


def rounds_of(seconds: float) -> int:
    """How many rounds a run has that takes so long, from the seconds that a run of a hundred records."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "study"
        subprocess.run(command(1, 100, 1, out), check=True, capture_output=True)
        summaries = [json.loads(file.read_text()) for file in out.glob("*/*/summary.json")]
        each = statistics.mean(summary["seconds"] for summary in summaries) / 100
    return max(1, round(seconds / each))


def timed(words: list[str], out: Path) -> dict[str, Any]:
    """A study's seconds, and the megabytes of its driver by the number of runs that had finished."""
    started, memory = time.perf_counter(), list[tuple[int, float]]()
    with tempfile.TemporaryFile("w+") as output:
        call = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT)
        while call.poll() is None:
            status = Path(f"/proc/{call.pid}/status")
            lines = status.read_text().splitlines() if status.exists() else []
            resident = [int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS")]
            memory += [(len(list(out.glob("*/*/summary.json"))), size) for size in resident]
            time.sleep(LOOK_EVERY)
        if call.returncode:
            output.seek(0)
            raise UserError(f"{' '.join(words)}: {output.read().strip().splitlines()[-1]}")
    runs = len(list(out.glob("*/*/summary.json")))
    by_tenth = {
        str(tenth): [size for ended, size in memory if tenth * runs / 10 <= ended < (tenth + 1) * runs / 10]
        for tenth in range(10)
    }
    return {
        "seconds": round(time.perf_counter() - started, 1),
        "runs": runs,
        "driver_megabytes": {tenth: round(statistics.mean(some), 1) for tenth, some in by_tenth.items() if some},
    }


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=50, help="runs are four times as many")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a run, on one core")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--turns", type=int, default=2, help="studies of each kind")
    parser.add_argument("--tiny", action="store_true", help="one study of four runs of each kind, as a test")
    parser.add_argument("--out", type=Path, help="a JSON file for the results and their conditions")
    parser.add_argument("--commit", help="the commit to record if this folder is not a repository")
    options = parser.parse_args(words)
    if options.tiny:
        options.seeds, options.seconds, options.turns = 1, 0.1, 1
    return options


def main(words: Sequence[str] | None = None) -> None:
    options = parsed(words)
    rounds = rounds_of(options.seconds)
    content: dict[str, Any] = {"conditions": conditions("cpu", options.commit), "rounds": rounds, "turns": []}
    content |= {"seconds_of_a_run": options.seconds, "jobs": options.jobs}
    for _ in range(options.turns):
        turn = {}
        for way, more in WAYS.items():
            folder = Path(tempfile.mkdtemp(prefix="ray-overhead-"))
            try:
                turn[way] = timed(command(options.seeds, rounds, options.jobs, folder / way, *more), folder / way)
            finally:
                shutil.rmtree(folder)
        turn["ratio"] = round(turn["ray"]["seconds"] / turn["local"]["seconds"], 3)
        content["turns"].append(turn)
        save_results(content, options.out)
    rows = [
        [way, str(turn[way]["runs"]), f"{turn[way]['seconds']:.1f}", f"{turn['ratio']:.2f}" if way == "ray" else ""]
        + [f"{turn[way]['driver_megabytes'].get(part, float('nan')):.0f}" for part in ("1", "5", "9")]
        for turn in content["turns"]
        for way in WAYS
    ]
    print(table(["with", "runs", "seconds", "ratio", "driver MB after a tenth", "half", "nine tenths"], rows))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
