"""An archive: many finished runs in one small JSON file, with what tables and figures need and the runs' conditions.

Settings are stored once (`base`) with what each run changes in them; splits and conditions once for all runs that share
them. Scores and bytes are stored exactly, losses and diagnostics to six digits. Left out are the values of single
clients, the events of rounds (dropped clients, notes, attackers; the summary has the number of dropped clients), the
epsilon of each round (the summary has that of the last), resumes, and runs that have not ended or are damaged.

    {"format": 1, "note": "...", "base": {...}, "conditions": [...], "splits": {...}, "runs": [...]}
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from fedgg.errors import UserError
from fedgg.files import LARGE, open_regular, read_json, write_output
from fedgg.runfolder.record_types import RunRecord, common, flat, nested
from fedgg.runfolder.validation import (
    PLACES,
    check_config,
    check_partition,
    check_round,
    check_summary,
    check_versions,
    is_number,
)

FORMAT = 1
EXACT = ("test_accuracy", "holdout_accuracy", "personal_accuracy", "unseen_accuracy", "bytes_up", "bytes_down")
ROUNDED = ("test_loss", "train_loss")
MOST_ROUNDS = 1_000_000  # of one run
_ENDED = ("finished", "diverged", "spent", "stopped_early")
_PER_RUN = ("format", "experiment", "model", "where")  # keys of versions.json that are not conditions


def is_archive(file: Path) -> bool:
    """Whether a file is an archive, by its first characters."""
    try:
        with open_regular(file) as content:
            return content.read(16).startswith(b'{"format":')
    except OSError:
        return False


def archive_of(records: Iterable[RunRecord], note: str = "") -> dict[str, Any]:
    """The content of an archive of the runs that have ended."""
    ended = [record for record in records if record.status in _ENDED and not record.damaged]
    settings = [flat(record.config) for record in ended]
    base = common(settings)
    conditions: list[dict[str, Any]] = []
    splits: dict[str, Any] = {}
    runs = []
    for record, run_settings in zip(ended, settings, strict=True):
        surroundings = {key: value for key, value in (record.versions or {}).items() if key not in _PER_RUN}
        if surroundings not in conditions:
            conditions.append(surroundings)
        run: dict[str, Any] = {
            "place": PurePosixPath(*record.path.parts[-3:]).as_posix(),
            "settings": {key: value for key, value in run_settings.items() if key not in base},
            "conditions": conditions.index(surroundings),
            "summary": record.summary,
        }
        if record.partition is not None:
            run["split"] = str(record.partition.get("hash", len(splits)))
            splits[run["split"]] = record.partition
        runs.append(run | {"rounds": len(record.rounds)} | _columns(record.rounds))
    return {"format": FORMAT, "note": note, "base": base, "conditions": conditions, "splits": splits, "runs": runs}


def records_in(content: dict[str, Any]) -> list[RunRecord]:
    """The runs of an archive's content, as if read from their folders."""
    if "runs" not in content or "splits" not in content:
        raise UserError("this is not an archive of runs: give a file that `fedgg reproduce --fold` wrote")
    if content.get("format") != FORMAT:
        raise UserError(f"this is an archive of format {content.get('format')!r}, and this version reads {FORMAT}")
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
        raise ValueError("its conditions or its place are not those of a run")
    check_versions(versions)
    return RunRecord(
        path=Path(run["place"]),
        config=config,
        rounds=rounds,
        partition=content["splits"].get(run.get("split")),
        summary=run["summary"],
        versions=versions,
    )


def write_archive(records: Iterable[RunRecord], file: Path, note: str = "") -> int:
    """Write an archive with one line for each run, so that versions of it can be compared; the number of runs in it."""
    content = archive_of(records, note)
    runs = content.pop("runs")
    head = "".join(f"{json.dumps(key)}:{_compact(value)},\n" for key, value in content.items())
    body = ",\n".join(map(_compact, runs))
    write_output(file, f'{{{head}"runs":[\n{body}\n]}}\n')
    return len(runs)


def read_archive(file: Path) -> list[RunRecord]:
    """The runs of an archive, as if read from their folders."""
    try:
        content = read_json(file, LARGE)
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as an archive of runs: {error}") from error
    try:
        return records_in(content)
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        lacks = "it lacks " if isinstance(error, LookupError) else ""
        raise UserError(f"{file} is broken: {lacks}{error}; write the archive again") from error


def _columns(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A list for each number that rounds have; a single number where it is the same in all rounds."""
    columns: dict[str, Any] = {key: _one_if_equal([line.get(key) for line in rounds]) for key in EXACT}
    columns |= {key: _one_if_equal([_six_digits(line.get(key)) for line in rounds]) for key in ROUNDED}
    others = dict.fromkeys(key for line in rounds for key, value in line.items() if _is_score(key) and is_number(value))
    columns |= {key: _one_if_equal([line.get(key) for line in rounds]) for key in others if key not in columns}
    names = list(dict.fromkeys(name for line in rounds for name in line.get("readings") or {}))
    readings = {
        name: _one_if_equal([_six_digits((line.get("readings") or {}).get(name)) for line in rounds]) for name in names
    }
    return {key: column for key, column in (columns | {"readings": readings}).items() if column is not None}


def _lines(run: dict[str, Any]) -> list[dict[str, Any]]:
    count = run["rounds"]
    if type(count) is not int or not 0 <= count <= MOST_ROUNDS:
        raise ValueError(f"a run of {count!r} rounds")
    others = [key for key in run if _is_score(key) and key not in (*EXACT, *ROUNDED)]
    columns = {key: _repeated(run[key], count) for key in (*EXACT, *ROUNDED, *others) if key in run}
    readings = {name: _repeated(column, count) for name, column in run["readings"].items()}
    return [
        {
            "round": at + 1,
            **{key: column[at] for key, column in columns.items() if column[at] is not None},
            "readings": {name: column[at] for name, column in readings.items()},
        }
        for at in range(count)
    ]


def _is_score(key: str) -> bool:
    """Whether a key of a round is that of a metric, as `test_rmse` or `personal_accuracy`."""
    return key.partition("_")[0] in PLACES and "_" in key


def _one_if_equal(column: list[Any]) -> Any:
    return column[0] if column and all(value == column[0] for value in column) else column or None


def _repeated(column: Any, count: int) -> list[Any]:
    if isinstance(column, list) and len(column) != count:
        raise ValueError(f"a column of {len(column)} numbers for {count} rounds")
    return column if isinstance(column, list) else [column] * count


def _six_digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _compact(value: Any) -> str:
    try:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except ValueError:
        return _with_infinities(value)


def _with_infinities(value: Any) -> str:
    """JSON has no infinity; a number too large for a float is read as one, in Python and elsewhere."""
    if isinstance(value, dict):
        pairs = (f"{json.dumps(key, ensure_ascii=False)}:{_with_infinities(inner)}" for key, inner in value.items())
        return f"{{{','.join(pairs)}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_with_infinities, value))}]"
    if isinstance(value, float) and math.isinf(value):
        return "1e999" if value > 0 else "-1e999"
    return json.dumps(value, ensure_ascii=False)
