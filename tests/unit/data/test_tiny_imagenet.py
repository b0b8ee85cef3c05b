"""Tiny-ImageNet as its publisher lays it out and as people sort it, written small by the test."""

from __future__ import annotations

import hashlib
import io
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedgg.data.catalog import TINY_IMAGENET, Publication
from fedgg.data.dataset import load
from fedgg.data.download import check
from fedgg.data.tiny_imagenet import load_tiny_imagenet
from fedgg.errors import UserError

IDS = ("n02", "n01", "n03")  # the order of wnids.txt is not that of the classes


def jpeg(seed: int, mode: str = "RGB", size: tuple[int, int] = (64, 64)) -> bytes:
    """Coarse noise, which a JPEG keeps roughly."""
    draw = np.random.default_rng(seed)
    pixels = draw.integers(0, 256, (8, 8, 3) if mode == "RGB" else (8, 8), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize(size, Image.Resampling.NEAREST).save(file, "JPEG", quality=95)
    return file.getvalue()


def files() -> dict[str, bytes]:
    """Four training and two test images of each class; one of them grey."""
    content = {"wnids.txt": "\n".join(IDS).encode(), "test/images/test_0.JPEG": jpeg(99)}
    content["words.txt"] = b"n01\tgoldfish, Carassius auratus\nn02\tbull\nn03\tbull, cow\nn04\tnone of these\n"
    lines = []
    for number, class_id in enumerate(IDS):
        content[f"train/{class_id}/{class_id}_boxes.txt"] = b"n01_0.JPEG\t0\t0\t62\t62\n"
        for image in range(4):
            mode = "L" if (number, image) == (0, 3) else "RGB"
            content[f"train/{class_id}/images/{class_id}_{image}.JPEG"] = jpeg(10 * number + image, mode)
        for image in range(2):
            content[f"val/images/val_{3 * image + number}.JPEG"] = jpeg(50 + 3 * image + number)
            lines.append(f"val_{3 * image + number}.JPEG\t{class_id}\t0\t32\t44\t62\n")
    return {**content, "val/val_annotations.txt": "".join(lines).encode()}


def pixels(raw: bytes) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(io.BytesIO(raw)).convert("RGB")).transpose(2, 0, 1)


def extract(folder: Path, content: dict[str, bytes]) -> Path:
    for name, raw in content.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
    return folder


def pack(folder: Path, content: dict[str, bytes]) -> Path:
    path = folder / "tiny-imagenet-200.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name, raw in content.items():
            archive.writestr(f"tiny-imagenet-200/{name}", raw)
    return path


def small(archive: Path | None = None) -> Publication:
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest() if archive else ""
    file = replace(TINY_IMAGENET.files[0], sha256=sha256)
    return replace(TINY_IMAGENET, files=(file,), classes=("0",) * 3, train_counts=(4,) * 3, test_counts=(2,) * 3)


@pytest.mark.parametrize("layout", ["zip", "zip below", "folder", "below", "itself"])
def test_layouts(tmp_path: Path, layout: str) -> None:
    content, place, archive = files(), tmp_path, None
    if layout.startswith("zip"):
        (tmp_path / "below").mkdir()
        archive = pack(tmp_path / "below" if "below" in layout else tmp_path, content)
    else:
        folder = extract(tmp_path / ("data/" * (layout == "below")) / "tiny-imagenet-200", content)
        place = folder if layout == "itself" else tmp_path
    dataset = load_tiny_imagenet(place, small(archive))
    assert dataset.x_train.dtype == torch.uint8
    assert dataset.shape == (3, 64, 64)
    assert dataset.classes == ("goldfish", "n02", "n03")  # two classes whose first word is the same
    assert dataset.y_train.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    expected = [pixels(content[f"train/{one}/images/{one}_{image}.JPEG"]) for one in sorted(IDS) for image in range(4)]
    assert np.array_equal(dataset.x_train.numpy(), np.stack(expected))
    lines = [line.split("\t")[:2] for line in content["val/val_annotations.txt"].decode().splitlines()]
    assert dataset.y_test.tolist() == [sorted(IDS).index(one) for _, one in lines]
    assert np.array_equal(
        dataset.x_test.numpy(), np.stack([pixels(content[f"val/images/{name}"]) for name, _ in lines])
    )


@pytest.mark.parametrize("inner", ["", "images/"])
def test_validation_images_sorted_into_classes(tmp_path: Path, inner: str) -> None:
    content = files()
    lines = [line.split("\t")[:2] for line in content.pop("val/val_annotations.txt").decode().splitlines()]
    for name, class_id in lines:
        content[f"val/{class_id}/{inner}{name}"] = content.pop(f"val/images/{name}")
    dataset = load_tiny_imagenet(extract(tmp_path / "tiny-imagenet-200", content), small())
    assert dataset.y_test.tolist() == [0, 0, 1, 1, 2, 2]
    assert np.array_equal(dataset.x_test[0].numpy(), pixels(content[f"val/n01/{inner}val_1.JPEG"]))


@pytest.mark.parametrize(
    ("name", "raw", "complaint"),
    [
        ("train/n01/images/n01_0.JPEG", None, "11 training images, published are 12"),
        ("train/n01/images/n01_4.JPEG", jpeg(1), "13 training images, published are 12"),
        ("train/n09/images/n09_0.JPEG", jpeg(1), "4 classes in train, published are 3"),
        ("train/n01/images/n01_0.JPEG", jpeg(1)[:300], r"n01_0\.JPEG: not an image"),
        ("train/n01/images/n01_0.JPEG", b"", r"n01_0\.JPEG: not an image"),
        ("train/n01/images/n01_0.JPEG", jpeg(1, size=(64, 63)), "64x63 pixels instead of 64x64"),
        ("val/images/val_0.JPEG", None, "damaged or unreadable"),
        ("val/val_annotations.txt", b"val_0.JPEG\tn07\t0\t0\t9\t9\n", "'n07' in val is none of the classes"),
        ("val/val_annotations.txt", b"", "0 test images, published are 6"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_damage_is_named(tmp_path: Path, name: str, raw: bytes | None, complaint: str, packed: bool) -> None:
    content = {**files(), name: raw}
    kept = {key: value for key, value in content.items() if value is not None}
    archive = pack(tmp_path, kept) if packed else None
    if not packed:
        extract(tmp_path / "tiny-imagenet-200", kept)
    with pytest.raises(UserError, match=complaint) as caught:
        load_tiny_imagenet(tmp_path, small(archive))
    assert "\n" not in str(caught.value)


def test_check_and_another_archive(tmp_path: Path) -> None:
    archive = pack(tmp_path, files())
    (finding,) = check("tiny-imagenet", tmp_path, True, {"tiny-imagenet": small(archive)})
    assert finding.ok
    assert "12 training and 6 test images 3x64x64, 3 classes; the publisher's own bytes" in finding.what
    with pytest.raises(UserError, match="is not the publisher's"):
        load_tiny_imagenet(tmp_path)
    with pytest.raises(UserError, match="`fedgg data fetch tiny-imagenet`"):
        load("tiny-imagenet", tmp_path / "nowhere")
    extract(tmp_path / "other" / "tiny-imagenet-200", files())
    (finding,) = check("tiny-imagenet", tmp_path / "other", False, {"tiny-imagenet": small()})
    assert finding.ok
    assert "no checksums" in finding.what
