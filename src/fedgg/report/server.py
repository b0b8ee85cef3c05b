"""The live page on this machine and for this machine only: two addresses, and nothing else is served."""

from __future__ import annotations

import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

from fedgg.errors import UserError
from fedgg.report.news import News

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
        if self.headers.get_all("Host") not in ([f"{LOOPBACK}:{port}"], [f"localhost:{port}"]):
            self._send(HTTPStatus.FORBIDDEN, "text/plain", f"ask for http://{LOOPBACK}:{port}/", with_body)
            return
        path, _, query = self.path.partition("?")
        if path == "/":
            self._send(HTTPStatus.OK, "text/html", self.server.news.page(), with_body)
        elif path == "/data.json":
            self._news(parse_qs(query).get("since", [""])[-1], with_body)
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
        """A line for every glance would bury what the terminal is for."""


_ALWAYS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
