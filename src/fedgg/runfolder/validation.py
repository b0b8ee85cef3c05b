"""The values that the files of a run folder may hold, checked whenever one is read.

A file may be well-formed and hold values that no run writes (an infinite number of bytes, a client that is a list).
They are refused with a ValueError that names the key and the value, so that other code need not expect them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fedgg.runfolder.checksums import without_checksum

LONGEST_TEXT = 10_000  # characters
LARGEST_NUMBER = 1e300  # beyond it, the difference of two numbers may be infinite, and a plot fails
LARGEST_COUNT = 2**53  # beyond it, whole numbers are not exact in JavaScript or in a float
SECTIONS = (
    "data",
    "split",
    "task",
    "model",
    "algorithm",
    "local",
    "optimiser",
    "schedule",
    "server",
    "server_schedule",
    "engine",
)
OPTIONAL_SECTIONS = ("privacy", "robust", "attack", "personal", "stop")
UNSET = (
    "task.loss",
    "model.start",
    "local.steps",
    "server.cohort",
    "optimiser.clip_norm",
    "engine.workers",
)  # None by default
STATUSES = ("finished", "diverged", "spent", "stopped_early", "stopped")
PLACES = ("test", "holdout", "personal", "unseen")  # where a metric is measured: `test_accuracy`, ...
BY_CLIENT, BY_CLASS = "_by_client", "_by_class"  # end the keys of a round that have a value for each of them

Spec = Mapping[str, tuple[Callable[[Any], bool], str]]


def summary_in(content: Any, *, checksum_required: bool = False) -> tuple[dict[str, Any], dict[str, str]]:
    """The content of summary.json without checksums, and the SHA-256 of other files that it lists; or a ValueError."""
    summary = without_checksum(content, required=checksum_required)
    checksums = summary.pop("checksums", {})
    check_summary(summary)
    if not isinstance(checksums, dict):
        raise ValueError(f"its checksums are {_shown(checksums)}")
    return summary, checksums


def check_round(line: Any) -> dict[str, Any]:
    """A line of rounds.jsonl, or a ValueError."""
    if not isinstance(line, dict) or type(line.get("round")) is not int:
        raise ValueError("is not a round")
    _check(line, _ROUND)
    _check(line, {key: _score(key) for key in line if key.startswith(_SCORES) and key not in _ROUND})
    for client in line.get("clients") or ():
        if "client" not in client:
            raise ValueError("does not name the client")
        _check(client, _CLIENT)
    for key in ("lost", "notes"):
        for event in line.get(key) or ():
            _check(event, _EVENT)
    return line


def check_summary(summary: Mapping[str, Any]) -> None:
    """A summary with a valid status, or a ValueError."""
    if summary.get("status") not in STATUSES:
        raise ValueError(f"its status is {_shown(summary.get('status'))}, and not one of {', '.join(STATUSES)}")
    _check(summary, _SUMMARY)
    _check(summary, {key: _NUMBER for key in summary if key.startswith(_SUMMARY_SCORES) and key not in _SUMMARY})


def check_versions(versions: Mapping[str, Any]) -> None:
    """A versions.json whose metrics, if it lists any, have a name and a direction, or a ValueError."""
    metrics = versions.get("metrics", [])
    if not isinstance(metrics, list) or not all(isinstance(metric, dict) for metric in metrics):
        raise ValueError(f"its metrics are {_shown(metrics)}, not a list of metrics")
    for metric in metrics:
        if not all(key in metric for key in _METRIC):
            raise ValueError(f"it has the metric {_shown(metric)}, which lacks one of {', '.join(_METRIC)}")
        _check(metric, _METRIC, "metrics.")


def check_partition(partition: Mapping[str, Any]) -> None:
    """A partition.json with a table of examples by client and class, or a ValueError."""
    _check(partition, _PARTITION)
    counts, classes = partition.get("counts"), partition.get("classes")
    widths = {len(row) for row in counts or ()}
    if len(widths) > 1 or (counts and widths == {0}):
        raise ValueError("its counts are not a table of clients by classes")
    if classes and widths and widths != {len(classes)}:
        raise ValueError(f"it names {len(classes)} classes and counts {widths.pop()}")


def check_config(config: Mapping[str, Any]) -> None:
    """The settings of a run as far as they are shown, or a ValueError; `Experiment` checks all of them."""
    for name in (*SECTIONS, *OPTIONAL_SECTIONS):
        off = name in OPTIONAL_SECTIONS and config.get(name) is None
        if not off and not isinstance(config.get(name, {}), dict):
            raise ValueError(f"{name} is {_shown(config[name])}, not a table")
    _check(config, _CONFIG)
    for section, spec in _IN_SECTION.items():
        _check(config.get(section) or {}, spec, f"{section}.")
    for section in SECTIONS:
        for key, value in (config.get(section) or {}).items():
            if _has_null(value) and f"{section}.{key}" not in UNSET:  # TOML has no null
                raise ValueError(f"{section}.{key} is {_shown(value)}, and a setting is never null")


def _has_null(value: Any) -> bool:
    return value is None or (isinstance(value, list) and any(map(_has_null, value)))


def _check(content: Mapping[str, Any], spec: Spec, prefix: str = "") -> None:
    for key, (fits, what) in spec.items():
        if key in content and not fits(content[key]):
            raise ValueError(f"has {prefix}{key} = {_shown(content[key])}, not {what}")


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:37]}..."


def is_number(value: Any) -> bool:
    """Whether it is a finite number that can be summed and plotted."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST_NUMBER <= value <= LARGEST_NUMBER


def _any_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _share(value: Any) -> bool:
    return _any_number(value) and (not is_number(value) or 0 <= value <= 1)


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST_COUNT


def _amount(value: Any) -> bool:
    return value is None or (is_number(value) and 0 <= value <= LARGEST_COUNT)


def _text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST_TEXT


def _text_or_none(value: Any) -> bool:
    return value is None or _text(value)


def _numbers(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and all(map(_any_number, value.values())))


def _amounts(value: Any) -> bool:
    return value is None or (
        isinstance(value, dict) and all(one is not None and _amount(one) for one in value.values())
    )


def _shares_by_client(value: Any) -> bool:
    if value is None:
        return True
    return isinstance(value, dict) and all(_is_client(key) and _share(one) for key, one in value.items())


def _numbers_by_client(value: Any) -> bool:
    return _numbers(value) and all(map(_is_client, value or ()))


def _is_client(key: str) -> bool:
    return key.isascii() and key.isdigit() and len(key) < 16


def _score(key: str) -> tuple[Callable[[Any], bool], str]:
    """What a round may have under the key of a score."""
    if key.endswith(BY_CLIENT):
        return _numbers_by_client, "a number for each client"
    return (_numbers, "a number for each class") if key.endswith(BY_CLASS) else _NUMBER


def _objects(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(one, dict) for one in value))


def _table(value: Any) -> bool:
    return value is None or (
        isinstance(value, list) and all(isinstance(row, list) and all(map(_whole, row)) for row in value)
    )


def _texts(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(map(_text, value)))


_NUMBER, _SHARE = (_any_number, "a number"), (_share, "a number from 0 to 1")
_SCORES = tuple(f"{place}_" for place in PLACES)
_SUMMARY_SCORES = tuple(f"{which}_{score}" for which in ("final", "highest", "lowest") for score in _SCORES)
_ROUND: Spec = {
    "round": (lambda value: _whole(value) and value > 0, "a whole number from 1"),
    "test_accuracy": _SHARE,
    "holdout_accuracy": _SHARE,
    "holdout_accuracy_by_client": (_shares_by_client, "a number from 0 to 1 for each client"),
    "personal_accuracy": _SHARE,
    "personal_accuracy_by_client": (_shares_by_client, "a number from 0 to 1 for each client"),
    "unseen_accuracy": _SHARE,
    "unseen_accuracy_by_client": (_shares_by_client, "a number from 0 to 1 for each client"),
    "test_loss": _NUMBER,
    "train_loss": _NUMBER,
    "server_lr": _NUMBER,
    "epsilon": _NUMBER,
    "delta": _NUMBER,
    "bytes_up": (_amount, "a number of bytes"),
    "bytes_down": (_amount, "a number of bytes"),
    "seconds": (_amounts, "a table of seconds"),
    "readings": (_numbers, "a table of numbers"),
    "clients": (_objects, "a list of clients"),
    "lost": (_objects, "a list of clients"),
    "notes": (_objects, "a list of clients"),
}
_CLIENT: Spec = {
    "client": (_whole, "the number of a client"),
    "examples": (_amount, "a number of examples"),
    "loss": _NUMBER,
}
_EVENT: Spec = {
    "client": (lambda value: _whole(value) or _text(value), "the number or the name of a client"),
    "why": (_text_or_none, "text"),
    "what": (_text_or_none, "text"),
}
_SUMMARY: Spec = {
    "why": (_text_or_none, "text"),
    "rounds_done": (_whole, "a number of rounds"),
    "final_test_accuracy": _SHARE,
    "highest_test_accuracy": _SHARE,
    "final_personal_accuracy": _SHARE,
    "final_unseen_accuracy": _SHARE,
    "highest_at_round": (lambda value: value is None or _whole(value), "a round"),
    "lowest_at_round": (lambda value: value is None or _whole(value), "a round"),
    "parameters": (_whole, "a number of parameters"),
    "clients_lost": (_whole, "a number of dropped clients"),
    "bytes": (_amount, "a number of bytes"),
    "seconds": (_amount, "a number of seconds"),
    "epsilon": _NUMBER,
    "delta": _NUMBER,
}
_METRIC: Spec = {
    "name": (lambda value: _text(value) and value.isidentifier(), "a name of letters, digits and underscores"),
    "higher_is_better": (lambda value: isinstance(value, bool), "true or false"),
    "percent": (lambda value: isinstance(value, bool), "true or false"),
}
_PARTITION: Spec = {
    "hash": (_text_or_none, "text"),
    "scheme": (_text_or_none, "text"),
    "classes": (_texts, "a list of names"),
    "counts": (_table, "a table of clients by classes"),
}
_CONFIG: Spec = {
    "name": (_text, "text"),
    "seed": (lambda value: type(value) is int and value >= 0, "a whole number from 0"),
    "rounds": (_whole, "a whole number"),
}
_IN_SECTION: dict[str, Spec] = {
    "data": {"source": (_text, "text")},
    "split": {"scheme": (_text, "text"), "beta": (is_number, "a number"), "clients": (_whole, "a whole number")},
    "model": {"name": (_text, "text")},
    "algorithm": {"name": (_text, "text")},
    "optimiser": {"name": (_text, "text")},
    "schedule": {"name": (_text, "text")},
    "server_schedule": {"name": (_text, "text")},
    "personal": {"method": (_text, "text")},
    "engine": {"precision": (_text, "text"), "device": (_text, "text"), "name": (_text, "text")},
}
