"""The live page of `fedgg watch`: its data with a version, and a server that sends the changes to a browser."""

from __future__ import annotations

import secrets
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from fedgg.analysis.collect import Group, Problem, RunCollection
from fedgg.errors import UserError
from fedgg.report.page import as_json, page_html
from fedgg.report.page_data import Data, PageGroup, page_group, page_groups, run_data
from fedgg.runfolder.record_types import RunRecord

LOOPBACK = "127.0.0.1"
PAUSE = 1.0  # seconds between two readings of the folders, for any number of requests


class LiveData:
    """The data of the page with a version that increases by one with each change. Folders are read on request only."""

    def __init__(self, paths: Sequence[Path], pause: float = PAUSE, metric: str | None = None):
        """`metric` names the measure that the page shows first, where runs have recorded it."""
        self._collection = RunCollection(paths)
        self._metric = metric
        self._pause = pause
        self._process = secrets.token_hex(4)  # versions of another process are not comparable
        self._number = 0
        self._refreshed = float("-inf")
        self._lock = threading.Lock()
        self._page: bytes | None = None
        self._shown: list[PageGroup] = []
        self._problems: list[Problem] = []
        self._runs: dict[str, tuple[RunRecord, Data, int]] = {}  # by id, with the version of the last change
        self._groups: dict[str, tuple[tuple[Any, ...], PageGroup, int]] = {}

    def page(self) -> bytes:
        """The current page, in UTF-8; the same object until something changes."""
        with self._lock:
            self._refresh()
            if self._page is None:
                page = page_html(self._shown, self._problems, self._since(0), live=True)
                self._page = page.encode("utf-8", "replace")
            return self._page

    def since(self, version: str) -> tuple[str, str | None]:
        """The current version, and the changes since `version`; None if there are none."""
        with self._lock:
            self._refresh()
            if version == self._version:
                return self._version, None
            problems = [vars(problem) for problem in self._problems]
            return self._version, as_json(self._since(self._number_in(version)) | {"problems": problems})

    def _number_in(self, version: str) -> int:
        """The number of a version issued by this process; 0, before the first change, for any other."""
        process, _, number = version.rpartition("-")
        is_ours = process == self._process and number.isdecimal() and len(number) <= len(str(self._number))
        return int(number) if is_ours and int(number) <= self._number else 0

    @property
    def _version(self) -> str:
        return f"{self._process}-{self._number}"

    def _refresh(self) -> None:
        if time.monotonic() - self._refreshed < self._pause:
            return
        if self._collection.refresh():
            self._page = None
            self._number += 1
            self._shown, problems = page_groups(self._collection.groups, self._update)
            self._problems = [*self._collection.problems, *problems]
            seen = {name for shown in self._shown for name in shown.data["run_ids"]}
            for vanished in self._runs.keys() - seen:
                del self._runs[vanished]
        self._refreshed = time.monotonic()

    def _update(self, group: Group) -> PageGroup:
        """Recompute the changed parts of a group; its data has the ids of its runs, not their data."""
        names = []
        for label, by_seed in group.study.runs.items():
            for seed, record in by_seed.items():
                data = run_data(group.study, label, seed)
                names.append(data["id"])
                known = self._runs.get(data["id"])
                if known is None or known[0] is not record or known[1].keys() != data.keys():
                    self._runs[data["id"]] = (record, data, self._number)
        study = group.study
        waiting = tuple(study.waiting.items())
        shape = (study.labels, study.seeds, study.size, waiting, *((name, self._runs[name][2]) for name in names))
        key = _key(group)
        if key not in self._groups or self._groups[key][0] != shape:
            shown = page_group(group, self._metric)
            self._groups[key] = (shape, replace(shown, data=shown.data | {"run_ids": names}), self._number)
        return self._groups[key][1]

    def _since(self, known: int) -> Data:
        groups = []
        for shown in self._shown:
            _, _, changed = self._groups[_key(shown.group)]
            if changed <= known:
                groups.append({"id": shown.data["id"], "same": True})
                continue
            runs = [self._runs[name] for name in shown.data["run_ids"]]
            groups.append(shown.data | {"runs": [data for _, data, changed in runs if changed > known]})
        return {"version": self._version, "groups": groups}


def _key(group: Group) -> str:
    return f"{group.study.path} {group.grouped_by}"


class LivePage(ThreadingHTTPServer):
    """Serves the page at `/` and its updates at `/data.json`, on the loopback address of this machine."""

    daemon_threads = True
    allow_reuse_address = False  # a port that another process listens on is refused, not shared

    def __init__(self, live_data: LiveData, port: int = 0):
        self.live_data = live_data
        try:
            super().__init__((LOOPBACK, port), _RequestHandler)
        except (OSError, OverflowError) as error:
            raise UserError(
                f"cannot listen on port {port} ({error}): choose another with --port, or omit the option"
            ) from error

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that disconnects during a response is not an error; other exceptions are printed."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/"


class _RequestHandler(BaseHTTPRequestHandler):
    server: LivePage
    protocol_version = "HTTP/1.1"
    server_version = "fedgg"
    sys_version = ""
    timeout = 60

    def do_GET(self) -> None:
        self._respond(with_body=True)

    def do_HEAD(self) -> None:
        self._respond(with_body=False)

    def _respond(self, with_body: bool) -> None:
        # Another host name that resolves to this address (DNS rebinding) would let a foreign page read this one.
        port = self.server.server_port
        if self.headers.get_all("Host") not in ([f"{LOOPBACK}:{port}"], [f"localhost:{port}"]):
            self._send(HTTPStatus.FORBIDDEN, "text/plain", f"request http://{LOOPBACK}:{port}/", with_body)
            return
        path, _, query = self.path.partition("?")
        if path == "/":
            self._send(HTTPStatus.OK, "text/html", self.server.live_data.page(), with_body)
        elif path == "/data.json":
            self._send_update(parse_qs(query).get("since", [""])[-1], with_body)
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "the page is at /", with_body)

    def _send_update(self, since: str, with_body: bool) -> None:
        version, changed = self.server.live_data.since(since)
        tag = {"ETag": f'"{version}"'}
        if changed is None and self.headers.get("If-None-Match") == tag["ETag"]:
            self._send(HTTPStatus.NOT_MODIFIED, None, "", with_body, tag)
        else:
            empty = f'{{"version":"{version}","groups":[],"problems":[]}}'
            self._send(
                HTTPStatus.OK,
                "application/json",
                changed or self.server.live_data.since("")[1] or empty,
                with_body,
                tag,
            )

    def _send(
        self,
        status: HTTPStatus,
        kind: str | None,
        text: str | bytes,
        with_body: bool,
        more: dict[str, str] | None = None,
    ) -> None:
        content = text.encode("utf-8", "replace") if isinstance(text, str) else text
        self.send_response(status)
        if kind is not None:
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
        for name, value in (_ALWAYS | (more or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if with_body and kind is not None:
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing: a line for each request would fill the terminal."""


_ALWAYS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
