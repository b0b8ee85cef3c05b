"""Personal parts of a model: parameters and buffers that stay with the client, and whole personal models (Ditto).

The rows that algorithms, servers and messages see hold the shared parameters only. The personal ones are client state:
rows whose names begin with `personal.`, kept between rounds as an algorithm's client state is. A client that has none
yet starts from the model's initial values.

    personal.w              the personal parameters in one row, `[1, Q]`; under Ditto the whole personal model
    personal.buffers.NAME   a personal buffer
    personal.optimiser.NAME the state of the optimiser of the personal parameters, where clients keep it
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from fedgg.core.algorithm import Algorithm, Client, Number
from fedgg.core.evaluation import Probe
from fedgg.core.layout import Layout
from fedgg.core.model import Net
from fedgg.core.optimisers import Optimiser, OptimiserSettings
from fedgg.core.tensor_rows import Rows, each_row

if TYPE_CHECKING:
    from fedgg.core.local import LocalStart

KEPT = "personal."  # begins the names of personal rows among those that a client keeps
BUFFERS = "buffers."
OPTIMISER = "optimiser."
ALONE = "alone"  # [K, 1]: how many steps train the personal parameters alone, before the others train the shared ones


@dataclass(frozen=True, eq=False)
class PersonalPart:
    """The parameters and buffers of a net that do not travel."""

    layout: Layout  # of the personal parameters
    start: Tensor  # [1, Q]
    start_buffers: Rows
    whole: Net  # the same model with all parameters in its rows


def with_personal_part(net: Net, names: Collection[str]) -> Net:
    """The same model with these parameters and buffers as its personal part, and rows of the others."""
    layout = net.layout
    parameters = {name: rows[:1] for name, rows in layout.unflatten(net.start).items()}
    twin = copy.copy(net)
    twin.layout = _reduced(layout, [name for name in layout.names if name not in names], layout.buffers, names)
    twin.start = _flat(twin.layout, parameters, net.start)
    twin.start_buffers = {name: rows for name, rows in net.start_buffers.items() if name not in names}
    twin.moving = tuple(name for name in net.moving if name not in names)
    twin.facts = {}
    personal_layout = _reduced(layout, [name for name in layout.names if name in names], (), ())
    buffers = {name: rows for name, rows in net.start_buffers.items() if name in names}
    twin.personal = PersonalPart(personal_layout, _flat(personal_layout, parameters, net.start), buffers, net)
    return twin


def personal_names(net: Net) -> tuple[str, ...]:
    """The parameters and buffers of the personal part; empty where there is none."""
    return () if net.personal is None else (*net.personal.layout.names, *net.personal.start_buffers)


def _reduced(layout: Layout, names: list[str], buffers: Collection[str], without: Collection[str]) -> Layout:
    places = [layout.names.index(name) for name in names]
    sizes = tuple(layout.sizes[place] for place in places)
    return replace(
        layout,
        names=tuple(names),
        shapes=tuple(layout.shapes[place] for place in places),
        buffers=tuple(name for name in buffers if name not in without),
        sizes=sizes,
        total=sum(sizes),
    )


def _flat(layout: Layout, parameters: Rows, like: Tensor) -> Tensor:
    return layout.flatten(parameters) if layout.names else like.new_zeros(1, 0)


# Client state --------------------------------------------------------------------------------------------------------


def kept_rows(w: Tensor, buffers: Rows, optimiser_state: Rows) -> Rows:
    """Personal rows under the names that they have in the client state."""
    return {
        f"{KEPT}w": w,
        **{f"{KEPT}{BUFFERS}{name}": rows for name, rows in buffers.items()},
        **{f"{KEPT}{OPTIMISER}{name}": rows for name, rows in optimiser_state.items()},
    }


def personal_rows(memory: Rows) -> tuple[Rows, Rows]:
    """The client state without its personal rows, and these, without the beginning of their names."""
    personal = {name.removeprefix(KEPT): rows for name, rows in memory.items() if name.startswith(KEPT)}
    return {name: rows for name, rows in memory.items() if not name.startswith(KEPT)}, personal


def buffers_in(personal: Rows) -> Rows:
    """Of personal rows the buffers, by their names in the module."""
    return {name.removeprefix(BUFFERS): rows for name, rows in personal.items() if name.startswith(BUFFERS)}


def first_rows(w: Tensor, buffers: Rows, settings: OptimiserSettings) -> Rows:
    """The personal rows of a client before its first round, as the client state has them."""
    state = settings.kind.on_rows([settings.values], w).start(w) if settings.kept else {}
    return kept_rows(w, buffers, state)


def tensors_of(net: Net, memory: Rows) -> Rows:
    """Personal parameters and buffers by their names in the module, `[1, ...]` each; initial ones where there is none.

    Beside the server's buffers, they make the server's row the whole model of a client.
    """
    part = net.personal
    assert part is not None
    _, personal = personal_rows(memory)
    return part.layout.unflatten(personal.get("w", part.start)) | part.start_buffers | buffers_in(personal)


# Local training ------------------------------------------------------------------------------------------------------


def open_personal(start: LocalStart, part: PersonalPart, optimiser: Optimiser, alone: Tensor | None) -> LocalStart:
    """What rows start from, their personal part taken out of the client state. `alone` `[K, 1]`: see `ALONE`."""
    memory, personal = personal_rows(start.memory)
    buffers = {name: rows.clone() for name, rows in buffers_in(personal).items()}  # training changes them in place
    state = {name: rows for name, rows in personal.items() if name.startswith(OPTIMISER)}
    if not state:
        state = {f"{OPTIMISER}{name}": rows for name, rows in optimiser.start(personal["w"]).items()}
    parameters = part.layout.unflatten(personal["w"])
    probe = start.probe and probe_with(start.probe, parameters | buffers)
    return replace(
        start,
        memory=memory,
        buffers=start.buffers | buffers,
        per_row=start.per_row | parameters,
        personal={"w": personal["w"], **state} | ({} if alone is None else {ALONE: alone}),
        probe=probe,
    )


def optimiser_state_in(personal: Rows) -> Rows:
    return {name.removeprefix(OPTIMISER): rows for name, rows in personal.items() if name.startswith(OPTIMISER)}


def probe_with(probe: Probe, tensors: Rows) -> Probe:
    """The same measurements of rows that have these tensors `[K, ...]`, by their names in the module."""
    each = probe.each
    tensors = {name: rows.clone() for name, rows in tensors.items()}

    def of_row(k: int) -> Probe:
        one = probe if each is None else each(k)
        return replace(one, buffers=one.buffers | each_row(tensors, slice(k, k + 1)))

    return replace(of_row(0), each=None if each is None else of_row)


# Ditto ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PersonalModel(Algorithm):
    """Training of a client's own model, drawn to the global one (Ditto; Li et al., ICML 2021, Algorithm 1, line 8):

    v <- v - lr (gradient of the client's loss at v + lambda (v - w)),  w the global model as received.

    Nothing travels up. The batches are those of the client's update of the global model.
    """

    strength: Number = 0.1  # lambda

    def begin(self, w: Tensor, client: Client) -> Rows:
        return {"anchor": client.down["global"]}

    def steer(self, grad: Tensor, w: Tensor, client: Client) -> Tensor:
        return grad + self.strength * (w - client.notes["anchor"])

    def finish(self, w: Tensor, client: Client) -> tuple[Rows, Rows]:
        return {}, {"w": w}

    def diagnostics(self, w: Tensor, client: Client) -> Rows:
        return {}
