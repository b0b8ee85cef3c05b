"""The sections of an experiment that are off unless they are there: wrappers around any algorithm."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fedgg.core.buffers import BufferPolicy
from fedgg.data.sources import are_own_arrays
from fedgg.data.transforms import Augmentation, Normalisation
from fedgg.engines.precision import Precision


class ConfigSection(BaseModel):
    # "constants": without it pydantic writes an infinite setting as None, and the setting is lost.
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, ser_json_inf_nan="constants", strict=False
    )


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


class RobustConfig(ConfigSection):
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
    def _own_settings(self) -> RobustConfig:
        if self.trim is not None and self.rule != "trimmed_mean":
            raise ValueError(f"robust.trim belongs to rule = 'trimmed_mean', not to {self.rule!r}: leave it out")
        if self.clip is not None and self.rule != "norm_clip":
            raise ValueError(f"robust.clip belongs to rule = 'norm_clip', not to {self.rule!r}: leave it out")
        return self


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


OFF_UNLESS_THERE = ("privacy", "robust", "attack")
SWITCHES = {"robust": "rule", "attack": "kind"}  # the key whose "none" switches a section off


class NamedConfig(ConfigSection):
    """A part chosen by name; every other key is one of its own settings, checked when the part is built."""

    model_config = ConfigDict(extra="allow")
    name: str

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})


class DataConfig(ConfigSection):
    source: str = Field("digits", description="digits, cifar10, cifar100, svhn or npz:FILE")
    normalise: Normalisation = Field(
        "auto", description="none, unit (pixels in 0..1), standard, or auto: none for your own arrays, else standard"
    )
    augment: Augmentation = Field("none", description="none, flip, crop or crop_flip; images only")
    proxy: int = Field(0, ge=0, description="training examples the server keeps; no client has them, nor the test set")
    holdout: float = Field(0.0, ge=0, lt=1, description="share of its examples each client keeps back to test on")

    @model_validator(mode="after")
    def _name_the_normalisation(self) -> DataConfig:
        """Hashes and config.toml have the kind that `auto` stands for; as a setting it stays unset."""
        if self.normalise == "auto":
            self.__dict__["normalise"] = "none" if are_own_arrays(self.source) else "standard"
            self.__pydantic_fields_set__.discard("normalise")
        return self


class SplitConfig(ConfigSection):
    scheme: Literal["dirichlet", "dirichlet_unbalanced", "dirichlet_client", "iid", "shards", "given"] = Field(
        "dirichlet", description="dirichlet, dirichlet_unbalanced, dirichlet_client, iid, shards, or given by the data"
    )
    clients: int = Field(10, ge=1, description="how many there are; under the scheme given as many as the data name")
    beta: float = Field(0.5, gt=0, description="Dirichlet concentration: smaller is more skewed")
    min_examples: int = Field(10, ge=0, description="the smallest client holds at least this many; unless given")
    shards_per_client: int = Field(2, ge=1, description="for the scheme shards")
    allow_empty: bool = Field(False, description="whether min_examples = 0 may leave a client with nothing")


class ModelConfig(NamedConfig):
    name: str = Field("mlp", description="linear, mlp, cnn, vgg16, or MODULE:CLASS or FILE.py:CLASS")
    start: str | None = Field(None, description="a safetensors file with the starting weights")
    statistics: BufferPolicy = Field("average", description="BatchNorm's: average, local or frozen")


class AlgorithmConfig(NamedConfig):
    name: str = Field("fedgg", description="a name from `fedgg list`, or MODULE:CLASS or FILE.py:CLASS")


class LocalConfig(ConfigSection):
    epochs: int = Field(5, ge=1, le=1_000_000, description="passes over a client's examples in a round")
    batch: int = Field(64, ge=1, description="examples a step")
    lr: float = Field(0.01, gt=0, description="learning rate of the clients' SGD")
    lr_decay: float = Field(1.0, gt=0, le=1, description="factor on lr after every round")
    momentum: float = Field(0.9, ge=0, lt=1, description="of the clients' SGD; starts at zero every round")
    weight_decay: float = Field(0.0, ge=0, description="of the clients' SGD")
    small_clients: Literal["whole", "refuse"] = Field(
        "whole", description="clients with less than a batch: train on all they have at once, or refuse the run"
    )


class ServerConfig(ConfigSection):
    cohort: int | float | None = Field(
        None, description="clients drawn each round: a number, or a share such as 0.1; all of them by default"
    )
    evaluate_every: int = Field(1, ge=1, description="rounds between evaluations on the server's test set")
    checkpoint_every: int = Field(1, ge=1, description="rounds between checkpoints; a resume repeats what lies between")
    memory_limit_mb: int = Field(
        1024, ge=0, description="what all clients may keep between rounds before it lies in a file; moves no number"
    )

    @field_validator("cohort", mode="before")
    @classmethod
    def _is_a_number(cls, cohort: Any) -> Any:
        if cohort is not None and (isinstance(cohort, bool) or not isinstance(cohort, int | float)):
            raise ValueError("give a number of clients from 1, or a share between 0 and 1")
        return cohort


class EngineConfig(ConfigSection):
    name: Literal["auto", "loop", "fused", "workers", "stacked", "streams"] = Field(
        "auto",
        description="loop: the reference, one client after another; fused: the same with faster steps; workers: fused, "
        "in parallel processes; stacked: small models as one program; streams: large ones, several in flight; auto: "
        "the fastest of them",
    )
    device: str = Field("cpu", description="cpu, cuda or cuda:N")
    precision: Precision = Field(
        "fp32", description="fp32 (without TF32) or fp64; on a GPU also tf32 and bf16, for products only"
    )
    deterministic: bool = Field(True, description="on a GPU, whether a run repeats bit for bit; False lets cuDNN try")
    threads: int = Field(
        1,
        ge=1,
        description="torch threads, whose number changes last bits; one is fastest for small models; workers have one",
    )
    workers: int | None = Field(None, ge=1, description="processes of the engine workers; one for each core by default")
    lost_clients: Literal["stop", "leave_out"] = Field(
        "stop", description="a client on which three workers died: stop the run, or leave it out of the round"
    )

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        kind, colon, number = device.partition(":")
        if not (device == "cpu" or (kind == "cuda" and (number.isdecimal() if colon else True))):
            raise ValueError("choose cpu, cuda or cuda:N")
        return device

    @model_validator(mode="after")
    def _fits_the_device(self) -> EngineConfig:
        if self.precision in ("tf32", "bf16") and self.device == "cpu":
            raise ValueError(f"engine.precision = {self.precision!r} needs a GPU: set engine.device = 'cuda'")
        if self.name == "streams" and self.device == "cpu":
            raise ValueError("engine 'streams' needs a GPU: set engine.device = 'cuda', or take 'workers'")
        if self.name == "workers" and self.device != "cpu":
            raise ValueError(f"engine 'workers' works on the cpu, not on {self.device}: take 'stacked' or 'fused'")
        return self

    @property
    def arithmetic_of(self) -> str:
        """The engine's name within a run's identity: on a CPU `auto`, `fused` and `workers` have the same bits.

        The fused step is "loop" there, as in folders of versions that had no other step under that name.
        """
        if self.name == "loop":
            return "local_step"
        fused = self.name == "fused" or (self.device == "cpu" and self.name in ("auto", "workers"))
        return "loop" if fused else self.name

    @property
    def threads_in_use(self) -> int:
        """Every process of the engine `workers` has one thread, the one that aggregates included."""
        return 1 if self.name == "workers" else self.threads
