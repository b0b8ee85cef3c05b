"""What went over the network, one line for each exchange, in `exchanges.jsonl` of the run folder.

Bytes of arrays are what the rounds' own record counts; what stands beside them (who is meant, which round, the loss) is
told apart. An exchange that was repeated has a line for each attempt.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from fedgg.core.server import Lost
from fedgg.files import append_line
from fedgg.flower.exchange import Exchange, Traffic
from fedgg.lab.files import writing_to


@dataclass
class Line:
    lost: list[Lost] = field(default_factory=list)


@dataclass(frozen=True)
class ExchangeLog:
    folder: Path
    check_lock: Callable[[], None]  # raises once the folder is no longer this process's

    @contextmanager
    def exchange(self, kind: str, round_: int, attempt: int, clients: list[int], exchange: Exchange) -> Iterator[Line]:
        line, started, exchange.traffic = Line(), time.monotonic(), Traffic()
        try:
            yield line
        finally:
            told = {
                "kind": kind,
                "round": round_,
                "attempt": attempt,
                "clients": clients,
                "lost": [asdict(gone) for gone in line.lost],
                "bytes": asdict(exchange.traffic),
                "seconds": round(time.monotonic() - started, 3),
                "when": datetime.now(UTC).isoformat(timespec="seconds"),
            }
            with writing_to(self.folder):
                append_line(self.folder / "exchanges.jsonl", json.dumps(told), self.check_lock)
