"""The sections of an experiment: their keys, types, defaults and descriptions."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import InitErrorDetails

from fedgg.aggregation import RULES
from fedgg.algorithms import ALGORITHMS
from fedgg.core.buffers import BufferPolicy
from fedgg.data import DATASETS, SPLITS
from fedgg.data.client_batches import Augmentation, Normalisation
from fedgg.data.partition import OFFERED
from fedgg.engines import ENGINES
from fedgg.engines.precision import Precision
from fedgg.models import MODELS
from fedgg.registry import Registry, accepted_settings, names_code


class ConfigSection(BaseModel):
    # "constants": without it pydantic writes an infinite setting as None, and the setting is lost.
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, ser_json_inf_nan="constants", strict=False
    )


class PartConfig(ConfigSection):
    """A section that names a part; keys beside the declared ones are settings of that part."""

    model_config = ConfigDict(extra="allow")

    @property
    def settings(self) -> dict[str, Any]:
        """The keys that are not declared here."""
        return dict(self.__pydantic_extra__ or {})


def _refuse_unknown_keys(settings: dict[str, Any]) -> None:
    """As pydantic refuses them in sections without settings."""
    if settings:
        details = [InitErrorDetails(type="extra_forbidden", loc=(key,), input=settings[key]) for key in settings]
        raise ValidationError.from_exception_data("unknown keys", details)


def _checked_name(registry: Registry[Any], name: str, *others: str) -> str:
    """The name, if it is registered or that of user code, which is not looked at here."""
    if name not in registry and name not in others and not names_code(name):
        raise ValueError(registry.suggestion(name, *others))
    return name


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

    rule: str = Field(description=f"{RULES.choices()}; none: no such section", examples=list(RULES))
    trim: float | None = Field(
        None, ge=0, lt=0.5, description="trimmed_mean: share of the clients removed at either end; 0.2 by default"
    )
    clip: float | None = Field(
        None, gt=0, description="norm_clip: the longest update; by default the median of the cohort's lengths"
    )

    @field_validator("rule")
    @classmethod
    def _known_rule(cls, rule: str) -> str:
        return _checked_name(RULES, rule)

    @model_validator(mode="after")
    def _settings_of_the_rule(self) -> RobustConfig:
        """Defaults of a registered rule become part of the experiment; settings of another rule are refused."""
        if self.rule not in RULES:
            return self
        accepted = accepted_settings(RULES[self.rule])
        _refuse_unknown_keys({key: value for key, value in self.settings.items() if key not in accepted})
        for key in ("trim", "clip"):
            if key in accepted:
                default = None if accepted[key].default is accepted[key].empty else accepted[key].default
                self.__dict__[key] = default if getattr(self, key) is None else getattr(self, key)
            elif getattr(self, key) is not None:
                rules = " or ".join(repr(name) for name, rule in RULES.items() if key in accepted_settings(rule))
                raise ValueError(f"robust.{key} belongs to rule = {rules}, not to {self.rule!r}: leave it out")
        return self

    @property
    def rule_settings(self) -> dict[str, Any]:
        """What the rule is made with."""
        declared = {"trim": self.trim, "clip": self.clip}
        return {key: value for key, value in declared.items() if value is not None} | self.settings


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


class DataConfig(ConfigSection):
    source: str = Field("digits", description=DATASETS.choices())
    normalise: Normalisation = Field(
        "auto", description="none, unit (pixels in 0..1), standard, or auto: none for your own data, else standard"
    )
    augment: Augmentation = Field("none", description="none, flip, crop or crop_flip; images only")
    proxy: int = Field(0, ge=0, description="training examples that the server holds instead of a client")
    holdout: float = Field(0.0, ge=0, lt=1, description="share of its examples that each client holds out for testing")

    @model_validator(mode="after")
    def _name_the_normalisation(self) -> DataConfig:
        """Hashes and config.toml have the kind that `auto` stands for; as a setting it stays unset."""
        if self.normalise == "auto":
            self.__dict__["normalise"] = "none" if ":" in self.source else "standard"
            self.__pydantic_fields_set__.discard("normalise")
        return self


class SplitConfig(PartConfig):
    scheme: str = Field("dirichlet", description=SPLITS.choices())
    clients: int = Field(10, ge=1, description="number of clients; for the scheme given, the data's")
    beta: float = Field(0.5, gt=0, description="Dirichlet concentration: smaller is more skewed")
    min_examples: int = Field(
        10, ge=0, description="the fewest examples of a client; splits with randomness are drawn until all have them"
    )
    shards_per_client: int = Field(2, ge=1, description="for the scheme shards")
    allow_empty: bool = Field(False, description="whether min_examples = 0 may leave a client without examples")

    @field_validator("scheme")
    @classmethod
    def _known_scheme(cls, scheme: str) -> str:
        return _checked_name(SPLITS, scheme)

    @model_validator(mode="after")
    def _settings_of_the_scheme(self) -> SplitConfig:
        if self.scheme in SPLITS:
            accepted = accepted_settings(SPLITS[self.scheme]).keys() - set(OFFERED)
            _refuse_unknown_keys({key: value for key, value in self.settings.items() if key not in accepted})
        return self

    @property
    def scheme_settings(self) -> dict[str, Any]:
        """What the scheme may read."""
        return {"beta": self.beta, "shards_per_client": self.shards_per_client, **self.settings}


class ModelConfig(PartConfig):
    name: str = Field("mlp", description=MODELS.choices())
    start: str | None = Field(None, description="a safetensors file with the initial weights")
    statistics: BufferPolicy = Field("average", description="BatchNorm's: average, local or frozen")


class AlgorithmConfig(PartConfig):
    name: str = Field("fedgg", description=ALGORITHMS.choices())


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
    checkpoint_every: int = Field(
        1, ge=1, description="rounds between checkpoints; a resume repeats those since the last"
    )
    memory_limit_mb: int = Field(
        1024, ge=0, description="MB of client state kept in memory; above it, state is stored in a file"
    )

    @field_validator("cohort", mode="before")
    @classmethod
    def _is_a_number(cls, cohort: Any) -> Any:
        if cohort is not None and (isinstance(cohort, bool) or not isinstance(cohort, int | float)):
            raise ValueError("give a number of clients from 1, or a share between 0 and 1")
        return cohort


class EngineConfig(ConfigSection):
    name: str = Field("auto", description=f"{ENGINES.choices('auto')}; auto: the fastest that fits")
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

    @field_validator("name")
    @classmethod
    def _known_engine(cls, name: str) -> str:
        return _checked_name(ENGINES, name, "auto")

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
        device, devices = self.device.partition(":")[0], _devices(self.name)
        if device not in devices:
            others = ", ".join(name for name in ENGINES if device in _devices(name))
            problem = "needs a GPU" if device == "cpu" else f"does not work on {self.device}"
            remedy = f"set engine.device = {' or '.join(map(repr, devices))}, or take one of the engines {others}"
            raise ValueError(f"engine {self.name!r} {problem}: {remedy}")
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


def _devices(engine: str) -> tuple[str, ...]:
    """The kinds of devices that a registered engine works on."""
    anywhere = ("cpu", "cuda")
    return getattr(ENGINES[engine], "devices", anywhere) if engine in ENGINES else anywhere
