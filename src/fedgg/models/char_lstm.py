"""A character LSTM: inputs are whole-number tokens `[N, T]`; outputs are scores for each token `[N, T, classes]`.

With `predict = "last"` outputs are those of the last token alone, `[N, classes]`. There are as many different tokens as
classes (the next token is the class) unless `vocabulary` says otherwise, as for the classification of texts.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedgg.models import check_choice, check_positive, number_of_tokens, sequence_length

Predict = Literal["every", "last"]
Outputs = Annotated[Predict, "outputs for every token (task next_token), or for the last one (classification)"]
Vocabulary = Annotated[int, "number of different tokens; 0: as many as classes"]


def char_lstm(
    shape: tuple[int, ...],
    classes: int,
    predict: Outputs = "every",
    vocabulary: Vocabulary = 0,
    embedding: Annotated[int, "size of the embedding of a token"] = 8,
    hidden: Annotated[int, "units of an LSTM layer"] = 256,
    layers: Annotated[int, "number of LSTM layers"] = 2,
) -> nn.Module:
    """Characters by an embedding of 8 and two LSTM layers of 256: the Shakespeare model of McMahan et al. 2017.

    LEAF (Caldas et al. 2018) and FedProx (Li et al. 2020) score the last token; FedJAX scores each token and has a tanh
    after each LSTM layer, which is not here. As in LEAF's, a gate has one bias (torch's own layer has two) and the
    forget gate's starts higher by one.
    """
    sequence_length(shape, "char_lstm")
    check_choice("char_lstm", "predict", predict, ("every", "last"))
    check_positive("char_lstm", embedding=embedding, hidden=hidden, layers=layers)
    tokens = number_of_tokens("char_lstm", vocabulary, classes)
    return CharLSTM(tokens, embedding, hidden, layers, classes, predict)


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
