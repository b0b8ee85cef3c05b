"""A user's FILE.py as a module, in this process and in others that cannot read the file.

The text travels, not the path: all processes of a run work with what was read at its beginning, even if the file is
edited meanwhile. A module is named after its text, so that reading a file twice gives the same classes, and another
version of it others.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from types import ModuleType

PREFIX = "fedgg_user_"

UserModule = tuple[str, str, str]  # name of the module, path, text


def module_of(path: Path, text: str) -> ModuleType:
    """The text of the file as a module; its exceptions are raised here."""
    version = hashlib.sha256(f"{path.resolve()}\n{text}".encode()).hexdigest()[:8]
    return load_user_module((f"{PREFIX}{path.stem}_{version}", str(path), text))


def loaded_user_modules() -> list[UserModule]:
    """Every user's file this process has read."""
    loaded = [(name, vars(module)) for name, module in sys.modules.items() if name.startswith(PREFIX)]
    return [(name, content["__file__"], content["__text__"]) for name, content in loaded]


def load_user_module(user_module: UserModule) -> ModuleType:
    name, path, text = user_module
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    vars(module).update(__file__=path, __text__=text)
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        exec(compile(text, path, "exec"), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module
