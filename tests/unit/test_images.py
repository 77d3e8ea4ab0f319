"""Image files: what is read, and what is refused with the file's name and the reason."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from flodl.datasets import fashion
from flodl.datasets.idx import DataError, read_idx
from flodl.datasets.images import find_images, read_fashion

TRAIN, TEST = 20, 10


def idx(array: np.ndarray, type_code: int = 0x08) -> bytes:
    header = bytes([0, 0, type_code, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.tobytes()


def digits(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (count, 28, 28), dtype=np.uint8), random.integers(0, 10, count, dtype=np.uint8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole set, gzipped."""
    for part, count in (("train", TRAIN), ("t10k", TEST)):
        pictures, labels = digits(count, count)
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(pictures)))
        (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    return tmp_path


@pytest.mark.parametrize("shape", [(3,), (2, 5), (4, 3, 2), (0, 28, 28)])
@pytest.mark.parametrize("is_gzipped", [False, True])
def test_an_idx_file_of_any_shape_is_read_as_written(tmp_path: Path, shape: tuple[int, ...], is_gzipped: bool) -> None:
    array = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    path = tmp_path / "values"
    path.write_bytes(gzip.compress(idx(array)) if is_gzipped else idx(array))
    assert np.array_equal(read_idx(path), array)


def refusal_of(path: Path) -> str:
    with pytest.raises(DataError) as refused:
        read_idx(path)
    message = str(refused.value)
    assert message.startswith(str(path))
    assert len(message.splitlines()) == 2
    return message


@pytest.mark.parametrize("length", range(20))
def test_a_file_cut_at_any_place_of_its_header_or_values_is_refused(tmp_path: Path, length: int) -> None:
    whole = idx(np.arange(8, dtype=np.uint8).reshape(2, 2, 2))
    assert len(whole) == 24
    path = tmp_path / "cut"
    path.write_bytes(whole[:length])
    refusal_of(path)


def test_what_a_short_or_long_file_holds_is_said_beside_what_it_promised(tmp_path: Path) -> None:
    whole = idx(np.zeros((4, 5), dtype=np.uint8))
    path = tmp_path / "values"
    path.write_bytes(whole[:-3])
    assert "holds 17 values; its header promises 20 ((4, 5))" in refusal_of(path)
    path.write_bytes(whole + b"x")
    assert "holds 21 values; its header promises 20" in refusal_of(path)


@pytest.mark.parametrize("cut", [1, 10, 40])
def test_a_gzip_file_that_was_cut_is_refused(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "cut.gz"
    path.write_bytes(gzip.compress(idx(np.zeros((50, 28, 28), dtype=np.uint8)))[:-cut])
    assert "cannot be read" in refusal_of(path)


def test_a_gzip_file_with_a_flipped_byte_is_refused(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(idx(digits(20, 3)[0])))
    packed[len(packed) // 2] ^= 0xFF
    path = tmp_path / "flipped.gz"
    path.write_bytes(packed)
    refusal_of(path)


@pytest.mark.parametrize("start", [b"\x89PNG\r\n", b"\0\0\x0d\x01", b"\0\x01\x08\x01", b"PK\x03\x04"])
def test_another_format_or_type_of_value_is_refused_by_its_first_bytes(tmp_path: Path, start: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(start + bytes(60))
    assert f"begins with {start[:4].hex()}" in refusal_of(path)


def test_a_header_that_promises_more_than_memory_allocates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "huge"
    path.write_bytes(bytes([0, 0, 8, 4]) + struct.pack(">4I", *[0xFFFFFFFF] * 4))
    assert "its header promises" in refusal_of(path)


@pytest.mark.parametrize("dimensions", [0, 9, 255])
def test_a_number_of_dimensions_that_no_image_has_is_refused(tmp_path: Path, dimensions: int) -> None:
    path = tmp_path / "flat"
    path.write_bytes(bytes([0, 0, 8, dimensions]) + struct.pack(">I", 1) * dimensions + b"x")
    assert f"has {dimensions} dimensions" in refusal_of(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "No such file" in refusal_of(tmp_path / "nothing")


def test_a_set_is_found_gzipped_or_not(folder: Path) -> None:
    packed = folder / "t10k-labels-idx1-ubyte.gz"
    (folder / "t10k-labels-idx1-ubyte").write_bytes(gzip.decompress(packed.read_bytes()))
    packed.unlink()
    found = find_images(folder)
    assert found.name == "Fashion-MNIST"
    assert found.train_images.shape == (TRAIN, 28, 28)
    assert np.array_equal(found.train_images, digits(TRAIN, TRAIN)[0])
    assert np.array_equal(found.test_labels, digits(TEST, TEST)[1])


def test_a_directory_without_the_files_says_what_is_missing_and_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no train-images-idx3-ubyte.*it holds nothing") as refused:
        read_fashion(tmp_path)
    accepted = str(refused.value).splitlines()[1]
    assert "gzipped or not" in accepted
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        assert f"{name}-ubyte" in accepted
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(DataError, match=r"it holds \['notes.txt'\]"):
        find_images(tmp_path)
    with pytest.raises(DataError, match="it holds nothing"):
        find_images(tmp_path / "no such folder")


def test_a_file_in_place_of_a_directory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    with pytest.raises(DataError, match="has no train-images"):
        find_images(path)


def test_sets_that_do_not_fit_together_are_refused_with_both_shapes(folder: Path) -> None:
    _, labels = digits(TRAIN - 1, 5)
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    with pytest.raises(DataError, match=rf"\({TRAIN}, 28, 28\) and labels \({TRAIN - 1},\)"):
        read_fashion(folder)


def test_labels_beyond_the_ten_classes_are_refused(folder: Path) -> None:
    wrong = np.full(TEST, 10, dtype=np.uint8)
    (folder / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(wrong)))
    with pytest.raises(DataError, match="labels go up to 10"):
        read_fashion(folder)


def test_an_empty_set_is_refused(folder: Path) -> None:
    pictures, labels = digits(0, 0)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(pictures)))
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    with pytest.raises(DataError, match="no train images"):
        read_fashion(folder)


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with neither the package nor a cache; the cache's place."""
    cache = tmp_path / "cache"
    monkeypatch.setattr(fashion, "SYSTEM_DIRECTORY", tmp_path / "nowhere")
    monkeypatch.setattr(fashion, "cache_directory", lambda: cache)
    return cache


def test_the_package_comes_before_the_cache_and_a_part_of_a_set_is_passed_over(
    folder: Path, bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fashion.installed_directory() is None
    bare.mkdir()
    for path in folder.glob("*.gz"):
        (bare / path.name).write_bytes(path.read_bytes())
    assert fashion.installed_directory() == bare
    assert len(find_images().train_images) == TRAIN
    monkeypatch.setattr(fashion, "SYSTEM_DIRECTORY", folder)
    assert fashion.installed_directory() == folder
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()
    assert fashion.installed_directory() == bare


@pytest.mark.usefixtures("bare")
def test_without_fashion_the_digits_of_scikit_learn_are_taken_and_named() -> None:
    pytest.importorskip("sklearn")
    found = find_images()
    assert found.name == "scikit-learn's digits"
    assert found.train_images.shape[1:] == (28, 28)
    assert len(found.train_images) + len(found.test_images) == 1797
    assert found.train_images.dtype == found.train_labels.dtype == np.uint8
    assert found.train_images.max() == 255
    assert set(found.train_labels) == set(range(10))
    again = find_images()
    assert np.array_equal(found.train_images, again.train_images)


@pytest.mark.usefixtures("bare")
def test_without_either_the_two_ways_out_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match="neither Debian's dataset-fashion-mnist nor scikit-learn"):
        find_images()
