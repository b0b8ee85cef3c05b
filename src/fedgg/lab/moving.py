"""When the clients' rows move from memory into a file: once, and for good.

Two reasons. They would take more memory than `server.memory_limit_mb`; or a checkpoint, which writes all rows that are
in memory, would write far more than its rounds have changed. Both are judged by what the rows of all clients will take
in the end, so that a large population goes to the file in its first round, instead of growing until it has to.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedgg.core.rows import Rows, payload
from fedgg.lab.config import ServerSettings
from fedgg.lab.shelf import ClientRows, Places, RowsOnDisk, Shelf, identity
from fedgg.lab.state import State

MEGABYTE = 1_000_000
SMALL = 4 * MEGABYTE  # a checkpoint of this size costs nothing worth saving
FAR_MORE = 4  # times as much as the rounds since the last checkpoint have changed

FILES = {"memory": "client-memory.slots", "kept_buffers": "client-buffers.slots"}  # beside the checkpoints


def moved(state: State, cohort: Iterable[int], population: int, settings: ServerSettings, folder: Path | None) -> State:
    """The same state, its rows in a file if they belong there. `folder`: where the checkpoints lie, if any are kept."""
    kinds = {name: rows for name in FILES if isinstance(rows := getattr(state, name), dict) and any(rows.values())}
    of_round = {name: {c: rows[c] for c in cohort if c in rows} for name, rows in kinds.items()}
    if not _belong_on_disk(list(of_round.values()), population, settings, folder is not None):
        return state
    shelved: dict[str, Any] = {name: _on_disk(rows, population, folder, name) for name, rows in kinds.items()}
    return replace(state, **shelved)


def all_in_all(of_round: Mapping[int, Rows], population: int) -> tuple[float, float]:
    """Bytes a round changes, and bytes that the rows of the whole population will take once all have been met.

    Rows that K clients of a round share stay until the last of the K is called again: the longest of K waits, which is
    some 1 + ln K times the mean one.
    """
    distinct = {identity(rows): payload(rows.values()) for rows in of_round.values()}
    changed, called = float(sum(distinct.values())), len(of_round)
    if called in (0, population):
        return changed, changed
    return changed, changed * population / called * (1 + math.log(called / len(distinct)))


def _belong_on_disk(
    of_round: list[dict[int, Rows]], population: int, settings: ServerSettings, has_folder: bool
) -> bool:
    sizes = [all_in_all(rows, population) for rows in of_round]
    changed, total = sum(size[0] for size in sizes), sum(size[1] for size in sizes)
    if total > settings.memory_limit_mb * MEGABYTE:
        return True
    return has_folder and total > max(SMALL, FAR_MORE * changed * settings.checkpoint_every)


def _on_disk(rows: ClientRows, population: int, folder: Path | None, name: str) -> RowsOnDisk:
    first = next(iter(rows.values()))
    device = next(iter(first.values())).device
    shelf = Shelf.new(folder / FILES[name] if folder else None, first, device)
    return RowsOnDisk(shelf, Places.none(population)) | rows
