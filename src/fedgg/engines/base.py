"""The interface of engines: the job of a round, models to be scored, and the precisions they compute in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from fedgg.core.algorithm import Algorithm, Batch
from fedgg.core.buffers import BufferPolicy, travelling
from fedgg.core.evaluation import Score, evaluate
from fedgg.core.local import LocalEnd
from fedgg.core.model import Net
from fedgg.core.optimisers import OptimiserSettings, kept_state, with_kept_state
from fedgg.core.personal import BUFFERS, PersonalModel, buffers_in, first_rows, kept_rows, personal_rows
from fedgg.core.random_choices import Positions, Work
from fedgg.core.server import Lost
from fedgg.core.tensor_rows import Rows


class ClientData(Protocol):
    """The clients' examples, wherever they are: one client's batches, or agendas that are gathered for many at once."""

    @property
    def proxy(self) -> Positions: ...  # examples of the server's own
    @property
    def examples_of_all(self) -> tuple[Tensor, ...]: ...  # large tensors, which experiments on the same data share
    def examples(self, client: int) -> int: ...
    def batches(self, seed: int, round_: int, client: int, work: Work) -> Iterator[Batch]: ...
    def agenda(self, seed: int, round_: int, client: int, work: Work) -> Any: ...
    def gather(self, agendas: Sequence[Any]) -> Iterator[Batch]: ...
    def lay_out(self, agendas: Sequence[Any], steps: int | None = None) -> Any: ...
    def read(self, where: Tensor, moves: Any, lanes: int = 0, dtype: torch.dtype | None = None) -> Batch: ...
    def shares_examples_with(self, other: object) -> bool: ...
    def client_chunks(self, client: int) -> Iterator[tuple[Tensor, Tensor]]: ...
    def proxy_chunks(self) -> Iterator[tuple[Tensor, Tensor]]: ...
    def unseen_chunks(self, client: int | None) -> int: ...
    def unseen(self, client: int | None, number: int) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class RoundJob:
    """What an engine trains in a round: these clients from this model."""

    algorithm: Algorithm
    net: Net
    data: ClientData
    work: Work
    optimiser: OptimiserSettings
    policy: BufferPolicy
    seed: int
    round: int
    cohort: list[int]
    w: Tensor  # [1, P]
    buffers: Rows  # the server's
    down: Rows
    memory: Mapping[int, Rows]  # absent before a client's first round
    kept_buffers: Mapping[int, Rows]  # under the policy `local`
    # Epochs that train the personal parameters alone, before the others train the shared ones; None: both together.
    personal_epochs: int | None = None
    personal_model: PersonalModel | None = None  # clients train models of their own besides (Ditto)
    from_memory: bool = False  # clients start from the model `w` in their memory, not from the server's
    upcoming: Sequence[int] = ()  # the clients of the next round, for what can be prepared

    def memory_before(self, client: int) -> Rows:
        """The client state it starts from: with that of the optimiser, where clients keep it."""
        memory = self.memory.get(client)
        if memory is not None:
            return memory if self.personal_model is None else personal_rows(memory)[0]
        memory = self.algorithm.client_memory(self.w)
        if self.optimiser.kept:
            memory = with_kept_state(memory, self.optimiser.kind.on_rows([self.optimiser.values], self.w).start(self.w))
        if self.net.personal is not None:
            memory = memory | first_rows(self.net.personal.start, self.net.personal.start_buffers, self.optimiser)
        return memory

    def buffers_before(self, client: int) -> Rows:
        """Those the client starts from: its own under `local`, once it has some; else the server's."""
        buffers = self.kept_buffers.get(client) if self.policy == "local" else None
        return self.buffers if buffers is None else buffers

    def buffers_down(self, client: int) -> Rows:
        """Those that travel to the client, which has the model as it was at the start."""
        has_own = self.policy == "local" and client in self.kept_buffers
        return {} if self.policy == "frozen" or has_own else self.travelling_down

    def buffers_up(self, client: int, end: LocalEnd) -> Rows:
        """Those that travel back, to a server that knows what the client started from."""
        if self.policy == "frozen":
            return {}
        if end.buffers.keys() <= set(self.net.moving):
            return end.buffers
        return travelling(self.net.moving, self.buffers_before(client), end.buffers)

    def personal_steps(self, client: int) -> int | None:
        """How many steps train the client's personal parameters alone; None: all train both."""
        if self.personal_epochs is None:
            return None
        return replace(self.work, epochs=self.personal_epochs).steps(self.data.examples(client))

    @property
    def moving_buffers(self) -> Rows:
        """The initial values of the buffers that training changes."""
        return {name: self.net.start_buffers[name] for name in self.net.moving}

    @cached_property
    def travelling_down(self) -> Rows:
        """The server's buffers that are not known from the model at the start."""
        return travelling(self.net.moving, self.net.start_buffers, self.buffers)


# Whole personal models (Ditto): a second job of the same round, which starts from the models that clients keep.


def personal_job(job: RoundJob) -> RoundJob:
    """The training of the clients' own models, with the model they received as `down`."""
    assert job.personal_model is not None
    first = first_rows(job.net.start, job.moving_buffers, job.optimiser)
    personal = {client: personal_rows(job.memory.get(client, first))[1] for client in job.cohort}
    memory = {
        client: {name: rows for name, rows in each.items() if not name.startswith(BUFFERS)}
        for client, each in personal.items()
    }
    buffers = {client: job.buffers | buffers_in(each) for client, each in personal.items()}
    return replace(
        job,
        algorithm=job.personal_model,
        personal_model=None,
        from_memory=True,
        policy="frozen" if job.policy == "frozen" else "local",
        down={"global": job.w},
        memory=memory,
        kept_buffers=buffers,
    )


def with_personal_models(
    job: RoundJob, ends: Mapping[int, LocalEnd | Lost], personal_ends: Mapping[int, LocalEnd | Lost]
) -> dict[int, LocalEnd | Lost]:
    """The ends of a round with the personal models among what clients keep."""
    return {client: _with_personal_model(job, end, personal_ends[client]) for client, end in ends.items()}


def _with_personal_model(job: RoundJob, end: LocalEnd | Lost, personal_end: LocalEnd | Lost) -> LocalEnd | Lost:
    if isinstance(end, Lost) or isinstance(personal_end, Lost):
        return end if isinstance(end, Lost) else personal_end
    _, state = kept_state(personal_end.memory)
    buffers = {name: personal_end.buffers[name] for name in job.moving_buffers}
    return replace(end, memory=end.memory | kept_rows(personal_end.memory["w"], buffers, state))


@dataclass(frozen=True)
class Look:
    """A model to be scored on examples that are not trained on: the server's test set, or what a client keeps back."""

    net: Net
    data: ClientData
    w: Tensor
    buffers: Rows
    client: int | None  # None: the server's test set
    model: Literal["global", "personal", "unseen"] = "global"  # whose: the server's, the client's, or an unseen one's
    # Personal tensors that are trained before the model is scored, by their names in the module.
    train_personal: Callable[[], Rows] | None = None


Scorer = Callable[[Sequence[Look]], list[Score]]


def score_here(looks: Sequence[Look]) -> list[Score]:
    """Each model scored in this process."""
    scores = []
    for look in looks:
        data, client, buffers = look.data, look.client, look.buffers
        if look.train_personal is not None:
            buffers = buffers | look.train_personal()
        chunks = (data.unseen(client, number) for number in range(data.unseen_chunks(client)))
        scores.append(evaluate(look.net, look.w, buffers, chunks))
    return scores


def recorded_on_host(end: LocalEnd) -> LocalEnd:
    """Loss and diagnostics, which are recorded only, copied from a GPU at once instead of number by number."""
    if not end.loss.is_cuda:
        return end
    recorded = [*end.diagnostics.values(), end.loss]
    together = torch.cat([rows.flatten(1) for rows in recorded], 1).cpu()
    parts = together.split([rows[0].numel() for rows in recorded], 1)
    *diagnostics, loss = (part.reshape(rows.shape).to(rows.dtype) for part, rows in zip(parts, recorded, strict=True))
    return replace(end, diagnostics=dict(zip(end.diagnostics, diagnostics, strict=True)), loss=loss)


class Engine(Protocol):
    """Trains the clients of a round and yields their results one by one, in any order; and scores models."""

    def train(self, job: RoundJob) -> Iterator[tuple[int, LocalEnd | Lost]]: ...
    def score(self, looks: Sequence[Look]) -> list[Score]: ...


# The precision of a run. Models, updates and sums are always in fp32 (or fp64).
#
# fp64  double precision;
# fp32  single precision, no TF32;
# tf32  matrix products and convolutions with TF32 operands: 10 bits of mantissa, sums in fp32;
# bf16  convolutions, and all matrix products of large models, with bfloat16 operands: 7 bits, sums in fp32.
Precision = Literal["fp64", "fp32", "tf32", "bf16"]
