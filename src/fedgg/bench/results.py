"""What a benchmark's record says: a table and a bar chart. Reads `bench.json` and nothing else."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from fedgg.analysis.labels import shortened
from fedgg.errors import UserError
from fedgg.files import read_json
from fedgg.report.figure_style import COLOURS, blank, styled
from fedgg.report.tables import NONE, Table

FORMAT = 1
APART = 0.05  # accuracies further below the middle than this are no longer the same training
ABOVE_CHANCE = 0.05
IDLE = 0.05  # of a core, between a contender's turns
BUSY = 0.1  # cores that worked for somebody else while a contender was timed
COLOUR_OF = {"fedgg": COLOURS[2], "loop": "#999999", "peer": COLOURS[1]}
NAME_OF = {"fedgg": "fedgg", "loop": "plain PyTorch", "peer": "other frameworks"}


@dataclass(frozen=True)
class Standing:
    """One contender with what follows from its rounds."""

    entry: dict[str, Any]
    seconds: tuple[float, ...]
    ratio: float | None  # to the reference, the middle of the ratios turn by turn
    flag: str | None

    @property
    def middle(self) -> float:
        return median(self.seconds)

    @property
    def start(self) -> float:
        """Until it was ready, and what its first round took longer than another: some load only then."""
        return float(self.entry["start_seconds"] + max(self.entry["first_round_seconds"] - self.middle, 0.0))


@dataclass(frozen=True)
class BenchRecord:
    content: dict[str, Any]
    standings: tuple[Standing, ...]  # the measured ones, fastest first

    @property
    def others_cores(self) -> float:
        """Cores that worked for somebody else, for the contender that had most of it."""
        return max((median(standing.entry["others_cores"] or [0.0]) for standing in self.standings), default=0.0)

    @property
    def others(self) -> list[dict[str, Any]]:
        measured = {standing.entry["name"] for standing in self.standings}
        return [entry for entry in self.content["contenders"] if entry["name"] not in measured]


def read_bench(file: Path) -> BenchRecord:
    try:
        content = read_json(file)
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}): it is no record of `fedgg bench`") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{file} is no record of `fedgg bench` that this version can read")
    entries = content["contenders"]
    rounds: dict[str, list[float | None]] = {entry["name"]: entry["round_seconds"] for entry in entries}
    reference = rounds.get(content["reference"], [])
    middle = median([e["accuracy"] for e in entries if e["accuracy"] is not None] or [0.0])
    standings = [
        Standing(
            entry,
            tuple(seconds for seconds in entry["round_seconds"] if seconds is not None),
            _ratio(entry["round_seconds"], reference),
            _flag(entry, middle, content),
        )
        for entry in entries
        if any(seconds is not None for seconds in entry["round_seconds"])
    ]
    return BenchRecord(content, tuple(sorted(standings, key=lambda standing: standing.middle)))


def _ratio(own: list[float | None], reference: list[float | None]) -> float | None:
    """Turn by turn, since both met the same noise in a turn."""
    pairs = [mine / theirs for mine, theirs in zip(own, reference, strict=False) if mine and theirs]
    return median(pairs) if pairs else None


def _flag(entry: dict[str, Any], middle: float, content: dict[str, Any]) -> str | None:
    accuracy = entry["accuracy"]
    if entry["status"] == "failed":
        return f"failed later: {entry['why']}"
    if accuracy is None:
        return None
    if accuracy < 1 / content["workload"]["classes"] + ABOVE_CHANCE:
        return "does not learn: its seconds mean nothing"
    if accuracy < middle - APART:
        return f"learns less than the others ({100 * (middle - accuracy):.0f} points below the middle)"
    return None


def bench_table(record: BenchRecord) -> Table:
    columns = ("contender", "s a round", "min..max", "to tight", "GB", "acc. %", "start s")
    rows = [
        (
            standing.entry["label"] + (" (!)" if standing.flag else ""),
            f"{standing.middle:.2f}",
            f"{min(standing.seconds):.2f}..{max(standing.seconds):.2f}",
            NONE if standing.ratio is None else f"{standing.ratio:.2f}",
            f"{standing.entry['peak_memory_bytes'] / 1e9:.2f}",
            NONE if standing.entry["accuracy"] is None else f"{100 * standing.entry['accuracy']:.1f}",
            f"{standing.start:.1f}",
        )
        for standing in record.standings
    ]
    rows += [(entry["label"], entry["status"], *[NONE] * 5) for entry in record.others]
    return Table(f"One round on {record.content['workload']['title']}", columns, tuple(rows), tuple(_notes(record)))


def _notes(record: BenchRecord) -> list[str]:
    content, conditions = record.content, record.content["conditions"]
    turns = max((len(standing.seconds) for standing in record.standings), default=0)
    notes = [
        content["workload"]["sentence"] + ".",
        f"Seconds: the middle of {turns} rounds, taken in turns, and their spread; to tight: the middle of the ratios "
        "to the tight loop on 2 threads, turn by turn. GB: "
        f"{conditions['memory'].partition(' ')[0]} of all its processes together, at its peak. Accuracy: after "
        f"{conditions['scored_after']} rounds. Start: until it is ready, data loaded, and what "
        "its first round takes longer than another.",
        f"{_machine(content)}.",
    ]
    if content["workload"]["stand_in"]:
        notes.append(
            "NOT CIFAR-10: generated images of the same shapes. `fedgg data fetch cifar10` gets the real ones."
        )
    if not content["finished"]:
        notes.append("Stopped before the end: these are the turns that were finished.")
    if record.others_cores > BUSY:
        notes.append(
            f"NOT A QUIET MACHINE: up to {record.others_cores:.1f} cores were busy with something else; measure again."
        )
    notes += [f"(!) {standing.entry['label']}: {standing.flag}." for standing in record.standings if standing.flag]
    notes += [
        f"{standing.entry['label']} kept {100 * share:.0f}% of a core busy between its turns."
        for standing in record.standings
        if (share := standing.entry["idle_processor_share"] or 0.0) > IDLE
    ]
    notes += [f"{entry['label']}: {entry['status']}, {entry['why']}." for entry in record.others if entry["why"]]
    return notes


def _machine(content: dict[str, Any]) -> str:
    machine, code, device = content["machine"], content["code"], content["conditions"]["device"]
    commit = f", commit {code['commit'][:7]}{' with changes' if code['changed'] else ''}" if code["commit"] else ""
    where = machine["gpu"] if device == "cuda" else f"{machine['processor']}, {machine['cores']} cores"
    torches = {entry["versions"].get("torch") for entry in content["contenders"] if entry["versions"]}
    torch = f", torch {', '.join(sorted(filter(None, torches)))}" if torches else ""
    return f"{where}{torch}, fedgg {code['fedgg']}{commit}, {content['when'][:10]}"


@styled
def bench_figure(record: BenchRecord) -> Figure:
    """Seconds a round as bars, fastest on top: the middle, with a line from the shortest to the longest."""
    standings = record.standings
    if not standings:
        raise UserError("no engine was measured, so there is nothing to draw")
    figure = blank(8.0, 1.9 + 0.36 * len(standings))
    axes = figure.subplots()
    places = range(len(standings))
    middles = [standing.middle for standing in standings]
    axes.barh(places, middles, height=0.68, color=[COLOUR_OF[standing.entry["kind"]] for standing in standings])
    spread = [
        [standing.middle - min(standing.seconds) for standing in standings],
        [max(standing.seconds) - standing.middle for standing in standings],
    ]
    axes.errorbar(middles, places, xerr=spread, fmt="none", ecolor="#333333", elinewidth=0.9, capsize=2.5)
    longest = max(max(standing.seconds) for standing in standings)
    for place, standing in zip(places, standings, strict=True):
        axes.text(max(standing.seconds) + 0.015 * longest, place, _beside(standing), va="center", fontsize=8)
    axes.set_yticks(places, [shortened(s.entry["label"], 34) for s in standings])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 1.4 * longest)
    axes.set_xlabel("seconds a round (line: shortest to longest)")
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    axes.set_title(_below(record), loc="left", fontsize=8, color="#555555")
    figure.suptitle(f"One FedAvg round on {record.content['workload']['title']}", x=0.01, ha="left", fontsize=10)
    kinds = [kind for kind in COLOUR_OF if any(standing.entry["kind"] == kind for standing in standings)]
    handles = [Patch(color=COLOUR_OF[kind], label=NAME_OF[kind]) for kind in kinds]
    figure.legend(handles=handles, loc="outside lower left", ncols=len(kinds))
    return figure


def _beside(standing: Standing) -> str:
    parts = [f"{standing.middle:.2f} s"]
    if standing.ratio is not None:
        parts.append(f"{standing.ratio:.2f}×")
    parts.append(f"{standing.entry['peak_memory_bytes'] / 1e9:.1f} GB")
    if standing.flag:
        parts.append("(!)")
    return "  ".join(parts)


def _below(record: BenchRecord) -> str:
    noise = ". NOT A QUIET MACHINE" if record.others_cores > BUSY else ""
    return "\n".join(textwrap.wrap(f"{record.content['workload']['sentence']}. {_machine(record.content)}{noise}", 92))
