"""The one interface: an algorithm is a frozen dataclass of pure functions over rows.

As it stands, `Algorithm` is FedAvg (McMahan et al. 2017). Another algorithm overrides the one or two functions in which
it differs. Fields are hyper-parameters and nothing else; numeric ones may be `[K, 1]` columns, which is how many
experiments train as one program.

Rules, each of them a test: functions do not change their arguments; a row's result depends on that row alone; a scalar
per client is `[K, 1]`; what is returned is a flat dict of tensors; delta = new - old, always.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from torch import Tensor

from fedgg.core.evaluation import Probe
from fedgg.core.forward import Forward
from fedgg.core.random_choices import Work
from fedgg.core.tensor_rows import Rows, dot, read_only, weighted_sum
from fedgg.errors import UserError

Number = float | Tensor  # a hyper-parameter: one value, or one for each row [K, 1]
Weighing = Literal["examples", "clients"]  # how clients count in the problem that is solved


def setting(
    default: Any,
    about: str,
    origin: str = "",
    *,
    positive: bool = False,
    may_be_infinite: bool = False,
    search: tuple[float, float] | None = None,
) -> Any:
    """A hyper-parameter of an algorithm or aggregation rule, with its meaning and the source of its default.

    `setting(0.1, "weight of the pull", "Li et al. 2020: best of 0.01 to 1")`; `fedgg list` shows both texts. Numbers
    are zero or more and finite; `positive`: zero is refused too, because something is divided by it; `may_be_infinite`:
    infinity has a meaning. `search`: the range in which `fedgg tune` looks for it, on a logarithmic scale where it
    spans a factor of ten.
    """
    limits = {"positive": positive, "may_be_infinite": may_be_infinite}
    return field(default=default, metadata={"about": about, "origin": origin, **limits, "search": search})


def what_it_must_be(value: Any, kind: Any, limits: Mapping[str, Any] | None = None) -> str | None:
    """In words, where the value is not a setting of this type; None where it is.

    `limits`: what `setting` declares; None: it declares nothing of this argument, and a whole number may be negative.
    """
    signed = limits is None
    limits = limits or {}
    positive = limits.get("positive", False)
    if get_origin(kind) is Literal:
        return None if value in get_args(kind) else f"choose from {', '.join(map(str, get_args(kind)))}"
    if kind is bool or kind is str:
        return None if isinstance(value, kind) else f"must be {'true or false' if kind is bool else 'text'}"
    if kind is int:
        if not isinstance(value, int) or isinstance(value, bool):
            return "must be a whole number"
        if signed or value >= (1 if positive else 0):
            return None
        return f"must be a whole number{' above zero' if positive else ', zero or more'}"
    if isinstance(value, Tensor):
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and value == math.inf:
        return None if limits.get("may_be_infinite") else "must be a finite number"
    if is_number and value >= 0 and not (positive and value == 0):
        return None
    return "must be a number above zero" if positive else "must be a number, zero or more"


class StepNotKept(UserError, RuntimeError):
    """The last local step is read where an engine has its inner products only."""


@dataclass(frozen=True)
class Batch:
    """One batch for each row; `mask` is 1 for examples that count and 0 for padding."""

    x: Tensor  # [K, B, ...]
    y: Tensor  # [K, B]
    mask: Tensor  # [K, B]
    at_work: Tensor | None = None  # [K, 1] bool: rows that take this step; None: all of them


@dataclass(frozen=True)
class Client:
    """What a client may read."""

    net: Forward
    probe: Probe | None  # measurements on the client's data; every engine sets one
    down: Rows  # received with the model
    memory: Rows  # kept between rounds
    notes: Rows  # kept during this round: what `begin` returned
    steps: Tensor  # [K, 1] local steps of this round
    effective_steps: Tensor  # [K, 1] what they are worth under momentum
    lr: Tensor  # [K, 1]
    momentum: Tensor  # [K, 1]
    examples: Tensor  # [K, 1]
    round: Tensor  # [K, 1] rounds played before this one
    step: Tensor  # [K, 1] local steps done so far
    w: Tensor  # [K, P] where the client stands
    last_step: Tensor | None  # [K, P] w - (w before the last local step); None where an engine keeps its sums only
    sums: Rows  # inner products an engine has computed, `[K, 1]`; others are computed when they are read
    layer_sums: Rows = field(default_factory=dict)  # the same by layer, where an engine computes one layer at a time

    def __post_init__(self) -> None:
        object.__setattr__(self, "down", read_only(self.down, "client.down"))
        object.__setattr__(self, "memory", read_only(self.memory, "client.memory"))
        object.__setattr__(self, "notes", read_only(self.notes, "client.notes"))

    def vector(self, name: str) -> Tensor:
        """`drift` (w - anchor), `step` (the last local step, zero before the first), or a note by its name."""
        if name == "drift":
            return self.w - self.notes["anchor"]
        if name == "step":
            if self.last_step is None:
                raise StepNotKept(
                    "this engine keeps inner products of the last local step, not the step itself, which is read here: "
                    "set engine.name = 'loop', or override steer(), with which the reference step is taken"
                )
            return self.last_step
        if name not in self.notes:
            self.check_noted(name)
        return self.notes[name]

    def check_noted(self, name: str) -> None:
        """UserError where `begin` has noted no such vector."""
        if name not in self.notes:
            elsewhere = next((rows for rows in ("down", "memory") if name in getattr(self, rows)), None)
            remedy = f"; return client.{elsewhere}[{name!r}] from begin(), too" if elsewhere else ""
            raise UserError(
                f"there is no vector {name!r}: begin() noted {', '.join(self.notes)}, and drift and step exist{remedy}"
            )

    def inner(self, a: str, b: str, *, by_layer: bool = False) -> Tensor:
        """Inner product of two vectors by name, `[K, 1]`; by layer `[K, P]`: each parameter carries its own layer's.

        An engine that computes the terms of one layer at a time gives that layer's, `[K, 1]`.
        """
        computed = self.layer_sums if by_layer else self.sums
        known = computed.get(f"{min(a, b)}.{max(a, b)}")  # one name, whichever comes first
        if known is not None:
            return known
        product = self.net.layout.layer_dot if by_layer else dot
        return product(self.vector(a), self.vector(b))

    @property
    def last_move(self) -> Tensor:
        """Length of the last local step, `[K, 1]`."""
        return self.inner("step", "step").sqrt()


def with_vectors(rows: Tensor, factors: Mapping[str, Number], client: Client, hook: str) -> Tensor:
    """Rows plus factors times the client's vectors by name, one after another.

    UserError, with the name of the hook, for a factor that is not one number a client.
    """
    if not isinstance(factors, Mapping):
        raise UserError(
            f"{hook} returned {type(factors).__name__}: return a dict of factors by the names of vectors, which are "
            f"drift, step and what begin() returns"
        )
    for name, factor in factors.items():
        if isinstance(factor, Tensor) and factor.ndim == 1:  # it would be taken for one row of parameters
            raise UserError(
                f"{hook} gives {name!r} a factor of shape {tuple(factor.shape)}: make it "
                f"one number a client, [{len(rows)}, 1], as inner products are and `keepdim=True` leaves sums"
            )
        rows = rows + factor * client.vector(name)
    return rows


@dataclass(frozen=True)
class Server:
    """What the server may read."""

    memory: Rows
    clients: int  # how many hold examples and can be drawn, in this round's cohort or not
    coverage: float  # share of all examples that this round's cohort holds
    round: int
    probe: Probe | None = None  # measurements on the server's own examples (`data.proxy`), where it has any
    lr: float = 1.0  # of this round: what `aggregate` changes in the model is multiplied by it afterwards

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory", read_only(self.memory, "server.memory"))


@dataclass(frozen=True)
class Algorithm:
    """FedAvg, to be read as the list of places in which an algorithm may differ from it. `w` is `[K, P]` throughout."""

    # Shown by `fedgg list`, together with what `check.cost` measures.
    when: ClassVar[str] = ""  # to use it, in one line
    # Forward passes beside FedAvg's, an example; a backward pass counts as two. In every step, and once a round.
    step_passes: ClassVar[float] = 0.0
    look_passes: ClassVar[float] = 0.0
    needs_representation: ClassVar[bool] = False  # of the model: see `core.model.head_of`
    needs_proxy: ClassVar[bool] = False  # examples at the server: `data.proxy`
    needs_classes: ClassVar[bool] = False  # of the task: targets that are the numbers of classes
    needs_steps: ClassVar[bool] = False  # in every step: how many the round has (`client.steps`), not only at its end
    # Sentences that explain values of `diagnostics`, by name; versions.json records them, and the report shows them.
    diagnostic_texts: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "readings" in vars(cls):
            raise UserError(f"{cls.__name__} defines readings(), which is called diagnostics() now: rename the method")
        texts = cls.diagnostic_texts
        if not isinstance(texts, Mapping) or not all(isinstance(part, str) for row in texts.items() for part in row):
            raise UserError(f"{cls.__name__}.diagnostic_texts must be a dict from names of diagnostics to sentences")

    def __post_init__(self) -> None:
        """Refuse settings out of their range. Columns are taken as they are: engines make them in every round."""
        class_: Any = type(self)
        for name, kind, limits in _settings(class_):
            value = getattr(self, name)
            if isinstance(value, _PLAIN) and (wrong := what_it_must_be(value, kind, limits)):
                raise UserError(f"{class_.__name__}({name}={value!r}): {wrong}")

    def neutral(self) -> Algorithm | None:
        """The same algorithm set so that it is FedAvg, bit for bit, where it has such a setting."""
        return None

    def solves(self) -> Weighing:
        """Which sum of the clients' losses it makes small: weighted by their `examples`, or all `clients` the same."""
        return "examples"

    def needs_sgd(self) -> str:
        """Why it is defined for SGD only, if it is: what rests on the length of SGD's steps. Otherwise empty."""
        return ""

    def fixes_server_step(self) -> str:
        """Why `server.lr` must be 1, if it must: what rests on the length of the server's step. Otherwise empty."""
        return ""

    def warning(self, examples: Sequence[int]) -> str:
        """What may go wrong with clients that hold so many examples each, printed before a run. Otherwise empty."""
        return ""

    def work(self, work: Work) -> Work:
        """Epochs or steps, and batch size, of a client in a round."""
        return work

    def server_memory(self, w: Tensor) -> Rows:
        """What the server keeps between rounds, before the first."""
        return {}

    def client_memory(self, w: Tensor) -> Rows:
        """What a client keeps between rounds, before the first round it takes part in."""
        return {}

    def broadcast(self, w: Tensor, server: Server) -> Tensor:
        """The model that travels to every client and is their anchor, `[1, P]`; the server's own stays as it is."""
        return w

    def send_down(self, w: Tensor, server: Server) -> Rows:
        """What travels to every client besides the model."""
        return {}

    def begin(self, w: Tensor, client: Client) -> Rows:
        """Notes for this round. `anchor` is the global model as received."""
        return {"anchor": w}

    def loss(self, w: Tensor, batch: Batch, client: Client) -> Tensor:
        """The local objective, `[K, 1]`; differentiated in `w` by the training loop."""
        return client.net.loss(w, batch.x, batch.y, batch.mask)

    def terms(self, client: Client) -> Mapping[str, Number]:
        """What is added to the gradient: factors, `[K, 1]` or numbers, of vectors by name (see `Client.vector`).

        Factors may depend on the rows through `client.inner` only: engines then add all terms in one pass.
        """
        return {}

    def displacement(self, client: Client) -> Mapping[str, Number]:
        """Where the gradient is taken: at w plus factors of vectors by name, as in `terms`; by default at w itself.

        `loss` is given that point; `client.w`, `steer`, weight decay and the step itself stay at w.
        """
        return {}

    def second_displacement(self, grad: Tensor, w: Tensor, client: Client) -> Tensor | None:
        """`[K, P]`: the gradient is taken a second time, at w plus this, and the first one is dropped. None: once.

        `grad` is the first gradient. Both passes see the same batch and the same dropout masks; the recorded loss and
        the statistics of normalisation layers are those of the first.
        """
        return None

    def steer(self, grad: Tensor, w: Tensor, client: Client) -> Tensor:
        """The gradient that goes into the optimiser; to be overridden where it is not a sum of such terms."""
        return with_vectors(grad, self.terms(client), client, f"{type(self).__name__}.terms()")

    def nudge(self, move: Tensor, w: Tensor, client: Client) -> Tensor:
        """The step that comes out of the optimiser, `w_new - w`."""
        return move

    def finish(self, w: Tensor, client: Client) -> tuple[Rows, Rows]:
        """What travels up, and the client's memory."""
        return {"delta": w - client.notes["anchor"]}, client.memory

    def diagnostics(self, w: Tensor, client: Client) -> Rows:
        """Diagnostics of the clients after their last local step, `[K, 1]` each: recorded, not used by the server.

        Called after `finish`; `client.memory` is what the client started the round with.
        """
        return {"drift": client.inner("drift", "drift").sqrt()}

    def aggregate(self, w: Tensor, up: Rows, share: Tensor, server: Server) -> tuple[Tensor, Rows]:
        """The next global model `[1, P]` and the server's memory; `share` `[K, 1]` sums to one."""
        return w + weighted_sum(share, up["delta"]), server.memory

    def sparse_up(self, parameters: int) -> Mapping[str, int]:
        """Entries of `finish`'s message that travel as values with their positions, and how many values at most.

        `parameters` is the length of a row. It changes the recorded bytes only; a message with more values that are
        not zero is an error.
        """
        return {}

    def sparse_down(self, parameters: int) -> Mapping[str, int]:
        """The same of what `send_down` sends."""
        return {}


_PLAIN = (bool, int, float, str, list, tuple, dict, type(None))  # not tensors, nor what stands for them in a trace


@cache
def _settings(kind: Any) -> tuple[tuple[str, Any, Mapping[str, Any]], ...]:
    """Name and type of every setting that is a number, a switch or a word, and what `setting` declares of it."""
    try:
        types = get_type_hints(kind)
    except Exception:  # a user's class, whose annotations need not be importable
        return ()
    known = {name for name, type_ in types.items() if type_ in (Number, float, int, bool, str)}
    known |= {name for name, type_ in types.items() if get_origin(type_) is Literal}
    return tuple((f.name, types[f.name], f.metadata) for f in fields(kind) if f.name in known)


def arithmetic_beside_fedavg(algorithm: Algorithm | type[Algorithm], epochs: float) -> float:
    """How many times FedAvg's: a step is a forward and a backward pass, which is as much as three forward passes."""
    return 1 + (algorithm.step_passes + algorithm.look_passes / epochs) / 3
