"""What runs are compared by: a metric, where it was measured, and how its values are compared and written.

The rounds of a run have a number for each metric under `test_<metric>`, `holdout_<metric>`, `personal_<metric>` and
`unseen_<metric>`, as far as it was measured there, and beside the last three the value of each client. Measures over
clients (worst client, worst decile, spread) are computed from these values when they are read, and so is
`client_<metric>`: by the model that clients use, so that personal models can be compared with a global one.
`versions.json` lists the metrics with their direction; without a list the metric is accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fedgg.runfolder.validation import BY_CLIENT, PLACES, is_number

# In a title, in a sentence, and in a few words.
_WHERE = {
    "test": ("test", "the server's test set", "server"),
    "holdout": ("hold-out", "the clients' hold-out examples", "clients"),
    "personal": ("personal", "the clients' hold-out examples, by each client's personal model", "personal models"),
    "unseen": ("unseen-client", "the hold-out examples of clients that take part in no round", "unseen clients"),
    "client": (
        "client",
        "the clients' hold-out examples, by the model each client uses: its personal one, or else the global one",
        "clients' models",
    ),
    "train": ("training", "the clients' batches during training", "clients"),
}
_OF_A_CLIENT = {
    "holdout": "{} of the global model on each client's hold-out examples",
    "personal": "{} of each client's personal model on its hold-out examples",
    "unseen": "{} on the hold-out examples of each client that takes part in no round: of the global model, or where "
    "parts are personal, with a personal part trained on the client's own examples",
    "client": "{} of the model each client uses, on its hold-out examples",
}
_TITLES = {
    "top5": "top-5 accuracy",
    "f1": "macro-F1",
    "rmse": "RMSE",
    "mae": "MAE",
    "auroc": "AUROC",
}
LARGEST_VALUE = 1e60  # beyond it, the variances of differences overflow; values beyond it count as missing
# Of the metrics that fedgg contains, those that are shares: for lines about a run in progress, without its folder.
SHARES = frozenset({"accuracy", "top5", "recall", "f1", "auroc", "label_accuracy"})
OVER_CLIENTS = {
    "worst_client": "{} of the worst client",
    "worst_decile": "{} of the worst tenth of the clients",
    "spread": "spread of {} over clients",
}


@dataclass(frozen=True)
class Measure:
    """One number of a round by which runs are compared.

    `over`: computed from the values of single clients. `worst_client` is the lowest of them (the highest where lower
    is better), `worst_decile` the mean of the worst tenth (of one client at least), `spread` the standard deviation.
    """

    metric: str
    where: str = "test"
    higher_is_better: bool = True
    percent: bool = True  # a share, shown times 100
    over: str | None = None

    @cached_property
    def key(self) -> str:
        """Its name on the command line and, unless it is computed over clients, in rounds.jsonl."""
        return f"{self.recorded}_{self.over}" if self.over else self.recorded

    @property
    def recorded(self) -> str:
        """The key of a round that it is taken from; that of the single clients is followed by `_by_client`."""
        return f"{self.where}_{self.metric}"

    def recorded_in(self, line: Mapping[str, Any]) -> str:
        """The same in a certain round: under `client`, of personal models where it has them."""
        if self.where != "client":
            return self.recorded
        personal = f"personal_{self.metric}"
        return personal if personal in line else f"holdout_{self.metric}"

    @property
    def title(self) -> str:
        """For people: "test accuracy", "hold-out RMSE of the worst client"."""
        plain = f"{_WHERE[self.where][0]} {self.metric_title}"
        return OVER_CLIENTS[self.over].format(plain) if self.over else plain

    @property
    def metric_title(self) -> str:
        """The same without the place: "accuracy", "RMSE"."""
        return _TITLES.get(self.metric, self.metric.replace("_", " "))

    @property
    def short(self) -> str:
        """The title; test accuracy, the most common measure, is called accuracy."""
        return "accuracy" if self.key == ACCURACY.key else self.title

    @property
    def place(self) -> str:
        """Where it was measured, in words."""
        return _WHERE[self.where][1]

    @property
    def brief(self) -> str:
        """Where it was measured, in a word or two."""
        return _WHERE[self.where][2]

    @property
    def where_word(self) -> str:
        """The place as it is called in titles."""
        return _WHERE[self.where][0]

    @property
    def client_caption(self) -> str:
        """What its value for a single client is."""
        name = self.metric_title[:1].upper() + self.metric_title[1:]
        return _OF_A_CLIENT.get(self.where, "{}").format(name)

    @property
    def file(self) -> str:
        """The name of its table and figure, without the ending."""
        return "accuracy" if self.key == ACCURACY.key else self.key

    # Comparing ----------------------------------------------------------------------------------------------------

    @property
    def best_word(self) -> str:
        return "highest" if self.higher_is_better else "lowest"

    def best(self, values: Iterable[float]) -> float:
        return max(values) if self.higher_is_better else min(values)

    def reaches(self, value: Any, target: float) -> Any:
        """Whether a value, or each of an array of values, is at least as good as the target."""
        return value >= target if self.higher_is_better else value <= target

    def at(self, line: Mapping[str, Any]) -> float | None:
        """Its value in a round; None where the round has none."""
        if self.over is None:
            value: Any = line.get(self.recorded_in(line))
            return float(value) if _is_comparable(value) else None
        by_client = (line.get(self.recorded_in(line) + BY_CLIENT) or {}).values()
        numbers = [float(value) for value in by_client if _is_comparable(value)]
        return self._over(numbers) if numbers else None

    def _over(self, by_client: Sequence[float]) -> float:
        if self.over == "spread":
            middle = math.fsum(by_client) / len(by_client)
            return math.sqrt(math.fsum((value - middle) ** 2 for value in by_client) / len(by_client))
        worst_first = sorted(by_client, reverse=not self.higher_is_better)
        worst = worst_first[: 1 if self.over == "worst_client" else max(1, len(worst_first) // 10)]
        return math.fsum(worst) / len(worst)

    # Writing ------------------------------------------------------------------------------------------------------

    @property
    def unit(self) -> str:
        """Follows a number in a sentence."""
        return " %" if self.percent else ""

    @property
    def points(self) -> str:
        """Follows a difference in a sentence."""
        return " points" if self.percent else ""

    def number(self, value: float, decimals: int = 1) -> str:
        """Without the unit: 62.5 for a share, 0.341 for another number; `decimals` of a share."""
        return f"{100 * value:.{decimals}f}" if self.percent else three_digits(value)

    def with_deviation(self, mean: float, deviation: float | None) -> str:
        """Mean and, where it is known, deviation or half the width of an interval; without the unit."""
        if deviation is None:
            return self.number(mean)
        if self.percent:
            return f"{self.number(mean)} ± {self.number(deviation)}"
        written = three_digits(mean)
        if deviation and _is_plain(deviation) and (mean == 0 or _is_plain(mean)):  # as many decimals as the deviation
            written = f"{mean:.{min(_decimals(deviation, 2), _decimals(mean or 1.0, 6))}f}"
        return f"{written} ± {three_digits(deviation, 2)}"

    def difference(self, mean: float, half_width: float | None) -> str:
        """With its sign."""
        return f"{'-' if mean < 0 else '+'}{self.with_deviation(abs(mean), half_width)}"


def _is_comparable(value: Any) -> bool:
    return is_number(value) and abs(value) <= LARGEST_VALUE


ACCURACY = Measure("accuracy")
LOSS = Measure("loss", higher_is_better=False, percent=False)


def three_digits(value: float, digits: int = 3) -> str:
    """Rounded to this many significant digits: 0.341, 12.3; whole from 1000 on, with an exponent from a million on."""
    if value == 0:
        return "0"
    if not _is_plain(value):
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:.{_decimals(value, digits)}f}"


def _is_plain(value: float) -> bool:
    return 1e-5 <= abs(value) < 1e6


def _decimals(value: float, digits: int) -> int:
    return max(0, digits - 1 - math.floor(math.log10(abs(value))))


def metrics_in(versions: Mapping[str, Any] | None) -> tuple[Measure, ...]:
    """The metrics of a run, on the test set, the primary one first; by its versions.json, which has been checked."""
    listed = (versions or {}).get("metrics")
    if not listed:
        return (ACCURACY,)
    return tuple(
        Measure(entry["name"], higher_is_better=entry["higher_is_better"], percent=entry["percent"]) for entry in listed
    )


def first_score(record: Mapping[str, Any], prefix: str = "") -> tuple[Measure, float] | None:
    """The primary metric of a round, or of a summary under `prefix`, and its value; None without one.

    It is the first that was written: on the test set, or else of personal models. Of a metric that fedgg does not
    contain, the unit is not known here.
    """
    for where in ("test", "personal"):
        start = f"{prefix}{where}_"
        key = next((key for key in record if key.startswith(start)), None)
        if key is not None and is_number(record[key]):
            metric = key.removeprefix(start)
            return Measure(metric, where, percent=metric in SHARES), float(record[key])
    return None


def planned_measures(metrics: Sequence[str], *, holdout: bool) -> list[str]:
    """The keys of what a run with these metrics is going to record, with hold-out examples or without."""
    by_client = [f"holdout_{metric}" for metric in metrics] if holdout else []
    over = [f"{key}_{name}" for key in by_client for name in OVER_CLIENTS]
    return [*(f"test_{metric}" for metric in metrics), *by_client, *over, "test_loss", "train_loss"]


def recorded_measures(metrics: Sequence[Measure], rounds: Sequence[Mapping[str, Any]]) -> dict[str, Measure]:
    """The measures that at least one of these rounds has, by key: metrics first, losses last."""
    keys = {
        key for line in rounds for key, value in line.items() if is_number(value) or (value and isinstance(value, dict))
    }
    measures: dict[str, Measure] = {}
    for where in (*PLACES, "client"):
        for metric in metrics:
            measured = replace(metric, where=where)
            recorded = f"personal_{metric.metric}" if where == "client" else measured.key
            by_client = recorded + BY_CLIENT in keys
            if recorded in keys or by_client:
                measures.setdefault(measured.key, measured)
            if by_client:
                for over in OVER_CLIENTS:
                    higher = metric.higher_is_better and over != "spread"
                    summary = replace(measured, over=over, higher_is_better=higher)
                    measures.setdefault(summary.key, summary)
    for where in (*PLACES, "train"):
        if (loss := replace(LOSS, where=where)).key in keys:
            measures.setdefault(loss.key, loss)
    return measures
