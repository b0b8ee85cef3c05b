"""A finished run: its history, its weights, its model, and predictions for new inputs.

A model takes inputs as the data had them, and answers with the labels of the data.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedgg.core.algorithm import Algorithm
from fedgg.core.layout import InputPart, unpacked
from fedgg.core.model import Net
from fedgg.core.server import ServerState
from fedgg.core.tasks import CLASSIFICATION, Task
from fedgg.core.tensor_rows import Rows
from fedgg.data.batch_preparation import Normalisation, Scaling
from fedgg.data.user_arrays import input_tensor, inputs_of_parts, inputs_packed, packed
from fedgg.errors import UserError
from fedgg.lab.build import Federation, ModelGiven
from fedgg.lab.checkpoint import BadCheckpoint, read_checkpoint
from fedgg.lab.config import Experiment
from fedgg.lab.engine_setup import DTYPES
from fedgg.lab.name_resolution import build_model
from fedgg.lab.one_round import State
from fedgg.lab.personal_parts import personal_model, with_personal_parts
from fedgg.lab.provenance import fingerprint
from fedgg.lab.store import Store
from fedgg.lab.task_and_metrics import predicting_task
from fedgg.lab.weight_files import load_weights, read_tensors
from fedgg.runfolder.checksums import checkpoints_in
from fedgg.runfolder.record_types import unknown_measure
from fedgg.runfolder.validation import PLACES, is_number

Output = Literal["labels", "probabilities", "logits"]


@dataclass(frozen=True, eq=False)
class Inputs:
    """What a model was trained on: the shape of an example, its scaling, and the labels of the classes."""

    shape: tuple[int, ...]
    classes: tuple[str, ...]
    words: bool  # whether labels are the names of the classes, rather than their numbers
    normalise: Normalisation
    scaling: Scaling
    whole: bool = False  # whether the model takes whole numbers (int64)
    parts: tuple[InputPart, ...] = ()  # of several inputs
    task: Task = CLASSIFICATION

    @classmethod
    def of(cls, federation: Federation) -> Inputs:
        origin, feed, scaling = federation.origin, federation.feed, federation.feed.scaling
        numbers = tuple(str(number) for number in range(len(origin.classes)))
        words = origin.labels_are_words or origin.classes != numbers
        scaling = Scaling(scaling.shift.cpu(), scaling.scale.cpu())
        normalise, whole = federation.experiment.data.normalise, feed.x_test.dtype == torch.int64
        return cls(origin.shape, origin.classes, words, normalise, scaling, whole, origin.parts, federation.net.task)

    @classmethod
    def from_json(cls, content: dict[str, Any], dtype: torch.dtype, task: Task) -> Inputs:
        """KeyError, TypeError or ValueError where the content is not that of an inputs.json."""
        shift, scale = (torch.tensor(content[key], dtype=dtype) for key in ("shift", "scale"))
        classes = tuple(str(name) for name in content["classes"])
        numbers = tuple(str(number) for number in range(len(classes)))
        words = content["labels"] == "words" if "labels" in content else classes != numbers  # earlier versions: without
        shape = tuple(int(length) for length in content["shape"])
        parts = tuple(
            InputPart(key, tuple(lengths), getattr(torch, kind)) for key, lengths, kind in content.get("parts", ())
        )
        whole = content.get("whole", False)
        return cls(shape, classes, words, content["normalise"], Scaling(shift, scale), whole, parts, task)

    def to_json(self) -> dict[str, Any]:
        return {
            "shape": list(self.shape),
            "classes": list(self.classes),
            "labels": "words" if self.words else "numbers",
            "normalise": self.normalise,
            "shift": self.scaling.shift.tolist(),
            "scale": self.scaling.scale.tolist(),
            **({"whole": True} if self.whole else {}),
            **({"parts": [part.described() for part in self.parts]} if self.parts else {}),
        }

    def arranged(self, x: Tensor) -> Tensor:
        """Examples as the data set of the run has them: images [N, H, W] as [N, 1, H, W], whole numbers or not."""
        x = x.unsqueeze(1) if (1, *x.shape[1:]) == self.shape else x
        return x if self.whole or x.dtype != torch.int64 else x.float()

    def labels(self, numbers: NDArray[np.int64]) -> NDArray[Any]:
        return np.array(self.classes)[numbers] if self.words else numbers


class RawInputModel(nn.Module):
    """A module behind the scaling of its inputs: `forward` takes examples as the data set has them, of any type.

    Of several inputs it takes what `forward` of the module takes, or all of them in one dict or tuple, as in the data.
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, module: nn.Module, inputs: Inputs):
        super().__init__()
        self.module = module
        self._inputs = inputs
        self.register_buffer("shift", inputs.scaling.shift.clone())
        self.register_buffer("scale", inputs.scaling.scale.clone())

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        x = self._one_tensor(inputs, named)
        scaled = Scaling(self.shift, self.scale)(self._inputs.arranged(x))
        arguments, keywords = unpacked(self._inputs.parts, scaled) if self._inputs.parts else ((scaled,), {})
        outputs: Tensor = self.module(*arguments, **keywords)
        return outputs

    def _one_tensor(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
        """The input; several of them side by side in one tensor, as `predict` gives them."""
        parts, together = self._inputs.parts, (*inputs, *named.values())
        if not parts:
            if len(together) != 1:
                raise UserError(f"the model takes one input, got {len(together)}")
            return cast(Tensor, together[0])
        given: Any = named or inputs
        if len(inputs) == 1 and not named:
            is_packed = isinstance(inputs[0], Tensor) and tuple(inputs[0].shape[1:]) == self._inputs.shape
            if is_packed:
                return cast(Tensor, inputs[0])
            given = inputs[0] if isinstance(inputs[0], Mapping | tuple | list) else inputs
        values = inputs_of_parts(given, parts, "model")
        return packed([torch.as_tensor(value, device=self.shift.device) for value in values], "model")


def predict(
    model: nn.Module, inputs: Inputs, x: Any, output: Output, chunk: int, device: str | torch.device
) -> NDArray[Any]:
    """What the model makes of the examples, `chunk` of them at a time."""
    if output not in get_args(Output):
        raise UserError(f"output = {output!r}: choose from {', '.join(get_args(Output))}")
    if chunk < 1:
        raise UserError(f"chunk = {chunk}: give at least 1 example at a time")
    if inputs.parts:
        examples = inputs.arranged(inputs_packed(x, inputs.parts, "predict"))
    else:
        examples = inputs.arranged(input_tensor(x, "x", "predict"))
    if examples.shape[1:] != inputs.shape:
        raise UserError(f"x holds examples of shape {tuple(examples.shape[1:])}; the model takes {inputs.shape}")
    if examples.is_floating_point() and not bool(torch.isfinite(examples).all()):
        first = int((~torch.isfinite(examples)).flatten(1).any(1).nonzero()[0])
        raise UserError(f"x holds NaN or infinity, first in example {first}; clean it first")
    model = model.to(device)
    with torch.inference_mode():
        parts = [model(some.to(device)).cpu() for some in examples.split(chunk)] if len(examples) else []
    logits = torch.cat(parts) if parts else torch.empty(0, len(inputs.classes), dtype=inputs.scaling.shift.dtype)
    match output:
        case "labels":
            predictions = inputs.task.predictions(logits).numpy()
            return inputs.labels(predictions) if inputs.task.targets == "classes" else predictions
        case "probabilities":
            return inputs.task.probabilities(logits).numpy()
        case _:
            return logits.numpy()


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
    _personal: Callable[[int], nn.Module] | None = field(repr=False)  # a new copy of a client's own module

    def __repr__(self) -> str:
        chosen, done = self.experiment, self.summary.get("rounds_done", len(self.rounds))
        place = f", in {self.folder}" if self.folder else ""
        return f"<Run of {chosen.algorithm.name} on {chosen.data.source}: {self.status} after round {done}{place}>"

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
        try:
            task = predicting_task(experiment)
            inputs = Inputs.from_json(store.read_json("inputs.json"), DTYPES[experiment.engine.precision], task)
        except (KeyError, TypeError, ValueError) as error:
            file = store.folder / "inputs.json"
            raise UserError(f"{file} is not what fedgg wrote ({error!r}): this is no run folder") from error
        store.check_final("model.safetensors")
        weights = read_tensors(store.folder / "model.safetensors")
        rebuild = partial(_rebuilt, store, experiment, inputs, weights, model)
        personal = partial(personal_module_from_folder, store, experiment, inputs, rebuild)
        return cls(experiment, store.folder, store.finished_rounds(), summary, weights, inputs, rebuild, personal)

    def model(self) -> nn.Module:
        """The trained model, a new copy in evaluation mode on the CPU, which takes inputs as the data had them.

        UserError where parts of it are personal, so that there is no whole global model: see `personal_model`.

        Their scaling (`data.normalise`) is inside, as the buffers `shift` and `scale`; `.module` is the bare module.
        """
        personal = self.experiment.personal
        if personal is not None and personal.method != "ditto":
            raise UserError("parts of the models are personal, and there is no global one: take run.personal_model(3)")
        return RawInputModel(self._module(), self.inputs).eval()

    def personal_model(self, client: int) -> nn.Module:
        """A client's own model, as `model()` is the global one; for experiments with [personal].

        A client that has not trained has the initial values in its personal part.
        """
        if self._personal is None or self.experiment.personal is None:
            raise UserError("clients of this run have no models of their own: set personal.method")
        if not isinstance(client, int):
            raise UserError(f"client {client!r}: give its number, from 0; partition.json has the clients' names")
        if not 0 <= client < self.experiment.split.clients:
            raise UserError(f"there is no client {client}: there are {self.experiment.split.clients}, from 0")
        return RawInputModel(self._personal(client), self.inputs).eval()

    def predict(
        self, x: Any, *, output: Output = "labels", chunk: int = 1024, device: str | torch.device = "cpu"
    ) -> NDArray[Any]:
        """The labels of examples as the data had them, in the data's own terms: words where those were words.

        With other tasks than classification what the model predicts: labels [N, labels], values, tokens [N, T].
        `output` may be "probabilities" or "logits" [N, classes] instead. `chunk` examples are computed at a time.
        """
        return predict(self.model(), self.inputs, x, output, chunk, device)

    @property
    def status(self) -> str:
        """`finished`, `diverged`, `spent` or `stopped_early`, as in `summary.json`."""
        return str(self.summary["status"])

    @property
    def test_accuracy(self) -> list[float]:
        """On the server's test set, at each evaluated round."""
        return [record["test_accuracy"] for record in self.rounds if "test_accuracy" in record]

    def scores(self, metric: str) -> dict[int, float]:
        """By round, of those that have it: a metric with the place where it was measured, as "holdout_accuracy"."""
        scores = {record["round"]: float(record[metric]) for record in self.rounds if is_number(record.get(metric))}
        if not scores:
            places = tuple(f"{place}_" for place in (*PLACES, "train"))
            known = dict.fromkeys(
                key for record in self.rounds for key in record if key.startswith(places) and is_number(record[key])
            )
            raise UserError(unknown_measure(metric, known))
        return scores


def trained_module(module: nn.Module, weights: Rows, unsaved: Rows) -> nn.Module:
    """A copy of the module, on the CPU, with these weights."""
    trained = copy.deepcopy(module).cpu()
    trained.load_state_dict(weights)
    for name, values in unsaved.items():
        trained.get_buffer(name).copy_(values)
    return trained


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
    versions = store.read_json("versions.json", "torch")
    same_torch = versions["torch"] == torch.__version__  # another version may print the same layers differently
    if ":" in name and same_torch and versions.get("structure") not in (None, fingerprint(str(module))):
        raise UserError(f"{file} is of a model of other layers: give the one that was trained")
    if (buffers := folder / "buffers.safetensors").exists():
        store.check_final(buffers.name)
        for buffer, values in read_tensors(buffers).items():
            module.get_buffer(buffer).copy_(values)
    return module


def personal_module(net: Net, state: State, client: int) -> nn.Module:
    """A copy of the module, on the CPU, with a client's own weights."""
    if not isinstance(state.memory, dict):
        raise UserError("the personal models of this run were in a temporary file: give the run a folder (out=...)")
    if net.personal is None and client not in state.memory:
        raise UserError(f"client {client} has not trained, so that it has no model of its own")
    buffers = state.kept_buffers.get(client, state.server.buffers)
    w, buffers = personal_model(net, state.server.w, buffers, state.memory.get(client, {}))
    weights, unsaved = final_tensors(net, replace(state.server, w=w, buffers=buffers))
    return trained_module(net.module, weights, unsaved)


def personal_module_from_folder(
    store: Store, experiment: Experiment, inputs: Inputs, rebuild: Callable[[], nn.Module], client: int
) -> nn.Module:
    """The same from the last checkpoint of a run folder."""
    if store.read_json("versions.json", "keeper")["keeper"] == "nodes":
        raise UserError(f"the personal models of {store.folder} are on the clients' nodes")
    path = checkpoints_in(store.folder)[-1]
    try:
        state = read_checkpoint(path, experiment.trajectories(), torch.device("cpu"))
    except BadCheckpoint as reason:
        raise UserError(f"{path} cannot be read: {reason}") from reason
    dtype = torch.int64 if inputs.whole else inputs.scaling.shift.dtype
    module, sample = rebuild(), torch.zeros(2, *inputs.shape, dtype=dtype)
    net = Net(module)
    net.parts = inputs.parts
    net.examine(sample, outputs_wanted=None)
    net = with_personal_parts(experiment, Algorithm(), net, sample)
    rows = state.memory
    state = replace(state, memory={client: rows[client]} if client in rows else {})
    return personal_module(net, state, client)


def final_tensors(net: Net, server: ServerState) -> tuple[Rows, Rows]:
    """The weights of the final model, and the buffers that its state_dict leaves out, where training changed them.

    Weights are under the names of the module's own state_dict: tied ones under both.
    """
    start_buffers = net.start_buffers if net.personal is None else net.personal.whole.start_buffers
    current = {name: rows[0] for name, rows in (net.layout.unflatten(server.w) | server.buffers).items()}
    name_of = {id(tensor): name for name, tensor in (*net.module.named_parameters(), *net.module.named_buffers())}
    in_module = net.module.state_dict(keep_vars=True)
    weights = {name: current.get(name_of.get(id(tensor), ""), tensor.detach()) for name, tensor in in_module.items()}
    unsaved = {
        name: rows[0]
        for name, rows in server.buffers.items()
        if name in start_buffers and name not in in_module and not torch.equal(rows, start_buffers[name])
    }
    return weights, unsaved
