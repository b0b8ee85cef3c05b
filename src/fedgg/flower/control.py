"""What is asked of a SuperLink, through Flower's own command line."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from fedgg.errors import UserError
from fedgg.files import write_text
from fedgg.flower.private_network import PrivateNetwork

CONNECTION = "here"
TIMEOUT = 60.0  # seconds for one question


@dataclass(frozen=True)
class Control:
    """The address of a SuperLink, and the environment in which `flwr` finds it."""

    environment: Mapping[str, str]
    network: PrivateNetwork | None = None  # in which the SuperLink is; None: that of this machine

    @classmethod
    def of(
        cls,
        environment: Mapping[str, str],
        address: str,
        authority: Path | None,
        network: PrivateNetwork | None = None,
    ) -> Control:
        home = Path(environment["FLWR_HOME"])
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        trust = {"insecure": True} if authority is None else {"root-certificates": str(authority)}
        connections = {"superlink": {"default": CONNECTION, CONNECTION: {"address": address, **trust}}}
        write_text(home / "config.toml", tomli_w.dumps(connections))
        return cls(environment, network)

    def register(self, public_key: Path, name: str) -> int:
        """From now on the owner of this key may join; the number Flower gives it."""
        return int(self._ask("supernode", "register", str(public_key), CONNECTION, "--name", name)["node-id"])

    def unregister(self, node: int) -> None:
        self._ask("supernode", "unregister", str(node), CONNECTION)

    def submit(self, app: Path, settings: Path) -> int:
        """Start a run; its number."""
        return int(self._ask("run", str(app), CONNECTION, "--run-config", str(settings))["run-id"])

    def state(self, run: int) -> tuple[str, str]:
        """As `running` or `finished:failed`, and what Flower says of it."""
        told = self._ask("list", CONNECTION, "--run-id", str(run))["runs"][0]
        return str(told["status"]), str(told.get("status-details") or "")

    def log(self, run: int) -> str:
        """What the ServerApp of a run has said."""
        return self._said("log", str(run), CONNECTION, "--show").stdout

    def _ask(self, *words: str) -> dict[str, Any]:
        """Flower prints sentences too; the answer is the JSON object at the end."""
        done = self._said(*words, "--format", "json")
        answer = _object_in(done.stdout)
        if done.returncode != 0 or not answer or answer.get("success") is False:
            reason = answer.get("error-message") or done.stdout + done.stderr
            raise UserError(f"flwr {' '.join(words)}: {' '.join(str(reason).split())}")
        return answer

    def _said(self, *words: str) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                ["flwr", *words] if self.network is None else self.network.inside(["flwr", *words]),
                env=dict(self.environment),
                pass_fds=() if self.network is None else self.network.descriptors,
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
                start_new_session=True,  # Ctrl-C is ours
            )
        except subprocess.TimeoutExpired:
            raise UserError(f"flwr {' '.join(words)}: no answer within {TIMEOUT:.0f} s") from None


def _object_in(text: str) -> dict[str, Any]:
    """Empty where there is none."""
    start = text.find("{")
    try:
        found = json.loads(text[start:]) if start >= 0 else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
