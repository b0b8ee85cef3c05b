"""An ordinary PyTorch training loop: a module, torch.optim.SGD, deep copies, an average of state dicts.

It is not slow on purpose: examples are on the device as bytes, batches are indexed there, and crops and flips are
applied to a whole batch at once.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedgg.data.batch_preparation import MARGIN
from fedgg.lab.build import Federation
from fedgg.lab.name_resolution import build_model


class EagerLoop:
    """Trains the clients of a federation one after another, repeatedly."""

    def __init__(self, federation: Federation, *, autocast: bool):
        experiment, feed = federation.experiment, federation.feed
        self._x, self._y, self._scaling = feed.x, feed.y, feed.scaling
        self._autocast = autocast
        self._local = experiment.local
        self._format = torch.channels_last if autocast else torch.contiguous_format
        shape, classes = federation.origin.shape, len(federation.origin.classes)
        model = build_model(experiment.model.name, experiment.model.settings, shape, classes, experiment.seed)
        self._model = model.to(self._x.device).to(memory_format=self._format)
        self._clients = [torch.as_tensor(positions, device=self._x.device) for positions in feed.clients]
        self._endless_training = self._train()

    def steps(self, count: int) -> None:
        for _ in range(count):
            next(self._endless_training)

    def copy_and_average(self) -> None:
        """The work of a round besides its steps."""
        total = sum(len(positions) for positions in self._clients)
        weights = [len(positions) / total for positions in self._clients]
        parts = [copy.deepcopy(self._model).state_dict() for _ in self._clients]
        average = {
            name: torch.stack([weight * part[name] for weight, part in zip(weights, parts, strict=True)])
            for name in parts[0]
        }
        self._model.load_state_dict({name: rows.sum(0) for name, rows in average.items()})

    def _train(self) -> Iterator[None]:
        """Yields after each step; starts again with the first client after the last."""
        loss_of = nn.CrossEntropyLoss()
        while True:
            for positions in self._clients:
                model = copy.deepcopy(self._model).train()
                optimiser = torch.optim.SGD(model.parameters(), lr=self._local.lr, momentum=self._local.momentum)
                for _ in range(self._local.epochs):
                    shuffled = positions[torch.randperm(len(positions), device=positions.device)]
                    for where in shuffled.split(self._local.batch):
                        x, y = self._batch(where), self._y[where]
                        optimiser.zero_grad()
                        with torch.autocast(x.device.type, torch.bfloat16, enabled=self._autocast):
                            loss = loss_of(model(x), y)
                        loss.backward()
                        optimiser.step()
                        yield

    def _batch(self, where: Tensor) -> Tensor:
        x = self._scaling(_cropped_and_flipped(self._x[where]))
        return x.contiguous(memory_format=self._format)


def _cropped_and_flipped(images: Tensor) -> Tensor:
    """Random crop with zero padding, and random horizontal flip."""
    count, _, height, width = images.shape
    padded = F.pad(images, (MARGIN,) * 4)
    device = images.device
    top, left = torch.randint(0, 2 * MARGIN + 1, (2, count, 1), device=device)
    rows = (top + torch.arange(height, device=device))[:, None, :, None]
    columns = (left + torch.arange(width, device=device))[:, None, None, :]
    examples = torch.arange(count, device=device)[:, None, None, None]
    channels = torch.arange(images.shape[1], device=device)[None, :, None, None]
    cropped = padded[examples, channels, rows, columns]
    mirror = torch.rand(count, 1, 1, 1, device=device) < 0.5
    return torch.where(mirror, cropped.flip(-1), cropped)
