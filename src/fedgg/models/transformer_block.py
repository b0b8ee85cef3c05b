"""A block of a pre-norm transformer (Xiong et al. 2020), for text and for images.

Dropout is on what a block adds to its input and not on attention weights: `F.scaled_dot_product_attention` would draw
these masks from torch's generators, and not by the counted masks of a run, which every engine shares. Its backend is
the one of plain products and a softmax on every device: for the fused kernel of a CPU `torch.func.vmap`, which trains
many clients at once, has no rule.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedgg.models.argument_checks import check_divides, check_dropout, check_positive


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
