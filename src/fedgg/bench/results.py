"""Results of a benchmark: the machine and code recorded with them, and `bench.json` as a table and a bar chart.

Imported without matplotlib, which the extra `bench` does not install.
"""

from __future__ import annotations

import os
import platform
import statistics
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedgg import __version__
from fedgg.analysis.labels import shortened
from fedgg.bench.contender_process import psutil
from fedgg.errors import UserError
from fedgg.files import read_json
from fedgg.lab.provenance import commit
from fedgg.report.tables import NONE, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def machine(device: str) -> dict[str, Any]:
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": psutil().virtual_memory().total,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "gpu": _gpu() if device == "cuda" else None,
    }


def code() -> dict[str, Any]:
    """The version of fedgg and, in a git repository, the commit and whether files differ from it."""
    return {"fedgg": __version__, **commit()}


def load_average() -> float:
    """The load average of the last minute."""
    return round(float(psutil().getloadavg()[0]), 2)


def free_memory() -> int:
    return int(psutil().virtual_memory().available)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


FORMAT = 1  # of bench.json
BELOW_MEDIAN = 0.05  # of accuracy: a contender further below the median does not train the same
ABOVE_CHANCE = 0.05
IDLE = 0.05  # of a core, used between a contender's turns
BUSY = 0.1  # cores used by other programs while a contender was timed
NAME_OF = {"fedgg": "fedgg", "loop": "plain PyTorch", "peer": "other frameworks"}


@dataclass(frozen=True)
class MeasuredContender:
    """One contender of `bench.json`, with figures computed from its rounds."""

    entry: dict[str, Any]
    seconds: tuple[float, ...]
    ratio: float | None  # to the reference: the median of the ratios of each turn
    flag: str | None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def start(self) -> float:
        """Seconds until it was ready, plus what its first round took longer: some load their data only then."""
        return float(self.entry["start_seconds"] + max(self.entry["first_round_seconds"] - self.median, 0.0))


@dataclass(frozen=True)
class BenchRecord:
    content: dict[str, Any]
    measured: tuple[MeasuredContender, ...]  # fastest first

    @property
    def others_cores(self) -> float:
        """Cores used by other programs, for the contender with most of it."""
        return max(
            (statistics.median(contender.entry["others_cores"] or [0.0]) for contender in self.measured), default=0.0
        )

    @property
    def not_measured(self) -> list[dict[str, Any]]:
        names = {contender.entry["name"] for contender in self.measured}
        return [entry for entry in self.content["contenders"] if entry["name"] not in names]


def read_bench(file: Path) -> BenchRecord:
    try:
        content = read_json(file)
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}): it is not a record of `fedgg bench`") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{file} is not a record of `fedgg bench` that this version can read")
    entries = content["contenders"]
    rounds: dict[str, list[float | None]] = {entry["name"]: entry["round_seconds"] for entry in entries}
    reference = rounds.get(content["reference"], [])
    median_accuracy = statistics.median([e["accuracy"] for e in entries if e["accuracy"] is not None] or [0.0])
    measured = [
        MeasuredContender(
            entry,
            tuple(seconds for seconds in entry["round_seconds"] if seconds is not None),
            _ratio(entry["round_seconds"], reference),
            _flag(entry, median_accuracy, content),
        )
        for entry in entries
        if any(seconds is not None for seconds in entry["round_seconds"])
    ]
    return BenchRecord(content, tuple(sorted(measured, key=lambda contender: contender.median)))


def _ratio(seconds: list[float | None], reference: list[float | None]) -> float | None:
    """The median over turns, because both had the same noise of the machine in a turn."""
    ratios = [mine / theirs for mine, theirs in zip(seconds, reference, strict=False) if mine and theirs]
    return statistics.median(ratios) if ratios else None


def _flag(entry: dict[str, Any], median_accuracy: float, content: dict[str, Any]) -> str | None:
    accuracy = entry["accuracy"]
    if entry["status"] == "failed":
        return f"failed later: {entry['why']}"
    if accuracy is None:
        return None
    if accuracy < 1 / content["workload"]["classes"] + ABOVE_CHANCE:
        return "does not learn, so its seconds cannot be compared"
    if accuracy < median_accuracy - BELOW_MEDIAN:
        return f"learns less than the others ({100 * (median_accuracy - accuracy):.0f} points below the median)"
    return None


def bench_table(record: BenchRecord) -> Table:
    columns = ("contender", "s/round", "min..max", "to tight", "GB", "acc. %", "start s")
    rows = [
        (
            contender.entry["label"] + (" (!)" if contender.flag else ""),
            f"{contender.median:.2f}",
            f"{min(contender.seconds):.2f}..{max(contender.seconds):.2f}",
            NONE if contender.ratio is None else f"{contender.ratio:.2f}",
            f"{contender.entry['peak_memory_bytes'] / 1e9:.2f}",
            NONE if contender.entry["accuracy"] is None else f"{100 * contender.entry['accuracy']:.1f}",
            f"{contender.start:.1f}",
        )
        for contender in record.measured
    ]
    rows += [(entry["label"], entry["status"], *[NONE] * 5) for entry in record.not_measured]
    return Table(f"One round on {record.content['workload']['title']}", columns, tuple(rows), tuple(_notes(record)))


def _notes(record: BenchRecord) -> list[str]:
    content, conditions = record.content, record.content["conditions"]
    turns = max((len(contender.seconds) for contender in record.measured), default=0)
    notes = [
        content["workload"]["sentence"] + ".",
        f"Seconds: the median of {turns} rounds, taken in turns, and their range; to tight: the median of the ratios "
        "to the tight loop on 2 threads in each turn. GB: "
        f"peak {conditions['memory'].partition(' ')[0]} of all its processes together. Accuracy: after "
        f"{conditions['scored_after']} rounds. Start: seconds until it is ready, plus what "
        "its first round takes longer than the others.",
        f"{_machine(content)}.",
    ]
    if content["workload"]["stand_in"]:
        notes.append(
            "NOT CIFAR-10: generated images of the same shapes. `fedgg data fetch cifar10` gets the real ones."
        )
    if not content["finished"]:
        notes.append("Stopped before the end: only the finished turns are shown.")
    if record.others_cores > BUSY:
        notes.append(
            f"NOT A QUIET MACHINE: up to {record.others_cores:.1f} cores were used by other programs; measure again."
        )
    notes += [f"(!) {contender.entry['label']}: {contender.flag}." for contender in record.measured if contender.flag]
    notes += [
        f"{contender.entry['label']} used {100 * share:.0f}% of a core between its turns."
        for contender in record.measured
        if (share := contender.entry["idle_processor_share"] or 0.0) > IDLE
    ]
    notes += [f"{entry['label']}: {entry['status']}, {entry['why']}." for entry in record.not_measured if entry["why"]]
    return notes


def _machine(content: dict[str, Any]) -> str:
    machine, code, device = content["machine"], content["code"], content["conditions"]["device"]
    commit = f", commit {code['commit'][:7]}{' with changes' if code['changed'] else ''}" if code["commit"] else ""
    where = machine["gpu"] if device == "cuda" else f"{machine['processor']}, {machine['cores']} cores"
    torches = {entry["versions"].get("torch") for entry in content["contenders"] if entry["versions"]}
    torch = f", torch {', '.join(sorted(filter(None, torches)))}" if torches else ""
    return f"{where}{torch}, fedgg {code['fedgg']}{commit}, {content['when'][:10]}"


def bench_figure(record: BenchRecord) -> Figure:
    """Median seconds per round as bars, fastest on top, with a line from the shortest to the longest round."""
    from matplotlib.patches import Patch  # not installed by the extra `bench`

    from fedgg.report.figure_style import COLOURS, blank, styled

    measured = record.measured
    if not measured:
        raise UserError("no contender was measured: nothing can be drawn")
    colours = {"fedgg": COLOURS[2], "loop": "#999999", "peer": COLOURS[1]}

    @styled
    def drawn() -> Figure:
        figure = blank(8.0, 1.9 + 0.36 * len(measured))
        axes = figure.subplots()
        bars = range(len(measured))
        medians = [contender.median for contender in measured]
        axes.barh(bars, medians, height=0.68, color=[colours[contender.entry["kind"]] for contender in measured])
        spread = [
            [contender.median - min(contender.seconds) for contender in measured],
            [max(contender.seconds) - contender.median for contender in measured],
        ]
        axes.errorbar(medians, bars, xerr=spread, fmt="none", ecolor="#333333", elinewidth=0.9, capsize=2.5)
        longest = max(max(contender.seconds) for contender in measured)
        for bar, contender in zip(bars, measured, strict=True):
            axes.text(max(contender.seconds) + 0.015 * longest, bar, _bar_label(contender), va="center", fontsize=8)
        axes.set_yticks(bars, [shortened(s.entry["label"], 34) for s in measured])
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(0, 1.4 * longest)
        axes.set_xlabel("seconds per round (line: shortest to longest)")
        axes.grid(axis="x")
        axes.set_axisbelow(True)
        axes.set_title(_subtitle(record), loc="left", fontsize=8, color="#555555")
        figure.suptitle(f"One FedAvg round on {record.content['workload']['title']}", x=0.01, ha="left", fontsize=10)
        kinds = [kind for kind in colours if any(contender.entry["kind"] == kind for contender in measured)]
        handles = [Patch(color=colours[kind], label=NAME_OF[kind]) for kind in kinds]
        figure.legend(handles=handles, loc="outside lower left", ncols=len(kinds))
        return figure

    return drawn()


def _bar_label(contender: MeasuredContender) -> str:
    parts = [f"{contender.median:.2f} s"]
    if contender.ratio is not None:
        parts.append(f"{contender.ratio:.2f}×")
    parts.append(f"{contender.entry['peak_memory_bytes'] / 1e9:.1f} GB")
    if contender.flag:
        parts.append("(!)")
    return "  ".join(parts)


def _subtitle(record: BenchRecord) -> str:
    noise = ". NOT A QUIET MACHINE" if record.others_cores > BUSY else ""
    return "\n".join(textwrap.wrap(f"{record.content['workload']['sentence']}. {_machine(record.content)}{noise}", 92))
