"""Images: the right pixels with the right class in the wanted shape, and a damaged file told by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from pydantic import TypeAdapter

from paceline.errors import DataError
from paceline.job.data import DataSpec
from paceline.job.samples import DataSets
from refusals import raises

RECORD_BYTES = 3073


def build(input_shape: tuple[int, ...] | None = None, seed: int = 0, **values: Any) -> DataSets:
    spec = TypeAdapter(DataSpec).validate_python(values)
    sets: DataSets = spec.build(input_shape=input_shape, seed=seed)
    return sets


def everything(sets: DataSets) -> list[tuple[torch.Tensor, torch.Tensor]]:
    sides: list[Any] = [sets.train] if sets.held_out is None else [sets.train, sets.held_out]
    return [side[i] for side in sides for i in range(len(side))]


# digits


def test_the_digits_are_the_1797_real_ones_each_with_its_label() -> None:
    from sklearn.datasets import load_digits

    sets = build(kind="digits")
    known = {
        tuple(image.flatten().astype(int)): label for image, label in zip(*load_digits(return_X_y=True), strict=True)
    }
    seen = {tuple((x.flatten() * 0.3760 + 0.3053).mul(16).round().int().tolist()): int(y) for x, y in everything(sets)}
    assert seen == known
    assert len(everything(sets)) == 1797
    assert len(sets.held_out) == 359  # type: ignore[arg-type]


def test_digits_are_standardised() -> None:
    pixels = torch.stack([x for x, _ in everything(build(kind="digits"))])
    assert pixels.dtype == torch.float32
    assert float(pixels.mean()) == pytest.approx(0, abs=1e-3)
    assert float(pixels.std()) == pytest.approx(1, abs=1e-3)


def test_digits_take_the_models_shape_unless_the_job_names_one() -> None:
    small = build(kind="digits", held_out=0).train
    large = build((3, 32, 16), kind="digits", held_out=0).train
    x, y = large[11]
    assert x.shape == (3, 32, 16)
    assert y == small[11][1]
    assert torch.equal(x[0], x[2])
    assert torch.nn.functional.avg_pool2d(x[:1], (4, 2)).sub(small[11][0]).abs().mean() < 0.3
    assert build((3, 32, 32), kind="digits", shape=[1, 28, 28]).train[0][0].shape == (1, 28, 28)
    with raises(DataError, "data.image_shape", kind="digits", shape=[784]):
        build((784,), kind="digits")


def test_digits_have_labels_for_the_stratified_partition() -> None:
    train: Any = build(kind="digits").train
    assert train.labels.tolist() == [int(train[i][1]) for i in range(len(train))]


# cifar10


def write_cifar(file: Path, records: int, seed: int) -> npt.NDArray[np.uint8]:
    content = np.random.default_rng(seed).integers(0, 256, (records, RECORD_BYTES), dtype=np.uint8)
    content[:, 0] %= 10
    content.tofile(file)
    return content


def test_cifar_records_become_planes_and_labels(tmp_path: Path) -> None:
    first, second = write_cifar(tmp_path / "data_batch_1.bin", 6, 1), write_cifar(tmp_path / "data_batch_2.bin", 4, 2)
    train: Any = build(kind="cifar10", path=tmp_path, held_out=0).train
    assert len(train) == 10
    for index, record in ((2, first[2]), (7, second[1])):
        image, label = train[index]
        raw = image * torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1) + torch.tensor(
            [0.4914, 0.4822, 0.4465]
        ).view(3, 1, 1)
        assert (raw * 255).round().int().flatten().tolist() == record[1:].tolist()
        assert int(label) == record[0]
    assert train.labels.tolist() == [*first[:, 0], *second[:, 0]]
    assert train.dataset.inputs.dtype == torch.uint8  # a quarter of the memory


def test_the_test_batch_is_the_held_out_set(tmp_path: Path) -> None:
    write_cifar(tmp_path / "data_batch_1.bin", 20, 1)
    test = write_cifar(tmp_path / "test_batch.bin", 5, 2)
    train, held_out, *_ = build(kind="cifar10", path=tmp_path)
    assert len(train) == 20  # type: ignore[arg-type]
    assert held_out.labels.tolist() == test[:, 0].tolist()  # type: ignore[union-attr]
    limited = build(kind="cifar10", path=tmp_path, limit=3)
    assert [len(side) for side in limited[:2]] == [3, 3]  # type: ignore[arg-type]
    assert build(kind="cifar10", path=tmp_path, held_out=0).held_out is None


def test_without_a_test_batch_a_share_is_held_out(tmp_path: Path) -> None:
    write_cifar(tmp_path / "data_batch_1.bin", 20, 1)
    assert [len(side) for side in build(kind="cifar10", path=tmp_path)[:2]] == [18, 2]  # type: ignore[arg-type]


def test_cifar_is_resized_and_greyed_for_models_that_want_it_so(tmp_path: Path) -> None:
    record = write_cifar(tmp_path / "data_batch_1.bin", 3, 1)[0]
    assert build((3, 64, 48), kind="cifar10", path=tmp_path).train[0][0].shape == (3, 64, 48)
    grey = build((1, 32, 32), kind="cifar10", path=tmp_path, held_out=0).train[0][0]
    luma = np.asarray(Image.fromarray(record[1:].reshape(3, 32, 32).transpose(1, 2, 0)).convert("L")).astype(int)
    assert np.abs((grey[0] * 0.2392 + 0.4809).mul(255).round().numpy() - luma).max() <= 1
    with raises(DataError, "data.image_channels", wanted=2):
        build((2, 32, 32), kind="cifar10", path=tmp_path)


def test_a_cut_cifar_file_is_told_by_record_and_offset(tmp_path: Path) -> None:
    write_cifar(tmp_path / "data_batch_1.bin", 3, 1)
    whole = (tmp_path / "data_batch_1.bin").read_bytes()
    (tmp_path / "data_batch_2.bin").write_bytes(whole[: 2 * RECORD_BYTES + 100])
    with raises(DataError, "data.cifar_record_short", offset=6146, record=2, size=100, file=tmp_path):
        build(kind="cifar10", path=tmp_path)
    (tmp_path / "data_batch_2.bin").write_bytes(b"")
    with raises(DataError, "data.cifar_record_short", bytes=0, offset=0, record=0, size=0):
        build(kind="cifar10", path=tmp_path)


def test_a_cifar_label_out_of_range_is_told_by_record_and_offset(tmp_path: Path) -> None:
    content = write_cifar(tmp_path / "data_batch_1.bin", 5, 1)
    content[3, 0] = 10
    content.tofile(tmp_path / "data_batch_1.bin")
    with raises(DataError, "data.cifar_label", label=10, offset=9219, record=3, file=tmp_path):
        build(kind="cifar10", path=tmp_path)


def test_a_folder_without_cifar_files_is_told_what_was_expected(tmp_path: Path) -> None:
    with raises(DataError, "data.no_cifar_files", folder=tmp_path):
        build(kind="cifar10", path=tmp_path)
    with raises(DataError, "data.unreadable", reason="No such file or directory", place=tmp_path):
        build(kind="cifar10", path=tmp_path / "gone")
    (tmp_path / "data_batch_1.bin").mkdir()
    with raises(DataError, "data.unreadable", reason="Is a directory", place=tmp_path):
        build(kind="cifar10", path=tmp_path)


# folders of images

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)
MEAN, STD = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1), torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


def paint(file: Path, colour: tuple[int, int, int], size: tuple[int, int] = (20, 10)) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(file)


def pixel(image: torch.Tensor, row: int = 0, column: int = 0) -> list[int]:
    return [int(v) for v in ((image * STD + MEAN) * 255).round()[:, row, column]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for n in range(4):
        paint(tmp_path / "data" / "zebra" / f"{n}.png", RED)
        paint(tmp_path / "data" / "ant" / "deeper" / f"{n}.jpg", BLUE)
    (tmp_path / "data" / "ant" / "notes.txt").write_text("no image")
    (tmp_path / "data" / ".cache").mkdir()
    return tmp_path / "data"


def test_a_folder_of_class_folders_becomes_images_with_sorted_classes(folder: Path) -> None:
    train: Any = build((3, 6, 8), kind="images", path=folder, held_out=0).train
    assert train.dataset.classes == ("ant", "zebra")
    assert len(train) == 8
    assert train.labels.tolist() == [0, 1] * 4  # round-robin, so that a limit keeps every class
    images, labels = train.__getitems__([1, 0])
    assert images.shape == (2, 3, 6, 8)
    assert images.dtype == torch.float32
    assert labels.tolist() == [1, 0]
    assert pixel(images[0]) == [255, 0, 0]
    assert pixel(images[1])[2] >= 250
    assert torch.equal(train[1][0], images[0])


def test_an_image_is_cropped_around_its_centre(tmp_path: Path) -> None:
    image = Image.new("RGB", (40, 10), RED)
    image.paste(GREEN, (12, 0, 28, 10))
    (tmp_path / "a").mkdir()
    image.save(tmp_path / "a" / "x.png")
    x = build(kind="images", path=tmp_path, shape=[3, 5, 5], held_out=0).train[0][0]
    assert [pixel(x, 2, column) for column in (0, 2, 4)] == [[0, 255, 0]] * 3


def test_a_large_photograph_keeps_its_picture_when_decoded_small(tmp_path: Path) -> None:
    image = Image.new("RGB", (800, 800), RED)
    image.paste(BLUE, (0, 400, 800, 800))
    (tmp_path / "a").mkdir()
    image.save(tmp_path / "a" / "x.jpg", quality=95)
    x = build(kind="images", path=tmp_path, shape=[3, 8, 8], held_out=0).train[0][0]
    assert pixel(x, 0, 0)[0] >= 250
    assert pixel(x, 7, 7)[2] >= 250


def test_colour_grey_palette_and_16_bit_files_mix(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    half = Image.new("L", (4, 4), 128)
    half.save(tmp_path / "a" / "0.png")
    half.convert("P").save(tmp_path / "a" / "1.gif")
    half.convert("RGBA").save(tmp_path / "a" / "2.png")
    Image.fromarray(np.full((4, 4), 128 << 8, dtype=np.uint16)).save(tmp_path / "a" / "3.png")
    train = build(kind="images", path=tmp_path, shape=[1, 4, 4], held_out=0).train
    values = [float(train[i][0].mean()) for i in range(4)]
    assert values == pytest.approx([(128 / 255 - 0.449) / 0.226] * 4, abs=1e-5)


def test_a_corrupt_image_is_named_when_it_is_reached(folder: Path) -> None:
    broken = folder / "ant" / "deeper" / "0.jpg"
    broken.write_bytes(broken.read_bytes()[:200])
    train = build((3, 6, 8), kind="images", path=folder, held_out=0).train  # decoding is lazy
    train[1]
    with raises(DataError, "data.file_unusable", file=broken):
        train[0]


def test_pixels_of_unknown_range_are_refused_rather_than_cut_to_white(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    Image.new("F", (4, 4)).save(tmp_path / "a" / "x.tif")
    with raises(DataError, "data.file_unusable", file=tmp_path):
        everything(build((3, 6, 8), kind="images", path=tmp_path, held_out=0))


def test_a_held_out_folder_uses_the_training_classes(folder: Path, tmp_path: Path) -> None:
    paint(tmp_path / "test" / "zebra" / "t.png", RED)
    values: dict[str, Any] = {"kind": "images", "path": folder, "held_out_path": tmp_path / "test", "shape": [3, 4, 4]}
    train, held_out, *_ = build(**values)
    assert len(train) == 8  # type: ignore[arg-type]
    assert held_out.labels.tolist() == [1]  # type: ignore[union-attr]
    paint(tmp_path / "test" / "wolf" / "t.png", RED)
    with raises(DataError, "data.class_unknown", classes=["ant", "zebra"], name="wolf"):
        build(**values)


def test_folders_that_hold_no_classes_or_no_images_are_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "empty").mkdir()
    with raises(DataError, "data.class_empty", folder=folder):
        build((3, 4, 4), kind="images", path=folder)
    with raises(DataError, "data.no_class_folders", folder=folder):
        build((3, 4, 4), kind="images", path=folder / "zebra")
    with raises(DataError, "data.unreadable", reason="No such file or directory", place=tmp_path):
        build((3, 4, 4), kind="images", path=tmp_path / "gone")
    with raises(DataError, "data.image_sizes_differ"):
        build(kind="images", path=folder)
