"""Which code an experiment may run. A name such as `FILE.py:NAME` is data: nothing runs until the user allows it.

Allowed is what the user names in this call (on the command line, with `--trust`, or by `fedgg.trust`), in the variable
FEDGG_TRUST, or has allowed before with the same content (a file of the user's own remembers path and SHA-256).
docs/trust.md is the page for users.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from fedgg.errors import UserError
from fedgg.files import MEGABYTE, open_regular, read_bytes
from fedgg.older_python import file_digest
from fedgg.registry import NAMED_PARTS, names_code

VARIABLE = "FEDGG_TRUST"
HANDED_IN = "python"  # names of objects from Python begin with `python:`
LIBRARY = ("fedgg.algorithms", "fedgg.models")  # loaded with the library, whatever an experiment says

IN_THIS_CALL, IN_ENVIRONMENT, BEFORE = "this call", VARIABLE, "an earlier permission"

Ask = Callable[[str], bool]


@dataclass(frozen=True)
class Code:
    """A file that a name in an experiment would run; found without running anything of it."""

    place: str  # as the experiment names it: FILE.py or PACKAGE.MODULE
    path: Path  # links resolved
    sha256: str
    text: str | None = field(default=None, repr=False)  # of a FILE.py: what was hashed is what runs

    def described(self) -> str:
        """Path and checksum, for people."""
        return f"{_shown(self.path)}, sha256 {self.sha256}"


# What a name stands for ----------------------------------------------------------------------------------------------


def code_at(place: str) -> Code:
    """The file behind FILE.py or PACKAGE.MODULE. Neither it nor a package around it is imported."""
    if not place.isprintable():
        raise UserError(f"{place!r} is not the name of a file or module")
    if place.endswith(".py"):
        return _file(place)
    words = place.split(".")
    if not all(word.isidentifier() for word in words):
        raise UserError(f"{place!r} is neither a FILE.py nor a module: write FILE.py:NAME or MODULE:NAME")
    if words[0] in sys.stdlib_module_names or words[0] == "__main__":
        raise UserError(f"{place} is part of Python, not of an experiment: name a FILE.py or a package")
    path = _module_file(words)
    if path is None:
        way_out = f": write {place}.py:NAME for the file" if _is_file(Path(f"{place}.py")) else ""
        raise UserError(
            f"{place} cannot be imported: no such module is installed, or it has no file of its own{way_out}"
        )
    with open_regular(path) as file:
        return Code(place, path, file_digest(file).hexdigest())


def _file(place: str) -> Code:
    if not _is_file(Path(place)):
        raise UserError(f"there is no file {place}{'' if Path(place).is_absolute() else ' in the current folder'}")
    path = Path(place).resolve()
    try:
        content = read_bytes(path)
        return Code(place, path, hashlib.sha256(content).hexdigest(), content.decode("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{place} cannot be imported: {error}") from error


def _module_file(words: list[str]) -> Path | None:
    """Found as an import would find it; only the finders look, and they look at names of files."""
    with suppress(ImportError, ValueError, AttributeError, OSError):
        spec: ModuleSpec | None = importlib.util.find_spec(words[0])
        for count in range(2, len(words) + 1):
            within = spec.submodule_search_locations if spec else None
            spec = PathFinder.find_spec(".".join(words[:count]), within) if within else None
        if spec is not None and spec.has_location and spec.origin and _is_file(Path(spec.origin)):
            return Path(spec.origin).resolve()
    return None


# What is allowed -----------------------------------------------------------------------------------------------------

_trusted: set[str] = set()  # in this process: files by full path, packages by name
_ask: Ask | None = None


def trust(*places: str | os.PathLike[str]) -> None:
    """Let experiments of this process run code: `trust("my_algorithm.py", "my_package")`."""
    _trusted.update(_full_name(os.fspath(place)) for place in places)


def trust_named(settings: Mapping[str, Any]) -> None:
    """The same for code that the user typed as the value of a setting; a mistake in it is reported where it is used."""
    metrics = settings.get("metrics") or ()
    metrics = metrics.split(",") if isinstance(metrics, str) else metrics
    for name in (*map(settings.get, (*NAMED_PARTS, "task.loss")), *metrics):
        if isinstance(name, str) and names_code(name):
            with suppress(UserError):
                trust(name.rpartition(":")[0])


def trusted_here() -> frozenset[str]:
    """For processes that this one starts."""
    return frozenset(_trusted)


def inherit(trusted: Iterable[str]) -> None:
    """What the process that started this one was allowed."""
    _trusted.update(trusted)


def environment_for_children() -> dict[str, str]:
    """The same for processes that are started by others, as Flower's are."""
    places = [*filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)), *sorted(_trusted)]
    return {VARIABLE: os.pathsep.join(places)} if places else {}


def ask_with(ask: Ask | None) -> None:
    """How to put a question to the user; None where there is no terminal."""
    global _ask
    _ask = ask


def check_trusted(code: Code, doubt: str = "") -> str:
    """What allows the code; a UserError where nothing does. With a doubt only this call, or an answer, counts."""
    allowed = _allowed_by(code)
    if allowed == IN_THIS_CALL or (allowed is not None and not doubt):
        if allowed == IN_THIS_CALL:
            _remember(code)
        return allowed
    because = f": {doubt}" if doubt else ""
    question = f"This experiment runs the code of {code.place} ({code.described()}){because}. Run it?"
    if _ask is not None and _ask(question):
        _trusted.add(str(code.path))
        _remember(code)
        return IN_THIS_CALL
    option = f"--trust {shlex.quote(code.place)}"
    if doubt:
        raise UserError(
            f"{code.place} ({code.described()}): {doubt}; to continue with this code, add {option} (a loss, metrics or "
            f"model that compute something else are refused all the same: choose another folder for these)"
        )
    raise UserError(
        f"this experiment runs the code of {code.place} ({code.described()}), which is not allowed: read it, then add "
        f"{option} (from Python: fedgg.trust({code.place!r}); on a Flower node: "
        f"{VARIABLE}={shlex.quote(code.place if code.text is None else _shown(code.path))})"
    )


def _allowed_by(code: Code) -> str | None:
    if code.text is None and any(f"{code.place}.".startswith(f"{package}.") for package in LIBRARY):
        return "the library"
    if _names(code, _trusted):
        return IN_THIS_CALL
    if _names(code, _from_environment()):
        return IN_ENVIRONMENT
    return BEFORE if _line(code) in _remembered() else None


def _names(code: Code, places: set[str]) -> bool:
    if str(code.path) in places:
        return True
    words = [] if code.text is not None else code.place.split(".")
    return any(".".join(words[:count]) in places for count in range(1, len(words) + 1))


def _full_name(place: str) -> str:
    """FILE.py as a full path, which must exist; a package as it is; `:NAME` behind either is left out."""
    place = place if place.endswith(".py") else place.rpartition(":")[0] or place
    if place.endswith(".py"):
        if not _is_file(Path(place)):
            raise UserError(f"there is no file {place}")
        return str(Path(place).resolve())
    if not all(word.isidentifier() for word in place.split(".")):
        raise UserError(f"trust {place!r}: name a FILE.py or a package")
    return place


def _from_environment() -> set[str]:
    """Full paths and packages: a relative path would be another file in every folder."""
    places = set()
    for place in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        if place.endswith(".py") and not Path(place).is_absolute():
            raise UserError(f"{VARIABLE} = {place!r}: give the full path of the file")
        places.add(str(Path(place).resolve()) if place.endswith(".py") else place)
    return places


# What was allowed before ---------------------------------------------------------------------------------------------


def record_file() -> Path | None:
    """One line for each file: its SHA-256 and its path; for this user alone."""
    state = os.environ.get("XDG_STATE_HOME", "")
    with suppress(RuntimeError):  # an account without a home
        folder = Path(state) if Path(state).is_absolute() else Path.home() / ".local" / "state"
        return folder / "fedgg" / "trusted-code"
    return None


def _remember(code: Code) -> None:
    """Where that is impossible, the user is asked again the next time."""
    file = record_file()
    if file is None or not str(code.path).isprintable() or _line(code) in _remembered():
        return
    with suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
        with os.fdopen(os.open(file, flags, 0o600), "a", encoding="utf-8") as record:
            record.write(f"{_line(code)}\n")


def _remembered() -> set[str]:
    """Nothing where another account could have written it."""
    file = record_file()
    try:
        if file is None or not file.is_file() or _open_to_others(file):
            return set()
        return set(read_bytes(file, MEGABYTE).decode("utf-8").splitlines())
    except (OSError, UnicodeDecodeError):
        return set()


def _open_to_others(file: Path) -> bool:
    about = file.stat()
    return hasattr(os, "getuid") and (about.st_uid != os.getuid() or bool(about.st_mode & 0o022))


def _line(code: Code) -> str:
    return f"{code.sha256}  {code.path}"


# What a run folder says of it ----------------------------------------------------------------------------------------


def doubt_about(code: Code, recorded: object) -> str:
    """Why code may not be what a run began with; empty where its folder says that it is."""
    then = recorded.get("sha256") if isinstance(recorded, dict) else None
    if then == code.sha256:
        return ""
    return "it has changed since this run began" if then else "the run folder does not say with which code it began"


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long, or not a name at all
        return False


def _shown(path: Path) -> str:
    return str(path) if str(path).isprintable() else ascii(str(path))
