"""Data files that no publisher wrote: read, or refused in one line; within bounds of memory and time."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import signal
import struct
import traceback
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
from odd import limit_memory
from safetensors.torch import save

from fedgg.data.readers import load_cifar10, load_svhn
from fedgg.data.user_arrays import load_npz
from fedgg.errors import UserError
from fedgg.lab.config import Experiment
from fedgg.lab.name_resolution import build_model
from fedgg.lab.weight_files import load_start

files = pytest.importorskip("fedgg.flower.data_files", reason="a client's file is read by the extra `flower`")

MEMORY, PATIENCE = 4 << 30, 30
Case = tuple[str, bytes]  # kind of file, content


class Kinds:
    """Each kind of file with a sound content, and how it is read."""

    def __init__(self, folder: Path):
        chance = np.random.default_rng(0)
        self.folder = folder
        self.cifar = folder / "c" / "cifar-10-batches-py"
        self.cifar.mkdir(parents=True)
        self.module = build_model("mlp", {"hidden": 8}, (1, 8, 8), 10, 0)
        labels, images = chance.integers(0, 10, 20), chance.integers(0, 256, (20, 3072), dtype=np.uint8)
        batch = pickle.dumps({b"data": images, b"labels": labels.tolist()}, protocol=2)
        for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
            (self.cifar / name).write_bytes(batch)
        for name in ("train_32x32.mat", "test_32x32.mat"):
            pixels = chance.integers(0, 256, (32, 32, 3, 10), dtype=np.uint8)
            digits = chance.integers(1, 11, (10, 1)).astype(np.uint8)
            scipy.io.savemat(folder / name, {"X": pixels, "y": digits}, do_compression=name.startswith("train"))
        x, y = chance.random((50, 8)).astype(np.float32), chance.integers(0, 3, 50)
        arrays = {"x_train": x, "y_train": y, "x_test": x[:20], "y_test": y[:20]}
        client = {"x": x, "y": y, "classes": np.array(["a", "b", "c"]), "shift": np.zeros(1), "scale": np.ones(1)}
        self.sound: list[Case] = [
            ("cifar", batch),
            ("npz", _npz(np.savez_compressed, arrays)),
            ("npz", _npz(np.savez, arrays)),
            ("mat", (folder / "train_32x32.mat").read_bytes()),
            ("mat", (folder / "test_32x32.mat").read_bytes()),
            ("safetensors", save(self.module.state_dict())),
            ("client", _npz(np.savez, client)),
        ]
        self.experiment = Experiment(engine={"precision": "fp32"})

    def read(self, kind: str, content: bytes) -> None:
        places = {"cifar": self.cifar / "data_batch_3", "mat": self.folder / "train_32x32.mat"}
        file = places.get(kind, self.folder / f"odd.{kind}")
        file.write_bytes(content)
        readers: dict[str, Callable[[], object]] = {
            "cifar": lambda: load_cifar10(self.folder / "c"),
            "npz": lambda: load_npz(file),
            "mat": lambda: load_svhn(self.folder),
            "safetensors": lambda: load_start(self.module, file),
            "client": lambda: files.read_client_file(file, self.experiment),
        }
        readers[kind]()


def _npz(write: Any, arrays: dict[str, Any]) -> bytes:
    content = io.BytesIO()
    write(content, **arrays)
    return content.getvalue()


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Kinds:
    return Kinds(tmp_path_factory.mktemp("data"))


def outcomes(kinds: Kinds, cases: Sequence[Case]) -> list[str]:
    """What comes of each, read in a process of its own with 4 GB more; a case on which it ends is the last."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        os.close(reading)
        limit_memory(MEMORY)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        for kind, content in cases:
            signal.alarm(PATIENCE)
            try:
                kinds.read(kind, content)
                outcome = "read"
            except UserError as error:
                outcome = "several lines" if "\n" in str(error) else "one line"
            except BaseException as error:
                outcome = f"{type(error).__name__}: {error} {traceback.format_exc()[-1500:]}"
            os.write(writing, json.dumps(outcome).encode() + b"\n")
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        answers = [str(json.loads(line)) for line in answer.read().splitlines()]
    _, status = os.waitpid(child, 0)
    return answers if len(answers) == len(cases) else [*answers, f"the process ended ({status})"]


def assert_read_or_refused(kinds: Kinds, cases: list[Case], name: str) -> None:
    at = 0
    while at < len(cases):
        for number, outcome in enumerate(outcomes(kinds, cases[at:]), start=at):
            if outcome not in ("read", "one line"):
                (kinds.folder / "odd-file").write_bytes(cases[number][1])
                pytest.fail(f"{name}, case {number}, {cases[number][0]} ({kinds.folder / 'odd-file'}): {outcome}")
            at = number + 1


# By chance ------------------------------------------------------------------------------------------------------------


def mutated(content: bytes, chance: random.Random) -> bytes:
    """Some bytes flipped, replaced, cut out, put in or moved."""
    odd = bytearray(content)
    for _ in range(chance.choice([1, 1, 2, 4, 16])):
        length = len(odd)
        if not length:
            break
        at, kind = chance.randrange(min(length, chance.choice([64, 400, length, length]))), chance.randrange(7)
        if kind == 0:
            odd[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            odd[at] = chance.randrange(256)
        elif kind == 2:
            odd = odd[:at]
        elif kind == 3:
            odd[at:at] = chance.randbytes(chance.choice([1, 4, 16]))
        elif kind == 4:
            del odd[at : at + chance.choice([1, 4, 16])]
        elif kind == 5:
            number = chance.choice([b"\xff" * 8, b"\0" * 8, b"\x7f" + b"\xff" * 7, struct.pack("<q", 2**40)])
            odd[at : at + 8] = number[: min(8, length - at)]
        else:
            other, many = chance.randrange(length), chance.randrange(1, 64)
            odd[at : at + many] = odd[other : other + many]
    return bytes(odd)


def through(kinds: Kinds, seed: int, count: int) -> None:
    chance = random.Random(seed)
    for first in range(0, count, 50):
        cases = []
        for _ in range(min(50, count - first)):
            kind, content = chance.choice(kinds.sound)
            cases.append((kind, mutated(content, chance)))
        assert_read_or_refused(kinds, cases, f"seed {seed}, from {first}")


def test_the_sound_ones_are_read(kinds: Kinds) -> None:
    assert outcomes(kinds, kinds.sound) == ["read"] * len(kinds.sound)


def test_sixty_odd_files(kinds: Kinds) -> None:
    through(kinds, 0, 60)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 7))
def test_three_thousand_odd_files(seed: int, kinds: Kinds) -> None:
    through(kinds, seed, 500)


# By hand --------------------------------------------------------------------------------------------------------------


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


def _asks(module: str, name: str) -> bytes:
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


def _npy(descr: Any, shape: str, data: bytes = b"") -> bytes:
    head = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    head += b" " * (64 - (10 + len(head) + 1) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + data


def _zipped(**arrays: bytes) -> bytes:
    rest = {"y_train": _npy("<i8", "(1,)", b"\0" * 8), "x_test": _npy("<f4", "(1, 2)", b"\0" * 8)}
    rest |= {"y_test": _npy("<i8", "(1,)", b"\0" * 8), "x_train": _npy("<f4", "(1, 2)", b"\0" * 8)}
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in (rest | arrays).items():
            archive.writestr(f"{name}.npy", array)
    return content.getvalue()


def _bomb() -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("x_train.npy", "w", force_zip64=True) as member:
            member.write(_npy("|u1", "(5000000000, 1)"))
            for _ in range(299):
                member.write(bytes(1 << 24))
        for name in ("y_train", "x_test", "y_test"):
            archive.writestr(f"{name}.npy", _npy("<i8", "(1,)", b"\0" * 8))
    return content.getvalue()


def _header(content: object, data: bytes = b"") -> bytes:
    head = json.dumps(content).encode()
    return struct.pack("<Q", len(head)) + head + data


def _nested(times: int) -> list[object]:
    content: list[object] = [0] * 10
    for _ in range(times):
        content = [content] * 10
    return content


ENDLESS: list[object] = []
ENDLESS.append(ENDLESS)
DEEP = b'{"__metadata__":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}"
PICKLES = {
    "os.system": pickle.dumps(Evil()),
    "os.system within": pickle.dumps({b"data": Evil(), b"labels": [1]}),
    "eval": b"cbuiltins\neval\n(S'1'\ntR.",
    "numpy.load": _asks("numpy", "load") + b"(S'/etc/passwd'\ntR.",
    "nested name": b"\x80\x04\x8c\x05numpy\x8c\x0cndarray.__new__\x93.",
    "extension": b"\x82\x01.",
    "persistent": b"Pfoo\n.",
    "memo": b"\x80\x02}r\xff\xff\xff\x7f.",
    "shared lists": pickle.dumps({b"data": _nested(8), b"labels": [0] * 10}, protocol=2),
    "endless data": pickle.dumps({b"data": ENDLESS, b"labels": [0] * 10}, protocol=2),
    "endless labels": pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": ENDLESS}, protocol=2),
    "objects": pickle.dumps({b"data": np.array([[None]], dtype=object), b"labels": [1]}),
    "state of a class": b"\x80\x02" + _asks("numpy", "ndarray") + b"N}X\x01\x00\x00\x00aK\x01s\x86b.",
    "state of a function": b"\x80\x02"
    + _asks("numpy.core.multiarray", "_reconstruct")
    + b"N}X\x0c\x00\x00\x00__defaults__)s\x86b.",
    "deep tuple": b"\x80\x02" + b"(" * 200_000 + b"t" * 200_000 + b".",
    "deep list": b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
    "long": b"\x80\x02\x8b\xff\xff\xff\x7f" + b"\x01" * 100 + b".",
    "long text": b"I" + b"9" * 200_000 + b"\n.",
}
ARRAYS = {
    "huge": _npy("<f8", "(1000000000000,)"),
    "huge in three": _npy("<f8", "(100000, 100000, 100000)"),
    "overflow": _npy("<f8", "(4294967296, 4294967296)"),
    "negative": _npy("<f8", "(-5,)"),
    "objects": _npy("|O", "(1,)"),
    "code": _npy("__import__('os')", "(1,)"),
    "header of 4 GB": b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**32 - 1) + b"x",
    "void": _npy("|V1000000000", "(1,)"),
    "records": _npy([("a", "<f8")], "(1,)", b"\0" * 8),
    "NaN": _npy("<f4", "(1, 2)", struct.pack("<ff", float("nan"), 1)),
    "infinite": _npy("<f4", "(1, 2)", struct.pack("<ff", float("inf"), 1)),
    "complex": _npy("<c8", "(1, 2)", b"\0" * 16),
    "dates": _npy("<M8[s]", "(1, 2)", b"\0" * 16),
    "text": _npy("<U4", "(1, 2)", b"\0" * 32),
    "empty": _npy("<f4", "(0, 2)"),
    "no dimension": _npy("<f4", "()", b"\0" * 4),
    "70 dimensions": _npy("<f4", "(" + "1," * 70 + ")", b"\0" * 4),
    "long double": _npy("<f16", "(1, 2)", b"\0" * 32),
    "deep header": _npy("<f4", "(" * 3000 + ")" * 3000),
}
LABELS = {
    "10**18": _npy("<i8", "(1,)", struct.pack("<q", 10**18)),
    "999999": _npy("<i8", "(1,)", struct.pack("<q", 999_999)),
    "NaN": _npy("<f8", "(1,)", struct.pack("<d", float("nan"))),
    "2**64 - 1": _npy("<u8", "(1,)", b"\xff" * 8),
}


def crafted(kinds: Kinds) -> dict[str, Case]:
    weights = kinds.module.state_dict()
    headers = {
        "giant header": struct.pack("<Q", 2**62) + b"{}",
        "header of 100 MB": struct.pack("<Q", 100_000_001) + b"{",
        "huge shape": _header({"0.weight": {"dtype": "F32", "shape": [2**40] * 2, "data_offsets": [0, 4]}}, b"\0" * 4),
        "doubles": save({name: tensor.double() for name, tensor in weights.items()}),
        "integers": save({name: tensor.long() for name, tensor in weights.items()}),
        "booleans": save({name: tensor.bool() for name, tensor in weights.items()}),
        "NaN": save({name: tensor * float("nan") for name, tensor in weights.items()}),
        "flat": save({name: tensor.reshape(-1) for name, tensor in weights.items()}),
        "deep": struct.pack("<Q", len(DEEP)) + DEEP,
    }
    return {
        **{f"pickle, {name}": ("cifar", content) for name, content in PICKLES.items()},
        **{f"array, {name}": ("npz", _zipped(x_train=content)) for name, content in ARRAYS.items()},
        **{f"labels, {name}": ("npz", _zipped(y_train=content)) for name, content in LABELS.items()},
        **{f"weights, {name}": ("safetensors", content) for name, content in headers.items()},
    }


def test_crafted_files(kinds: Kinds) -> None:
    assert_read_or_refused(kinds, list(crafted(kinds).values()), "by hand")


@pytest.mark.slow
def test_an_archive_that_unpacks_to_five_gigabytes(kinds: Kinds) -> None:
    assert outcomes(kinds, [("npz", _bomb())]) == ["one line"]


@pytest.mark.parametrize("kind", ["npz", "safetensors", "client", "cifar", "mat"])
def test_a_fifo_is_not_waited_for(kind: str, tmp_path: Path) -> None:
    kinds = Kinds(tmp_path)
    names = {"cifar": kinds.cifar / "data_batch_3", "mat": tmp_path / "train_32x32.mat"}
    file = names.get(kind, tmp_path / f"odd.{kind}")
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    readers: dict[str, Callable[[], object]] = {
        "npz": lambda: load_npz(file),
        "safetensors": lambda: load_start(kinds.module, file),
        "client": lambda: files.read_client_file(file, kinds.experiment),
        "cifar": lambda: load_cifar10(tmp_path / "c"),
        "mat": lambda: load_svhn(tmp_path),
    }
    with pytest.raises(UserError):
        readers[kind]()
