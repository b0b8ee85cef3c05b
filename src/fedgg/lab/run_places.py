"""Where the runs of a study are computed: a shard of them, several devices, and the place that a run records."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fedgg.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Shard:
    """One of several fixed parts of a study, counted from 1."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


def shard_from(text: str) -> Shard:
    """`3/8` as the third of eight shards."""
    words = re.fullmatch(r"\s*(\d{1,6})\s*/\s*(\d{1,6})\s*", text)
    if words is None or not 1 <= int(words[1]) <= int(words[2]):
        raise UserError(f"--shard {text!r}: write NUMBER/COUNT, counted from 1, for instance 3/8")
    return Shard(int(words[1]), int(words[2]))


def shards_of(runs: Sequence[T], count: int, row: Callable[[T], object]) -> list[Shard]:
    """The shard of each run: it depends on the list of all runs alone, not on which of them have ended.

    Runs are dealt out row by row, so that neither the runs of all shards nor those of one row differ by more than one.
    """
    by_row: dict[object, list[int]] = {}
    for number, run in enumerate(runs):
        by_row.setdefault(row(run), []).append(number)
    in_order = [number for numbers in by_row.values() for number in numbers]
    shards = {number: Shard(place % count + 1, count) for place, number in enumerate(in_order)}
    return [shards[number] for number in range(len(runs))]


# Devices --------------------------------------------------------------------------------------------------------------


def devices_from(text: str) -> tuple[str, ...] | None:
    """`cuda:0,1`, `cuda:0,cuda:0`, `cuda:all` or `cpu,cpu` as one device for each process; None for a single device."""
    if text == "cuda:all":
        return _all_devices()
    if "," not in text:
        return None
    devices: list[str] = []
    for word in (part.strip() for part in text.split(",")):
        kind = devices[-1].partition(":")[0] if devices and word.isdecimal() else ""
        device = f"{kind}:{word}" if kind == "cuda" else word
        if not re.fullmatch(r"cpu|cuda:\d+", device):
            raise UserError(
                f"device {text!r}: write cuda:all, or a list such as cuda:0,1 or cuda:0,cuda:0 (one process for each)"
            )
        devices.append(device)
    if len({device.partition(":")[0] for device in devices}) > 1:
        raise UserError(f"device {text!r}: all must be of one kind of device, cpu or cuda")
    return tuple(devices)


def _all_devices() -> tuple[str, ...]:
    import torch

    if not (count := torch.cuda.device_count()):
        raise UserError("device 'cuda:all': this machine has no CUDA device; set --device cpu")
    return tuple(f"cuda:{number}" for number in range(count))


def kind_of(devices: Sequence[str]) -> str:
    """cpu or cuda. A process for one of several GPUs sees this one alone, under the name `cuda`."""
    return devices[0].partition(":")[0]


# The place of a run ---------------------------------------------------------------------------------------------------

PLACE: dict[str, str] = {}  # what `record_place` was called with


def record_place(**facts: str | None) -> None:
    """Runs of this process record where they are: `node` (the name of the machine), `device`, `shard` and others.

    Without a call nothing is recorded: a run on one machine does not name it.
    """
    PLACE.clear()
    PLACE.update({key: value for key, value in facts.items() if value})


def machine_name() -> str:
    return platform.node() or "unknown"
