"""The sections of an experiment: their keys, types, defaults and descriptions."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import InitErrorDetails

from fedgg.algorithms import ALGORITHMS
from fedgg.core.buffers import BufferPolicy
from fedgg.core.optimisers import OPTIMISERS, SCHEDULES
from fedgg.core.random_choices import Work
from fedgg.core.tasks import TASKS
from fedgg.data import DATASETS, NOT_SETTINGS, SPLITS, TEXTS, registered_name
from fedgg.data.batch_preparation import Augmentation, Normalisation
from fedgg.data.partition import OFFERED_TO_REGISTERED
from fedgg.engines import ENGINES
from fedgg.engines.base import Precision
from fedgg.lab.run_places import devices_from
from fedgg.models import MODELS
from fedgg.older_python import Self
from fedgg.registry import HUGGING_FACE, Registry, accepted_settings, described_parameters, names_code


class ConfigSection(BaseModel):
    # "constants": without it pydantic writes an infinite setting as None, and the setting is lost.
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, ser_json_inf_nan="constants", strict=False
    )


class PartConfig(ConfigSection):
    """A section that names a part; keys beside the declared ones are settings of that part."""

    model_config = ConfigDict(extra="allow")
    registry: ClassVar[Registry[Any] | None] = None  # None: the name is checked where the part is built
    other_names: ClassVar[tuple[str, ...]] = ()  # beside the registered ones
    not_settings: ClassVar[tuple[str, ...]] = ()  # parameters of parts that the library fills in

    @field_validator("name", "scheme", "rule", check_fields=False)
    @classmethod
    def _is_registered_or_code(cls, name: str) -> str:
        """User code is not looked at here."""
        registry, others = cls.registry, cls.other_names
        if registry is not None and not (name in registry or name in others or names_code(name)):
            raise ValueError(registry.suggestion(name, *others))
        return name

    @model_validator(mode="after")
    def _settings_are_known(self) -> Self:
        """Keys that are not declared must be parameters of the registered part."""
        name = str(getattr(self, "name", None) or getattr(self, "scheme", None) or getattr(self, "source", ""))
        if self.__pydantic_extra__ and self.not_settings and self.registry and registered_name(name) in self.registry:
            accepted = accepted_settings(self.registry[registered_name(name)]).keys() - set(self.not_settings)
            if self.__pydantic_extra__.keys() - accepted:
                raise unknown_keys({key: value for key, value in self.settings.items() if key not in accepted})
        return self

    @property
    def settings(self) -> dict[str, Any]:
        """The keys that are not declared here."""
        return dict(self.__pydantic_extra__ or {})

    @classmethod
    def undeclared_settings(cls) -> dict[str, tuple[str, str]]:
        """Parameters of the registered parts that are keys without being declared here: default, and meaning."""
        meanings: dict[str, dict[str, list[str]]] = {}  # by key: each meaning with the parts that declare it
        defaults: dict[str, str] = {}
        allowed = cls.registry if cls.model_config.get("extra") == "allow" else None
        for name, part in (allowed or {}).items():
            for key, (default, about) in described_parameters(part).items():
                if key not in cls.model_fields and key not in cls.not_settings:
                    meanings.setdefault(key, {}).setdefault(about, []).append(name)
                    defaults[key] = default
        rows = {}
        for key, abouts in meanings.items():
            texts = [
                f"{', '.join(names)}: {about}" if about else f"of {', '.join(names)}" for about, names in abouts.items()
            ]
            rows[key] = (defaults[key], "; ".join(texts))
        return rows


def unknown_keys(settings: dict[str, Any]) -> ValidationError:
    """The error with which pydantic refuses them in sections without settings."""
    details = [InitErrorDetails(type="extra_forbidden", loc=(key,), input=settings[key]) for key in settings]
    return ValidationError.from_exception_data("unknown keys", details)


class DataConfig(PartConfig):
    registry = DATASETS
    not_settings = NOT_SETTINGS

    source: str = Field("digits", description=DATASETS.choices())
    normalise: Normalisation = Field(
        "auto",
        description="none, unit (pixels in 0..1), standard, or auto: none for text and your own data, else standard",
    )
    images: bool = Field(False, description="whether arrays [N, H, W] are images of one channel; cnn and others ask it")
    augment: Augmentation = Field("none", description="none, flip, crop or crop_flip; images only")
    proxy: int = Field(0, ge=0, description="training examples that the server holds instead of a client")
    holdout: float = Field(0.0, ge=0, lt=1, description="share of its examples that each client holds out for testing")

    @model_validator(mode="after")
    def _name_the_normalisation(self) -> DataConfig:
        """Hashes and config.toml have the kind that `auto` stands for; as a setting it stays unset."""
        if self.normalise == "auto":
            is_own = ":" in self.source and not self.source.startswith(HUGGING_FACE)
            self.__dict__["normalise"] = "none" if is_own or self.source in TEXTS else "standard"
            self.__pydantic_fields_set__.discard("normalise")
        return self

    @property
    def data_set(self) -> DataConfig:
        """The source and its settings alone: equal in experiments that can share one copy of the data."""
        return DataConfig(source=self.source, **self.settings)


class SplitConfig(PartConfig):
    registry = SPLITS
    not_settings = OFFERED_TO_REGISTERED

    scheme: str = Field("dirichlet", description=SPLITS.choices())
    clients: int = Field(10, ge=1, description="number of clients; for the scheme given, the data's")
    beta: float = Field(0.5, gt=0, description="Dirichlet concentration: smaller is more skewed")
    min_examples: int = Field(
        10, ge=0, description="the fewest examples of a client; splits with randomness are drawn until all have them"
    )
    shards_per_client: int = Field(2, ge=1, description="for the scheme shards")
    allow_empty: bool = Field(False, description="whether min_examples = 0 may leave a client without examples")
    feature_noise: float = Field(
        0.0,
        ge=0,
        description="Gaussian noise on clients' inputs: of variance feature_noise * (i + 1) / clients at client i",
    )
    feature_rotation: float = Field(
        0.0, description="clients' images are rotated: by feature_rotation * i / clients degrees at client i"
    )
    unseen: int = Field(
        0, ge=0, description="clients, drawn from the seed, that never train: the model is scored on their hold-out"
    )

    @property
    def scheme_settings(self) -> dict[str, Any]:
        """The settings that the scheme may have parameters for."""
        return {"beta": self.beta, "shards_per_client": self.shards_per_client, **self.settings}


class TaskConfig(PartConfig):
    """What is learnt: the targets of examples, and the loss."""

    registry = TASKS
    not_settings = ("function", "task")

    name: str = Field("classification", description=TASKS.choices())
    loss: str | None = Field(None, description="FILE.py:FUNCTION in place of the loss of the task")


class ModelConfig(PartConfig):
    not_settings = ("shape", "classes")

    name: str = Field("mlp", description=MODELS.choices())
    start: str | None = Field(None, description="a safetensors file with the initial weights")
    statistics: BufferPolicy = Field("average", description="BatchNorm's: average, local or frozen")


class AlgorithmConfig(PartConfig):
    name: str = Field("fedgg", description=ALGORITHMS.choices())


class LocalConfig(ConfigSection):
    epochs: int = Field(5, ge=1, le=1_000_000, description="passes over a client's examples in a round")
    steps: int | None = Field(
        None, ge=1, le=1_000_000_000, description="steps of every client in a round, in place of epochs"
    )
    part: float = Field(
        1.0, gt=0, le=1, description="clients do a share of their work, drawn in each round between this and 1"
    )
    batch: int = Field(64, ge=1, description="examples a step")
    lr: float = Field(0.01, gt=0, description="learning rate of the clients' optimiser")
    lr_decay: float = Field(1.0, gt=0, le=1, description="factor on lr after every round; see [schedule]")
    momentum: float = Field(0.9, ge=0, lt=1, description="of SGD")
    weight_decay: float = Field(0.0, ge=0, description="of the clients' optimiser")
    small_clients: Literal["whole", "refuse"] = Field(
        "whole", description="clients with less than a batch: train on all they have at once, or refuse the run"
    )
    drop_last: bool = Field(
        False,
        description="leave out the last batch of an epoch where it is shorter than the others, as PyTorch's DataLoader "
        "does; a client with less than a batch trains on all it has",
    )

    def work(self) -> Work:
        """What a client does in a round, by these settings."""
        return Work(self.epochs, self.batch, self.steps, self.part, self.drop_last)


class OptimiserConfig(PartConfig):
    """The clients' optimiser; its lr, momentum and weight decay are keys of [local]."""

    registry = OPTIMISERS
    not_settings = ("lr", "momentum", "weight_decay", "clip_norm", "used")

    name: str = Field("sgd", description=OPTIMISERS.choices())
    clip_norm: float | None = Field(None, gt=0, description="the longest gradient, algorithm's terms included")
    state: Literal["fresh", "kept"] = Field(
        "fresh", description="of momentum and moments: fresh in every round, or kept by the client between its rounds"
    )


class ScheduleConfig(PartConfig):
    """A learning rate over the rounds: a factor on local.lr ([schedule]), or on server.lr ([server_schedule])."""

    registry = SCHEDULES
    not_settings = ("round_", "rounds", "lr_decay")

    name: str = Field("exponential", description=SCHEDULES.choices())
    warmup: int = Field(0, ge=0, description="rounds over which the learning rate first grows linearly")


class ServerConfig(ConfigSection):
    cohort: int | float | None = Field(
        None, description="clients drawn each round: a number, or a share such as 0.1; all of them by default"
    )
    lr: float = Field(1.0, gt=0, description="server learning rate: a factor on what a round changes in the model")
    lr_decay: float = Field(1.0, gt=0, le=1, description="factor on lr after every round; see [server_schedule]")
    evaluate_every: int = Field(1, ge=1, description="rounds between evaluations on the server's test set")
    checkpoint_every: int | None = Field(
        None, ge=1, description="rounds between checkpoints; by default they are due by time (checkpoint_seconds)"
    )
    checkpoint_seconds: float = Field(
        60.0,
        ge=0,
        description="most seconds between checkpoints, which a resume may repeat; fewer where writing one is quick",
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


class EngineConfig(PartConfig):
    model_config = ConfigDict(extra="forbid")
    registry = ENGINES
    other_names = ("auto",)

    name: str = Field("auto", description=f"{ENGINES.choices('auto')}; auto: the fastest that fits")
    device: str = Field(
        "cpu",
        description="cpu, cuda or cuda:N; a list (cuda:0,1) or cuda:all spreads the clients of a round over several",
    )
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
        several = devices_from(device)
        if several is not None:
            return ",".join(several)
        kind, colon, number = device.partition(":")
        if not (device == "cpu" or (kind == "cuda" and (number.isdecimal() if colon else True))):
            raise ValueError("choose cpu, cuda or cuda:N; or a list such as cuda:0,1, or cuda:all")
        return device

    @model_validator(mode="after")
    def _fits_the_device(self) -> EngineConfig:
        device, anywhere = "cpu" if self.devices[0] == "cpu" else "cuda", ("cpu", "cuda")
        if self.precision in ("tf32", "bf16") and device == "cpu":
            raise ValueError(f"engine.precision = {self.precision!r} needs a GPU: set engine.device = 'cuda'")
        if (self.name == "devices") > (len(self.devices) > 1):
            raise ValueError("engine 'devices' needs several: set engine.device to a list, as cuda:0,1 or cuda:all")
        if self.name == "workers" and len(self.devices) > 1:
            raise ValueError("engine 'workers' has processes of its own: set engine.device = 'cpu' and engine.workers")
        devices = getattr(ENGINES[self.name], "devices", anywhere) if self.name in ENGINES else anywhere
        if device not in devices:
            others = ", ".join(name for name in ENGINES if device in getattr(ENGINES[name], "devices", anywhere))
            problem = "needs a GPU" if device == "cpu" else f"does not work on {self.device}"
            remedy = f"set engine.device = {' or '.join(map(repr, devices))}, or take one of the engines {others}"
            raise ValueError(f"engine {self.name!r} {problem}: {remedy}")
        return self

    @property
    def devices(self) -> tuple[str, ...]:
        """Those that the clients of a round are spread over, all CPUs or all GPUs; usually one."""
        return tuple(self.device.split(","))

    @property
    def threads_in_use(self) -> int:
        """Every process of the engine `workers` has one thread, the one that aggregates included."""
        return 1 if self.name == "workers" else self.threads
