"""Pre-norm transformers (Xiong et al. 2020): a causal decoder for text and a ViT for images, of the same blocks.

Dropout is on what a block adds to its input and not on attention weights: `F.scaled_dot_product_attention` would draw
these masks from torch's generators, and not by the counted masks of a run, which every engine shares. Its backend is
the one of plain products and a softmax on every device: for the fused kernel of a CPU `torch.func.vmap`, which trains
many clients at once, has no rule.

The decoder takes whole-number tokens `[N, T]`, see `char_lstm`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedgg.errors import UserError
from fedgg.models import (
    check_choice,
    check_divides,
    check_dropout,
    check_positive,
    image_shape,
    number_of_tokens,
    sequence_length,
)
from fedgg.models.char_lstm import Outputs, Predict, Vocabulary

Layers = Annotated[int, "number of blocks"]
Width = Annotated[int, "size of the representation of a token or patch"]
Heads = Annotated[int, "attention heads of a block; they divide width"]
Dropout = Annotated[float, "on embeddings and on what a block adds"]


class TransformerBlock(nn.Module):
    """Self-attention, then two linear layers with GELU, four times as wide between them; each added to its input."""

    def __init__(self, width: int, heads: int, dropout: float, causal: bool):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)
        for part in (self.queries_keys_values, self.attention_out, self.mlp[0], self.mlp[2]):
            assert isinstance(part, nn.Linear)
            nn.init.xavier_uniform_(part.weight)
            nn.init.zeros_(part.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        y: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return y

    def attention(self, x: Tensor) -> Tensor:
        """`[N, T, width]` to the same shape."""
        length, width = x.shape[-2:]
        split = self.queries_keys_values(x).view(-1, length, 3, self.heads, width // self.heads)
        queries, keys, values = split.permute(2, 0, 3, 1, 4).unbind(0)  # [N, heads, T, width of a head]
        with sdpa_kernel(SDPBackend.MATH):
            mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=self.causal)
        y: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(-1, length, width))
        return y


def check_blocks(model: str, layers: int, width: int, heads: int, dropout: float) -> None:
    """UserError where such blocks do not exist."""
    check_positive(model, layers=layers, width=width, heads=heads)
    check_divides(model, "heads", heads, "a width", width)
    check_dropout(dropout)


def vit(
    shape: tuple[int, ...],
    classes: int,
    patch: Annotated[int, "height and width of a patch in pixels"] = 4,
    layers: Layers = 4,
    width: Width = 128,
    heads: Heads = 4,
    pool: Annotated[Literal["mean", "token"], "the classifier reads the mean over patches, or a class token"] = "mean",
    dropout: Dropout = 0.0,
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


def transformer(
    shape: tuple[int, ...],
    classes: int,
    predict: Outputs = "every",
    vocabulary: Vocabulary = 0,
    layers: Layers = 4,
    width: Width = 128,
    heads: Heads = 4,
    dropout: Dropout = 0.0,
    tied: Annotated[bool, "whether the output layer has the weights of the embedding"] = False,
) -> nn.Module:
    """A causal transformer of 4 pre-norm blocks of width 128 with learned positions, 0.8 million parameters in them.

    The context is the length of the examples. `tied`: the output layer's weights are the embedding's.
    """
    context = sequence_length(shape, "transformer")
    check_choice("transformer", "predict", predict, ("every", "last"))
    check_blocks("transformer", layers, width, heads, dropout)
    tokens = number_of_tokens("transformer", vocabulary, classes)
    if tied and tokens != classes:
        raise UserError(
            f"transformer with tied = true needs as many tokens as classes, got vocabulary = {tokens} and {classes} "
            f"classes: set tied = false"
        )
    return Transformer(tokens, context, layers, width, heads, dropout, classes, predict, tied)


class Transformer(nn.Module):
    def __init__(
        self,
        tokens: int,
        context: int,
        layers: int,
        width: int,
        heads: int,
        dropout: float,
        classes: int,
        predict: Predict,
        tied: bool,
    ):
        super().__init__()
        self.predict = predict
        self.embedding = nn.Embedding(tokens, width)
        self.positions = nn.Parameter(torch.empty(context, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, dropout, causal=True) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes, bias=False)
        for weight in (self.embedding.weight, self.positions, self.head.weight):
            nn.init.normal_(weight, 0, 0.02)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.embedding(tokens.long())  # they may arrive as whole floating point numbers
        x = self.blocks(self.dropout(embedded + self.positions[: tokens.shape[1]]))
        y: Tensor = self.head(self.norm(x if self.predict == "every" else x[:, -1]))
        return y
