"""Multiply-adds as torch's own counter has them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedgg.engines.flops import CountedProducts
from fedgg.models import MODELS


class Mixed(nn.Module):
    """Products in every form."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(3, 5, 3)
        self.groups = nn.Conv2d(6, 8, 3, groups=2)
        self.weight = nn.Parameter(torch.randn(4, 7))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)[:, :4]
        products = [flat @ self.weight, torch.matmul(flat, self.weight), flat.mm(self.weight)]
        products += [torch.addmm(torch.zeros(7), flat, self.weight), torch.bmm(x[:, 0], x[:, 1])]
        products += [nn.functional.linear(input=flat, weight=self.weight.T)]
        return torch.stack([*(p.sum() for p in products), self.up(x).sum(), self.groups(torch.cat([x, x], 1)).sum()])


@pytest.mark.parametrize("name", [*MODELS, "mixed"])
def test_products_are_counted_as_torch_counts_them(name: str) -> None:
    x = torch.randn(2, 3, 32, 32)
    if name in ("char_lstm", "transformer"):
        x = torch.zeros(2, 9, dtype=torch.int64)
    module = Mixed() if name == "mixed" else MODELS[name](tuple(x.shape[1:]), 10)
    with torch.no_grad(), FlopCounterMode(display=False) as theirs:
        module(x)
    with torch.no_grad(), CountedProducts() as ours:
        module(x)
    assert 2 * ours.multiply_adds == theirs.get_total_flops() > 0
