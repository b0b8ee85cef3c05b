"""The live page of `fedgg watch`: a server on this machine, and what has changed since a browser last asked."""

from __future__ import annotations

import secrets
import sys
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fedgg.analysis.collect import Gathering, Group, Problem
from fedgg.analysis.run_columns import run_data
from fedgg.errors import UserError
from fedgg.report.html import as_json
from fedgg.report.page import page_of
from fedgg.report.page_data import Data, group_data, identity, shown
from fedgg.runfolder.records import RunRecord

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
        self._shown: list[Group] = []
        self._problems: list[Problem] = []
        self._runs: dict[str, tuple[RunRecord, Data, int]] = {}
        self._groups: dict[str, tuple[tuple[Any, ...], Data, int]] = {}

    def page(self) -> str:
        """The whole page as it is now."""
        with self._lock:
            self._look()
            return page_of(self._shown, self._problems, self._since(0), live=True)

    def since(self, version: str) -> tuple[str, str | None]:
        """The version now, and what has changed since the one given; None if nothing has."""
        with self._lock:
            self._look()
            if version == self._version:
                return self._version, None
            born, _, number = version.rpartition("-")
            known = int(number) if born == self._born and number.isdecimal() else 0
            problems = [vars(problem) for problem in self._problems]
            return self._version, as_json(self._since(known) | {"problems": problems})

    @property
    def _version(self) -> str:
        return f"{self._born}-{self._number}"

    def _look(self) -> None:
        if time.monotonic() - self._looked < self._pause:
            return
        if self._gathering.look():
            self._number += 1
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


LOOPBACK = "127.0.0.1"


class LivePage(ThreadingHTTPServer):
    """`/` is the page, `/data.json` its news. Bound to the loopback address: nobody else can reach it."""

    daemon_threads = True
    allow_reuse_address = False  # a port that somebody listens on is refused, not shared

    def __init__(self, news: News, port: int = 0):
        self.news = news
        try:
            super().__init__((LOOPBACK, port), _Answer)
        except (OSError, OverflowError) as error:
            raise UserError(
                f"port {port} cannot be listened on ({error}): choose another with --port, or leave it out"
            ) from error

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that leaves in the middle of an answer is no error; anything else is, and says so."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/"


class _Answer(BaseHTTPRequestHandler):
    server: LivePage
    protocol_version = "HTTP/1.1"
    server_version = "fedgg"
    sys_version = ""
    timeout = 60

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        # A name of somebody else's that leads here (DNS rebinding) would let their page read ours.
        port = self.server.server_port
        if self.headers.get("Host") not in (f"{LOOPBACK}:{port}", f"localhost:{port}"):
            self._send(HTTPStatus.FORBIDDEN, "text/plain", f"ask for http://{LOOPBACK}:{port}/", with_body)
            return
        asked = urlsplit(self.path)
        if asked.path == "/":
            self._send(HTTPStatus.OK, "text/html", self.server.news.page(), with_body)
        elif asked.path == "/data.json":
            self._news(parse_qs(asked.query).get("since", [""])[-1], with_body)
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "there is the page, and nothing else", with_body)

    def _news(self, since: str, with_body: bool) -> None:
        version, changed = self.server.news.since(since)
        tag = {"ETag": f'"{version}"'}
        if changed is None and self.headers.get("If-None-Match") == tag["ETag"]:
            self._send(HTTPStatus.NOT_MODIFIED, None, "", with_body, tag)
        else:
            empty = f'{{"version":"{version}","groups":[],"problems":[]}}'
            self._send(
                HTTPStatus.OK, "application/json", changed or self.server.news.since("")[1] or empty, with_body, tag
            )

    def _send(
        self, status: HTTPStatus, kind: str | None, text: str, with_body: bool, more: dict[str, str] | None = None
    ) -> None:
        content = text.encode("utf-8", "replace")
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
        """A line for every glance would bury what the terminal is for."""


_ALWAYS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
