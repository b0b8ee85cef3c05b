"""Models of text: inputs are whole-number tokens `[N, T]`; outputs are scores for each token `[N, T, classes]`.

With `predict = "last"` outputs are those of the last token alone, `[N, classes]`. There are as many different tokens as
classes (the next token is the class) unless `vocabulary` says otherwise, as for the classification of texts.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedgg.errors import UserError
from fedgg.models.argument_checks import check_choice, check_positive, sequence_length
from fedgg.models.transformer_block import TransformerBlock, check_blocks

Predict = Literal["every", "last"]


def char_lstm(
    shape: tuple[int, ...],
    classes: int,
    predict: Predict = "every",
    vocabulary: int = 0,
    embedding: int = 8,
    hidden: int = 256,
    layers: int = 2,
) -> nn.Module:
    """Characters by an embedding of 8 and two LSTM layers of 256: the Shakespeare model of McMahan et al. 2017.

    LEAF (Caldas et al. 2018) and FedProx (Li et al. 2020) score the last token; FedJAX scores each token and has a tanh
    after each LSTM layer, which is not here. As in LEAF's, a gate has one bias (torch's own layer has two) and the
    forget gate's starts higher by one.
    """
    sequence_length(shape, "char_lstm")
    check_choice("char_lstm", "predict", predict, ("every", "last"))
    check_positive("char_lstm", embedding=embedding, hidden=hidden, layers=layers)
    tokens = _number_of_tokens("char_lstm", vocabulary, classes)
    return CharLSTM(tokens, embedding, hidden, layers, classes, predict)


def transformer(
    shape: tuple[int, ...],
    classes: int,
    predict: Predict = "every",
    vocabulary: int = 0,
    layers: int = 4,
    width: int = 128,
    heads: int = 4,
    dropout: float = 0.0,
    tied: bool = False,
) -> nn.Module:
    """A causal transformer of 4 pre-norm blocks of width 128 with learned positions, 0.8 million parameters in them.

    The context is the length of the examples. `tied`: the output layer's weights are the embedding's.
    """
    context = sequence_length(shape, "transformer")
    check_choice("transformer", "predict", predict, ("every", "last"))
    check_blocks("transformer", layers, width, heads, dropout)
    tokens = _number_of_tokens("transformer", vocabulary, classes)
    if tied and tokens != classes:
        raise UserError(
            f"transformer with tied = true needs as many tokens as classes, got vocabulary = {tokens} and {classes} "
            f"classes: set tied = false"
        )
    return Transformer(tokens, context, layers, width, heads, dropout, classes, predict, tied)


def _number_of_tokens(model: str, vocabulary: int, classes: int) -> int:
    if vocabulary < 0:
        raise UserError(f"{model}: vocabulary = {vocabulary}: give the number of different tokens, or 0 for classes")
    return vocabulary or classes


class CharLSTM(nn.Module):
    def __init__(self, tokens: int, embedding: int, hidden: int, layers: int, classes: int, predict: Predict):
        super().__init__()
        self.predict = predict
        self.embedding = nn.Embedding(tokens, embedding)
        sizes = [embedding, *[hidden] * layers]
        self.layers = nn.Sequential(*(LSTMLayer(sizes[n], hidden) for n in range(layers)))
        self.head = nn.Linear(hidden, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layers(self.embedding(tokens.long()))  # they may arrive as whole floating point numbers
        y: Tensor = self.head(x if self.predict == "every" else x[:, -1])
        return y


class LSTMLayer(nn.Module):
    """`[N, T, features]` to `[N, T, hidden]`, with gates in the order of `nn.LSTM`: input, forget, cell, output.

    Written out step by step, since `torch.func.vmap`, which trains many clients at once, has no rule for `nn.LSTM`.
    """

    def __init__(self, features: int, hidden: int):
        super().__init__()
        self.weight_ih = nn.Parameter(torch.empty(4 * hidden, features))
        self.weight_hh = nn.Parameter(torch.empty(4 * hidden, hidden))
        self.bias = nn.Parameter(torch.zeros(4 * hidden))
        nn.init.xavier_uniform_(self.weight_ih)
        nn.init.xavier_uniform_(self.weight_hh)
        nn.init.ones_(self.bias[hidden : 2 * hidden])

    def forward(self, x: Tensor) -> Tensor:
        state = cell = x.new_zeros(len(x), self.weight_hh.shape[1])
        states = []
        for from_input in F.linear(x, self.weight_ih, self.bias).unbind(1):
            gates = from_input + F.linear(state, self.weight_hh)
            write, forget, candidate, read = gates.chunk(4, -1)
            cell = forget.sigmoid() * cell + write.sigmoid() * candidate.tanh()
            state = read.sigmoid() * cell.tanh()
            states.append(state)
        return torch.stack(states, 1)


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
