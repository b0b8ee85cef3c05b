"""Write requirements.lock: what constraints.txt pins, with the SHA-256 of the files that the package index has of it.

`make lock`, after a change of constraints.txt. Files for other Python versions than ours are left out. So is torch: its
builds for CPU and CUDA have one version and different files, and come from different indexes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit
from urllib.request import urlopen

from pip._internal.models.index import PyPI
from pip._vendor.packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename

ROOT = Path(__file__).parent.parent
WITHOUT_HASHES = ("torch",)
PYTHONS = (11, 12, 13)


class Links(HTMLParser):
    """The files of a project on the page that every package index has of it: SHA-256 by file name."""

    def __init__(self, page: str):
        super().__init__()
        self.files: dict[str, str] = {}
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        link = urlsplit(dict(attrs).get("href") or "")
        if tag == "a" and link.fragment.startswith("sha256="):
            self.files[unquote(link.path.rsplit("/", 1)[-1])] = link.fragment.removeprefix("sha256=")


def index_address() -> str:
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True
    )
    return (os.environ.get("PIP_INDEX_URL") or asked.stdout.strip() or PyPI.simple_url).rstrip("/")


def hashes(index: str, name: str, version: str) -> list[str]:
    with urlopen(f"{index}/{canonicalize_name(name)}/", timeout=60) as page:
        files = Links(page.read().decode()).files
    ours = sorted({digest for file, digest in files.items() if _is_ours(file, version)})
    if not ours or not all(re.fullmatch("[0-9a-f]{64}", digest) for digest in ours):
        sys.exit(f"the package index has no SHA-256 of {name}=={version}")
    return ours


def _is_ours(file: str, version: str) -> bool:
    """Whether it is of this version and could be installed by one of our Python versions, on whatever platform."""
    try:
        if not file.endswith(".whl"):
            return str(parse_sdist_filename(file)[1]) == version
        _, found, _, tags = parse_wheel_filename(file)
    except ValueError:  # of a name from before there were rules for names
        return False
    return str(found) == version and any(_fits(tag.interpreter, tag.abi) for tag in tags)


def _fits(interpreter: str, abi: str) -> bool:
    if interpreter.startswith("py3"):
        return True
    minor = int(interpreter[3:]) if re.fullmatch(r"cp3\d+", interpreter) else 0
    if abi == "abi3":  # for this version and later ones
        return 0 < minor <= PYTHONS[-1]
    return minor in PYTHONS and not abi.endswith("t")  # "t": without the global interpreter lock


def main() -> None:
    index = index_address()
    lines = [line.strip() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    entries = ["# What `make` installs with these hashes; written by `make lock` from constraints.txt."]
    for line in lines:
        name, version = line.split("==")
        if name not in WITHOUT_HASHES:
            entries.append(" \\\n    ".join([line, *(f"--hash=sha256:{one}" for one in hashes(index, name, version))]))
    (ROOT / "requirements.lock").write_text("\n".join(entries) + "\n")


if __name__ == "__main__":
    main()
