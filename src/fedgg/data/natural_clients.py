"""Data sets whose examples name their client: FEMNIST by writer, as LEAF writes it, and Shakespeare by role."""

from __future__ import annotations

import json
import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedgg.core.random_choices import stream
from fedgg.data.catalog import SHAKESPEARE, Publication, file_hash, missing_data, places_to_look
from fedgg.data.dataset import Dataset
from fedgg.data.dataset_cache import cached
from fedgg.errors import UserError
from fedgg.files import MEGABYTE, open_regular, read_bytes

Images = NDArray[np.uint8]  # [N, 784]
Labels = NDArray[np.int64]  # [N]
Tokens = NDArray[np.int64]

# FEMNIST -------------------------------------------------------------------------------------------------------------

CHARACTERS = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
TEST_SHARE = 0.1  # of each writer's images, LEAF's default
_STEPS = ("rem_user_data", "sampled_data", "all_data")  # LEAF's folders before its own split, the last step first


def load_femnist(folder: str | Path, writers: Annotated[int, "how many, the first by name; 0: all"] = 0) -> Dataset:
    """FEMNIST, handwritten characters 1x28x28 in 62 classes by writer; LEAF's files, not tried against the publisher.

    From the JSON files that LEAF's data/femnist/preprocess.sh writes: `train` and `test`, or its last step before
    these, of which a tenth of each writer's images, always the same, is the test set. Paper is 255 and ink 0, as in
    LEAF. `writers`: only so many, the first in the order of their names; 0: all of them.
    """
    if writers < 0:
        raise UserError(f"data.writers = {writers}: give a number of writers, or 0 for all of them")
    base = _leaf_folder(Path(folder))
    sources = sorted(path for name in ("train", "test", *_STEPS) for path in (base / name).glob("*.json"))
    return cached(base, sources, __file__, ("femnist", writers), lambda: _read_femnist(base, writers))


def _read_femnist(base: Path, writers: int = 0) -> Dataset:
    """FEMNIST from the folder that `_leaf_folder` found."""
    if (base / "train").is_dir():
        train, test = (_read_leaf(base / part) for part in ("train", "test"))
        train = _first(train, writers)
        if train.keys() & test.keys():  # LEAF's other split has test images of other writers
            test = {writer: images for writer, images in test.items() if writer in train}
    else:
        step = next(base / name for name in _STEPS if any((base / name).glob("*.json")))
        train, test = _split_images(_first(_read_leaf(step, least=2), writers))  # LEAF's least, too
    names = sorted(train)
    owners = np.repeat(np.arange(len(names)), [len(train[writer][1]) for writer in names])
    x_train, y_train = _joined(train, base)
    x_test, y_test = _joined(test, base)
    return Dataset(
        name="femnist",
        x_train=torch.from_numpy(x_train),
        y_train=torch.from_numpy(y_train),
        x_test=torch.from_numpy(x_test),
        y_test=torch.from_numpy(y_test),
        classes=CHARACTERS,
        peak=255.0,
        owners=torch.from_numpy(owners),
        client_names=tuple(names),
    )


def _leaf_folder(folder: Path) -> Path:
    try:
        for place in places_to_look(folder):
            for base in (place, place / "data", place / "femnist", place / "femnist" / "data"):
                is_split = all(any((base / part).glob("*.json")) for part in ("train", "test"))
                if is_split or any(any((base / name).glob("*.json")) for name in _STEPS):
                    return base
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror}); choose another folder or its rights") from error
    raise UserError(
        f"femnist: found no train/*.json and test/*.json, nor all_data/*.json, in {folder} or below; run LEAF's "
        f"data/femnist/preprocess.sh and say with --data-folder or FEDGG_DATA where its folder data is, or set "
        f"data.source = 'hf:flwrlabs/femnist' and data.client = 'writer_id'"
    )


def _read_leaf(folder: Path, least: int = 1) -> dict[str, tuple[Images, Labels]]:
    """The images of each writer that has so many, read file by file."""
    by_writer: dict[str, tuple[Images, Labels]] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            with open_regular(path) as file:
                content = json.load(file)["user_data"]
            for writer, examples in content.items():
                images, labels = _pixels(examples["x"], path, writer), _characters(examples["y"], path, writer)
                if len(images) != len(labels):
                    raise UserError(f"{path}: writer {writer!r} has {len(images)} images and {len(labels)} labels")
                if writer in by_writer:
                    raise UserError(f"{path}: writer {writer!r} is in another file too; run preprocess.sh again")
                if len(labels) >= least:
                    by_writer[writer] = (images, labels)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise UserError(f"{path}: not a file of LEAF, or cut short ({reason}); write it again") from error
    return by_writer


def _pixels(rows: Any, path: Path, writer: str) -> Images:
    """LEAF writes grey values divided by 255; its page describes whole numbers, which are read too."""
    if not rows:
        return np.empty((0, 28 * 28), np.uint8)
    values = np.asarray(rows, np.float64).reshape(len(rows), -1)
    if values.shape[1] != 28 * 28:
        raise UserError(f"{path}: images of writer {writer!r} have {values.shape[1]} pixels, expected 784")
    grey = values * 255 if values.max() <= 1 else values
    whole = grey.round()
    if not (np.abs(grey - whole).max() < 1e-3 and whole.min() >= 0 and whole.max() <= 255):
        raise UserError(f"{path}: images of writer {writer!r} are not grey values divided by 255; write it again")
    return whole.astype(np.uint8)


def _characters(numbers: Any, path: Path, writer: str) -> Labels:
    labels = np.asarray(numbers, np.float64).reshape(-1)
    if len(labels) and not np.isin(labels, np.arange(len(CHARACTERS))).all():
        raise UserError(f"{path}: writer {writer!r} has labels outside 0 to {len(CHARACTERS) - 1}; write it again")
    return labels.astype(np.int64)


def _first(by_writer: Mapping[str, tuple[Images, Labels]], writers: int) -> dict[str, tuple[Images, Labels]]:
    if writers > len(by_writer):
        raise UserError(f"data.writers = {writers}, and the files have {len(by_writer)}: take fewer, or 0 for all")
    return {writer: by_writer[writer] for writer in sorted(by_writer)[: writers or None]}


def _split_images(
    by_writer: Mapping[str, tuple[Images, Labels]],
) -> tuple[dict[str, tuple[Images, Labels]], dict[str, tuple[Images, Labels]]]:
    """Drawn, since a writer's images come in the order of the form: digits first."""
    train: dict[str, tuple[Images, Labels]] = {}
    test: dict[str, tuple[Images, Labels]] = {}
    for number, (writer, (images, labels)) in enumerate(sorted(by_writer.items())):
        order = stream(0, "femnist split", number).permutation(len(labels))
        count = max(1, round(TEST_SHARE * len(labels)))
        for part, chosen in ((test, order[:count]), (train, order[count:])):
            where = np.sort(chosen)
            part[writer] = (images[where], labels[where])
    return train, test


def _joined(by_writer: Mapping[str, tuple[Images, Labels]], base: Path) -> tuple[Images, Labels]:
    """Writer after writer, in the order of their names."""
    if not by_writer:
        raise UserError(f"{base}: its files have no images; run LEAF's preprocess.sh again")
    parts = [by_writer[writer] for writer in sorted(by_writer)]
    images = np.concatenate([images for images, _ in parts]).reshape(-1, 1, 28, 28)
    return images, np.concatenate([labels for _, labels in parts])


# Shakespeare ---------------------------------------------------------------------------------------------------------

TEST_LINES = 0.2  # of a role's lines, its last ones


def load_shakespeare(
    folder: str | Path,
    length: Annotated[int, "characters of a sequence"] = 80,
    roles: Annotated[int, "how many, those with the most text; 0: all"] = 0,
    publication: Publication = SHAKESPEARE,
) -> Dataset:
    """Shakespeare by role, 12,490 sequences of 80 characters for the task next_token; a download of 1.1 MB.

    From input.txt of karpathy/char-rnn. The speeches of a role, whatever the play, are one text; the last fifth of its
    lines (rounded up, as McMahan et al. 2017) is for testing. Texts are cut into windows of `length` characters that do
    not overlap, with the next of each character as target. Roles without a window to train and one to test are left
    out: with 80 characters 203 of 309 remain, with 10,005 training and 2,485 test windows. Tokens are the positions of
    characters in the sorted list of the 65 that occur.
    `roles`: only so many, those with the most training windows; 0: all of them.
    """
    if length < 1:
        raise UserError(f"data.length = {length}: give a number of characters from 1, for instance 80")
    if roles < 0:
        raise UserError(f"data.roles = {roles}: give a number of roles, or 0 for all of them")
    copies = find_shakespeare(Path(folder), publication)
    if not copies:
        raise missing_data(publication, "input.txt", Path(folder))
    copy, settings = copies[0], (publication, length, roles)
    return cached(copy.path, [copy.path], __file__, settings, lambda: copy.read(length, roles))


def find_shakespeare(folder: Path, publication: Publication) -> list[ShakespeareCopy]:
    """The publisher's input.txt in `folder` or one level below; without it, other files of this name."""
    try:
        names, file = (publication.folder, "tinyshakespeare", ""), publication.files[0].name
        paths = dict.fromkeys(place / name / file for place in places_to_look(folder) for name in names)
        copies = [ShakespeareCopy(path, publication) for path in paths if path.is_file()]
        return [copy for copy in copies if copy.is_original()] or copies
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror}); choose another folder or its rights") from error


@dataclass(frozen=True)
class ShakespeareCopy:
    """The text on disk."""

    path: Path
    publication: Publication

    def is_original(self) -> bool:
        return file_hash(self.path) == self.publication.files[0].sha256

    def read(self, length: int = 80, roles: int = 0) -> Dataset:
        if not self.is_original():
            expected = self.publication.files[0].sha256
            raise UserError(
                f"{self.path}: SHA-256 {file_hash(self.path)} is not the publisher's {expected}; "
                f"`fedgg data fetch {self.publication.name}` brings the original"
            )
        text = read_bytes(self.path, 64 * MEGABYTE).decode("utf-8")
        vocabulary = sorted(set(text))
        by_role = _windows_by_role(text, vocabulary, length)
        if roles > len(by_role):
            enough = f"{len(by_role)} roles have enough text for data.length = {length}"
            raise UserError(f"data.roles = {roles}, and {enough}: take fewer, or 0 for all of them")
        most = sorted(by_role, key=lambda role: (-len(by_role[role][0]), role))[: roles or None]
        if not most:
            raise UserError(f"data.length = {length}: no role has a window to train and one to test; take less")
        names = sorted(most)
        train, test = (np.concatenate([by_role[role][part] for role in names]) for part in (0, 1))
        owners = np.repeat(np.arange(len(names)), [len(by_role[role][0]) for role in names])
        return Dataset(
            name=self.publication.name,
            x_train=torch.from_numpy(train[:, :-1].copy()),
            y_train=torch.from_numpy(train[:, 1:].copy()),
            x_test=torch.from_numpy(test[:, :-1].copy()),
            y_test=torch.from_numpy(test[:, 1:].copy()),
            classes=tuple("\\n" if character == "\n" else character for character in vocabulary),
            owners=torch.from_numpy(owners),
            client_names=tuple(names),
            targets="tokens",
        )


def lines_by_role(text: str) -> dict[str, list[str]]:
    """The lines of each role in their order; a speech begins, after an empty line, with the role's name and a colon."""
    by_role: dict[str, list[str]] = {}
    role, is_first = "", True
    for line in text.splitlines():
        if is_first and line.endswith(":"):
            role, is_first = line.removesuffix(":"), False
            by_role.setdefault(role, [])
        elif line:
            by_role.setdefault(role, []).append(line)
        else:
            is_first = True
    return by_role


def _windows_by_role(text: str, vocabulary: Sequence[str], length: int) -> dict[str, tuple[Tokens, Tokens]]:
    """Training and test windows [n, length + 1] of the roles that have both: inputs, and the next character of each."""
    number = {character: at for at, character in enumerate(vocabulary)}
    by_role = {}
    for role, lines in lines_by_role(text).items():
        split = len(lines) - math.ceil(TEST_LINES * len(lines))
        parts = []
        for part in (lines[:split], lines[split:]):
            tokens = np.array([number[character] for line in part for character in f"{line}\n"], np.int64)
            starts = np.arange(max(len(tokens) - 1, 0) // length) * length
            parts.append(tokens[starts[:, None] + np.arange(length + 1)])
        if all(map(len, parts)):
            by_role[role] = (parts[0], parts[1])
    return by_role
