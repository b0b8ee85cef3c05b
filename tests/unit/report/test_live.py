"""The live page serves two addresses to this machine, tells only what changed, and gives nothing else away."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from written_folders import write_run, write_study

from fedgg.errors import UserError
from fedgg.report.live import LiveData, LivePage


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    curves = {"A": [[0.1, 0.2], [0.2, 0.3]], "<b>": [[0.3], [0.4]]}
    return write_study(tmp_path / "study", curves, reference="A", statuses={("A", 1): None})


@pytest.fixture
def server(folder: Path, tmp_path: Path) -> Iterator[LivePage]:
    with LivePage(LiveData([folder, tmp_path / "more"], pause=0)) as page:
        thread = threading.Thread(target=page.serve_forever, args=(0.02,))
        thread.start()
        yield page
        page.shutdown()
        thread.join()


def ask(
    server: LivePage, path: str, way: str = "GET", host: str | None = None, **headers: str
) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.putrequest(way, path, skip_host=True)
    if host != "":
        connection.putheader("Host", host or f"127.0.0.1:{server.server_port}")
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer, content


def news(server: LivePage, since: str = "") -> Any:
    answer, content = ask(server, f"/data.json?since={since}", If_None_Match=f'"{since}"')
    return json.loads(content) if answer.status == 200 else answer.status


def test_this_machine_only(server: LivePage) -> None:
    assert server.server_address[0] == "127.0.0.1"
    answer, content = ask(server, "/")
    assert answer.status == 200
    assert b"<!doctype html>" in content
    assert b"connect-src 'self'" in content
    names = {name.lower() for name, _ in answer.getheaders()}
    assert not any(name.startswith("access-control") for name in names)
    assert answer.getheader("X-Content-Type-Options") == "nosniff"
    assert answer.getheader("Cross-Origin-Resource-Policy") == "same-origin"
    assert ask(server, "/", host=f"localhost:{server.server_port}")[0].status == 200
    head, nothing = ask(server, "/", way="HEAD")
    assert (head.status, nothing) == (200, b"")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "127.0.0.1.evil.example", ""])
def test_other_names_for_this_machine_are_refused(server: LivePage, host: str) -> None:
    for path in ("/", "/data.json"):
        answer, content = ask(server, path, host=host)
        assert answer.status in (400, 403)
        assert b"seed" not in content


@pytest.mark.parametrize(
    "path",
    [
        "/study.json",
        "/../study/study.json",
        "/..%2f..%2fetc/passwd",
        "//etc/passwd",
        "/run-0/seed-0/config.toml",
        "/data.json/",
        "http://x/",
        "http://[/",  # of which urlsplit raises a ValueError
    ],
)
def test_nothing_else_is_served(server: LivePage, path: str) -> None:
    answer, content = ask(server, path)
    assert (answer.status, content) == (404, b"the page is at /")


def test_two_names_in_one_request_are_refused(server: LivePage) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as connection:
        connection.sendall(f"GET / HTTP/1.0\r\nHost: 127.0.0.1:{server.server_port}\r\nHost: x\r\n\r\n".encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 403")


@pytest.mark.parametrize("number", ["9" * 5000, "²", "-1"])
def test_a_version_of_no_number_is_answered_with_everything(
    server: LivePage, number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    everything = news(server)
    process = everything["version"].partition("-")[0]
    assert news(server, f"{process}-{quote(number)}") == everything
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("way", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_sent(server: LivePage, way: str) -> None:
    assert ask(server, "/data.json", way=way)[0].status == 501


def test_only_what_changed_is_told(server: LivePage, folder: Path, tmp_path: Path) -> None:
    everything = news(server)
    (group,) = everything["groups"]
    assert len(group["runs"]) == len(group["run_ids"]) == 4
    assert news(server, everything["version"]) == 304
    grown = folder / "run-0" / "seed-1" / "rounds.jsonl"
    grown.write_text(grown.read_text() + json.dumps({"round": 3, "test_accuracy": 0.5}) + "\n")
    later = news(server, everything["version"])
    (changed,) = later["groups"]
    assert [(run["label"], run["seed"], run["round"]) for run in changed["runs"]] == [("A", 1, [1, 2, 3])]
    assert changed["run_ids"] == group["run_ids"]
    write_run(tmp_path / "more", [0.7])
    both = news(server, later["version"])["groups"]
    assert [one.get("same", False) for one in both] == [False, True]
    # Somebody who has the page of another process is told everything.
    assert all("runs" in one for one in news(server, "deadbeef-3")["groups"])


def test_readers_share_one_page(folder: Path) -> None:
    """The page has megabytes: hundreds of connections that do not read hold one copy."""
    told = LiveData([folder], pause=0)
    page = told.page()
    assert told.page() is page
    grown = folder / "run-0" / "seed-1" / "rounds.jsonl"
    grown.write_text(grown.read_text() + json.dumps({"round": 3, "test_accuracy": 0.5}) + "\n")
    assert told.page() != page


def test_folders_may_vanish(server: LivePage, folder: Path) -> None:
    before = news(server)
    shutil.rmtree(folder)
    after = news(server, before["version"])
    assert after["groups"] == []
    assert any("does not exist" in problem["why"] for problem in after["problems"])
    folder.mkdir()
    assert ask(server, "/")[0].status == 200


def test_a_port_in_use(server: LivePage, folder: Path) -> None:
    with pytest.raises(UserError, match=f"cannot listen on port {server.server_port}"):
        LivePage(LiveData([folder]), server.server_port)


def test_nobody_asks_nothing_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    told = LiveData([folder], pause=1000)
    look = told._collection.refresh

    def counted() -> bool:
        looks.append(1)
        return look()

    monkeypatch.setattr(told._collection, "refresh", counted)
    assert looks == []
    for _ in range(3):
        told.since("")
    assert looks == [1]
