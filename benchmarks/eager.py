"""The loop most people write: an ordinary module, torch.optim.SGD, deep copies, an average of state dicts.

Nothing in it is slow on purpose: examples lie on the device as bytes, batches are indexed there, and crops and flips
are done for a whole batch at once.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedgg.data.client_batches import MARGIN
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
        self._clients = [torch.as_tensor(own, device=self._x.device) for own in feed.clients]
        self._going = self._train()

    def steps(self, count: int) -> None:
        for _ in range(count):
            next(self._going)

    def copy_and_average(self) -> None:
        """The work of a round besides its steps."""
        total = sum(len(own) for own in self._clients)
        parts = [copy.deepcopy(self._model).state_dict() for _ in self._clients]
        average = {
            name: torch.stack([len(own) / total * part[name] for own, part in zip(self._clients, parts, strict=True)])
            for name in parts[0]
        }
        self._model.load_state_dict({name: rows.sum(0) for name, rows in average.items()})

    def _train(self) -> Iterator[None]:
        """One step at a time; clients take their turn again and again."""
        loss_of = nn.CrossEntropyLoss()
        while True:
            for own in self._clients:
                model = copy.deepcopy(self._model).train()
                optimiser = torch.optim.SGD(model.parameters(), lr=self._local.lr, momentum=self._local.momentum)
                for _ in range(self._local.epochs):
                    for where in own[torch.randperm(len(own), device=own.device)].split(self._local.batch):
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
    which = torch.arange(count, device=device)[:, None, None, None]
    channels = torch.arange(images.shape[1], device=device)[None, :, None, None]
    cropped = padded[which, channels, rows, columns]
    mirror = torch.rand(count, 1, 1, 1, device=device) < 0.5
    return torch.where(mirror, cropped.flip(-1), cropped)
