"""What `make` installs: versions in constraints.txt, the SHA-256 of their files in requirements.lock."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_pinned_package_but_torch_has_hashes_of_the_same_version() -> None:
    pinned = {line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")}
    entries = (ROOT / "requirements.lock").read_text().replace(" \\\n", " ").splitlines()[1:]
    locked = {entry.split()[0]: entry.split()[1:] for entry in entries}
    assert locked.keys() == {line for line in pinned if not line.startswith("torch==")}, "run `make lock`"
    assert all(hashes for hashes in locked.values())
    for option in (option for hashes in locked.values() for option in hashes):
        assert re.fullmatch("--hash=sha256:[0-9a-f]{64}", option)
