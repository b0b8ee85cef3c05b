"""What the files of a run folder hold, checked as they are read: the one reader of histories.

A file may be well-formed and still hold what no run writes (an infinite number of bytes, a client that is a list).
It is refused here, with the key and the value in a ValueError, so that nothing behind it has to expect it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedgg import files
from fedgg.errors import UserError
from fedgg.files import parse_json, parse_lines, parse_toml
from fedgg.runfolder.checksums import KEY, LineChecksums, sha256, without_checksum

LONGEST = 10_000  # letters of a name
FARTHEST = 1e300  # numbers beyond it cannot be drawn: their differences are no longer finite
LARGEST = 2**53  # above it, whole numbers are no longer exact in JavaScript, nor in a float
SECTIONS = ("data", "split", "model", "algorithm", "local", "server", "engine")
OFF_UNLESS_THERE = ("privacy", "robust", "attack")
STATUSES = ("finished", "diverged", "spent", "stopped")

Spec = Mapping[str, tuple[Callable[[Any], bool], str]]


@dataclass(frozen=True)
class History:
    """The rounds of a rounds.jsonl, up to the first line that a run has not written so."""

    content: bytes
    rounds: list[dict[str, Any]]
    ends: list[int]  # by round: the bytes of the file up to the end of its line
    damage: str | None  # what is wrong with the line behind them
    has_checksums: bool

    def up_to(self, rounds: int) -> bytes:
        return self.content[: self.ends[rounds - 1]] if rounds else b""

    def sha256(self, rounds: int) -> str:
        return sha256(self.up_to(rounds))


def read_history(content: bytes, *, checksums_required: bool = False) -> History:
    """A last line torn by a kill does not count, and is no damage."""
    checksums = LineChecksums(required=checksums_required)
    rounds: list[dict[str, Any]] = []
    ends: list[int] = []
    damage, end = None, 0
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        end += len(line) + 1
        checksums.check(line + b"\n")
        damage = checksums.complaint
        try:
            if damage is None and line.strip():
                record = parse_json(line)
                check_round(record)
                if record["round"] != len(rounds) + 1:
                    raise ValueError(f"tells round {record['round']}, where round {len(rounds) + 1} belongs")
                record.pop(KEY, None)
                rounds.append(record)
                ends.append(end)
        except ValueError as error:
            damage = f"line {number} {' '.join(str(error).split())}"
        if damage is not None:
            break
    return History(content, rounds, ends, damage, checksums.present)


def add_rounds(
    rounds: list[dict[str, Any]],
    content: bytes,
    first_line: int = 1,
    *,
    may_be_torn: bool = True,
    checksums: LineChecksums | None = None,
) -> list[str]:
    """Append the rounds that some lines of rounds.jsonl hold to those already known; what is wrong with the others.

    Lines are only ever appended, so a kill can tear the last one and no other: that one, if it may be torn, is left out
    without a complaint. `checksums` are those of the lines before; it remembers what is wrong with its own.
    """
    if checksums is not None:
        checksums.check_all(content)
    complaints = []
    last = content.rstrip().count(b"\n") + 1
    for number, line in parse_lines(content):
        at = f"line {first_line + number - 1}"
        if isinstance(line, ValueError):
            if number < last or not may_be_torn:
                complaints.append(f"{at}: {' '.join(str(line).split())}")
            continue
        try:
            check_round(line)
        except ValueError as error:
            complaints.append(f"{at} {error}")
            continue
        if rounds and line["round"] <= rounds[-1]["round"]:
            complaints.append(f"{at} tells round {line['round']} after round {rounds[-1]['round']}")
        else:
            line.pop(KEY, None)
            rounds.append(line)
    return complaints


def summary_in(content: Any, *, checksum_required: bool = False) -> tuple[dict[str, Any], dict[str, str]]:
    """A summary.json: how the run ended, and SHA-256 of other files at that time; or a ValueError."""
    summary = without_checksum(content, required=checksum_required)
    checksums = summary.pop("checksums", {})
    check_summary(summary)
    if not isinstance(checksums, dict):
        raise ValueError(f"its checksums are {_shown(checksums)}")
    return summary, checksums


def check_round(line: Any) -> dict[str, Any]:
    """A line of rounds.jsonl, or a ValueError."""
    if not isinstance(line, dict) or type(line.get("round")) is not int:
        raise ValueError("is not a round")
    _check(line, _ROUND)
    for client in line.get("clients") or ():
        if "client" not in client:
            raise ValueError("does not name the client")
        _check(client, _CLIENT)
    for key in ("lost", "notes"):
        for event in line.get(key) or ():
            _check(event, _EVENT)
    return line


def check_summary(summary: Mapping[str, Any]) -> None:
    """A summary that says how the run ended, or a ValueError."""
    if summary.get("status") not in STATUSES:
        raise ValueError(f"its status is {_shown(summary.get('status'))}, and not one of {', '.join(STATUSES)}")
    _check(summary, _SUMMARY)


def check_partition(partition: Mapping[str, Any]) -> None:
    """Who holds what: clients by classes; or a ValueError."""
    _check(partition, _PARTITION)
    counts, classes = partition.get("counts"), partition.get("classes")
    widths = {len(row) for row in counts or ()}
    if len(widths) > 1 or (counts and widths == {0}):
        raise ValueError("its counts are not a table of clients by classes")
    if classes and widths and widths != {len(classes)}:
        raise ValueError(f"it names {len(classes)} classes and counts {widths.pop()}")


def check_config(config: Mapping[str, Any]) -> None:
    """The settings of a run as far as they are shown, or a ValueError; `Experiment` checks all of them."""
    for name in (*SECTIONS, *OFF_UNLESS_THERE):
        off = name in OFF_UNLESS_THERE and config.get(name) is None
        if not off and not isinstance(config.get(name, {}), dict):
            raise ValueError(f"{name} is {_shown(config[name])}, not a table")
    _check(config, _CONFIG)
    for section, spec in _IN_SECTION.items():
        _check(config.get(section) or {}, spec, f"{section}.")


def _check(content: Mapping[str, Any], spec: Spec, prefix: str = "") -> None:
    for key, (fits, what) in spec.items():
        if key in content and not fits(content[key]):
            raise ValueError(f"has {prefix}{key} = {_shown(content[key])}, not {what}")


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:37]}..."


def is_number(value: Any) -> bool:
    """A finite one that can be added up and drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -FARTHEST <= value <= FARTHEST


def _any_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _share(value: Any) -> bool:
    return _any_number(value) and (not is_number(value) or 0 <= value <= 1)


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


def _amount(value: Any) -> bool:
    return value is None or (is_number(value) and 0 <= value <= LARGEST)


def _text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST


def _text_or_none(value: Any) -> bool:
    return value is None or _text(value)


def _numbers(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and all(map(_any_number, value.values())))


def _amounts(value: Any) -> bool:
    return value is None or (
        isinstance(value, dict) and all(one is not None and _amount(one) for one in value.values())
    )


def _shares_by_client(value: Any) -> bool:
    if value is None:
        return True
    return isinstance(value, dict) and all(
        key.isascii() and key.isdigit() and len(key) < 16 and _share(one) for key, one in value.items()
    )


def _objects(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(one, dict) for one in value))


def _table(value: Any) -> bool:
    return value is None or (
        isinstance(value, list)
        and all(isinstance(row, list) and all(type(one) is int and 0 <= one <= LARGEST for one in row) for row in value)
    )


def _texts(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(map(_text, value)))


_NUMBER, _SHARE = (_any_number, "a number"), (_share, "a number from 0 to 1")
_ROUND: Spec = {
    "round": (lambda value: _whole(value) and value > 0, "a whole number from 1"),
    "test_accuracy": _SHARE,
    "holdout_accuracy": _SHARE,
    "holdout_accuracy_by_client": (_shares_by_client, "a number from 0 to 1 for each client"),
    "test_loss": _NUMBER,
    "train_loss": _NUMBER,
    "epsilon": _NUMBER,
    "delta": _NUMBER,
    "bytes_up": (_amount, "a number of bytes"),
    "bytes_down": (_amount, "a number of bytes"),
    "seconds": (_amounts, "a table of seconds"),
    "readings": (_numbers, "a table of numbers"),
    "clients": (_objects, "a list of clients"),
    "lost": (_objects, "a list of clients"),
    "notes": (_objects, "a list of clients"),
}
_CLIENT: Spec = {
    "client": (_whole, "the number of a client"),
    "examples": (_amount, "a number of examples"),
    "loss": _NUMBER,
}
_EVENT: Spec = {
    "client": (lambda value: _whole(value) or _text(value), "the number or the name of a client"),
    "why": (_text_or_none, "text"),
    "what": (_text_or_none, "text"),
}
_SUMMARY: Spec = {
    "why": (_text_or_none, "text"),
    "rounds_done": (_whole, "a number of rounds"),
    "final_test_accuracy": _SHARE,
    "highest_test_accuracy": _SHARE,
    "highest_at_round": (lambda value: value is None or _whole(value), "a round"),
    "bytes": (_amount, "a number of bytes"),
    "seconds": (_amount, "a number of seconds"),
    "epsilon": _NUMBER,
    "delta": _NUMBER,
}
_PARTITION: Spec = {
    "hash": (_text_or_none, "text"),
    "scheme": (_text_or_none, "text"),
    "classes": (_texts, "a list of names"),
    "counts": (_table, "a table of clients by classes"),
}
_CONFIG: Spec = {
    "name": (_text, "text"),
    "seed": (lambda value: type(value) is int and value >= 0, "a whole number from 0"),
    "rounds": (_whole, "a whole number"),
}
_IN_SECTION: dict[str, Spec] = {
    "data": {"source": (_text, "text")},
    "split": {"scheme": (_text, "text"), "beta": (is_number, "a number"), "clients": (_whole, "a whole number")},
    "model": {"name": (_text, "text")},
    "algorithm": {"name": (_text, "text")},
    "engine": {"precision": (_text, "text"), "device": (_text, "text"), "name": (_text, "text")},
}


def broken(file: Path, why: str) -> UserError:
    return UserError(f"{file} is broken: {' '.join(why.split())}; restore the file or run again into a new folder")


def read_bytes(file: Path, limit: int | None = None, start: int = 0) -> bytes:
    try:
        return files.read_bytes(file, limit, start)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{file} cannot be read: {reason}; check the path and its permissions") from error


def parsed_config(file: Path, content: bytes) -> dict[str, Any]:
    try:
        config = parse_toml(content)
        check_config(config)
    except ValueError as error:
        raise broken(file, str(error)) from error
    return config


def read_object(file: Path) -> dict[str, Any]:
    """One JSON object, which fits its checksum if it has one."""
    try:
        return without_checksum(parsed_object(read_bytes(file)))
    except ValueError as error:
        raise broken(file, str(error)) from error


def parsed_object(content: bytes) -> dict[str, Any]:
    """One JSON object, or a ValueError that says what else it is."""
    if not content.strip():
        raise ValueError("it is empty")
    value = parse_json(content)
    if not isinstance(value, dict):
        raise ValueError("it does not hold one JSON object")
    return value


def read_events(file: Path, checksums: LineChecksums) -> tuple[dict[str, Any], ...]:
    """When the run was resumed, or what happened to its processes; a line torn by a kill is left out."""
    content = read_bytes(file) if file.exists() else b""
    checksums.check_all(content)
    lines = [line for _, line in parse_lines(content) if isinstance(line, dict)]
    return tuple({key: value for key, value in line.items() if key != KEY} for line in lines)
