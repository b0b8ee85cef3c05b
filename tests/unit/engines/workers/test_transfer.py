"""Objects on their way to another process arrive as they were, and leave no file open."""

from __future__ import annotations

import os
import threading
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedgg.engines.workers.process import ALIGNED, INLINE, PackedObject, pack, receive, send, unpack

LARGE = INLINE // 4 + 1  # numbers of four bytes


def tensors() -> dict[str, Tensor]:
    return {
        "large": torch.randn(3, LARGE),
        "scalar": torch.tensor(1.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "bits": torch.tensor([[True, False]]),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "short": torch.randn(2, 3).bfloat16(),
        "turned": torch.arange(12).view(3, 4).T,
        "spread": torch.ones(1, 1).expand(2, 7),
        "counter": torch.tensor([7]),
        "odd": torch.tensor([float("nan"), float("inf"), -0.0]),
    }


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def travelled(thing: Any, **how: Any) -> Any:
    """Over a real pipe, as one process would send it to another."""
    ours, theirs = Pipe()
    parcel = pack(thing, **how)
    sender = threading.Thread(target=send, args=(ours, ("label", 3), parcel))
    sender.start()
    label, arrived = receive(theirs)
    sender.join()
    parcel.close()
    assert label == ("label", 3)
    assert arrived is not None
    ours.close()
    theirs.close()
    return unpack(arrived)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("large", [False, True])
def test_tensors_arrive_as_they_were(shared: bool, large: bool) -> None:
    sent = {name: tensor for name, tensor in tensors().items() if large or name != "large"}
    arrived = travelled(sent, shared=shared)
    assert arrived.keys() == sent.keys()
    for name, tensor in sent.items():
        assert same(arrived[name], tensor), name
        assert tensor.numel() == 0 or arrived[name].data_ptr() % ALIGNED == 0, f"{name}: kernels see other addresses"
        arrived[name].add_(1) if tensor.dtype != torch.bool else None  # what arrives may be written into
        assert same(sent[name], tensor)


def test_modules_and_arrays_arrive_as_they_were() -> None:
    module = nn.Sequential(nn.Linear(300, 200), nn.BatchNorm1d(200))
    module[0].bias.requires_grad_(False)
    arrived, positions = travelled((module, np.arange(30000)))
    assert str(arrived) == str(module)
    for (name, a), (_, b) in zip(module.named_parameters(), arrived.named_parameters(), strict=True):
        assert same(a.detach(), b.detach()), name
        assert a.requires_grad == b.requires_grad
    assert np.array_equal(positions, np.arange(30000))


def test_what_the_receiver_has_already_does_not_travel() -> None:
    net, w = nn.Linear(500, 500), torch.randn(1, 3)
    parcel = pack({"net": net, "w": w}, {id(net): 42})
    assert parcel.file is None
    arrived = unpack(parcel, {42: "theirs"})
    assert arrived["net"] == "theirs"
    assert torch.equal(arrived["w"], w)


def test_who_writes_into_what_is_shared_writes_alone() -> None:
    numbers = torch.zeros(LARGE)
    parcel = pack(numbers, shared=True)
    assert parcel.file is not None

    def received() -> Tensor:
        again = PackedObject(parcel.pickled, parcel.places, parcel.inline, os.dup(parcel.file or 0), True)
        tensor: Tensor = unpack(again)
        return tensor

    one, other = received(), received()
    one.fill_(5)
    assert not other.any()
    assert not numbers.any()
    assert not received().any()
    parcel.close()


def test_without_memory_for_files_they_lie_in_the_temporary_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(name: str) -> int:
        return os.open("/dev/full", os.O_RDWR)  # every write fails as on a device without room

    monkeypatch.setattr(os, "memfd_create", full, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    sent = torch.randn(LARGE)
    assert torch.equal(travelled(sent), sent)
    assert torch.equal(travelled(sent, shared=True), sent)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to count files")
def test_no_file_stays_open() -> None:
    def files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = files()
    for _ in range(5):
        travelled(tensors())
    assert files() == before


def test_a_sender_that_dies_within_a_message_is_gone() -> None:
    ours, theirs = Pipe()
    os.write(ours.fileno(), b"\0\0\0\x20half")
    ours.close()
    with pytest.raises(EOFError):
        receive(theirs)
