"""What `fedgg reproduce --list` shows: the items with what they still take, and the readings by name."""

from __future__ import annotations

from pathlib import Path

from fedgg.paper.estimate import Estimate, Need
from fedgg.paper.items import QUICK, Item, shown_dataset
from fedgg.paper.plan import Plan
from fedgg.paper.readings import READINGS
from fedgg.report.conditions import shown_seconds
from fedgg.report.tables import NONE, Table


def items_table(plan: Plan, out: Path, processes: int) -> Table:
    """Runs needed and finished, and the time left; data sets of which nothing has finished are probed for it."""
    estimate = Estimate(plan, out, processes)
    rows = []
    for item in plan.items:
        without = "the split alone" if item.kind == "split" else "not of these data sets"
        rows.append((item.name, _what(plan, item), *_cells(estimate.need([item]), without)))
    rows.append(("together", "shared runs are run once", *_cells(estimate.need(plan.items), NONE)))
    columns = ("item", "what it is", "runs", "finished", "time left here")
    return Table("The paper's tables and figures", columns, tuple(rows), _notes(plan, out, processes, estimate))


def _what(plan: Plan, item: Item) -> str:
    """A study of one data set with its name: several ask the same of others."""
    what = item.title.partition(": ")[2]
    alone = item.ours and len(item.datasets) == 1
    return f"{what}; {shown_dataset(QUICK if plan.quick else item.datasets[0])}" if alone else what


def readings_table() -> Table:
    rows = tuple((name, reading.says) for name, reading in READINGS.items())
    return Table("Readings of FedGG, for --reading", ("name", "what it is"), rows)


def _cells(need: Need, without: str) -> tuple[str, str, str]:
    if not need.runs:
        return "0", "0", without
    return str(need.runs), str(need.ended), shown_seconds(need.seconds) if need.runs > need.ended else NONE


def _notes(plan: Plan, out: Path, processes: int, estimate: Estimate) -> tuple[str, ...]:
    seeds = ", ".join(map(str, plan.seeds))
    told = [f"{', '.join(plan.datasets)}; {plan.rounds()} rounds; seeds {seeds}; finished: in {out}."]
    if estimate.sources():
        device = plan.base(plan.datasets[0]).engine.device
        told.append(
            f"Time left on {device}{f' with {processes} processes' if device == 'cpu' else ''}, estimated from:"
        )
    return (*told, *estimate.sources())
