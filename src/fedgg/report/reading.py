"""The files of a run folder one by one; what is wrong with one is said in one line."""

from __future__ import annotations

import json
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedgg.errors import UserError


def broken(file: Path, why: str) -> UserError:
    return UserError(f"{file} is broken: {' '.join(why.split())}; restore the file or run again into a new folder")


def read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}; check the path and its permissions") from error


def read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_bytes(file).decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise broken(file, str(error)) from error


def read_object(file: Path) -> dict[str, Any]:
    try:
        return parsed_object(read_bytes(file))
    except ValueError as error:
        raise broken(file, str(error)) from error


def parsed_object(content: bytes) -> dict[str, Any]:
    """One JSON object, or a ValueError that says what else it is."""
    if not content.strip():
        raise ValueError("it is empty")
    value = json.loads(content)
    if not isinstance(value, dict):
        raise ValueError("it does not hold one JSON object")
    return value


def read_resumes(file: Path) -> tuple[dict[str, Any], ...]:
    """When the run was taken up again; a line torn by a kill is left out."""
    told = []
    for line in read_bytes(file).split(b"\n") if file.exists() else ():
        with suppress(ValueError):
            told.append(json.loads(line))
    return tuple(line for line in told if isinstance(line, dict))


def add_rounds(
    rounds: list[dict[str, Any]], content: bytes, first_line: int = 1, *, may_be_torn: bool = True
) -> list[str]:
    """Append the rounds that some lines of rounds.jsonl tell to those already known; what is wrong with the others.

    Lines are only ever appended, so a kill can tear the last one and no other: that one, if it may be torn, is left out
    without a word.
    """
    complaints = []
    lines = content.rstrip().split(b"\n")
    for number, line in enumerate(lines, start=first_line):
        if not line.strip():
            continue
        try:
            told = json.loads(line)
        except ValueError as error:
            if number < first_line + len(lines) - 1 or not may_be_torn:
                complaints.append(f"line {number}: {error}")
            continue
        if not isinstance(told, dict) or type(told.get("round")) is not int:
            complaints.append(f"line {number} is not a round")
        elif rounds and told["round"] <= rounds[-1]["round"]:
            complaints.append(f"line {number} tells round {told['round']} after round {rounds[-1]['round']}")
        else:
            rounds.append(told)
    return complaints
