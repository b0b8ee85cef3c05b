"""The script and the cluster file in docs/clusters.md."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from clusters import assert_same

PAGE = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text(encoding="utf-8")
STUDY = """
seeds = [0, 1]

[experiment]
rounds = 2
split = { clients = 3 }
local = { epochs = 1 }
model = { name = "linear" }

[variants.FedAvg.algorithm]
name = "fedavg"

[variants.SCAFFOLD.algorithm]
name = "scaffold"
"""


def block(language: str, beginning: str) -> str:
    blocks: list[str] = re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)
    return next(text for text in blocks if text.startswith(beginning))


@pytest.mark.slow
def test_the_job_array(tmp_path: Path) -> None:
    """Each job of the array as SLURM would call it, one after another: sbatch itself is not here."""
    script = tmp_path / "study.sh"
    script.write_text(block("bash", "#!/bin/bash"))
    (tmp_path / "my-study.toml").write_text(STUDY)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    jobs = int(re.findall(r"--array=1-(\d+)", script.read_text())[0])
    for number in range(1, jobs + 1):
        slurm = {"SLURM_ARRAY_TASK_ID": str(number), "SLURM_ARRAY_TASK_COUNT": str(jobs), "SLURM_CPUS_PER_TASK": "1"}
        subprocess.run(
            ["bash", str(script)], cwd=tmp_path, env={**os.environ, **slurm, "PATH": path}, check=True, timeout=100
        )
    fedgg = Path(sys.executable).with_name("fedgg")
    words = ["compare", "my-study.toml", "--out", "runs/alone", "--jobs", "1"]
    subprocess.run([fedgg, *words], cwd=tmp_path, check=True, timeout=100)
    assert_same(tmp_path / "runs" / "mine", tmp_path / "runs" / "alone")
    shards = [
        json.loads(file.read_text())["where"]["shard"]
        for file in (tmp_path / "runs" / "mine").glob("*/*/versions.json")
    ]
    assert sorted(shards) == ["1/8", "2/8", "3/8", "4/8"]


def test_the_cluster_file() -> None:
    """As far as Ray's schema checks it."""
    pytest.importorskip("ray")
    import yaml
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(yaml.safe_load(block("yaml", "cluster_name")))
    validate_config(config)
    assert config["provider"]["worker_ips"] == ["10.0.0.2", "10.0.0.3"]
