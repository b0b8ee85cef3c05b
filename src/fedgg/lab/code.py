"""What can be told of code a user brought: whether it is still the same."""

from __future__ import annotations

import hashlib
import inspect
from typing import Any

from torch import nn

OURS = ("fedgg", "torch", "builtins", "abc", "typing")  # versions tell of these


def fingerprint(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def structure_of(module: nn.Module) -> str:
    """Of the layers as torch prints them: a ReLU is no Tanh, though both have no parameters."""
    return fingerprint(str(module))


def code_of(thing: Any) -> str | None:
    """Of the source of its class and of that one's bases; None for our own, and for what was typed at a prompt."""
    kinds = [kind for kind in type(thing).__mro__ if kind.__module__.partition(".")[0] not in OURS]
    try:
        return fingerprint("\n".join(inspect.getsource(kind) for kind in kinds)) if kinds else None
    except (OSError, TypeError):
        return None
