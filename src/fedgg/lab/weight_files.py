"""Weights of a module: from safetensors files, checked and loaded; frozen ones shared between runs."""

from __future__ import annotations

import hashlib
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn

from fedgg.core.buffers import not_finite
from fedgg.errors import UserError
from fedgg.files import check_regular


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The content of a safetensors file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        check_regular(path)
        return load_file(path)
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{path} is not a readable safetensors file: {error}") from error


def load_weights(module: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    """Replace the module's weights by those of a file, which must be of the same names and shapes."""
    expected = module.state_dict()
    missing, foreign = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or foreign:
        raise UserError(f"{path} does not fit the model: missing {missing[:3]}, unknown {foreign[:3]}")
    for name, tensor in expected.items():
        if tensor.shape != tensors[name].shape:
            shapes = f"{tuple(tensors[name].shape)}, the model needs {tuple(tensor.shape)}"
            raise UserError(f"{path}: {name} has shape {shapes}")
    module.load_state_dict(tensors)


def load_start(module: nn.Module, path: Path) -> None:
    """Replace the module's weights by those of a safetensors file."""
    try:
        tensors = read_tensors(path)
        trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        constants = {name: tensor.cpu().clone() for name, tensor in module.state_dict().items() if name not in trained}
        load_weights(module, tensors, path)
        for name, tensor in tensors.items():
            usual = constants.get(name, torch.zeros_like(tensor))  # a constant may be infinite
            if not_finite({name: usual}, {name: tensor}):
                raise UserError(f"{path}: {name} holds NaN or infinity")
    except UserError as error:
        raise UserError(f"model.start: {error}") from error


_frozen: WeakValueDictionary[tuple[str, str], nn.Parameter] = WeakValueDictionary()  # by device and content


def share_frozen(module: nn.Module) -> None:
    """Parameters that are not trained use the memory of those with the same values in modules of this process."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            continue
        digest = hashlib.sha256(f"{parameter.dtype}{tuple(parameter.shape)}{parameter.stride()}".encode())
        digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().astype(np.uint8).data)
        same = _frozen.setdefault((str(parameter.device), digest.hexdigest()), parameter)
        if same is not parameter:
            parameter.data = same.data
