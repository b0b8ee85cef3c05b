"""Many finished runs in one small JSON file: what tables and figures use, and under which conditions it came about.

Settings are stored once (`base`) with what each run changes in them; splits and conditions once for all runs that share
them. Accuracies and bytes are kept exactly, losses and diagnostics to six digits; what every single client did in a
round, and runs that have not ended or are damaged, are left out.

    {"format": 1, "note": "...", "base": {...}, "conditions": [...], "splits": {...}, "runs": [...]}
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from fedgg.errors import UserError
from fedgg.files import LARGE, open_regular, read_json
from fedgg.output_files import write_text
from fedgg.runfolder.read import RunRecord
from fedgg.runfolder.records import check_config, check_partition, check_round, check_summary
from fedgg.runfolder.settings import common, flat, nested

FORMAT = 1
EXACT = ("test_accuracy", "holdout_accuracy", "bytes_up", "bytes_down")
ROUNDED = ("test_loss", "train_loss")
MOST_ROUNDS = 1_000_000  # of a folded run
_ENDED = ("finished", "diverged", "spent")
_OWN = ("format", "experiment", "model")  # of versions.json: a run's own, not its surroundings


def is_folded(file: Path) -> bool:
    """Whether it is such a file, by its first word."""
    try:
        with open_regular(file) as content:
            return content.read(16).startswith(b'{"format":')
    except OSError:
        return False


def fold(records: Iterable[RunRecord], note: str = "") -> dict[str, Any]:
    """The runs that have ended, compactly."""
    ended = [record for record in records if record.status in _ENDED and not record.damaged]
    settings = [flat(record.config) for record in ended]
    base = common(settings)
    conditions: list[dict[str, Any]] = []
    splits: dict[str, Any] = {}
    runs = []
    for record, own in zip(ended, settings, strict=True):
        around = {key: value for key, value in (record.versions or {}).items() if key not in _OWN}
        if around not in conditions:
            conditions.append(around)
        run: dict[str, Any] = {
            "place": PurePosixPath(*record.path.parts[-3:]).as_posix(),
            "settings": {key: value for key, value in own.items() if key not in base},
            "conditions": conditions.index(around),
            "summary": record.summary,
        }
        if record.partition is not None:
            run["split"] = str(record.partition.get("hash", len(splits)))
            splits[run["split"]] = record.partition
        runs.append(run | {"rounds": len(record.rounds)} | _columns(record.rounds))
    return {"format": FORMAT, "note": note, "base": base, "conditions": conditions, "splits": splits, "runs": runs}


def unfold(content: dict[str, Any]) -> list[RunRecord]:
    """The runs again, as if read from their folders."""
    if "runs" not in content or "splits" not in content:
        raise UserError("this is no file of folded runs: give one that `fedgg reproduce --fold` wrote")
    if content.get("format") != FORMAT:
        raise UserError(f"format {content.get('format')!r} of folded runs is not {FORMAT}, which this version reads")
    for partition in content["splits"].values():
        check_partition(partition)
    return [_record(run, content) for run in content["runs"]]


def _record(run: dict[str, Any], content: dict[str, Any]) -> RunRecord:
    config, rounds = nested(content["base"] | run["settings"]), _lines(run)
    check_config(config)
    check_summary(run["summary"])
    for line in rounds:
        check_round(line)
    versions = content["conditions"][run["conditions"]]
    if not isinstance(versions, dict) or "\0" in run["place"]:
        raise ValueError("its conditions or its place are not what a run has")
    return RunRecord(
        path=Path(run["place"]),
        config=config,
        rounds=rounds,
        partition=content["splits"].get(run.get("split")),
        summary=run["summary"],
        versions=versions,
    )


def write_folded(records: Iterable[RunRecord], file: Path, note: str = "") -> int:
    """Write the file, one run a line, so that a later version differs in the lines that differ; how many there are."""
    content = fold(records, note)
    runs = content.pop("runs")
    head = "".join(f"{json.dumps(key)}:{_compact(value)},\n" for key, value in content.items())
    body = ",\n".join(map(_compact, runs))
    write_text(file, f'{{{head}"runs":[\n{body}\n]}}\n')
    return len(runs)


def read_folded(file: Path) -> list[RunRecord]:
    try:
        content = read_json(file, LARGE)
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as folded runs: {error}") from error
    try:
        return unfold(content)
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        lacks = "it lacks " if isinstance(error, LookupError) else ""
        raise UserError(f"{file} is broken: {lacks}{error}; fold the runs again") from error


def _columns(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One list for each number a round has; one number where all rounds have the same."""
    columns: dict[str, Any] = {key: _alike([line.get(key) for line in rounds]) for key in EXACT}
    columns |= {key: _alike([_short(line.get(key)) for line in rounds]) for key in ROUNDED}
    names = list(dict.fromkeys(name for line in rounds for name in line.get("readings") or {}))
    readings = {name: _alike([_short((line.get("readings") or {}).get(name)) for line in rounds]) for name in names}
    return {key: column for key, column in (columns | {"readings": readings}).items() if column is not None}


def _lines(run: dict[str, Any]) -> list[dict[str, Any]]:
    count = run["rounds"]
    if type(count) is not int or not 0 <= count <= MOST_ROUNDS:
        raise ValueError(f"a run of {count!r} rounds")
    columns = {key: _spread_out(run[key], count) for key in (*EXACT, *ROUNDED) if key in run}
    readings = {name: _spread_out(column, count) for name, column in run["readings"].items()}
    return [
        {
            "round": at + 1,
            **{key: column[at] for key, column in columns.items() if column[at] is not None},
            "readings": {name: column[at] for name, column in readings.items()},
        }
        for at in range(count)
    ]


def _alike(column: list[Any]) -> Any:
    return column[0] if column and all(value == column[0] for value in column) else column or None


def _spread_out(column: Any, count: int) -> list[Any]:
    if isinstance(column, list) and len(column) != count:
        raise ValueError(f"a column of {len(column)} numbers for {count} rounds")
    return column if isinstance(column, list) else [column] * count


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _compact(value: Any) -> str:
    try:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except ValueError:
        return _with_infinities(value)


def _with_infinities(value: Any) -> str:
    """JSON has no word for infinity; a number too large for a float is read as one, in Python and elsewhere."""
    if isinstance(value, dict):
        pairs = (f"{json.dumps(key, ensure_ascii=False)}:{_with_infinities(inner)}" for key, inner in value.items())
        return f"{{{','.join(pairs)}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_with_infinities, value))}]"
    if isinstance(value, float) and math.isinf(value):
        return "1e999" if value > 0 else "-1e999"
    return json.dumps(value, ensure_ascii=False)
