"""A user's FILE.py as a module, in this process and in worker processes.

Its text is sent to other processes, not its path: all processes of a run use the text read at the start, even if the
file is edited meanwhile. The module's name contains a hash of path and text: loading the same text again gives the same
classes, an edited file gives new ones.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from types import ModuleType

PREFIX = "fedgg_user_"

UserModule = tuple[str, str, str]  # name of the module, path, text


def module_of(path: Path, text: str) -> ModuleType:
    """The text of the file as a module; errors in it are raised."""
    version = hashlib.sha256(f"{path.resolve()}\n{text}".encode()).hexdigest()[:8]
    return load_user_module((f"{PREFIX}{path.stem}_{version}", str(path), text))


def loaded_user_modules() -> list[UserModule]:
    """The user modules loaded in this process."""
    loaded = [(name, vars(module)) for name, module in sys.modules.items() if name.startswith(PREFIX)]
    return [(name, content["__file__"], content["__text__"]) for name, content in loaded]


def load_user_module(user_module: UserModule) -> ModuleType:
    name, path, text = user_module
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    vars(module).update(__file__=path, __text__=text)
    sys.modules[name] = module  # dataclasses look up their module there
    try:
        exec(compile(text, path, "exec"), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module
