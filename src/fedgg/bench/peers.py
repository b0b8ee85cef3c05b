"""Other frameworks: a folder each in `benchmarks/peers`, an environment each in `.bench`, so that pins never collide.

A folder holds `peer.toml` (who takes part under which name), `requirements.txt` and `contender.py`; what pip must
install without what it asks for is in `without-dependencies.txt`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import fedgg
from fedgg.errors import UserError
from fedgg.files import LARGE, MEGABYTE, open_log, read_bytes, read_json, read_toml, write_text

ENVIRONMENTS = ".bench"
PIP_INSTALL = ("-m", "pip", "install", "--disable-pip-version-check")
RECEIPT = "installed.json"  # written last: an environment without it is incomplete


@dataclass(frozen=True)
class Entry:
    """One way in which a peer takes part, for instance with two workers."""

    name: str
    label: str
    words: tuple[str, ...]


@dataclass(frozen=True)
class Peer:
    """A framework that is measured beside fedgg."""

    folder: Path
    environment: Path
    entries: tuple[Entry, ...]

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
        """What pip is told to install, step by step."""
        alone = self.folder / "without-dependencies.txt"
        first = ("--requirement", str(self.folder / "requirements.txt"))
        return [first, ("--no-deps", "--requirement", str(alone))] if alone.exists() else [first]

    @property
    def absent(self) -> str | None:
        """Why it cannot take part, and what helps."""
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
    """`benchmarks/peers` of the repository that this fedgg is run from; an installed one has none."""
    for root in (Path(fedgg.__file__).parents[2], Path.cwd()):
        if (root / "benchmarks" / "peers").is_dir():
            return root / "benchmarks" / "peers"
    return None


def find_peers(folder: Path | None) -> list[Peer]:
    """Every peer with a `peer.toml`, by name."""
    if folder is None:
        return []
    environments = (folder.parents[1] / ENVIRONMENTS).resolve()
    return [_read(file, environments) for file in sorted(folder.glob("*/peer.toml"))]


def chosen_peers(names: list[str]) -> list[Peer]:
    folder = peers_folder()
    if folder is None:
        raise UserError("the peers' scripts are in fedgg's repository: clone it and run `fedgg bench setup` there")
    peers = {peer.name: peer for peer in find_peers(folder)}
    for name in names:
        if name not in peers:
            raise UserError(f"unknown peer {name!r}: choose from {', '.join(peers)}")
    return [peer for name, peer in peers.items() if not names or name in names]


def install(peer: Peer, tell: Callable[[str], None], python: str = sys.executable) -> None:
    """Make the peer's environment anew, with the torch that fedgg has, so that nobody wins by another torch."""
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
                raise UserError(f"{peer.name} could not be installed: {_complaint(log)}; the log is {log}")
    constraint.unlink()
    seconds = round(time.perf_counter() - started, 1)
    size = _size(peer.environment)
    receipt = {"requirements": peer.fingerprint(), "torch": torch, "seconds": seconds, "bytes": size}
    write_text(peer.environment / RECEIPT, json.dumps(receipt, indent=2))
    tell(f"{peer.name}: installed in {seconds:.0f} s, {size / 1e9:.1f} GB")


def _read(file: Path, environments: Path) -> Peer:
    try:
        content = read_toml(file)
        entries = tuple(
            Entry(str(entry["name"]), str(entry["label"]), tuple(map(str, entry.get("words", ()))))
            for entry in content["contender"]
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} cannot be read ({error!r}); each [[contender]] has a name and a label") from error
    return Peer(file.parent, environments / file.parent.name, entries)


def _complaint(log: Path) -> str:
    lines = [line for line in read_bytes(log, LARGE).decode("utf-8", "replace").splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("ERROR")), lines[-1] if lines else "no word")


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
