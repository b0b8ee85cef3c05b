"""The build: studies of `experiments/` become data of the package `fedgg.paper`. All else is in pyproject.toml."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


class BuildWithStudies(build_py):
    """Copies experiments/*.toml beside fedgg/paper/plan.py, which reads them; a checkout has them in experiments/."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        studies = sorted((ROOT / "experiments").glob("*.toml"))
        if not studies:
            raise FileNotFoundError("experiments/*.toml are missing, and `fedgg reproduce` needs them")
        folder = Path(self.build_lib) / "fedgg" / "paper" / "studies"
        folder.mkdir(parents=True, exist_ok=True)
        for study in studies:
            shutil.copyfile(study, folder / study.name)


setup(cmdclass={"build_py": BuildWithStudies})
