"""Sections that are off unless they are there: identity, TOML, and mistakes in one line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest

from fedgg.aggregation import RULES
from fedgg.core.algorithm import setting
from fedgg.core.server import Collector
from fedgg.errors import UserError
from fedgg.lab.config import Experiment, described_settings, load_experiment
from fedgg.lab.name_resolution import build_rule
from fedgg.lab.study import grid

OTHER = Experiment(
    seed=3, rounds=7, algorithm={"name": "scaffold"}, server={"cohort": 3}, model={"name": "mlp", "hidden": 8}
)


def test_experiments_without_them_are_who_they_were() -> None:
    """As computed before there were such sections: run folders and archives of that time are found again."""
    assert Experiment().hash() == "efacc91555c4ad187adbc2c5acf9b19df9d1f021a64af06d86a7dd7ec2142371"
    assert Experiment().trajectory() == "6c85a70c1891d0b9266d77d975e59192aed58bcfafb9665a5830da71b2f11594"
    assert OTHER.hash() == "0b08995874ec776d06c90f1eeb07ce3036e6640fd2c783ad4dcc05c8782fdca8"
    assert OTHER.trajectory() == "85f721b4dc8d33bfc8e5317e6912b3d244d50743adfdc15c660970246cb77641"


def test_with_them_they_are_others() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"privacy.noise": 1.0},
        {"privacy.noise": 2.0},
        {"privacy.clip": 2.0},
        {"robust.rule": "median"},
        {"robust.rule": "trimmed_mean"},
        {"robust.rule": "trimmed_mean", "robust.trim": 0.1},
        {"robust.rule": "norm_clip"},
        {"robust.rule": "norm_clip", "robust.clip": 1.0},
        {"attack.kind": "nan"},
        {"attack.kind": "noise", "attack.clients": 2},
    ]
    made = [Experiment().changed(change) for change in changes]
    assert len({e.hash() for e in made}) == len({e.trajectory() for e in made}) == len(changes)


def test_a_limit_says_how_far_the_path_is_followed() -> None:
    private = Experiment(privacy={})
    limited = private.changed({"privacy.epsilon_limit": 3.0})
    assert limited.trajectory() == private.trajectory()
    assert limited.hash() != private.hash()


@pytest.mark.parametrize(
    "content",
    [
        {"privacy": {"clip": 0.5, "noise": 2.0, "delta": 1e-6, "epsilon_limit": 4.0}},
        {"robust": {"rule": "trimmed_mean"}, "attack": {"kind": "sign_flip", "clients": 3, "scale": 4.0}},
        {"robust": {"rule": "median"}},
        {"robust": {"rule": "norm_clip", "clip": 2.0}},
    ],
)
def test_toml_round_trip(content: dict[str, Any], tmp_path: Any) -> None:
    path = tmp_path / "config.toml"
    experiment = Experiment(**content)
    path.write_text(experiment.to_toml())
    assert load_experiment(path) == experiment
    assert load_experiment(path).hash() == experiment.hash()


def test_another_rule_drops_the_old_ones_settings() -> None:
    trimmed = Experiment(robust={"rule": "trimmed_mean", "trim": 0.1})
    assert trimmed.changed({"robust.rule": "median"}) == Experiment(robust={"rule": "median"})
    assert trimmed.changed({"robust.clip": 2.0, "robust.rule": "norm_clip"}).robust.clip == 2.0  # type: ignore[union-attr]
    swept = grid({"robust.rule": ["median", "trimmed_mean", "norm_clip"]})
    rules = [trimmed.changed(changes).robust for changes in swept.values()]
    assert [rule.trim for rule in rules if rule] == [None, 0.1, None]


@dataclass(frozen=True)
class Deep(Collector):
    depth: int = setting(3, "how often it is repeated", "ours", positive=True)
    bound: float | None = None

    def __post_init__(self) -> None:
        if self.depth > 100:
            raise UserError(f"robust.depth = {self.depth}: must be 100 or less")


def test_a_rules_parameters_are_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule is registered in one place: no section names what it can be given."""
    median = Experiment(robust={"rule": "median"})
    before = median.hash(), median.trajectory(), median.to_toml()
    monkeypatch.setitem(RULES._entries, "deep", Deep)
    experiment = Experiment(robust={"rule": "deep"})
    assert experiment.robust is not None
    assert "depth = 3" in experiment.to_toml()
    assert experiment.hash() == Experiment(robust={"rule": "deep", "depth": 3}).hash()
    assert experiment.hash() != Experiment(robust={"rule": "deep", "depth": 4}).hash()
    assert build_rule(experiment.robust) == Deep(3)
    with pytest.raises(UserError, match=r"^robust.depth belongs to rule = 'deep', not to 'median': leave it out$"):
        Experiment(robust={"rule": "median", "depth": 3})
    again = experiment.changed({"robust.rule": "median"})
    assert (again.hash(), again.trajectory(), again.to_toml()) == before


def test_a_rules_parameters_are_listed_suggested_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES._entries, "deep", Deep)
    described = {key: row for key, *row in described_settings()}
    assert described["robust.depth"] == ["3", "deep: how often it is repeated"]
    assert described["robust.bound"] == ["", "of deep"]
    for key, message in (
        ("dept", "unknown key 'robust.dept': did you mean 'robust.depth'?"),
        ("sorts", "unknown key 'robust.sorts': choose from robust.rule, robust.trim, robust.clip, robust.depth, "),
    ):
        with pytest.raises(UserError, match=f"^{re.escape(message)}"):
            Experiment(robust={"rule": "deep", key: 3})
    with pytest.raises(UserError, match=r"^unknown key 'depth': did you mean 'robust.depth'\?$"):
        Experiment(depth=3)
    for depth, limit in ((0, "a whole number above zero"), (1.5, "a whole number"), (101, "100 or less")):
        robust = Experiment(robust={"rule": "deep", "depth": depth}).robust
        assert robust is not None
        with pytest.raises(UserError, match=f"^robust.depth = {depth}: must be {limit}$"):
            build_rule(robust)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"privacy": {}, "robust": {"rule": "median"}}, ("privacy and robust", "leave one out")),
        ({"robust": {"trim": 0.1}}, ("robust.rule is missing: choose from median, trimmed_mean, norm_clip",)),
        ({"attack": {}}, ("attack.kind is missing: choose from sign_flip, noise, nan",)),
        ({"robust": {"rule": "median", "trim": 0.1}}, ("robust.trim", "'trimmed_mean'", "leave it out")),
        ({"robust": {"rule": "trimmed_mean", "clip": 1.0}}, ("robust.clip", "'norm_clip'")),
        ({"robust": {"rule": "trimmed_mean", "trim": 0.5}}, ("robust.trim = 0.5", "less than 0.5")),
        ({"robust": {"rule": "mean"}}, ("robust.rule = 'mean'", "'median'")),
        ({"privacy": {"clop": 1}}, ("'privacy.clop'", "'privacy.clip'")),
        ({"privasy": {"clip": 1}}, ("'privasy.clip'", "'privacy.clip'")),
        ({"privacy": {"clip": 0}}, ("privacy.clip = 0",)),
        ({"privacy": {"clip": float("inf")}}, ("privacy.clip",)),
        ({"privacy": {"noise": -1}}, ("privacy.noise = -1",)),
        ({"privacy": {"delta": 1}}, ("privacy.delta = 1",)),
        ({"privacy": {"noise": 0, "epsilon_limit": 1}}, ("privacy.epsilon_limit needs noise",)),
        ({"attack": {"kind": "nan", "clients": 11}}, ("attack.clients = 11", "10 clients")),
    ],
)
def test_mistakes_in_one_line(content: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        Experiment(**content)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_every_key_is_described() -> None:
    rows = {key: (default, meaning) for key, default, meaning in described_settings()}
    for key in ("privacy.noise", "privacy.epsilon_limit", "robust.rule", "robust.trim", "attack.kind", "attack.scale"):
        assert rows[key][1]
    assert rows["privacy.clip"][0] == "1.0"
    assert "off" in rows["privacy"][1]
    assert rows["local.lr"][0] == "0.01"
