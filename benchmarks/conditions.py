"""Shared by the benchmark scripts: conditions of a measurement, random images, timing that waits for the device."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

from fedgg.bench.results import code
from fedgg.data.dataset import Dataset
from fedgg.errors import UserError

TEST_IMAGES = 64  # not used, but a data set needs some


def conditions(device: str, commit: str | None) -> dict[str, Any]:
    """Machine, versions and commit; `commit` replaces the detected one if this folder is not a repository."""
    detected = code()
    return {
        "machine": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
            "load_before": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        },
        "code": detected if commit is None else {**detected, "commit": commit},
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "cuda": torch.version.cuda},
        "when": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }


def add_common_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, help="a JSON file for the results and their conditions")
    parser.add_argument("--commit", help="the commit to record if this folder is not a repository")


def named(text: str, known: Collection[str], option: str) -> list[str]:
    """The names in `a,b,c`; UserError for one that is not known."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise UserError(f"{option} {name}: choose from {', '.join(known)}")
    if not names:
        raise UserError(f"{option} names nothing: choose from {', '.join(known)}")
    return list(dict.fromkeys(names))


def present_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no GPU on this machine; use --device cpu")
    return torch.device(name)


def random_images(count: int, shape: tuple[int, ...], classes: int, device: torch.device) -> Dataset:
    """Random bytes; the classes are equally large."""
    generator = torch.Generator().manual_seed(0)

    def images(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randint(0, 256, (size, *shape), dtype=torch.uint8, generator=generator)
        return x, torch.arange(size) % classes

    names = tuple(map(str, range(classes)))
    return Dataset("random images", *images(count), *images(TEST_IMAGES), names, 255.0).to(device)


def seconds(work: Callable[[], Any]) -> float:
    """Seconds until the function has returned and the device has finished."""
    _wait()
    started = time.perf_counter()
    work()
    _wait()
    return time.perf_counter() - started


def free_memory() -> None:
    """Free the memory of the last contender for the next one."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table with aligned columns; numbers are right-aligned."""
    widths = [max(len(cell) for cell in column) for column in zip(head, *rows, strict=True)]
    lines = [
        " | ".join(
            cell.rjust(width) if cell[:1].isdigit() else cell.ljust(width)
            for cell, width in zip(row, widths, strict=True)
        )
        for row in [head, ["-" * width for width in widths], *rows]
    ]
    return "\n".join(f"| {line} |" for line in lines)


def save_results(content: dict[str, Any], file: Path | None) -> None:
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
