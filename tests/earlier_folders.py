"""Run folders as versions of fedgg before checksums left them: what a test changes in one is not taken for damage."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save

from fedgg.lab.checkpoint import _checksum
from fedgg.runfolder import checksums


def without_checksums(folder: Path) -> Path:
    (folder / checksums.FILE).unlink()
    for name in ("rounds.jsonl", "resumes.jsonl"):
        if (folder / name).exists():
            lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
            for line in lines:
                line.pop("checksum")
            (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    if (folder / "summary.json").exists():
        summary = json.loads((folder / "summary.json").read_text())
        del summary["checksum"], summary["checksums"]
        (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    for path in (folder / "checkpoint").glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            facts = {key: value for key, value in file.metadata().items() if key not in ("checksum", "checksums")}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        path.write_bytes(save(tensors, metadata=facts | {"checksum": _checksum(tensors, facts)}))
    return folder
