"""Odd content for run folders, by hand and by chance, and the watch over whatever reads it."""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomli_w
from earlier_folders import without_checksums

from fedgg.lab.config import Experiment
from fedgg.lab.runner import run
from fedgg.older_python import tomllib

Change = Callable[[Path], None]
PATIENCE = 60.0  # seconds: nothing here takes one


class Hang(BaseException):
    """Something took far too long."""


@contextmanager
def patience(seconds: float = PATIENCE) -> Iterator[None]:
    """Raises Hang in the main thread; a system call that waits is interrupted too."""

    def ring(*_: object) -> None:
        raise Hang(f"more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def reference(folder: Path) -> Path:
    """A real run, from which all the odd ones are made."""
    experiment = Experiment(
        rounds=6,
        seed=3,
        data={"holdout": 0.2},
        split={"clients": 4, "beta": 0.5},
        model={"name": "linear"},
        algorithm={"name": "scaffold"},
        local={"epochs": 1},
    )
    run(experiment, out=folder)
    return without_checksums(folder)  # so that odd values reach what reads them; damage has a test of its own


# By hand --------------------------------------------------------------------------------------------------------------

DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
HTML = "</script><img src=x onerror=alert(1)>"


def _text(name: str, content: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).write_text(content)

    return change


def _of_a_terabyte(name: str) -> Change:
    return lambda folder: os.truncate(folder / name, 1 << 40)  # sparse: it takes no room


def _json(name: str, **facts: Any) -> Change:
    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps(content | facts))

    return change


def _study(**facts: Any) -> Change:
    plan = {"format": 1, "labels": ["a"], "seeds": [0], "reference": "a", "runs": {"a": {"0": "."}}}
    return _text("study.json", json.dumps(plan | facts))


def _round(at: int, **facts: Any) -> Change:
    def change(folder: Path) -> None:
        lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
        lines[at] |= facts
        (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    return change


def _config(old: str, new: str) -> Change:
    def change(folder: Path) -> None:
        text = (folder / "config.toml").read_text()
        assert old in text
        (folder / "config.toml").write_text(text.replace(old, new, 1))

    return change


def _instead(name: str, make: Callable[[Path], None]) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return change


def _link(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


FILES = ("config.toml", "rounds.jsonl", "partition.json", "versions.json", "summary.json")
LABELS = [f"row {number}" for number in range(10_000)]

CRAFTED: dict[str, Change] = {
    **{f"deep {name}": _text(name, DEEP) for name in (*FILES[1:], "resumes.jsonl", "study.json")},
    **{f"{name} is a directory": _instead(name, Path.mkdir) for name in FILES},
    **{f"{name} is a FIFO": _instead(name, os.mkfifo) for name in FILES},
    **{f"{name} leads to /dev/zero": _instead(name, _link("/dev/zero")) for name in FILES},
    **{f"{name} leads nowhere": _instead(name, _link("nowhere")) for name in FILES},
    **{f"{name} leads to itself": _instead(name, lambda path: path.symlink_to(path.name)) for name in FILES},
    **{f"{name} is empty": _text(name, "") for name in FILES},
    **{f"{name} is a list": _text(name, "[]\n") for name in FILES},
    **{f"{name} is a terabyte": _of_a_terabyte(name) for name in FILES},
    "deep TOML list": _text("config.toml", "name = " + "[" * 20_000 + "]" * 20_000),
    "deep TOML table": _config("rounds = 6", f"rounds = 6\n{'.'.join('a' * 3000)} = 1"),
    "huge integer": _config("rounds = 6", f"rounds = {'9' * 4000}"),
    "huger integer": _config("rounds = 6", f"rounds = {'9' * 5000}"),
    "rounds are text": _config("rounds = 6", "rounds = '<b>x'"),
    "rounds are a date": _config("rounds = 6", "rounds = 1979-05-27T07:32:00Z"),
    "dates and tables": _config("rounds = 6", "rounds = 6\nzz = [{d = 1979-05-27}, {x = {y = [1, {z = 07:32:00}]}}]"),
    "seed of 32 digits": _config("seed = 3", f"seed = {'9' * 32}"),
    "negative seed": _config("seed = 3", "seed = -1"),
    "beta is NaN": _config("beta = 0.5", "beta = nan"),
    "sections are scalars": _text("config.toml", "rounds = 6\ndata = 5\nsplit = 'x'\nmodel = [1]\nalgorithm = 3"),
    "keys with dots": _config("rounds = 6", 'rounds = 6\n"data.source" = 1\n"rounds.x" = 2'),
    "name as mathematics": _config('name = ""', r"name = '$\frac{$ $x^^$'"),
    "name as markup": _config('name = ""', "name = '[/red] [bold'"),
    "name with NUL": _config('name = ""', r'name = "a\u0000b"'),
    "name with escapes": _config('name = ""', r'name = "\u001b[31mRED\u001b[2J"'),
    "name of 10 MB": _config('name = ""', f'name = "{"A" * 10_000_000}"'),
    "name of 900 kB": _config('name = ""', f'name = "{"A" * 900_000}"'),
    "source is a list": _config('source = "digits"', 'source = ["digits"]'),
    "4000 digits of accuracy": _text("rounds.jsonl", f'{{"round": 1, "test_accuracy": {"9" * 4000}}}\n'),
    "10**30 as round": _round(-1, round=10**30),
    "2**63 as round": _round(-1, round=2**63),
    "10**15 as round": _round(-1, round=10**15),
    "round 0": _round(0, round=0),
    "round is true": _round(0, round=True),
    "NaN and infinities": _round(0, test_accuracy=float("nan"), test_loss=float("inf"), train_loss=float("-inf")),
    "infinite bytes": _round(0, bytes_up=float("inf")),
    "NaN bytes": _round(0, bytes_down=float("nan")),
    "10**38 bytes": _round(0, bytes_up=10**38),
    "negative bytes": _round(0, bytes_up=-1),
    "1e308 as accuracy": _round(0, test_accuracy=1e308),
    "1e308 as loss": _round(0, test_loss=1e308, train_loss=-1e308),
    "1e308 as reading": _round(0, readings={"drift": 1e308, "x": -1e308}),
    "accuracy is HTML": _round(0, test_accuracy=HTML),
    "seconds are text": _round(0, seconds={"train": "x"}),
    "seconds are infinite": _round(0, seconds={"train": float("inf")}),
    "readings are a list": _round(0, readings=[1, 2]),
    "readings are objects": _round(0, readings={"x": {}}),
    "clients are text": _round(0, clients="abc"),
    "client of 30 digits": _round(0, clients=[{"client": 10**30, "loss": 1.0}]),
    "client is a list": _round(0, clients=[{"client": [], "loss": 1.0}]),
    "lost are text": _round(0, lost=["x"]),
    "lost without a number": _round(0, lost=[{"why": HTML}]),
    "hold-out by a word": _round(-1, holdout_accuracy_by_client={"x": 1}),
    "hold-out by a list": _round(-1, holdout_accuracy_by_client={"1": []}),
    "lines that are no objects": _text("rounds.jsonl", "[1,2]\n123\nnull\n"),
    "surrogate in the classes": _json("partition.json", classes=["\ud800"] * 10),
    "surrogate in the versions": _json("versions.json", torch="\ud800"),
    "surrogate in the reason": _json("summary.json", status="diverged", why="\ud800x"),
    "surrogate in a loss": _round(0, lost=[{"client": 1, "why": "\ud800"}]),
    "classes are a number": _json("partition.json", classes=5),
    "classes are HTML": _json("partition.json", classes=[HTML] * 10),
    "counts of 400 digits": _json("partition.json", counts=[[10**400] * 10] * 4),
    "counts are negative": _json("partition.json", counts=[[-1] * 10] * 4),
    "counts are ragged": _json("partition.json", counts=[[1], [2, 3], []]),
    "counts are text": _json("partition.json", counts=[["a"] * 10] * 4),
    "counts without clients": _json("partition.json", counts=[]),
    "counts of nothing": _json("partition.json", counts=[[], []]),
    "counts of 100,000 clients": _json("partition.json", counts=[[1] * 10] * 100_000),
    "split without a hash": _text("partition.json", '{"counts": [[1, 2]], "classes": ["a", "b"]}'),
    "hash is a list": _json("partition.json", hash=[1]),
    "status with escapes": _json("summary.json", status="\x1b]0;x\x07\x1b[31mEVIL\x1b[2J"),
    "status as markup": _json("summary.json", status="[/x][bold]"),
    "reason as markup": _json("summary.json", status="diverged", why="[/x]\x1b[2J"),
    "reason is a number": _json("summary.json", status="diverged", why=5),
    "10**38 rounds done": _json("summary.json", rounds_done=10**38),
    "seconds of text": _json("summary.json", seconds="x"),
    "dropped clients are a list": _json("summary.json", clients_lost=[3]),
    "epsilon is text": _json("summary.json", epsilon="x", delta=[]),
    "versions nested": _json("versions.json", torch=[[["<b>"]]], code=[1], commit={"a": {"b": 1}}),
    "a link to the folder above": lambda folder: (folder / "loop").symlink_to(".."),
    "study: out of its folder": _study(runs={"a": {"0": "../../../../etc"}}),
    "study: NUL": _study(runs={"a": {"0": "a\0b"}}),
    "study: a name of 10 kB": _study(runs={"a": {"0": "x" * 10_000}}),
    "study: seed of 400 digits": _study(seeds=[10**400], runs={"a": {str(10**400): "."}}),
    "study: surrogates": _study(labels=["\ud800"], reference="\ud800", runs={"\ud800": {"0": "."}}),
    "study: markup": _study(labels=["[/x]"], reference="[/x]", runs={"[/x]": {"0": "."}}),
    "study: a place that is a number": _study(runs={"a": {"0": 5}}),
    "study: 10,000 rows": _study(
        labels=LABELS,
        reference=LABELS[0],
        runs={label: {"0": "."} if at < 50 else {} for at, label in enumerate(LABELS)},
    ),
    "study: 3,000 seeds": _study(seeds=list(range(3000)), runs={"a": {str(seed): "." for seed in range(3)}}),
}


LARGE = ("counts of 100,000 clients", "study: 10,000 rows", "study: 3,000 seeds", "name of 900 kB")  # take seconds


def crafted(name: str, whole: Path, folder: Path) -> Path:
    shutil.copytree(whole, folder)
    CRAFTED[name](folder)
    return folder


# By chance ------------------------------------------------------------------------------------------------------------

NUMBERS = (-1, 0, 1e308, float("inf"), float("nan"), 10**30, 10**400, -1e-300, 2**63)
TEXTS = ("", "x", "<b>", "[/x]", "\ud800", "\x1b[2J", "../../x")
VALUES: tuple[Any, ...] = (None, True, *NUMBERS, *TEXTS, [], {}, [[]], {"a": 1}, [1, 2, 3], [None])
_GONE = object()


def mutated(content: Any, chance: random.Random) -> Any:
    """The same with one or two values replaced or removed."""
    content = copy.deepcopy(content)
    for _ in range(chance.choice([1, 1, 2])):
        places = [place for place in _places(content) if place]
        if places:
            whole = chance.choice(places)
            _put(content, whole[: chance.randrange(1, len(whole) + 1)], chance.choice([*VALUES, _GONE]))
    return content


def _places(content: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield above
    if isinstance(content, dict):
        for key in content:
            yield from _places(content[key], (*above, key))
    elif isinstance(content, list):
        for at in range(min(len(content), 5)):
            yield from _places(content[at], (*above, at))


def _put(content: Any, place: tuple[Any, ...], value: Any) -> None:
    for key in place[:-1]:
        content = content[key]
    if value is _GONE:
        del content[place[-1]]
    else:
        content[place[-1]] = copy.deepcopy(value)  # a later change may reach into it


def odd_folder(whole: Path, folder: Path, chance: random.Random) -> Path:
    """A copy with one or two of its files changed."""
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("*.png", "checkpoint"))
    for name in chance.sample(FILES, chance.choice([1, 1, 2])):
        file = folder / name
        if name == "config.toml":
            try:
                file.write_text(tomli_w.dumps(mutated(tomllib.loads(file.read_text()), chance)))
            except (TypeError, ValueError):  # TOML has no word for it
                file.write_text("x =")
        elif name == "rounds.jsonl":
            lines = file.read_text().splitlines()
            at = chance.randrange(len(lines))
            lines[at] = json.dumps(mutated(json.loads(lines[at]), chance))
            file.write_text("\n".join(lines) + "\n")
        else:
            file.write_text(json.dumps(mutated(json.loads(file.read_text()), chance)))
    return folder


def limit_memory(more: int) -> None:
    """Of this process, to what it has and so many bytes more: some builds of torch take much address space."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + more, size + more))
