"""`char_lstm`: the size of LEAF's network, and the numbers of torch's own LSTM layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fedgg.errors import UserError
from fedgg.models.char_lstm import char_lstm


def test_size() -> None:
    """LEAF's, for 80 characters: an embedding of 8, two layers of 256 with one bias each, and 80 outputs."""
    layers = 4 * 256 * (8 + 256 + 1) + 4 * 256 * (256 + 256 + 1)
    assert sum(p.numel() for p in char_lstm((80,), 80).parameters()) == 80 * 8 + layers + 257 * 80 == 817_872


@pytest.mark.parametrize("predict", ["every", "last"])
def test_the_forward_pass_is_that_of_plain_torch(predict: Any) -> None:
    module = char_lstm((6,), 5, predict=predict, vocabulary=9, embedding=3, hidden=4, layers=3).double()
    weights = module.state_dict()
    for layer in range(3):
        weights[f"layers.{layer}.bias"].copy_(torch.randn(16))
    theirs = nn.LSTM(3, 4, 3, batch_first=True, dtype=torch.float64)
    for layer in range(3):
        ours = [weights[f"layers.{layer}.{name}"] for name in ("weight_ih", "weight_hh", "bias")]
        for name, tensor in zip(
            ("weight_ih", "weight_hh", "bias_ih", "bias_hh"), (*ours, torch.zeros(16)), strict=True
        ):
            theirs.get_parameter(f"{name}_l{layer}").data.copy_(tensor)
    tokens = torch.arange(12).view(2, 6) % 9
    states = theirs(weights["embedding.weight"][tokens])[0]
    expected = states @ weights["head.weight"].T + weights["head.bias"]
    expected = expected if predict == "every" else expected[:, -1]
    assert expected.shape == ((2, 6, 5) if predict == "every" else (2, 5))
    torch.testing.assert_close(module(tokens), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(module(tokens.double()), module(tokens), rtol=0, atol=0)


def test_forget_gates_start_open() -> None:
    bias = char_lstm((6,), 5, hidden=4).state_dict()["layers.1.bias"]
    assert bias.tolist() == [0.0] * 4 + [1.0] * 4 + [0.0] * 8


@pytest.mark.parametrize(
    ("shape", "settings", "words"),
    [
        ((1, 8, 8), {}, r"sequences of tokens, as examples of shape \[T\], got examples of shape \(1, 8, 8\)"),
        ((), {}, "sequences"),
        ((8,), {"hidden": 0}, "hidden = 0"),
        ((8,), {"embedding": 0}, "embedding = 0"),
        ((8,), {"predict": "all"}, "no predict 'all': choose every or last"),
        ((8,), {"vocabulary": -2}, "vocabulary = -2"),
    ],
)
def test_what_cannot_be_built(shape: tuple[int, ...], settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        char_lstm(shape, 10, **settings)
    assert "\n" not in str(caught.value)
