"""The Gaussian mechanism on what clients send: worked by hand, and what the algorithm must never see."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import rows, sent
from torch import Tensor

from fedgg.aggregation import ClientPrivacy
from fedgg.algorithms import SCAFFOLD, FedAvg
from fedgg.core.algorithm import Algorithm, Server
from fedgg.core.local import LocalEnd
from fedgg.core.server import ServerState, close_round
from fedgg.core.tensor_rows import Rows
from fedgg.errors import UserError


def test_worked_by_hand() -> None:
    """Lengths 5, 0.5 and 0: the first is cut to 1, the others stay; all count the same, whatever their share."""
    up = {"delta": rows([3, 4], [0.3, 0.4], [0, 0])}
    seen, share = ClientPrivacy(clip=1.0, noise=0.0, seed=0).collect(sent(up, [0.8, 0.1, 0.1]))
    assert seen["delta"].shape == (3, 2)
    assert torch.allclose(seen["delta"], rows([0.3, 0.4]).expand(3, 2))
    assert share.tolist() == [[1 / 3]] * 3


def test_all_that_a_client_sends_is_one_vector() -> None:
    up = {"delta": rows([3, 0]), "variate_change": rows([0, 4])}
    seen, _ = ClientPrivacy(clip=1.0, noise=0.0, seed=0).collect(sent(up))
    assert torch.allclose(seen["delta"], rows([0.6, 0]))
    assert torch.allclose(seen["variate_change"], rows([0, 0.8]))


def test_the_mean_is_over_those_asked_also_when_some_are_lost() -> None:
    seen, share = ClientPrivacy(clip=10.0, noise=0.0, seed=0).collect(sent({"delta": rows([4, 8])}, asked=4))
    assert torch.allclose(seen["delta"], rows([1, 2]).expand(4, 2))
    assert len(share) == 4


def test_lengths_that_overflow_float32_are_clipped_all_the_same() -> None:
    huge = torch.tensor([[3e30, 4e30], [0.0, 0.0]])
    seen, _ = ClientPrivacy(clip=1.0, noise=0.0, seed=0).collect(sent({"delta": huge}))
    assert torch.allclose(seen["delta"][0], torch.tensor([0.3, 0.4]))


@settings(deadline=None, max_examples=50)
@given(
    clients=st.lists(st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3), min_size=1, max_size=6),
    other=st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3),
    clip=st.floats(1e-3, 1e3),
)
def test_another_client_moves_the_sum_by_two_clips_at_most(
    clients: list[list[float]], other: list[float], clip: float
) -> None:
    """The sensitivity that the noise is measured by."""
    mechanism, count = ClientPrivacy(clip, 0.0, 0), len(clients)
    one = mechanism.collect(sent({"delta": rows(*clients)}))[0]["delta"][0] * count
    two = mechanism.collect(sent({"delta": rows(*clients[:-1], other)}))[0]["delta"][0] * count
    assert float((one - two).norm()) <= 2 * clip * (1 + 1e-12)


def test_the_noise_is_as_large_as_said_and_a_function_of_seed_and_round() -> None:
    up = {"delta": torch.zeros(4, 40_000).double(), "more": torch.zeros(4, 40_000).double()}
    mechanism = ClientPrivacy(clip=2.0, noise=3.0, seed=5)
    seen, _ = mechanism.collect(sent(up, round_=7))
    for name in up:
        assert float(seen[name][0].std()) == pytest.approx(3.0 * 2.0 / 4, rel=0.02)  # of the sum: noise clip
        assert abs(float(seen[name][0].mean())) < 0.04
        assert torch.equal(seen[name][0], seen[name][3])
    assert not torch.equal(seen["delta"][0], seen["more"][0])
    again, _ = mechanism.collect(sent(up, round_=7))
    assert torch.equal(again["delta"], seen["delta"])
    for other in (ClientPrivacy(2.0, 3.0, 6).collect(sent(up, round_=7)), mechanism.collect(sent(up, round_=8))):
        assert abs(float(torch.corrcoef(torch.stack([other[0]["delta"][0], seen["delta"][0]]))[0, 1])) < 0.03


@dataclass(frozen=True)
class Listening(FedAvg):
    """Writes down everything the server's half of an algorithm is told."""

    heard: list[Any] = field(default_factory=list)

    def aggregate(self, w: Tensor, up: Rows, share: Tensor, server: Server) -> tuple[Tensor, Rows]:
        self.heard.append((up["delta"].clone(), share.clone(), server.coverage))
        return super().aggregate(w, up, share, server)


def closed(algorithm: Algorithm, deltas: list[list[float]], examples: list[int], **more: Any) -> tuple[Tensor, Rows]:
    state = ServerState(torch.zeros(1, 2).double(), {}, algorithm.server_memory(torch.zeros(1, 2).double()))
    ends = {
        client: LocalEnd(
            {"delta": rows(delta), **{name: rows(delta) for name in more.get("also", ())}},
            {},
            {},
            {},
            torch.zeros(1, 1),
        )
        for client, delta in enumerate(deltas)
    }
    server = Server(state.memory, 10, len(deltas) / 10, 0)
    new, _ = close_round(
        algorithm, state, server, ends, dict(enumerate(examples)), "average", more.get("by", ClientPrivacy(1e9, 0.0, 0))
    )
    return new.w, new.memory


def test_the_algorithm_never_hears_of_example_counts() -> None:
    heard = []
    for examples in ([1, 1, 1], [900, 5, 70]):
        algorithm = Listening()
        closed(algorithm, [[1, 2], [3, 4], [5, 9]], examples)
        heard.append(algorithm.heard[0])
    assert torch.equal(heard[0][0], heard[1][0])
    assert torch.equal(heard[0][1], heard[1][1])
    assert heard[0][2] == heard[1][2]


def test_without_noise_and_clip_it_is_fedavg_that_counts_clients_equally() -> None:
    deltas = [[1.0, 2.0], [3.0, 4.0], [5.0, 9.0]]
    w, _ = closed(FedAvg(), deltas, [900, 5, 70])
    assert torch.allclose(w, rows([3.0, 5.0]), rtol=0, atol=1e-14)


def test_algorithms_that_add_up_clients_still_do() -> None:
    """SCAFFOLD's uniform mean divides a sum over the cohort by all clients: 3 of 10 that sent the mean (3, 5)."""
    deltas = [[1.0, 2.0], [3.0, 4.0], [5.0, 9.0]]
    for mean in ("uniform", "share"):
        _, memory = closed(SCAFFOLD(variate_mean=mean), deltas, [900, 5, 70], also=["variate_change"])
        assert torch.allclose(memory["variate"], 0.3 * rows([3.0, 5.0]), rtol=0, atol=1e-14)


def test_a_number_beside_the_update_is_refused_by_name() -> None:
    mechanism = ClientPrivacy(1.0, 1.0, 0)
    mechanism.check({"delta": rows([1, 2]), "more": rows([1, 2])}, 2)
    with pytest.raises(UserError, match="'worth' of size 1: take another algorithm"):
        mechanism.check({"delta": rows([1, 2]), "worth": rows([3])}, 2)


def test_clipping_never_lengthens() -> None:
    up = {"delta": rows([math.nextafter(1, 2), 0], [0.5, 0], [0, 0])}
    seen, _ = ClientPrivacy(clip=1.0, noise=0.0, seed=0).collect(sent(up, asked=1))
    assert float(seen["delta"][0, 0]) == 1.5
