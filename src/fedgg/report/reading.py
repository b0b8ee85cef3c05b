"""The files of a run folder one by one; what is wrong with one is said in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedgg import files
from fedgg.errors import UserError
from fedgg.files import parse_json, parse_lines, parse_toml
from fedgg.run_records import check_config


def broken(file: Path, why: str) -> UserError:
    return UserError(f"{file} is broken: {' '.join(why.split())}; restore the file or run again into a new folder")


def read_bytes(file: Path, limit: int | None = None, start: int = 0) -> bytes:
    try:
        return files.read_bytes(file, limit, start)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{file} cannot be read: {reason}; check the path and its permissions") from error


def read_config(file: Path) -> dict[str, Any]:
    try:
        config = parse_toml(read_bytes(file))
        check_config(config)
    except ValueError as error:
        raise broken(file, str(error)) from error
    return config


def read_object(file: Path) -> dict[str, Any]:
    try:
        return parsed_object(read_bytes(file))
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


def read_resumes(file: Path) -> tuple[dict[str, Any], ...]:
    """When the run was taken up again; a line torn by a kill is left out."""
    lines = parse_lines(read_bytes(file)) if file.exists() else ()
    return tuple(line for _, line in lines if isinstance(line, dict))
