"""The studies behind the paper's tables and figures: `experiments/NAME.toml`, in the repository or beside a wheel."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from fedgg.errors import UserError
from fedgg.lab.study import Study, load_study


@cache
def preset(name: str) -> Study:
    return load_study(find(f"{name}.toml"))


def find(file: str) -> Path:
    """In a checkout the folder is known; where a wheel put it, the list of installed files says."""
    here = Path(__file__).parents[3] / "experiments" / file
    if here.is_file():
        return here
    try:
        installed = files("fedgg") or []
    except PackageNotFoundError:
        installed = []
    for entry in installed:
        if entry.parts[-2:] == ("experiments", file):
            return Path(str(entry.locate())).resolve()
    raise UserError(f"experiments/{file} is not where fedgg is installed: install it again, or run from its repository")
