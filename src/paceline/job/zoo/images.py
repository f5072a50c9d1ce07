"""Image data with one class per image: scikit-learn's digits, CIFAR-10, and folders of image files."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset

from paceline.errors import DataError
from paceline.extensions import optional_package
from paceline.job.samples import Batch, DataSets, Labels, TensorSamples, split
from paceline.job.zoo.arrays import files_below, folder_entries, reading

if TYPE_CHECKING:
    from PIL.Image import Image

    from paceline.job.data import Cifar10, Digits, Images


Shape = tuple[int, int, int]  # channels, height, width

_CIFAR_RECORD_BYTES = 1 + 3 * 32 * 32  # one label, followed by the red, green and blue planes
_CIFAR_FILES = "the files data_batch_*.bin (and test_batch.bin) of CIFAR-10's binary version, not its Python version"
_CLASS_FOLDERS = "a folder that holds one folder of images per class"
_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")


class Normalise:
    """Conversion of image bytes (n, channels, height, width) to normalized floats, resized to `size`.

    The result is (value / 255 - mean) / std.
    """

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...], size: tuple[int, int]) -> None:
        self.size = size
        self._scale = 1 / (255 * torch.tensor(std).view(-1, 1, 1))
        self._shift = -torch.tensor(mean).view(-1, 1, 1) / torch.tensor(std).view(-1, 1, 1)

    def __call__(self, images: Tensor) -> Tensor:
        # with contiguous planes, the operations take half as long
        return _resize(images.contiguous().float().mul_(self._scale).add_(self._shift), self.size)


# Mean and standard deviation of the pixels on the scale 0..1. CIFAR-10 has its own values; other photographs use those
# of ImageNet.
_CIFAR = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
_CIFAR_GREY = ((0.4809,), (0.2392,))
PHOTO = {1: ((0.449,), (0.226,)), 3: ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}
_DIGITS = (0.3053, 0.3760)


def build_digits(spec: Digits, input_shape: tuple[int, ...] | None, seed: int) -> DataSets:
    """Load handwritten digits as float32 with mean 0 and variance 1.

    The images are resized to the sample shape. The grey plane is repeated over the channels without a copy.
    """
    channels, height, width = _image_shape("digits", spec.shape or input_shape or (1, 8, 8))
    images, labels = _digits()
    mean, std = _DIGITS
    grey = torch.from_numpy(images).float().div_(16).sub_(mean).div_(std).unsqueeze(1)
    inputs = _resize(grey, (height, width)).expand(-1, channels, -1, -1)
    return split(TensorSamples(inputs, torch.from_numpy(labels).long()), spec, seed)


def _digits() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Read the images (1797, 8, 8), with values from 0 to 16, and their labels from scikit-learn's file.

    The function does not import scikit-learn, because this would take longer than the rest of a short run.
    """
    package = find_spec("sklearn")
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz" if package and package.origin else None
    if file is None or not file.is_file():
        digits = optional_package("sklearn.datasets", "scikit-learn").load_digits()
        return digits.images, digits.target
    table = np.loadtxt(file, delimiter=",")
    return table[:, :-1].reshape(-1, 8, 8), table[:, -1]


def build_cifar10(spec: Cifar10, input_shape: tuple[int, ...] | None, seed: int) -> DataSets:
    """Load CIFAR-10 as bytes, which are converted to floats batch by batch."""
    shape = photo_shape("cifar10", input_shape or (3, 32, 32))
    with reading(spec.path, _CIFAR_FILES):
        names = {entry.name: entry for entry in folder_entries(spec.path)}
        batches = [entry for name, entry in names.items() if name.startswith("data_batch_") and name.endswith(".bin")]
        if not batches:
            raise DataError(
                "data.no_cifar_files",
                "{folder}: this folder contains no data_batch_*.bin. Expected: {expected}",
                folder=spec.path.absolute(),
                expected=_CIFAR_FILES,
            )
        train = _cifar_samples(batches, shape)
        given = Path(spec.test) if isinstance(spec.test, str) else None
        file = given / "test_batch.bin" if given is not None and given.is_dir() else given
        test = None if file is None else _cifar_samples([file], shape)
        beside = names.get("test_batch.bin")
        validates = beside is not None and spec.held_out and not (file is not None and file.samefile(beside))
        held_out = _cifar_samples([beside], shape) if beside is not None and validates else None
    return split(train, spec, seed, held_out=held_out, test=test)


def build_images(spec: Images, input_shape: tuple[int, ...] | None, seed: int) -> DataSets:
    """Load a folder of image files, which are decoded on access.

    The sorted subfolders are the classes.
    """
    wanted = spec.shape or input_shape
    if wanted is None:
        raise DataError(
            "data.image_sizes_differ",
            "images differ in size, and the model does not define an input shape. Give data.shape, e.g. [3, 224, 224].",
        )
    shape = photo_shape("images", wanted)
    optional_package("PIL", "Pillow")
    train = ImageFolder(spec.path, shape)
    held_out, test = (
        None if path is None else ImageFolder(Path(path), shape, train.classes)
        for path in (spec.held_out_path, spec.test if isinstance(spec.test, str) else None)
    )
    return split(train, spec, seed, held_out=held_out, test=test)


class ImageFolder(Dataset[Batch]):
    """A data set from a folder that contains one folder of images per class.

    Samples are listed round-robin over the classes, so the first samples include every class. Each image is resized to
    cover `shape` and cropped around its centre.

    Args:
        folder: folder with one subfolder per class, which may have further subfolders.
        shape: channels (1 or 3), height, width of every sample.
        classes: the known classes; by default, the names of the subfolders.

    Raises:
        DataError: there is no class folder, a class folder has no images, or its name is not in `classes`.
    """

    def __init__(self, folder: Path, shape: Shape, classes: tuple[str, ...] | None = None) -> None:
        with reading(folder, _CLASS_FOLDERS):
            folders = [entry for entry in folder_entries(folder) if entry.is_dir()]
            files = {entry.name: files_below(entry, _IMAGE_SUFFIXES) for entry in folders}
        _check_classes(folder, files, classes)
        self.classes = classes or tuple(files)
        numbered = [(nth, name, file) for name, of_class in files.items() for nth, file in enumerate(of_class)]
        label_of = {name: label for label, name in enumerate(self.classes)}
        listed = sorted((nth, label_of[name], file) for nth, name, file in numbered)
        self.files = [file for _, _, file in listed]
        self.labels: Labels = np.array([label for _, label, _ in listed], dtype=np.int64)
        self.shape = shape
        self._normalise = Normalise(*PHOTO[shape[0]], shape[1:])

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Batch:
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices: list[int]) -> Batch:
        pixels = np.stack([decoded(self.files[i], self.shape, str(Path(self.files[i]).absolute())) for i in indices])
        return self._normalise(torch.from_numpy(pixels)), torch.from_numpy(self.labels[indices])


def _resize(images: Tensor, size: tuple[int, int]) -> Tensor:
    if tuple(images.shape[-2:]) == size:
        return images
    return interpolate(images, size, mode="bilinear", align_corners=False, antialias=True)


def _image_shape(kind: str, shape: tuple[int, ...]) -> Shape:
    if len(shape) != 3:
        raise DataError(
            "data.image_shape",
            "{kind} are images (channels, height, width), but the shape {shape!s} is requested. Use a shape such "
            "as [1, 28, 28].",
            kind=kind,
            shape=list(shape),
        )
    return shape


def photo_shape(kind: str, shape: tuple[int, ...]) -> Shape:
    """Check that a shape is one of photographs: 1 or 3 channels, height, width."""
    wanted = _image_shape(kind, shape)
    if wanted[0] not in (1, 3):
        raise DataError(
            "data.image_channels",
            "{kind} have 1 channel (grey) or 3 (colour), but {wanted} are requested",
            kind=kind,
            wanted=wanted[0],
        )
    return wanted


def _cifar_samples(files: list[Path], shape: Shape) -> TensorSamples:
    records = [_cifar_records(file) for file in files]
    planes = (r[:, 1:].reshape(-1, 3, 32, 32) for r in records)
    pixels = np.concatenate([p if shape[0] == 3 else _grey(p) for p in planes])
    labels = np.concatenate([r[:, 0] for r in records]).astype(np.int64)
    mean, std = _CIFAR if shape[0] == 3 else _CIFAR_GREY
    return TensorSamples(torch.from_numpy(pixels), torch.from_numpy(labels), Normalise(mean, std, shape[1:]))


def _cifar_records(file: Path) -> npt.NDArray[np.uint8]:
    content = np.fromfile(file, dtype=np.uint8)
    whole, rest = divmod(len(content), _CIFAR_RECORD_BYTES)
    if rest or not whole:
        raise DataError(
            "data.cifar_record_short",
            "{file}: record {record}, which begins at byte offset {offset}, has {size} bytes instead of {expected}. "
            "The file has {bytes} bytes. It is truncated, empty, or not a CIFAR-10 binary file: download it again.",
            file=file.absolute(),
            record=whole,
            offset=whole * _CIFAR_RECORD_BYTES,
            size=rest,
            expected=_CIFAR_RECORD_BYTES,
            bytes=len(content),
        )
    records = content.reshape(whole, _CIFAR_RECORD_BYTES)
    wrong = np.flatnonzero(records[:, 0] > 9)
    if len(wrong):
        record = int(wrong[0])
        raise DataError(
            "data.cifar_label",
            "{file}: record {record}, at byte offset {offset}, has label {label}; CIFAR-10's labels are 0..9. The "
            "file is damaged, or belongs to CIFAR-100: download it again.",
            file=file.absolute(),
            record=record,
            offset=record * _CIFAR_RECORD_BYTES,
            label=records[record, 0],
        )
    return records


def _grey(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Convert RGB images to grey, (samples, 1, height, width), with the luma of ITU-R BT.601 like Pillow."""
    weights = np.array([299, 587, 114], dtype=np.uint32).reshape(3, 1, 1)
    return ((pixels * weights).sum(axis=1, keepdims=True) // 1000).astype(np.uint8)  # type: ignore[no-any-return]


def _check_classes(folder: Path, files: dict[str, list[str]], classes: tuple[str, ...] | None) -> None:
    if not files:
        raise DataError(
            "data.no_class_folders",
            "{folder}: this folder contains no class folders. Expected: {expected}",
            folder=folder.absolute(),
            expected=_CLASS_FOLDERS,
        )
    for name, of_class in files.items():
        if not of_class:
            raise DataError(
                "data.class_empty",
                "{folder}: this class folder contains no {suffixes} file. Add files, or remove the folder.",
                folder=(folder / name).absolute(),
                suffixes=" ".join(_IMAGE_SUFFIXES),
            )
        if classes is not None and name not in classes:
            raise DataError(
                "data.class_unknown",
                "{folder}: class {name!r} is not among the training classes: {classes}",
                folder=(folder / name).absolute(),
                name=name,
                classes=list(classes),
            )


def decoded(source: str | BinaryIO | Image, shape: Shape, name: str) -> npt.NDArray[np.uint8]:
    """Decode an image, and return its pixels, shape (channels, height, width).

    Args:
        source: a path, an open file or an image.
        name: the image's name in errors.
    """
    import PIL.Image
    import PIL.ImageOps

    channels, height, width = shape
    mode = "L" if channels == 1 else "RGB"
    try:
        with source if isinstance(source, PIL.Image.Image) else PIL.Image.open(source) as image:
            image.draft(mode, (width, height))  # JPEG only: decode at a smaller scale that still covers the shape
            plain = _to_bytes(image)
            if plain.mode != mode:
                plain = plain.convert(mode)
            if plain.size != (width, height):
                plain = PIL.ImageOps.fit(plain, (width, height), PIL.Image.Resampling.BILINEAR)
            pixels = np.asarray(plain)
    except Exception as error:  # the type of Pillow's errors depends on the format
        reason = f"cannot be decoded as an image ({type(error).__name__}: {error}); mend or remove it"
        raise DataError("data.file_unusable", "{file}: {reason}", file=name, reason=reason) from error
    return pixels.reshape(height, width, channels).transpose(2, 0, 1)


def _to_bytes(image: Image) -> Image:
    """Convert a 16-bit grey image to 8 bits by scaling its values.

    Pillow's own conversion would clip all values above 255 to white.
    """
    from PIL.Image import fromarray

    if image.mode.startswith("I;16"):
        return fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"32-bit pixels (mode {image.mode}), whose range is unknown; save it with 8 or 16 bits")
    return image
