"""`transformer` and `vit` against torch's own encoder layers, and what follows from causality and tied weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedgg.errors import UserError
from fedgg.models.transformers import transformer, vit

TINY: dict[str, Any] = {"layers": 2, "width": 12, "heads": 3}


def moved(module: nn.Module) -> nn.Module:
    """In float64, with no parameter where it starts: zeros would hide mistakes."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.double().parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return module


def by_torch(weights: dict[str, Tensor], x: Tensor, causal: bool, layers: int = 2, heads: int = 3) -> Tensor:
    """Blocks as `nn.TransformerEncoderLayer` computes them, with the last normalisation."""
    width = x.shape[-1]
    mask = torch.full((x.shape[1], x.shape[1]), -torch.inf, dtype=x.dtype).triu(1) if causal else None
    names = {
        "self_attn.in_proj_": "queries_keys_values.",
        "self_attn.out_proj.": "attention_out.",
        "linear1.": "mlp.0.",
        "linear2.": "mlp.2.",
        "norm1.": "attention_norm.",
        "norm2.": "mlp_norm.",
    }
    for number in range(layers):
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True, dtype=x.dtype
        )
        named = {
            f"{theirs}{part}": weights[f"blocks.{number}.{ours}{part}"]
            for theirs, ours in names.items()
            for part in ("weight", "bias")
        }
        layer.load_state_dict(named)
        x = layer(x, src_mask=mask)
    return F.layer_norm(x, (width,), weights["norm.weight"], weights["norm.bias"])


@pytest.mark.parametrize("predict", ["every", "last"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_transformer_is_that_of_plain_torch(predict: Any, tied: bool) -> None:
    module = moved(transformer((7,), 9, predict=predict, tied=tied, **TINY))
    weights, tokens = module.state_dict(), torch.arange(21).view(3, 7) % 9
    x = F.one_hot(tokens, 9).double() @ weights["embedding.weight"] + weights["positions"]
    head = weights["embedding.weight" if tied else "head.weight"]
    expected = by_torch(weights, x, causal=True) @ head.T
    assert expected.shape == (3, 7, 9)
    expected = expected if predict == "every" else expected[:, -1]
    torch.testing.assert_close(module(tokens), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(module(tokens.double()), module(tokens), rtol=0, atol=0)


@pytest.mark.parametrize("pool", ["mean", "token"])
def test_the_vit_is_that_of_plain_torch(pool: Any) -> None:
    module = moved(vit((2, 6, 9), 4, patch=3, pool=pool, **TINY))
    weights, images = module.state_dict(), torch.randn(2, 2, 6, 9, dtype=torch.float64)
    patches = F.unfold(images, 3, stride=3).mT  # [N, patches, channels * 3 * 3]
    x = patches @ weights["patches.weight"].flatten(1).T + weights["patches.bias"]
    if pool == "token":
        x = torch.cat([weights["class_token"].expand(2, 1, 12), x], 1)
    x = by_torch(weights, x + weights["positions"], causal=False)
    read = x.mean(1) if pool == "mean" else x[:, 0]
    expected = read @ weights["head.weight"].T + weights["head.bias"]
    torch.testing.assert_close(module(images), expected, rtol=1e-10, atol=1e-10)


def test_a_token_changes_nothing_before_it() -> None:
    module = moved(transformer((6,), 5, **TINY))
    tokens = torch.tensor([[0, 1, 2, 3, 4, 0]])
    changed = tokens.clone()
    changed[0, 3] = 1
    before, after = module(tokens), module(changed)
    torch.testing.assert_close(before[:, :3], after[:, :3], rtol=0, atol=1e-12)
    assert ((before - after)[0, 3:].abs().amax(1) > 1e-6).all()
    torch.testing.assert_close(module(tokens[:, :4]), before[:, :4], rtol=1e-10, atol=1e-10)


def test_sizes() -> None:
    blocks = 4 * (12 * 128 * 128 + 13 * 128) + 2 * 128
    tokens, positions = 80 * 128, 64 * 128
    for tied, heads in (False, 2), (True, 1):
        module = transformer((64,), 80, tied=tied)
        assert sum(p.numel() for p in module.parameters()) == blocks + heads * tokens + positions
    image = (3 * 16 + 1) * 128 + 64 * 128 + 10 * 129
    assert sum(p.numel() for p in vit((3, 32, 32), 10).parameters()) == blocks + image
    assert sum(p.numel() for p in vit((3, 32, 32), 10, pool="token").parameters()) == blocks + image + 2 * 128


@pytest.mark.parametrize(
    ("maker", "shape", "settings", "words"),
    [
        (transformer, (3, 32, 32), {}, r"sequences of tokens.*\(3, 32, 32\)"),
        (transformer, (0,), {}, "sequences"),
        (transformer, (8,), {"heads": 5}, "heads = 5 needs a width that 5 divides, got 128"),
        (transformer, (8,), {"layers": 0}, "layers = 0"),
        (transformer, (8,), {"dropout": 1.0}, "dropout"),
        (transformer, (8,), {"predict": "first"}, "no predict 'first'"),
        (transformer, (8,), {"vocabulary": 12, "tied": True}, "as many tokens as classes"),
        (transformer, (8,), {"vocabulary": -1}, "vocabulary = -1"),
        (vit, (12,), {}, "images of 4 x 4"),
        (vit, (32, 32, 3), {}, "channels first"),
        (vit, (3, 32, 30), {}, "patch = 4 needs a width of the images that 4 divides, got 30"),
        (vit, (3, 32, 32), {"patch": 0}, "patch = 0"),
        (vit, (3, 32, 32), {"pool": "max"}, "no pool 'max': choose mean or token"),
    ],
)
def test_what_cannot_be_built(maker: Any, shape: tuple[int, ...], settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        maker(shape, 10, **settings)
    assert "\n" not in str(caught.value)
