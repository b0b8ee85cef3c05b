"""The files of a run folder one by one; what is wrong with one is said in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedgg import files
from fedgg.checksums import KEY, LineChecksums, without_checksum
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
