"""What a live page is told: everything at first, then only the runs and groups that have changed."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedgg.report.document import as_json
from fedgg.report.folders import RunRecord
from fedgg.report.gathering import Gathering, Group, Problem
from fedgg.report.page_data import Data, group_data, identity, shown
from fedgg.report.page_runs import run_data
from fedgg.report.report_page import page_of

PAUSE = 1.0  # seconds between two looks at the folders, however many ask


class News:
    """Followed folders with a version that grows by one with every change; nobody asks, nothing is read."""

    def __init__(self, paths: Sequence[Path], pause: float = PAUSE):
        self._gathering = Gathering(paths)
        self._pause = pause
        self._born = secrets.token_hex(4)  # versions of another process mean nothing here
        self._number = 0
        self._looked = float("-inf")
        self._lock = threading.Lock()
        self._page: bytes | None = None
        self._shown: list[Group] = []
        self._problems: list[Problem] = []
        self._runs: dict[str, tuple[RunRecord, Data, int]] = {}
        self._groups: dict[str, tuple[tuple[Any, ...], Data, int]] = {}

    def page(self) -> bytes:
        """The whole page as it is now, in UTF-8; the same object until something changes."""
        with self._lock:
            self._look()
            if self._page is None:
                page = page_of(self._shown, self._problems, self._since(0), live=True)
                self._page = page.encode("utf-8", "replace")
            return self._page

    def since(self, version: str) -> tuple[str, str | None]:
        """The version now, and what has changed since the one given; None if nothing has."""
        with self._lock:
            self._look()
            if version == self._version:
                return self._version, None
            problems = [vars(problem) for problem in self._problems]
            return self._version, as_json(self._since(self._number_in(version)) | {"problems": problems})

    @property
    def _version(self) -> str:
        return f"{self._born}-{self._number}"

    def _number_in(self, version: str) -> int:
        """0, which is before the first change, unless this process has given the version."""
        born, _, number = version.rpartition("-")
        given = born == self._born and number.isdecimal() and len(number) <= len(str(self._number))
        return int(number) if given and int(number) <= self._number else 0

    def _look(self) -> None:
        if time.monotonic() - self._looked < self._pause:
            return
        if self._gathering.look():
            self._number += 1
            self._page = None
            self._shown, heads, odd = shown(self._gathering.groups, self._update)
            self._problems = [*self._gathering.problems, *odd]
            seen = {name for head in heads for name in head["run_ids"]}
            for gone in self._runs.keys() - seen:
                del self._runs[gone]
        self._looked = time.monotonic()

    def _update(self, group: Group) -> Data:
        """Work out again what has changed of a group; all but its runs, of which it has the names."""
        names = []
        for label, by_seed in group.study.runs.items():
            for seed, record in by_seed.items():
                name = identity(str(record.path), label, str(seed))
                names.append(name)
                if name not in self._runs or self._runs[name][0] is not record:
                    self._runs[name] = (record, {"id": name, **run_data(record, label, seed)}, self._number)
        study = group.study
        shape = (study.labels, study.seeds, study.size, *((name, self._runs[name][2]) for name in names))
        place = _place(group)
        if place not in self._groups or self._groups[place][0] != shape:
            self._groups[place] = (shape, group_data(group) | {"run_ids": names}, self._number)
        return self._groups[place][1]

    def _since(self, known: int) -> Data:
        told = []
        for group in self._shown:
            _, head, number = self._groups[_place(group)]
            if number <= known:
                told.append({"id": head["id"], "same": True})
                continue
            fresh = [self._runs[name] for name in head["run_ids"]]
            told.append(head | {"runs": [data for _, data, since in fresh if since > known]})
        return {"version": self._version, "groups": told}


def _place(group: Group) -> str:
    return f"{group.study.path} {group.loose}"
