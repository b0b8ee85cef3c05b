"""Damage to the files of a run folder, by chance: what a failing disk, a bad copy or an editor does to them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

Damage = Callable[[bytes, random.Random], bytes]
LEFT_OUT = ("lock",)  # empty, and not read


def _flipped(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _digit(content: bytes, chance: random.Random) -> bytes:
    """Another digit in the place of one: what stays well-formed."""
    places = [at for at, letter in enumerate(content) if letter in b"0123456789"]
    if not places:
        return _flipped(content, chance)
    changed = bytearray(content)
    at = chance.choice(places)
    changed[at] = chance.choice([letter for letter in b"0123456789" if letter != changed[at]])
    return bytes(changed)


def _random_bytes(content: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(content))
    length = min(len(content) - at, chance.choice([1, 2, 16, 512]))
    return content[:at] + chance.randbytes(length) + content[at + length :]


def _zeros(content: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(content))
    length = min(len(content) - at, chance.choice([1, 8, 512, 4096, len(content)]))
    return content[:at] + bytes(length) + content[at + length :]


def _cut(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content))]


def _cut_at_a_line(content: bytes, chance: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    return b"".join(lines[: chance.randrange(len(lines))])


def _lines(content: bytes, chance: random.Random, change: Callable[[list[bytes], int, int], None]) -> bytes:
    lines = content.splitlines(keepends=True)
    change(lines, chance.randrange(len(lines)), chance.randrange(len(lines)))
    return b"".join(lines)


def _swap(lines: list[bytes], one: int, other: int) -> None:
    lines[one], lines[other] = lines[other], lines[one]


def _swapped(content: bytes, chance: random.Random) -> bytes:
    return _lines(content, chance, _swap)


def _duplicated(content: bytes, chance: random.Random) -> bytes:
    return _lines(content, chance, lambda lines, one, other: lines.insert(other, lines[one]))


def _without_a_line(content: bytes, chance: random.Random) -> bytes:
    return _lines(content, chance, lambda lines, one, _: lines.__delitem__(one))


def _repeated_piece(content: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(content))
    return content[:at] + content[at : at + chance.choice([1, 10, 1000])] + content[at:]


KINDS: dict[str, Damage] = {
    "a flipped bit": _flipped,
    "another digit": _digit,
    "random bytes": _random_bytes,
    "zeros": _zeros,
    "cut": _cut,
    "cut at the end of a line": _cut_at_a_line,
    "swapped lines": _swapped,
    "a duplicated line": _duplicated,
    "a deleted line": _without_a_line,
    "a piece twice": _repeated_piece,
    "emptied": lambda content, chance: b"",
}


def damage_one_file(folder: Path, chance: random.Random) -> tuple[str, str] | None:
    """The file and what was done to it; None where it left the file as it was."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name not in LEFT_OUT)
    # The small files that hold settings and history as often as all others together.
    text = [file for file in files if file.suffix in (".toml", ".json", ".jsonl")]
    file = chance.choice(chance.choice([text, files]))
    name = file.relative_to(folder).as_posix()
    kind = chance.choice(["deleted", *KINDS, *KINDS])
    if kind == "deleted":
        file.unlink()
        return name, kind
    before = file.read_bytes()
    after = KINDS[kind](before, chance) if before else b"x"
    file.write_bytes(after)
    return None if after == before else (name, kind)
