"""Contenders of a benchmark: fedgg's engines, two plain loops, and other frameworks (peers) from `benchmarks/peers`.

A peer's folder holds `peer.toml` (names of its contenders), `contender.py` and `requirements.txt`; packages that pip
must install without their dependencies are in `without-dependencies.txt`.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import fedgg
from fedgg.errors import UserError
from fedgg.files import LARGE, MEGABYTE, open_log, read_bytes, read_json, read_toml, write_text

ENVIRONMENTS = ".bench"
PIP_INSTALL = ("-m", "pip", "install", "--disable-pip-version-check")
RECEIPT = "installed.json"  # written last: an environment without it is incomplete


@dataclass(frozen=True)
class PeerEntry:
    """One contender of a peer, for instance with two workers."""

    name: str
    label: str
    words: tuple[str, ...]


@dataclass(frozen=True)
class Peer:
    """Another framework that is measured."""

    folder: Path
    environment: Path
    entries: tuple[PeerEntry, ...]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def script(self) -> Path:
        return self.folder / "contender.py"

    @property
    def python(self) -> Path:
        return self.environment / "bin" / "python"

    @property
    def requirements(self) -> list[tuple[str, ...]]:
        """The arguments of each `pip install`, in order."""
        without_dependencies = self.folder / "without-dependencies.txt"
        first = ("--requirement", str(self.folder / "requirements.txt"))
        return (
            [first, ("--no-deps", "--requirement", str(without_dependencies))]
            if without_dependencies.exists()
            else [first]
        )

    @property
    def absent(self) -> str | None:
        """Why it cannot be measured, and the command that installs it."""
        receipt = self.environment / RECEIPT
        if not receipt.exists() or not self.python.exists():
            return f"not installed; run `fedgg bench setup {self.name}`"
        if read_json(receipt)["requirements"] != self.fingerprint():
            return f"its requirements have changed; run `fedgg bench setup {self.name}`"
        return None

    def fingerprint(self) -> str:
        files = [read_bytes(Path(words[-1]), MEGABYTE) for words in self.requirements]
        return hashlib.sha256(b"".join(files)).hexdigest()


def peers_folder() -> Path | None:
    """`benchmarks/peers` of fedgg's repository; None if fedgg is installed as a package."""
    for root in (Path(fedgg.__file__).parents[2], Path.cwd()):
        if (root / "benchmarks" / "peers").is_dir():
            return root / "benchmarks" / "peers"
    return None


def find_peers(folder: Path | None) -> list[Peer]:
    """Every peer with a `peer.toml`, by name."""
    if folder is None:
        return []
    environments = (folder.parents[1] / ENVIRONMENTS).resolve()
    return [_read_peer(file, environments) for file in sorted(folder.glob("*/peer.toml"))]


def chosen_peers(names: list[str]) -> list[Peer]:
    folder = peers_folder()
    if folder is None:
        raise UserError(
            "the scripts of other frameworks are in fedgg's repository: clone it and run `fedgg bench setup` there"
        )
    peers = {peer.name: peer for peer in find_peers(folder)}
    for name in names:
        if name not in peers:
            raise UserError(f"unknown peer {name!r}: choose from {', '.join(peers)}")
    return [peer for name, peer in peers.items() if not names or name in names]


def install(peer: Peer, tell: Callable[[str], None], python: str = sys.executable) -> None:
    """Create the peer's virtual environment, with the same version of torch as fedgg's."""
    torch = version("torch").partition("+")[0]
    started, log = time.perf_counter(), peer.environment.with_suffix(".log")
    shutil.rmtree(peer.environment, ignore_errors=True)
    peer.environment.parent.mkdir(parents=True, exist_ok=True)
    constraint = peer.environment.with_suffix(".constraint")
    write_text(constraint, f"torch=={torch}\n")
    steps = (
        (python, "-m", "venv", str(peer.environment)),
        *((str(peer.python), *PIP_INSTALL, "--constraint", str(constraint), *words) for words in peer.requirements),
    )
    tell(f"{peer.name}: installing into {peer.environment} (log: {log})")
    with open_log(log) as output:
        for words in steps:
            if subprocess.run(words, stdout=output, stderr=subprocess.STDOUT, check=False).returncode:
                raise UserError(f"{peer.name} could not be installed: {_pip_error(log)}; the log is {log}")
    constraint.unlink()
    seconds = round(time.perf_counter() - started, 1)
    size = _size(peer.environment)
    receipt = {"requirements": peer.fingerprint(), "torch": torch, "seconds": seconds, "bytes": size}
    write_text(peer.environment / RECEIPT, json.dumps(receipt, indent=2))
    tell(f"{peer.name}: installed in {seconds:.0f} s, {size / 1e9:.1f} GB")


def _read_peer(file: Path, environments: Path) -> Peer:
    try:
        content = read_toml(file)
        entries = tuple(
            PeerEntry(str(entry["name"]), str(entry["label"]), tuple(map(str, entry.get("words", ()))))
            for entry in content["contender"]
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} cannot be read ({error!r}); each [[contender]] has a name and a label") from error
    return Peer(file.parent, environments / file.parent.name, entries)


def _pip_error(log: Path) -> str:
    lines = [line for line in read_bytes(log, LARGE).decode("utf-8", "replace").splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("ERROR")), lines[-1] if lines else "no output")


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


Device = Literal["cpu", "cuda"]
EVERYWHERE: tuple[Device, ...] = ("cpu", "cuda")
REFERENCE = "tight-2"


@dataclass(frozen=True)
class Contender:
    """A program to measure, or the reason why it cannot be measured."""

    name: str
    label: str
    words: tuple[str, ...]
    kind: Literal["fedgg", "loop", "peer"]
    threads: int = 1  # torch threads of each of its processes
    devices: tuple[Device, ...] = EVERYWHERE
    folder: Path | None = None  # of a peer
    absent: str | None = None


@dataclass(frozen=True)
class EngineEntry:
    """An engine of fedgg with its settings."""

    name: str
    label: str
    settings: dict[str, Any] = field(default_factory=dict)
    devices: tuple[Device, ...] = EVERYWHERE


# `stacked` and `streams` are for GPUs; `workers` has two processes, as the peers have.
ENGINES = (
    EngineEntry("fused", "fedgg fused"),
    EngineEntry("loop", "fedgg loop"),
    EngineEntry("workers", "fedgg workers, 2 processes", {"workers": 2}, ("cpu",)),
    EngineEntry("stacked", "fedgg stacked", {}, ("cuda",)),
    EngineEntry("streams", "fedgg streams", {}, ("cuda",)),
)


def all_contenders(peers: Path | None = None) -> list[Contender]:
    """All contenders, also those that are not installed, in the order of their turns."""
    return [*_engines(), *_loops(), *_peers(peers)]


def chosen(
    contenders: Sequence[Contender], device: Device, only: Sequence[str] = (), skip: Sequence[str] = ()
) -> list[Contender]:
    """The contenders for this device, selected by name (`pfl-2`) or by the part before the hyphen (`pfl`)."""
    for name in (*only, *skip):
        if not any(_is_named(contender, name) for contender in contenders):
            names = [contender.name for contender in contenders]
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UserError(f"unknown contender {name!r}: {hint}choose from {', '.join(names)}")
    selected = [
        contender
        for contender in contenders
        if device in contender.devices
        and (not only or any(_is_named(contender, name) for name in only))
        and not any(_is_named(contender, name) for name in skip)
    ]
    if not selected:
        raise UserError(f"no contender is left to measure on {device}: name others with --only, or fewer with --skip")
    return selected


def _is_named(contender: Contender, name: str) -> bool:
    return name in (contender.name, contender.name.partition("-")[0])


def _engines() -> list[Contender]:
    from fedgg.engines import ENGINES as REGISTERED

    return [
        Contender(
            name=f"fedgg-{entry.name}",
            label=entry.label,
            words=(*_module("fedgg_engine"), json.dumps({"name": entry.name, **entry.settings})),
            kind="fedgg",
            devices=entry.devices,
            absent=None
            if entry.name in ("auto", *REGISTERED)
            else f"this version of fedgg has no engine {entry.name!r}",
        )
        for entry in ENGINES
    ]


def _loops() -> list[Contender]:
    return [
        Contender("tight-2", "tight loop, 2 threads", _loop("tight"), "loop", threads=2),
        Contender("tight-1", "tight loop, 1 thread", _loop("tight"), "loop", threads=1, devices=("cpu",)),
        Contender("plain-2", "researcher's loop, 2 threads", _loop("plain"), "loop", threads=2),
    ]


def _peers(folder: Path | None) -> list[Contender]:
    return [
        Contender(
            name=entry.name,
            label=entry.label,
            words=(str(peer.python), str(peer.script), *entry.words),
            kind="peer",
            devices=("cpu",),
            folder=peer.folder,
            absent=peer.absent,
        )
        for peer in find_peers(folder or peers_folder())
        for entry in peer.entries
    ]


def _module(name: str) -> tuple[str, ...]:
    return (sys.executable, "-m", f"fedgg.bench.runners.{name}")


def _loop(kind: str) -> tuple[str, ...]:
    return (*_module("pytorch_loops"), kind)
