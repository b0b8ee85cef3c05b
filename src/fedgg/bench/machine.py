"""The machine and the code of a measurement: processor, memory, load, versions, commit.

Without matplotlib, which the extra `bench` does not install.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from fedgg import __version__
from fedgg.bench.contender_process import psutil
from fedgg.lab.provenance import commit


def machine(device: str) -> dict[str, Any]:
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": psutil().virtual_memory().total,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "gpu": _gpu() if device == "cuda" else None,
    }


def code() -> dict[str, Any]:
    """The version of fedgg and, in a git repository, the commit and whether files differ from it."""
    return {"fedgg": __version__, **commit()}


def load_average() -> float:
    """The load average of the last minute."""
    return round(float(psutil().getloadavg()[0]), 2)


def free_memory() -> int:
    return int(psutil().virtual_memory().available)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
