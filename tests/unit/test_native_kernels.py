"""The kernels against numpy, bit for bit: every formula with each product and sum rounded apart."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flodl.errors import NativeError
from flodl.native import available_isas, by_address, isa
from tests.unit.fresh_python import output_of, run_python

Array = NDArray[Any]
Floats = NDArray[np.float32]

LENGTHS = (0, 1, 31, 32, 33, 1_000_003)
DTYPES = ("f32", "bf16", "f16")
STORED = {"f32": np.float32, "bf16": np.uint16, "f16": np.float16, "f64": np.float64}


def widen(stored: Array, dtype: str) -> Floats:
    if dtype == "bf16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def narrow(values: Array, dtype: str) -> Array:
    if dtype != "bf16":
        return values.astype(STORED[dtype])
    # To nearest, ties to even, by comparing the two neighbours in exact arithmetic.
    below = values.view(np.uint32) & np.uint32(0xFFFF0000)
    above = below + np.uint32(0x10000)
    exact = values.astype(np.float64)
    to_below = np.abs(exact - below.view(np.float32))
    to_above = np.abs(above.view(np.float32) - exact)
    is_odd = (below >> 16) % 2 == 1
    takes_above = (to_above < to_below) | ((to_above == to_below) & is_odd)
    return (np.where(takes_above, above, below) >> 16).astype(np.uint16)


def sample(count: int, dtype: str, seed: int) -> Array:
    """Values of many magnitudes, both signs, with zeros."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(count) * 10.0 ** random.uniform(-4, 2, count)
    values[random.random(count) < 0.05] = 0.0
    return narrow(values.astype(np.float32), dtype)


def address(array: Array) -> int:
    assert array.flags.c_contiguous
    return array.ctypes.data


def bits(array: Array) -> bytes:
    return array.tobytes()


def sums(inputs: Sequence[Floats], weights: Sequence[float]) -> Floats:
    total = np.float32(weights[0]) * inputs[0]
    for weight, values in zip(weights[1:], inputs[1:], strict=True):
        total = total + np.float32(weight) * values
    return total


def squares(a: Array, b: Array) -> float:
    return float(np.sum((a.astype(np.float64) - b.astype(np.float64)) ** 2))


over_lengths = pytest.mark.parametrize("count", LENGTHS)
over_dtypes = pytest.mark.parametrize("dtype", DTYPES)


@over_lengths
@over_dtypes
@pytest.mark.parametrize("streams", [False, True])
def test_weighted_sum(count: int, dtype: str, streams: bool) -> None:
    weights = [0.5, 0.3, 0.2]
    inputs = [sample(count, dtype, seed) for seed in (1, 2, 3)]
    out = np.zeros(count, STORED[dtype])
    finite, distances, norm_sq, digest = by_address.weighted_sum(
        address(out), dtype, [address(x) for x in inputs], weights, dtype, count, streams
    )
    expected = narrow(sums([widen(x, dtype) for x in inputs], weights), dtype)
    assert bits(out) == bits(expected)
    assert finite == [True, True, True]
    mean = widen(expected, dtype)
    assert distances == pytest.approx([squares(widen(x, dtype), mean) for x in inputs], rel=1e-5)
    assert norm_sq == pytest.approx(squares(mean, np.zeros_like(mean)), rel=1e-5)
    assert digest == by_address.copy_hash(0, address(out), out.nbytes)


@over_lengths
def test_weighted_sum_of_f64_accumulates_in_f64(count: int) -> None:
    random = np.random.default_rng(4)
    inputs = [random.standard_normal(count) for _ in range(2)]
    out = np.zeros(count)
    by_address.weighted_sum(address(out), "f64", [address(x) for x in inputs], [0.25, 0.75], "f64", count)
    assert bits(out) == bits(0.25 * inputs[0] + 0.75 * inputs[1])


@pytest.mark.parametrize(("dtype", "out_dtype"), [("bf16", "f32"), ("f32", "bf16"), ("f32", "f16"), ("f16", "f32")])
def test_weighted_sum_into_another_dtype(dtype: str, out_dtype: str) -> None:
    count = 600_001
    inputs = [sample(count, dtype, seed) for seed in (5, 6)]
    out = np.zeros(count, STORED[out_dtype])
    *_, digest = by_address.weighted_sum(
        address(out), out_dtype, [address(x) for x in inputs], [0.6, 0.4], dtype, count
    )
    assert bits(out) == bits(narrow(sums([widen(x, dtype) for x in inputs], [0.6, 0.4]), out_dtype))
    assert digest == by_address.copy_hash(0, address(out), out.nbytes)


@over_dtypes
def test_one_input_is_copied_bit_for_bit(dtype: str) -> None:
    source = np.arange(65536, dtype=np.uint16) if dtype != "f32" else np.arange(65536, dtype=np.uint32) * 65537
    out = np.zeros_like(source)
    finite, *_ = by_address.weighted_sum(address(out), dtype, [address(source)], [1.0], dtype, source.size)
    # Every bit pattern is in there; of a NaN only that it stays one is promised.
    is_nan = np.isnan(widen(source.view(STORED[dtype]), dtype))
    assert is_nan.any()
    assert bits(out[~is_nan]) == bits(source[~is_nan])
    assert np.isnan(widen(out.view(STORED[dtype]), dtype))[is_nan].all()
    assert finite == [False]


@over_dtypes
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_input_that_is_not_finite_is_found(dtype: str, bad: float) -> None:
    count = 400_000
    inputs = [sample(count, dtype, seed) for seed in (7, 8, 9)]
    inputs[1][count - 3] = np.uint16(np.float32(bad).view(np.uint32) >> 16) if dtype == "bf16" else bad
    out = np.zeros(count, STORED[dtype])
    finite, *_ = by_address.weighted_sum(
        address(out), dtype, [address(x) for x in inputs], [0.3, 0.3, 0.4], dtype, count
    )
    assert finite == [True, False, True]


@over_lengths
@over_dtypes
def test_gather_copies_and_looks(count: int, dtype: str) -> None:
    source = sample(count, dtype, 10)
    copied = np.zeros_like(source)
    norm_sq, finite, digest = by_address.gather(address(copied), address(source), dtype, count)
    assert bits(copied) == bits(source)
    assert finite
    wide = widen(source, dtype)
    assert norm_sq == pytest.approx(squares(wide, np.zeros_like(wide)), rel=1e-5)
    assert by_address.gather(0, address(source), dtype, count) == (norm_sq, finite, digest)
    assert digest == by_address.copy_hash(0, address(source), source.nbytes)


@over_lengths
@over_dtypes
@pytest.mark.parametrize("rule", ["nesterov", "heavy_ball"])
def test_outer_step(count: int, dtype: str, rule: str) -> None:
    lr, momentum = np.float32(0.7), np.float32(0.9)
    previous, theta = sample(count, dtype, 11), sample(count, dtype, 12)
    velocity = sample(count, "f32", 13)
    copy = np.zeros_like(theta)
    before, consensus, old_velocity = widen(previous, dtype), widen(theta, dtype), velocity.copy()
    digest = by_address.outer_step(
        rule, 0.7, 0.9, address(previous), address(theta), address(velocity), dtype, count, [address(copy)]
    )
    gradient = before - consensus
    next_velocity = momentum * old_velocity + gradient
    direction = gradient + momentum * next_velocity if rule == "nesterov" else next_velocity
    expected = narrow(before - lr * direction, dtype)
    assert bits(velocity) == bits(next_velocity)
    assert bits(theta) == bits(expected)
    assert bits(copy) == bits(expected)
    assert digest == by_address.copy_hash(0, address(theta), theta.nbytes)


@over_dtypes
def test_an_outer_step_of_one_without_momentum_passes_the_consensus_through(dtype: str) -> None:
    previous, theta = sample(1000, dtype, 14), sample(1000, dtype, 15)
    consensus = theta.copy()
    velocity = np.zeros(1000, np.float32)
    by_address.outer_step("nesterov", 1.0, 0.0, address(previous), address(theta), address(velocity), dtype, 1000)
    assert bits(theta) == bits(consensus)


@over_lengths
@over_dtypes
def test_blend_delta(count: int, dtype: str) -> None:
    w, theta, snapshot = (sample(count, dtype, seed) for seed in (16, 17, 18))
    snapshot[::3] = w[::3]
    wide_w, wide_theta, wide_snapshot = (widen(x, dtype) for x in (w, theta, snapshot))
    expected = narrow(wide_theta + (wide_w - wide_snapshot), dtype)
    expected[::3] = theta[::3]
    by_address.blend_delta(address(w), address(theta), address(snapshot), dtype, count)
    assert bits(w) == bits(expected)


@over_lengths
@over_dtypes
def test_blend_elastic(count: int, dtype: str) -> None:
    w, theta = sample(count, dtype, 19), sample(count, dtype, 20)
    alpha = np.float32(0.3)
    expected = narrow((np.float32(1) - alpha) * widen(w, dtype) + alpha * widen(theta, dtype), dtype)
    by_address.blend_elastic(address(w), address(theta), 0.3, dtype, count)
    assert bits(w) == bits(expected)


@over_lengths
@over_dtypes
def test_distance(count: int, dtype: str) -> None:
    a, b = sample(count, dtype, 21), sample(count, dtype, 22)
    expected = squares(widen(a, dtype), widen(b, dtype))
    assert by_address.distance_sq(address(a), address(b), dtype, count) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("size", [0, 1, 2047, 2048, 1 << 20, (1 << 20) + 1, 3_500_000])
def test_copy_hash_copies_and_every_byte_counts(size: int) -> None:
    source = np.random.default_rng(23).integers(0, 256, size, np.uint8)
    copied = np.zeros_like(source)
    digest = by_address.copy_hash(address(copied), address(source), size)
    assert bits(copied) == bits(source)
    assert by_address.copy_hash(0, address(source), size) == digest
    for place in {0, size // 2, size - 1} if size else set():
        copied[place] ^= 1
        assert by_address.copy_hash(0, address(copied), size) != digest
        copied[place] ^= 1
    if size > 2 << 20:
        whole = 1 << 20
        swapped = np.concatenate([source[whole : 2 * whole], source[:whole], source[2 * whole :]])
        assert by_address.copy_hash(0, address(swapped), size) != digest


def test_arguments_out_of_contract_are_refused_by_name() -> None:
    a, b, c = (np.ones(64, np.float32) for _ in range(3))
    there = address(a)
    refusals: list[tuple[str, Callable[[], object]]] = [
        ("src: null address", lambda: by_address.copy_hash(there, 0, 4)),
        ("dst|src", lambda: by_address.copy_hash(there + 4, there, 64)),
        ("multiple of the element", lambda: by_address.distance_sq(there + 2, address(b), "f32", 4)),
        ("more than any layout", lambda: by_address.distance_sq(there, address(b), "f32", 1 << 60)),
        ("f32, bf16, f16 or f64", lambda: by_address.distance_sq(there, address(b), "i32", 4)),
        ("there are f32", lambda: by_address.distance_sq(there, address(b), "float", 4)),
        ("1 to 256", lambda: by_address.weighted_sum(there, "f32", [], [], "f32", 4)),
        ("weight", lambda: by_address.weighted_sum(there, "f32", [address(b)], [0.5, 0.5], "f32", 4)),
        ("weight 1", lambda: by_address.weighted_sum(there, "f32", [address(b)], [0.5], "f32", 4)),
        ("out overlaps an input", lambda: by_address.weighted_sum(there, "f32", [there], [1.0], "f32", 4)),
        ("f64 goes with", lambda: by_address.weighted_sum(there, "f64", [address(b)], [1.0], "f32", 4)),
        ("none has no step", lambda: by_address.outer_step("none", 1, 0, there, address(b), address(c), "f32", 4)),
        ("outer rule", lambda: by_address.outer_step("adam", 1, 0, there, address(b), address(c), "f32", 4)),
        ("alpha", lambda: by_address.blend_elastic(there, address(b), float("nan"), "f32", 4)),
        ("w overlaps theta", lambda: by_address.blend_delta(there, there, address(b), "f32", 4)),
    ]
    for words, call in refusals:
        with pytest.raises(NativeError, match=words):
            call()
    assert bits(a) == bits(b) == bits(c) == bits(np.ones(64, np.float32))


HASHES = """
import ctypes, json, random
from flodl import native
count = 500_003
exponent_never_full = bytes(byte & 0xBB for byte in range(256))
inputs = []
for seed in range(3):
    values = bytearray(random.Random(seed).randbytes(2 * count))
    values[1::2] = values[1::2].translate(exponent_never_full)
    inputs.append((ctypes.c_uint16 * count).from_buffer_copy(values))
velocity = (ctypes.c_float * count)()
out = (ctypes.c_uint16 * count)()
at = ctypes.addressof
answers = []
for dtype in ("bf16", "f16"):
    places = [at(x) for x in inputs]
    answers += native.by_address.weighted_sum(at(out), dtype, places, [0.5, 0.3, 0.2], dtype, count)
    answers.append(native.by_address.outer_step("nesterov", 0.7, 0.9, places[0], at(out), at(velocity), dtype, count))
    answers += native.by_address.gather(0, at(out), dtype, count)
    answers.append(native.by_address.distance_sq(at(out), places[1], dtype, count))
    answers.append(native.by_address.copy_hash(0, at(velocity), 4 * count))
print(json.dumps([native.isa(), [str(x) for x in answers]]))
"""


def test_every_instruction_set_gives_the_same_bits() -> None:
    outputs = {name: json.loads(output_of("-c", HASHES, environment={"FLODL_ISA": name})) for name in available_isas()}
    assert {name: answer[0] for name, answer in outputs.items()} == {name: name for name in available_isas()}
    assert "baseline" in outputs
    assert all(answer[1] == outputs["baseline"][1] for answer in outputs.values())


def test_an_unknown_instruction_set_is_a_clear_error() -> None:
    done = run_python("-c", "from flodl import native; native.isa()", environment={"FLODL_ISA": "nonsense"})
    assert done.returncode == 1
    assert "NativeError" in done.stderr
    assert "nonsense" in done.stderr
    assert "baseline" in done.stderr


def test_the_table_in_use_is_an_available_one() -> None:
    assert isa() in available_isas()
