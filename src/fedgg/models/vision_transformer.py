"""A small vision transformer (Dosovitskiy et al. 2021): patches of an image as tokens, with learned positions."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from fedgg.models.argument_checks import check_choice, check_divides, check_positive, image_shape
from fedgg.models.transformer_block import TransformerBlock, check_blocks


def vit(
    shape: tuple[int, ...],
    classes: int,
    patch: int = 4,
    layers: int = 4,
    width: int = 128,
    heads: int = 4,
    pool: Literal["mean", "token"] = "mean",
    dropout: float = 0.0,
) -> nn.Module:
    """A vision transformer of 4 pre-norm blocks of width 128 on patches of 4 x 4 pixels.

    `pool`: the classifier reads the mean over the patches, or a class token beside them as in the paper.
    """
    check_positive("vit", patch=patch)
    check_choice("vit", "pool", pool, ("mean", "token"))
    check_blocks("vit", layers, width, heads, dropout)
    channels, height, wide = image_shape(shape, "vit", patch, "a smaller patch, or mlp")
    for whole, side in (("a height", height), ("a width of the images", wide)):
        check_divides("vit", "patch", patch, whole, side)
    return VisionTransformer(
        channels, (height // patch) * (wide // patch), patch, layers, width, heads, pool, dropout, classes
    )


class VisionTransformer(nn.Module):
    def __init__(
        self,
        channels: int,
        patches: int,
        patch: int,
        layers: int,
        width: int,
        heads: int,
        pool: Literal["mean", "token"],
        dropout: float,
        classes: int,
    ):
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, width)) if pool == "token" else None
        self.positions = nn.Parameter(torch.empty(patches + (pool == "token"), width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, dropout, causal=False) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        nn.init.normal_(self.positions, 0, 0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)  # [N, patches, width]
        if self.class_token is not None:
            x = torch.cat([self.class_token.expand(len(x), 1, -1), x], 1)
        x = self.norm(self.blocks(self.dropout(x + self.positions)))
        y: Tensor = self.head(x.mean(1) if self.class_token is None else x[:, 0])
        return y
