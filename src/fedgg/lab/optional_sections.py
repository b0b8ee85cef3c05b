"""The sections of an experiment that are off unless one of their keys is set."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from fedgg.aggregation import RULES
from fedgg.lab.config_sections import ConfigSection, PartConfig, unknown_keys
from fedgg.registry import accepted_settings


class PrivacyConfig(ConfigSection):
    """Client-level differential privacy: every client's message is clipped, the server adds noise; clients count the
    same. Where cohorts are drawn, needs `pip install "fedgg[privacy]"`."""

    clip: float = Field(1.0, gt=0, description="length that no client's message exceeds, all it sends up as one vector")
    noise: float = Field(1.0, ge=0, description="standard deviation of the noise on the sum, in units of clip")
    delta: float = Field(1e-5, gt=0, lt=1, description="the delta of (epsilon, delta); well below 1 / clients")
    epsilon_limit: float | None = Field(
        None, gt=0, description="the run stops before it spends more; a larger one lets it go on"
    )

    @model_validator(mode="after")
    def _limit_can_hold(self) -> PrivacyConfig:
        if self.epsilon_limit is not None and self.noise == 0:
            raise ValueError("privacy.epsilon_limit needs noise: with privacy.noise = 0 epsilon is infinite")
        return self


class RobustConfig(PartConfig):
    """Robust aggregation: a minority of bad clients cannot carry the model away."""

    registry = RULES

    rule: str = Field(description=f"{RULES.choices()}; none: no such section", examples=list(RULES))
    trim: float | None = Field(
        None, ge=0, lt=0.5, description="trimmed_mean: share of the clients removed at either end; 0.2 by default"
    )
    clip: float | None = Field(
        None, gt=0, description="norm_clip: the longest update; by default the median of the cohort's lengths"
    )

    @model_validator(mode="after")
    def _settings_of_the_rule(self) -> RobustConfig:
        """Defaults of a registered rule become part of the experiment; settings of another rule are refused.

        A rule's settings are its parameters. Those declared above are part of an identity under any rule, as None.
        """
        if self.rule not in RULES:
            return self
        parameters = {name: accepted_settings(rule) for name, rule in RULES.items()}
        known = {key for settings in parameters.values() for key in settings}
        unknown = {key: value for key, value in self.settings.items() if key not in known}
        if unknown:
            raise unknown_keys(unknown)
        for key in self.rule_settings:
            if key not in parameters[self.rule]:
                rules = " or ".join(repr(name) for name in RULES if key in parameters[name])
                raise ValueError(f"robust.{key} belongs to rule = {rules}, not to {self.rule!r}: leave it out")
        for key, parameter in parameters[self.rule].items():
            if key not in self.rule_settings and parameter.default not in (None, parameter.empty):
                values = self.__dict__ if key in type(self).model_fields else self.__pydantic_extra__
                assert values is not None, "this section has settings"
                values[key] = parameter.default
        return self

    @property
    def rule_settings(self) -> dict[str, Any]:
        """The settings that are set: arguments of the rule."""
        return self.model_dump(exclude={"rule"}, exclude_none=True)


class AttackConfig(ConfigSection):
    """Clients that send up something else than their update, to see what an aggregation rule withstands."""

    kind: Literal["sign_flip", "noise", "nan"] = Field(
        description="sign_flip (-scale times the update), noise (normal numbers instead) or nan; none: no such section"
    )
    clients: int = Field(
        1, ge=1, description="how many of the clients that hold examples attack, in every round; drawn from the seed"
    )
    scale: float = Field(1.0, gt=0, description="sign_flip: factor; noise: standard deviation of each coordinate")

    @field_validator("kind", mode="before")
    @classmethod
    def _nan_is_a_kind(cls, kind: Any) -> Any:
        """TOML reads the bare word nan as a number."""
        return "nan" if isinstance(kind, float) and kind != kind else kind


class StopConfig(ConfigSection):
    """Early stopping: the run ends after an evaluation at which a score has reached a target, or has not improved for
    some evaluations."""

    metric: str = Field(
        description="a score of rounds.jsonl: test_, holdout_, personal_ or unseen_ with one of the run's metrics, as "
        "holdout_accuracy or test_rmse, or test_loss or train_loss; none: no such section",
        examples=["holdout_accuracy", "test_loss", "train_loss"],
    )
    patience: int | None = Field(None, ge=1, description="evaluations without improvement after which the run ends")
    min_delta: float = Field(0.0, ge=0, description="an improvement is larger than this")
    target: float | None = Field(None, description="the run ends when the score is this good; accuracies from 0 to 1")

    @model_validator(mode="after")
    def _can_stop(self) -> StopConfig:
        if self.patience is None and self.target is None:
            raise ValueError("stop needs stop.patience or stop.target: set one of them")
        return self


PersonalMethod = Literal["fedper", "fedrep", "fedbn", "lg_fedavg", "ditto", "local"]


class PersonalConfig(ConfigSection):
    """Personal parts: parameters that stay with the client and never travel, or a whole personal model."""

    method: PersonalMethod | None = Field(
        None,
        description="fedper, fedrep (the head stays), fedbn (normalisation layers stay), lg_fedavg (all but the head "
        "stays), ditto (a whole model besides) or local (all stays); none: no such section",
    )
    parameters: list[str] | None = Field(
        None, description="patterns of parameters and buffers that stay, such as ['fc.*']; by default the method's"
    )
    head_epochs: int | None = Field(
        None,
        ge=1,
        description="fedrep: epochs that train the head alone, before the others train the body alone; all "
        "but the last by default",
    )
    ditto_lambda: float | None = Field(
        None, ge=0, description="ditto: how strongly the personal model is drawn to the global one; 0.1 by default"
    )
    unseen_epochs: int | None = Field(
        None,
        ge=0,
        description="epochs that train the personal part of clients of split.unseen before they are scored; 1 by "
        "default",
    )

    @field_validator("parameters", mode="before")
    @classmethod
    def _patterns(cls, patterns: Any) -> Any:
        """One pattern, several with commas between them, or a list."""
        return [pattern.strip() for pattern in patterns.split(",")] if isinstance(patterns, str) else patterns

    @model_validator(mode="after")
    def _settings_of_the_method(self) -> PersonalConfig:
        method = self.method
        if method is None and not self.parameters:
            raise ValueError("[personal] needs personal.method, or personal.parameters such as ['fc.*']")
        if method in ("ditto", "local") and self.parameters is not None:
            raise ValueError(f"personal.parameters has no meaning under personal.method = {method!r}: leave it out")
        if self.parameters is not None and not all(self.parameters):
            raise ValueError("personal.parameters is empty or has an empty pattern: give names such as ['fc.*']")
        for key, owner in (("head_epochs", "fedrep"), ("ditto_lambda", "ditto")):
            if getattr(self, key) is not None and method != owner:
                raise ValueError(f"personal.{key} belongs to personal.method = {owner!r}: leave it out")
        if method == "ditto" and self.unseen_epochs is not None:
            raise ValueError("personal.unseen_epochs has no meaning under 'ditto': unseen clients get the global model")
        return self


OFF_UNLESS_THERE = ("privacy", "robust", "attack", "personal", "stop")


# The key whose "none" switches a section off.
SWITCHES = {"robust": "rule", "attack": "kind", "personal": "method", "stop": "metric"}
