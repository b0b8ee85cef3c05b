"""The sections of an experiment that are off unless they are there: wrappers around any algorithm."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class Section(BaseModel):
    # "constants": without it pydantic writes an infinite setting as None, and the setting is lost.
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, ser_json_inf_nan="constants", strict=False
    )


class Privacy(Section):
    """Client-level differential privacy: every client's message is clipped, the server adds noise; clients count the
    same. Where cohorts are drawn, needs `pip install "fedgg[privacy]"`."""

    clip: float = Field(1.0, gt=0, description="length that no client's message exceeds, all it sends up as one vector")
    noise: float = Field(1.0, ge=0, description="standard deviation of the noise on the sum, in units of clip")
    delta: float = Field(1e-5, gt=0, lt=1, description="the delta of (epsilon, delta); well below 1 / clients")
    epsilon_limit: float | None = Field(
        None, gt=0, description="the run stops before it spends more; a larger one lets it go on"
    )

    @model_validator(mode="after")
    def _limit_can_hold(self) -> Privacy:
        if self.epsilon_limit is not None and self.noise == 0:
            raise ValueError("privacy.epsilon_limit needs noise: with privacy.noise = 0 epsilon is infinite")
        return self


class Robust(Section):
    """Robust aggregation: a minority of bad clients cannot carry the model away."""

    rule: Literal["median", "trimmed_mean", "norm_clip"] = Field(
        description="median, trimmed_mean (of each coordinate; clients count the same) or norm_clip (by examples); "
        "none: no such section"
    )
    trim: float | None = Field(
        None, ge=0, lt=0.5, description="trimmed_mean: part of the clients cut off at either end; 0.2 by default"
    )
    clip: float | None = Field(
        None, gt=0, description="norm_clip: the longest update; by default the median of the cohort's lengths"
    )

    @model_validator(mode="before")
    @classmethod
    def _usual_trim(cls, content: Any) -> Any:
        if isinstance(content, dict) and content.get("rule") == "trimmed_mean" and content.get("trim") is None:
            return {**content, "trim": 0.2}
        return content

    @model_validator(mode="after")
    def _own_settings(self) -> Robust:
        if self.trim is not None and self.rule != "trimmed_mean":
            raise ValueError(f"robust.trim belongs to rule = 'trimmed_mean', not to {self.rule!r}: leave it out")
        if self.clip is not None and self.rule != "norm_clip":
            raise ValueError(f"robust.clip belongs to rule = 'norm_clip', not to {self.rule!r}: leave it out")
        return self


class Attack(Section):
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


OFF_UNLESS_THERE = ("privacy", "robust", "attack")
SWITCHES = {"robust": "rule", "attack": "kind"}  # the key whose "none" switches a section off
