"""Scripts under benchmarks/, imported by their file."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

HOME = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, HOME / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # a dataclass looks its module up there
    spec.loader.exec_module(module)
    return module
