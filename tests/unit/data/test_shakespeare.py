"""Shakespeare by role: a small play of the same format, written by the test, and the real text where there is one."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fedgg
from fedgg.data.catalog import SHAKESPEARE, Publication, data_folder
from fedgg.data.dataset import Dataset, load
from fedgg.data.download import check
from fedgg.data.natural_clients import find_shakespeare, lines_by_role, load_shakespeare
from fedgg.errors import UserError

PLAY = """First Citizen:
Speak, speak.
You are all resolved: to die?

ALL:
No.

Ghost of GREY:

First Citizen:
Resolved.


KING:
Once more unto
the breach, dear friends,
once more:
Or close the wall up
with our English dead.
"""


def long_play() -> str:
    """Three roles that speak in turns, so that each has several windows."""
    draw = np.random.default_rng(0)
    letters = list("abcdefg hIJ,.")
    blocks = []
    for turn in range(64):  # so that a fifth of the lines is not a whole number
        lines = ["".join(draw.choice(letters, 1 + int(draw.integers(9, 30)))) for _ in range(1 + turn % 3)]
        blocks.append(f"ROLE {turn % 3}:\n" + "\n".join(lines) + "\n")
    return "\n".join([*blocks, "BRIEF:\nNo.\n"])


def published(folder: Path, text: str) -> Publication:
    path = folder / "input.txt"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    file = replace(SHAKESPEARE.files[0], sha256=hashlib.sha256(text.encode()).hexdigest())
    return replace(SHAKESPEARE, files=(file,))


def decoded(dataset: Dataset, tokens: torch.Tensor) -> str:
    return "".join("\n" if (word := dataset.classes[token]) == "\\n" else word for token in tokens.tolist())


def test_lines_of_each_role_in_their_order() -> None:
    assert lines_by_role(PLAY) == {
        "First Citizen": ["Speak, speak.", "You are all resolved: to die?", "Resolved."],
        "ALL": ["No."],
        "Ghost of GREY": [],
        "KING": PLAY.split("KING:\n")[1].splitlines(),
    }


@pytest.mark.parametrize("length", [1, 7, 40])
def test_windows_are_the_text_of_each_role(tmp_path: Path, length: int) -> None:
    text = long_play()
    dataset = load_shakespeare(tmp_path, length, publication=published(tmp_path, text))
    assert dataset.targets == "tokens"
    assert dataset.x_train.dtype == dataset.y_train.dtype == torch.int64
    assert dataset.shape == (length,)
    assert "".join(dataset.classes).replace("\\n", "\n") == "".join(sorted(set(text)))
    assert dataset.client_names == ("ROLE 0", "ROLE 1", "ROLE 2"), "BRIEF has too little text"
    assert dataset.owners is not None
    tests = ""
    for role in range(3):
        speeches = [block for block in text.split("\n\n") if block.startswith(f"ROLE {role}:")]
        lines = [line for speech in speeches for line in speech.split("\n")[1:] if line]
        cut = len(lines) - math.ceil(len(lines) / 5)
        whole = "".join(f"{line}\n" for line in lines[:cut])
        x, y = (tensor[dataset.owners == role] for tensor in (dataset.x_train, dataset.y_train))
        assert len(x) == (len(whole) - 1) // length
        assert decoded(dataset, x.flatten()) == whole[: x.numel()], "windows follow each other and do not overlap"
        assert decoded(dataset, y.flatten()) == whole[1 : x.numel() + 1], "targets are the next characters"
        rest = "".join(f"{line}\n" for line in lines[cut:])
        tests += rest[: (len(rest) - 1) // length * length]
    assert decoded(dataset, dataset.x_test.flatten()) == tests


def test_roles_with_too_little_text_are_left_out_and_roles_can_be_chosen(tmp_path: Path) -> None:
    publication = published(tmp_path / "tinyshakespeare", long_play())
    by_size = load_shakespeare(tmp_path, 20, publication=publication)
    assert by_size.owners is not None
    sizes = by_size.owners.bincount()
    assert by_size.client_names is not None
    most = by_size.client_names[int(sizes.argmax())]
    one = load_shakespeare(tmp_path, 20, roles=1, publication=publication)
    assert one.client_names == (most,)
    assert len(one.x_train) == int(sizes.max())
    for settings, complaint in (
        ({"length": 0}, r"data\.length = 0: give a number of characters from 1"),
        ({"length": 100_000}, "no role has a window"),
        ({"roles": -1}, r"data\.roles = -1"),
        ({"roles": 4, "length": 20}, r"data\.roles = 4, and 3 roles have enough text for data\.length = 20"),
    ):
        with pytest.raises(UserError, match=complaint):
            load_shakespeare(tmp_path, **settings, publication=publication)


def test_another_text_is_refused_and_a_stray_one_passed_over(tmp_path: Path) -> None:
    publication = published(tmp_path / "zzz", PLAY)
    (tmp_path / "puzzle").mkdir()
    (tmp_path / "puzzle" / "input.txt").write_text("another file of this name")
    dataset = load_shakespeare(tmp_path, 5, publication=publication)
    assert dataset.client_names == ("First Citizen", "KING")
    (tmp_path / "zzz" / "input.txt").write_text(PLAY + "\n")
    with pytest.raises(UserError, match=r"is not the publisher's .*`fedgg data fetch shakespeare`"):
        load_shakespeare(tmp_path, 5, publication=publication)
    with pytest.raises(UserError, match=r"found no input\.txt .*`fedgg data fetch shakespeare`"):
        load("shakespeare", tmp_path / "nowhere")


def test_a_run_by_role_on_next_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publication = published(tmp_path, long_play())
    monkeypatch.setattr(load_shakespeare, "__defaults__", (80, 0, publication))
    experiment = fedgg.Experiment(
        rounds=2,
        data={"source": "shakespeare", "length": 20},
        split={"scheme": "given"},
        task={"name": "next_token"},
        model={"name": "char_lstm", "hidden": 8, "layers": 1},
        local={"epochs": 1, "batch": 4, "lr": 0.5},
    )
    assert experiment.data.normalise == "none"
    (finding,) = check("shakespeare", tmp_path, True, {"shakespeare": publication})
    assert finding.ok
    assert "24 training and 6 test examples 80, 26 classes, 3 clients; the publisher's own bytes" in finding.what
    result = fedgg.run(experiment, data_folder=tmp_path)
    assert result.experiment.split.clients == 3
    with pytest.raises(UserError, match=r"those of shakespeare are tokens: set task\.name = 'next_token'"):
        fedgg.run(experiment.changed({"task.name": "classification"}), data_folder=tmp_path)


@pytest.mark.slow
def test_the_real_text() -> None:
    if not any(copy.is_original() for copy in find_shakespeare(data_folder(), SHAKESPEARE)):
        pytest.skip("input.txt is not on this machine: `fedgg data fetch shakespeare`, or FEDGG_DATA")
    for length, expected in ((20, (258, 40_699, 10_319)), (80, (203, 10_005, 2_485)), (200, (144, 3_833, 924))):
        dataset = load("shakespeare", length=length)
        assert dataset.client_names is not None
        assert (len(dataset.client_names), len(dataset.x_train), len(dataset.x_test)) == expected
        assert dataset.classes == SHAKESPEARE.classes
    assert (sum(SHAKESPEARE.train_counts), sum(SHAKESPEARE.test_counts)) == (10_005, 2_485)
