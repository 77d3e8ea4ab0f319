"""Small labelled images for the demo and the benchmarks: Fashion-MNIST where it lies, else scikit-learn's digits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flodl.datasets.fashion import FILES, file_in, installed_directory
from flodl.datasets.idx import DataError, read_idx

CLASSES = 10
FASHION = "Fashion-MNIST"


@dataclass(frozen=True)
class Images:
    """Images N x 28 x 28 and labels N, uint8, 10 classes. `name` says which, for every report of a result."""

    name: str
    train_images: NDArray[np.uint8]
    train_labels: NDArray[np.uint8]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.uint8]


def find_images(directory: str | Path | None = None) -> Images:
    """Fashion-MNIST from `directory`, the system's package or the cache; without any, scikit-learn's digits.

    Raises DataError where a named directory holds something else, or nothing is to be had.
    """
    found = installed_directory() if directory is None else Path(directory)
    return _digits() if found is None else read_fashion(found)


def read_fashion(directory: Path) -> Images:
    """The four IDX files of Fashion-MNIST, gzipped or not. Raises DataError naming what is wrong."""
    found = {name: _file(directory, stem) for name, stem in FILES.items()}
    arrays = {name: read_idx(path) for name, path in found.items()}
    for part in ("train", "test"):
        images, labels = arrays[f"{part}_images"], arrays[f"{part}_labels"]
        if not len(images):
            raise DataError(f"{directory} holds no {part} images: {found[f'{part}_images'].name} is empty")
        if images.ndim != 3 or images.shape[1:] != (28, 28) or labels.shape != images.shape[:1]:
            raise DataError(
                f"{directory}: {part} images are {images.shape} and labels {labels.shape}; expected N x 28 x 28 and N"
            )
        if labels.max() >= CLASSES:
            raise DataError(f"{directory}: {part} labels go up to {labels.max()}; expected 0 to {CLASSES - 1}")
    return Images(FASHION, **arrays)


def _file(directory: Path, stem: str) -> Path:
    found = file_in(directory, stem)
    if found is not None:
        return found
    there = sorted(path.name for path in directory.iterdir())[:10] if directory.is_dir() else []
    raise DataError(
        f"{directory} has no {stem}(.gz); it holds {there or 'nothing'}\n"
        f"Name a directory with the four files of Fashion-MNIST, gzipped or not: {', '.join(FILES.values())}."
    )


def _digits() -> Images:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            "no images: neither Debian's dataset-fashion-mnist nor scikit-learn is installed, and none were fetched\n"
            "Run `pip install scikit-learn`, or name a directory with the files of Fashion-MNIST."
        ) from error
    digits = load_digits()
    # 8 x 8 at 0..16, three times as large and framed: 28 x 28 at 0..255.
    large = np.kron(digits.images, np.ones((1, 3, 3))) * (255.0 / 16.0)
    images = np.pad(large, ((0, 0), (2, 2), (2, 2))).round().astype(np.uint8)
    labels = digits.target.astype(np.uint8)
    order = np.random.Generator(np.random.PCG64(0)).permutation(len(images))
    images, labels = images[order], labels[order]
    cut = len(images) * 5 // 6
    return Images("scikit-learn's digits", images[:cut], labels[:cut], images[cut:], labels[cut:])
