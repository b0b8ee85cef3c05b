"""The one reader and the one writer: what they refuse, and what a kill or a link leaves as it was."""

from __future__ import annotations

import ast
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import fedgg
from fedgg import files
from fedgg.files import RefusedFile

HOME = Path(fedgg.__file__).parent
IN_PLACE: tuple[Callable[[Path], Any], ...] = (
    partial(files.open_in_place, mode="ab"),
    partial(files.open_in_place, mode="r+b"),
)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """Somebody's file that no write may reach."""
    file = tmp_path / "elsewhere" / "precious"
    file.parent.mkdir()
    file.write_text("precious")
    return file


# Writing --------------------------------------------------------------------------------------------------------------


def test_a_link_is_replaced_and_not_followed(tmp_path: Path, elsewhere: Path) -> None:
    for name in ("page.html", "page.html.tmp"):
        (tmp_path / name).symlink_to(elsewhere)
    files.write_text(tmp_path / "page.html", "new")
    assert elsewhere.read_text() == "precious"
    assert not (tmp_path / "page.html").is_symlink()
    assert (tmp_path / "page.html").read_text() == "new"


@pytest.mark.parametrize("kind", ["symbolic link", "hard link"])
def test_appending_and_writing_in_place_refuse_links(tmp_path: Path, elsewhere: Path, kind: str) -> None:
    link = tmp_path / "rounds.jsonl"
    if kind == "hard link":
        link.hardlink_to(elsewhere)
    else:
        link.symlink_to(elsewhere)
    for refusing in (*IN_PLACE, files.check_in_place):
        with pytest.raises(RefusedFile, match=rf"rounds\.jsonl is a {kind}"):
            refusing(link)
    with pytest.raises(FileExistsError):
        files.open_new(link)
    files.write_text(link, "new")
    assert elsewhere.read_text() == "precious"
    with files.open_in_place(link, "ab") as file:
        file.write(b"er")
    assert link.read_text() == "newer"


@pytest.mark.parametrize("kind", ["fifo", "directory", "socket", "device"])
def test_what_is_not_a_regular_file_is_neither_read_nor_written(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
    else:
        path.symlink_to("/dev/zero")
    uses: tuple[Callable[[Path], Any], ...] = (files.read_bytes, files.check_regular, *IN_PLACE)
    for use in uses:
        with pytest.raises(OSError, match=r"x\.json"):
            use(path)
    with pytest.raises(RefusedFile, match="not a regular file"):
        files.write_atomically(path, b"new")


def test_folders_below_the_one_named_are_real_ones(tmp_path: Path, elsewhere: Path) -> None:
    named = tmp_path / "named"
    named.symlink_to(elsewhere.parent)  # which the user may do
    files.make_folder(named / "a" / "b", named)
    assert (elsewhere.parent / "a" / "b").is_dir()
    (elsewhere.parent / "c").symlink_to(tmp_path)
    for use in (files.make_folder, files.check_folder):
        with pytest.raises(RefusedFile, match="c is a symbolic link"):
            use(named / "c" / "d", named)
    with pytest.raises(RefusedFile, match="c is a symbolic link"):
        files.refuse_links(elsewhere.parent)
    (elsewhere.parent / "c").unlink()
    files.refuse_links(elsewhere.parent)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text("old")

    def failing() -> None:
        with files.replacing(file) as sink:
            sink.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        failing()
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from fedgg.files import replacing
with replacing(Path({str(tmp_path / "x.json")!r})) as sink:
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    assert len(list(tmp_path.glob("x.json.*.tmp"))) == 1
    with files.replacing(tmp_path / "y.json") as sink:
        assert len(list(tmp_path.glob("*.tmp"))) == 1, "the dead one's is gone, this one's is there"
        files.write_text(tmp_path / "z.json", "{}")
        sink.write(b"{}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["y.json", "z.json"]


def test_several_writers_of_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    file, faults = tmp_path / "x", list[BaseException]()

    def write(letter: bytes) -> None:
        try:
            for _ in range(30):
                files.write_atomically(file, letter * 10_000)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=write, args=(letter,)) for letter in (b"a", b"b", b"c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert re.fullmatch(rb"a{10000}|b{10000}|c{10000}", file.read_bytes())


def test_the_mode_is_the_one_asked_for(tmp_path: Path) -> None:
    files.write_atomically(tmp_path / "key", b"secret", 0o600)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


# Reading --------------------------------------------------------------------------------------------------------------


def test_a_link_to_a_regular_file_is_read(tmp_path: Path, elsewhere: Path) -> None:
    (tmp_path / "x.json").symlink_to(elsewhere)
    assert files.read_bytes(tmp_path / "x.json") == b"precious"


def test_a_file_beyond_its_limit_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.toml").open("wb") as file:
        file.truncate(1 << 40)  # sparse: a terabyte that takes no room
    with pytest.raises(RefusedFile, match=r"has 1,048,576 MiB, and at most 1 MiB"):
        files.read_toml(tmp_path / "config.toml")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[" * 100_000, "nested more than 64 deep"),
        ("[" * 100 + "]" * 100, "nested more than 64 deep"),
        ('{"a":' * 100 + "1" + "}" * 100, "nested more than 64 deep"),
        ("9" * 41, "integer of 41 digits"),
        ("-" + "9" * 5000, "integer of 5000 digits"),
        (r'{"a": "\ud800"}', "not Unicode"),
        (r'{"\uDC80": 1}', "not Unicode"),
        (b'"\xed\xa0\x80"', "not UTF-8"),
        (b"\xff\xfe[\x00]\x00", "not UTF-8"),
        ("", "Expecting value"),
        ("{", "Expecting property name"),
    ],
    ids=range(11),
)
def test_json_that_is_refused(content: bytes | str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        files.parse_json(content.encode() if isinstance(content, str) else content)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("a = " + "[" * 20_000 + "]" * 20_000, "nested more than 64 deep"),
        ("[" + ".".join("a" * 3000) + "]\nx = 1", "nested more than 64 deep"),
        ("a = " + "9" * 41, "integer of more than 40 digits"),
        ("a = [{b = -" + "9" * 4000 + "}]", "integer of more than 40 digits"),
        ("a = " + "9" * 5000, "limit"),
        (b"a = '\xff'", "not UTF-8"),
        ("a =", "Invalid value"),
    ],
    ids=range(7),
)
def test_toml_that_is_refused(content: bytes | str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        files.parse_toml(content)


def test_what_looks_odd_and_is_in_order() -> None:
    text = json.dumps({"hash": "1" * 64, "emoji": "\U0001f984", "deep": [[[[1]]]], "loss": float("inf")})
    assert files.parse_json(text) == json.loads(text)
    assert files.parse_toml(f"a = '{'1' * 64}'\nb = {'9' * 40}\nc = inf")["b"] == 10**40 - 1


def test_lines_are_told_apart() -> None:
    lines = list(files.parse_lines(b'{"round": 1}\n\n{"round"\n[1]\n{"rou'))
    assert [number for number, _ in lines] == [1, 3, 4, 5]
    assert lines[0][1] == {"round": 1}
    assert isinstance(lines[1][1], ValueError)
    assert isinstance(lines[3][1], ValueError)


# Nothing else opens files ---------------------------------------------------------------------------------------------

ALONE = {
    "files.py",
    "flower/local/namespaces.py",  # is run by its path in a process of its own, and writes to /proc
    "bench/bench_kit.py",  # goes into the environments of other frameworks
}
REASONS = {  # by file, the calls that are in order there
    "report/page.py": {"read_text"},  # our own assets
    "engines/import_user_file.py": {"read_text"},  # the user's code, which is to be run anyway
    "bench/results.py": {"read_text"},  # /proc/cpuinfo
    "flower/local/flower_commands.py": {"json.loads"},  # what a program of ours prints
    "bench/contender_process.py": {"json.loads", "read_text"},
    "bench/runners/fedgg_engine.py": {"json.loads"},
    "lab/checkpoint.py": {"json.loads"},  # facts that a checksum covers
    "flower/node_state.py": {"json.loads"},
    "cli/terminal.py": {"open"},  # /dev/null, in place of a standard error that is closed
    "data/readers.py": {"gzip.open", "tarfile.open"},  # on a file that was opened here
    "data/mnist_family.py": {"gzip.open"},
    "data/natural_clients.py": {"json.load"},
}
CALLS = {"write_text", "write_bytes", "read_text", "read_bytes", "copyfile", "copy2", "fdopen"}
NAMED = {"json.load", "json.loads", "tomllib.load", "tomllib.loads", "open", "gzip.open", "tarfile.open"}
INTO_A_BUFFER = {"savefig", "savez", "savez_compressed", "np.load", "zipfile.ZipFile", "loadmat"}
BUFFERS = {"content", "sink", "file"}


def _strays(path: Path) -> list[str]:
    place, strays = path.relative_to(HOME).as_posix(), []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            owner, _, name = called.rpartition(".")
            first = ast.unparse(node.args[0]) if node.args else ""
            own = owner in ("files", "shutil.", "copy") or not owner
            stray = name in CALLS and not own and owner != "os"
            stray |= called in NAMED
            stray |= bool({name, called} & INTO_A_BUFFER) and first not in BUFFERS
            stray |= name == "open" and re.match(r"'[rwax]b?\+?b?'", first) is not None
            if stray and not {name, called} & REASONS.get(place, set()):
                strays.append(f"{place}, line {node.lineno}: {ast.unparse(node)[:80]}")
    return strays


def test_no_other_file_opens_files() -> None:
    """Files come from `fedgg.files`, buffers in memory are no files; exceptions have a reason above."""
    assert not [
        stray
        for path in HOME.rglob("*.py")
        if path.relative_to(HOME).as_posix() not in ALONE
        for stray in _strays(path)
    ]
