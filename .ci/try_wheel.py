"""Install a wheel, and the wheel built from an sdist, in fresh environments outside the checkout, and try each there.

python .ci/try_wheel.py dist/*.whl dist/*.tar.gz      # `make dist`

Tried are the demo and the quick version of the paper's tables, whose studies must be in the wheel. The packages are
those of constraints.txt, from the indexes that pip is set up for.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
WITHOUT = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


def run(words: list[str | Path], folder: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in WITHOUT}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def try_archive(archive: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        venv.create(folder / "environment", with_pip=True)
        programs = folder / "environment" / ("Scripts" if os.name == "nt" else "bin")
        pip: list[str | Path] = [programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        print(f"{archive.name}: installing", flush=True)
        run([*pip, "--constraint", ROOT / "constraints.txt", f"{archive.resolve()}[report]"], folder)
        place = run([programs / "python", "-c", "import fedgg; print(fedgg.__file__, fedgg.__version__)"], folder)
        if str(ROOT) in place:
            sys.exit(f"{archive.name} was tried with the checkout's package: {place}")
        for words in (["compare", "--rounds", "5"], ["reproduce", "all", "--quick"]):
            print(f"{archive.name}: fedgg {' '.join(words)}", flush=True)
            run([programs / "fedgg", *words], folder)
        pages = sorted(path.name for path in (folder / "runs").rglob("*.html"))
        if not {"report.html", "paper.html"} <= set(pages):
            sys.exit(f"{archive.name}: pages are missing, there are {', '.join(pages) or 'none'}")
        print(f"{archive.name}: {place.split()[-1]} works outside the checkout", flush=True)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        try_archive(Path(name))
