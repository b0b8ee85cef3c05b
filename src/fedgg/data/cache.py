"""Where data lives on this machine."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "FEDGG_DATA"


def data_folder(flag: str | Path | None = None) -> Path:
    """The folder for data sets: the argument, else the variable FEDGG_DATA, else the user's cache folder."""
    chosen = flag or os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    import pooch

    return Path(pooch.os_cache("fedgg"))


def places_to_look(folder: Path) -> list[Path]:
    """The folder and the folders within it, without those that are closed to us (a shared /tmp is full of them)."""
    if not folder.is_dir():
        return []
    return [folder, *sorted(place for place in folder.iterdir() if os.access(place, os.X_OK) and place.is_dir())]
