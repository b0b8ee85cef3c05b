"""A finished run: its history, its weights, its model, and predictions for new inputs."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray
from torch import nn

from fedgg.core.client_rows import Rows
from fedgg.errors import UserError
from fedgg.lab.build import Federation, ModelGiven
from fedgg.lab.config import Experiment
from fedgg.lab.engine_setup import DTYPES
from fedgg.lab.name_resolution import build_model, load_weights, read_tensors
from fedgg.lab.predictions import Inputs, Output, RawInputModel, predict
from fedgg.lab.provenance import structure_of
from fedgg.lab.run_state import (
    State,
)
from fedgg.lab.store import Store

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Run:
    """A finished run: its history, its weights, and the model they make."""

    experiment: Experiment
    folder: Path | None
    rounds: list[dict[str, Any]] = field(repr=False)
    summary: dict[str, Any]
    weights: Rows = field(repr=False)  # the final model under the module's own names, for inputs scaled as in the run
    inputs: Inputs = field(repr=False)  # the shape of an example, its scaling, the classes
    _module: Callable[[], nn.Module] = field(repr=False)  # a new copy of the trained module

    @classmethod
    def load(cls, folder: str | os.PathLike[str], model: ModelGiven | None = None) -> Run:
        """A finished run from its folder.

        `model` is needed for `model()` and `predict()` of a run that was given a module from Python: the same module,
        or what makes it. Models that the experiment names are built from their names.
        """
        store = Store(Path(folder))
        if (store.folder / "study.json").exists():
            first = next((path.parent for path in sorted(store.folder.glob("*/seed-*/config.toml"))), None)
            example = f": load one of its runs, for instance {first}" if first else ""
            raise UserError(f"{store.folder} holds a comparison{example}")
        experiment, summary = store.experiment(), store.summary()
        if summary is None:
            raise UserError(f"the run in {store.folder} is not finished: go on with fedgg resume {store.folder}")
        inputs = store.inputs(DTYPES[experiment.engine.precision])
        store.check_final("model.safetensors")
        weights = read_tensors(store.folder / "model.safetensors")
        rebuild = partial(_rebuilt, store, experiment, inputs, weights, model)
        return cls(experiment, store.folder, store.finished_rounds(), summary, weights, inputs, rebuild)

    def model(self) -> nn.Module:
        """The trained model, a new copy in evaluation mode on the CPU, which takes inputs as the data had them.

        Their scaling (`data.normalise`) is inside, as the buffers `shift` and `scale`; `.module` is the bare module.
        """
        return RawInputModel(self._module(), self.inputs).eval()

    def predict(
        self, x: Any, *, output: Output = "labels", chunk: int = 1024, device: str | torch.device = "cpu"
    ) -> NDArray[Any]:
        """The labels of examples as the data had them, in the data's own terms: words where those were words.

        `output` may be "probabilities" or "logits" [N, classes] instead. `chunk` examples are computed at a time.
        """
        return predict(self.model(), self.inputs, x, output, chunk, device)

    @property
    def status(self) -> str:
        return str(self.summary["status"])

    @property
    def test_accuracy(self) -> list[float]:
        """On the server's test set, at each evaluated round."""
        return [record["test_accuracy"] for record in self.rounds if "test_accuracy" in record]


def trained_module(module: nn.Module, weights: Rows, unsaved: Rows) -> nn.Module:
    """A copy of the module, on the CPU, with these weights."""
    own = copy.deepcopy(module).cpu()
    own.load_state_dict(weights)
    for name, values in unsaved.items():
        own.get_buffer(name).copy_(values)
    return own


def _rebuilt(
    store: Store, experiment: Experiment, inputs: Inputs, weights: Rows, given: ModelGiven | None
) -> nn.Module:
    """The same from a run folder."""
    name, folder = experiment.model.name, store.folder
    if given is None and name.startswith("python:"):
        raise UserError(
            f"{folder} was run with a module from Python ({name.removeprefix('python:')}): "
            f"load it with fedgg.Run.load({str(folder)!r}, model=...)"
        )
    module = build_model(
        name if given is None else given, experiment.model.settings, inputs.shape, len(inputs.classes), experiment.seed
    ).to(device="cpu", dtype=inputs.scaling.shift.dtype)
    file = folder / "model.safetensors"
    load_weights(module, weights, file)
    structure, under = store.structure()
    if ":" in name and under == torch.__version__ and structure not in (None, structure_of(module)):
        raise UserError(f"{file} is of a model of other layers: give the one that was trained")
    if (buffers := folder / "buffers.safetensors").exists():
        store.check_final(buffers.name)
        for buffer, values in read_tensors(buffers).items():
            module.get_buffer(buffer).copy_(values)
    return module


def final_weights(federation: Federation, state: State) -> Rows:
    """Under the names of the module's own state_dict: tied weights under both, buffers only if they are persistent."""
    net, server = federation.net, state.server
    current = {name: rows[0] for name, rows in (net.layout.unflatten(server.w) | server.buffers).items()}
    named = [*net.module.named_parameters(), *net.module.named_buffers()]
    name_of = {id(tensor): name for name, tensor in named}
    own = net.module.state_dict(keep_vars=True)
    return {name: current.get(name_of.get(id(tensor), ""), tensor.detach()) for name, tensor in own.items()}


def unsaved_buffers(federation: Federation, state: State) -> Rows:
    """Buffers that the module's state_dict leaves out, where training changed them."""
    net = federation.net
    saved = net.module.state_dict().keys()
    return {
        name: rows[0]
        for name, rows in state.server.buffers.items()
        if name not in saved and not torch.equal(rows, net.start_buffers[name])
    }
