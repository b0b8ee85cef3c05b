"""Fetching from a real server on this machine: one that breaks off, lies, knows ranges or does not."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pooch
import pytest

from fedgg.data.catalog import CIFAR10, PUBLICATIONS, Publication, PublishedFile
from fedgg.data.download import fetch
from fedgg.errors import UserError

NAME = "data.bin"
CONTENT = np.random.default_rng(0).bytes(300_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@dataclass
class Server:
    """How the next answers are to be, and what was asked."""

    url: str = ""
    content: bytes = CONTENT
    break_after: int | None = None  # bytes of the body, then the connection is closed
    knows_ranges: bool = True
    says_length: bool = True
    status: int = 200
    range_offset: int = 0  # a server that answers another range than the one asked for
    redirect: bool = False
    encoding: str | None = None
    asked: list[str | None] = field(default_factory=list)  # the Range header of each request

    def known(self) -> dict[str, Publication]:
        file = PublishedFile(NAME, f"{self.url}/{NAME}", SHA256, len(CONTENT))
        return {"mine": replace(CIFAR10, name="mine", files=(file,), alternatives=())}

    def fetch(self, folder: Path, progress: Callable[[str, int, int | None], None] | None = None) -> list[Path]:
        return fetch("mine", folder, progress=progress, publications=self.known())


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("NO_PROXY", "*")
    state = Server()

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if state.redirect and not self.path.startswith("/moved"):
                self.send_response(302)
                self.send_header("Location", f"{state.url}/moved{self.path}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            asked = self.headers.get("Range")
            state.asked.append(asked)
            start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and state.knows_ranges else 0
            if start and start >= len(state.content):
                self.send_error(416)
                return
            if state.status != 200:
                self.send_error(state.status)
                return
            start = max(0, start - state.range_offset)
            body = state.content[start:]
            self.send_response(206 if asked and state.knows_ranges else 200)
            if asked and state.knows_ranges:
                self.send_header("Content-Range", f"bytes {start}-{len(state.content) - 1}/{len(state.content)}")
            if state.says_length:
                self.send_header("Content-Length", str(len(body)))
            if state.encoding:
                self.send_header("Content-Encoding", state.encoding)
            self.end_headers()
            self.wfile.write(body[: state.break_after])
            self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as http:
        state.url = f"http://127.0.0.1:{http.server_port}"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield state
        http.shutdown()
        thread.join()


def parts(folder: Path) -> list[Path]:
    return list(folder.glob("*.part"))


def break_off(server: Server, folder: Path, after: int = 100_000) -> int:
    server.break_after = after
    with pytest.raises(UserError):
        server.fetch(folder)
    server.break_after = None
    (part,) = parts(folder)
    return part.stat().st_size


def test_a_file_arrives_and_is_not_fetched_twice(server: Server, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    seen: list[tuple[str, int, int | None]] = []
    assert server.fetch(folder, lambda *step: seen.append(step)) == [folder / NAME]
    assert (folder / NAME).read_bytes() == CONTENT
    assert seen[-1] == (NAME, len(CONTENT), len(CONTENT))
    assert [step[1] for step in seen] == sorted(step[1] for step in seen)
    server.fetch(folder)
    assert server.asked == [None]
    assert sorted(path.name for path in folder.iterdir()) in ([NAME], [".fetch.lock", NAME])


@pytest.mark.parametrize("says_length", [True, False])
def test_a_broken_connection_is_resumed(server: Server, tmp_path: Path, says_length: bool) -> None:
    server.says_length, server.break_after = says_length, 100_000
    with pytest.raises(UserError) as caught:
        server.fetch(tmp_path)
    for word in (NAME, f"{server.url}/{NAME}", str(tmp_path), "by hand", "call again to resume"):
        assert word in str(caught.value)
    assert not (tmp_path / NAME).exists()
    server.break_after = None
    server.fetch(tmp_path)
    assert (tmp_path / NAME).read_bytes() == CONTENT
    assert server.asked == [None, "bytes=100000-"]
    assert parts(tmp_path) == []


def test_many_breaks_still_arrive(server: Server, tmp_path: Path) -> None:
    server.break_after = 70_000
    for _ in range(4):
        with pytest.raises(UserError):
            server.fetch(tmp_path)
    server.fetch(tmp_path)
    assert (tmp_path / NAME).read_bytes() == CONTENT
    assert server.asked[1:] == [f"bytes={n * 70_000}-" for n in range(1, 5)]


def test_a_server_without_ranges_starts_over(server: Server, tmp_path: Path) -> None:
    break_off(server, tmp_path)
    server.knows_ranges = False
    seen: list[int] = []
    server.fetch(tmp_path, lambda _name, done, _total: seen.append(done))
    assert (tmp_path / NAME).read_bytes() == CONTENT
    assert seen[0] <= 1 << 16


def test_a_server_that_answers_another_range_is_asked_again(server: Server, tmp_path: Path) -> None:
    done = break_off(server, tmp_path)
    server.range_offset = 10
    server.fetch(tmp_path)
    assert (tmp_path / NAME).read_bytes() == CONTENT
    assert server.asked == [None, f"bytes={done}-", None]


@pytest.mark.parametrize("extra", [0, 50])
def test_a_part_as_long_as_the_file_or_longer_but_wrong(server: Server, tmp_path: Path, extra: int) -> None:
    break_off(server, tmp_path)
    parts(tmp_path)[0].write_bytes(b"x" * (len(CONTENT) + extra))
    server.fetch(tmp_path)
    assert (tmp_path / NAME).read_bytes() == CONTENT
    assert server.asked[1:] == [f"bytes={len(CONTENT) + extra}-", None]  # 416, then from the start


def test_a_complete_part_needs_no_server(server: Server, tmp_path: Path) -> None:
    break_off(server, tmp_path)
    parts(tmp_path)[0].write_bytes(CONTENT)
    server.status = 500
    server.fetch(tmp_path)
    assert (tmp_path / NAME).read_bytes() == CONTENT


def test_wrong_bytes_are_deleted_and_named(server: Server, tmp_path: Path) -> None:
    server.content = CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])
    with pytest.raises(UserError) as caught:
        server.fetch(tmp_path)
    for word in (NAME, SHA256, hashlib.sha256(server.content).hexdigest()):
        assert word in str(caught.value)
    assert [path.name for path in tmp_path.iterdir() if path.name != ".fetch.lock"] == []
    server.content = CONTENT
    server.fetch(tmp_path)
    assert server.asked == [None, None]


def test_a_wrong_file_is_replaced_only_by_a_right_one(server: Server, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"mine")
    server.status = 503
    with pytest.raises(UserError, match="the server answered 503"):
        server.fetch(tmp_path)
    assert (tmp_path / NAME).read_bytes() == b"mine"
    server.status = 200
    server.fetch(tmp_path)
    assert (tmp_path / NAME).read_bytes() == CONTENT


def test_interrupting_keeps_the_part(server: Server, tmp_path: Path) -> None:
    def interrupt(_name: str, done: int, _total: int | None) -> None:
        if done > 100_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        server.fetch(tmp_path, interrupt)
    (part,) = parts(tmp_path)
    kept = part.stat().st_size
    assert kept > 100_000
    server.fetch(tmp_path)
    assert server.asked == [None, f"bytes={kept}-"]
    assert (tmp_path / NAME).read_bytes() == CONTENT


def test_a_mirror_is_not_mixed_with_the_publisher(server: Server, tmp_path: Path) -> None:
    break_off(server, tmp_path)
    fetch("mine", tmp_path, mirror=f"{server.url}/mirror/", publications=server.known())
    assert server.asked == [None, None]
    assert (tmp_path / NAME).read_bytes() == CONTENT
    assert parts(tmp_path) == []


def test_a_redirect_keeps_the_range(server: Server, tmp_path: Path) -> None:
    server.redirect = True
    done = break_off(server, tmp_path)
    server.fetch(tmp_path)
    assert server.asked == [None, f"bytes={done}-"]


def test_an_archive_announced_as_an_encoding_is_left_packed(server: Server, tmp_path: Path) -> None:
    server.encoding = "gzip"
    server.fetch(tmp_path)
    assert (tmp_path / NAME).read_bytes() == CONTENT


@pytest.mark.parametrize("mirror", ["http://127.0.0.1:1/", "ftp://example.invalid", "no address"])
def test_no_connection(server: Server, tmp_path: Path, mirror: str) -> None:
    with pytest.raises(UserError, match=rf"{NAME}: .*call again to resume, or put the file into .* by hand") as caught:
        fetch("mine", tmp_path, mirror=mirror, publications=server.known())
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
def test_a_full_disk(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_off(server, tmp_path)
    monkeypatch.setattr("fedgg.data.download.open_in_place", lambda part, mode: Path("/dev/full").open(mode))  # noqa: SIM115
    with pytest.raises(UserError, match=r"the disk is full, mine needs .* MB"):
        server.fetch(tmp_path)


def test_a_folder_that_cannot_be_used(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match="cannot be used"):
        server.fetch(tmp_path / "file")
    if os.geteuid() != 0:
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(UserError, match="cannot be used"):
            server.fetch(tmp_path / "closed")


def test_two_at_once_do_not_disturb_each_other(server: Server, tmp_path: Path) -> None:
    threads = [threading.Thread(target=server.fetch, args=(tmp_path,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.asked == [None]
    assert (tmp_path / NAME).read_bytes() == CONTENT


def test_pooch_stays_silent_and_as_it_was(server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    level = pooch.get_logger().level
    server.fetch(tmp_path)
    assert capfd.readouterr() == ("", "")
    assert pooch.get_logger().level == level


@pytest.mark.parametrize(
    ("name", "hint"),
    [("cifar-10", "did you mean .cifar10."), ("digits", "part of scikit-learn"), ("zzz", "choose from cifar10")],
)
def test_names_without_files(name: str, hint: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=hint):
        fetch(name, tmp_path)


def test_files_whose_names_others_use_have_a_folder_of_their_own() -> None:
    places = [(f"{one.folder}/{file.name}", file.sha256) for one in PUBLICATIONS.values() for file in one.files]
    assert len({place for place, _ in places}) == len(set(places)), "two publications would replace each other's file"
    assert all(re.fullmatch("[0-9a-f]{64}", sha256) for _, sha256 in places)


def test_a_folder_of_its_own_is_used(server: Server, tmp_path: Path) -> None:
    publications = {"mine": replace(server.known()["mine"], folder="MINE/raw")}
    assert fetch("mine", tmp_path, publications=publications) == [tmp_path / "MINE" / "raw" / NAME]
    assert (tmp_path / "MINE" / "raw" / NAME).read_bytes() == CONTENT
