"""Writes tests/vectors/kernels/*.txt: inputs and expected outputs of the averaging kernels, from numpy alone.

Nothing of the native code is used: the formulas of native/kernels/math.h and blocks.h are written again here, so that
the two can disagree. One case per line: a name, then `key=value` fields; arrays are little-endian hex of their bytes,
lists are separated by commas, `-` is empty. `norm` and `distances` are the bits of an f64.

    python tools/make_kernel_vectors.py tests/vectors/kernels
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]
MASK = (1 << 64) - 1
GOLDEN, ODD = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
FIRST, SECOND = 0x6A09E667F3BCC909, 0x3C6EF372FE94F82B
THIRD, FOURTH = 0xA54FF53A5F1D36F1, 0x510E527FADE682D1
BLOCK, ROWS, LANES = 512, 8, 16


def narrow(values: Floats, dtype: str) -> NDArray[np.generic]:
    """The stored form: f32, f64, or the 16 bits of bf16 and f16; to nearest, ties to even."""
    if dtype == "f64":
        return values.astype(np.float64)
    wide = values.astype(np.float32)
    if dtype == "f32":
        return wide
    if dtype == "f16":
        with np.errstate(over="ignore"):
            return wide.astype(np.float16).view(np.uint16)
    bits = wide.view(np.uint32).astype(np.uint64)
    rest, kept = bits & 0xFFFF, bits >> 16
    up = (rest > 0x8000) | ((rest == 0x8000) & (kept & 1 == 1))
    return np.where(np.isnan(wide), kept | 0x40, kept + up).astype(np.uint16)


def widen(stored: NDArray[np.generic], dtype: str) -> Floats:
    if dtype == "bf16":
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "f16":
        return stored.view(np.float16).astype(np.float32)
    return stored.astype(np.float64 if dtype == "f64" else np.float32)


def reduce(terms: Floats) -> float:
    """Adds squares in the shape that blocks.h states."""
    blocks = -(-len(terms) // BLOCK)
    shaped = np.zeros(blocks * BLOCK, terms.dtype)
    shaped[: len(terms)] = terms
    totals = np.zeros(LANES, np.float64)
    for block in shaped.reshape(blocks, BLOCK // (ROWS * LANES), ROWS, LANES):
        lanes = np.zeros(LANES, terms.dtype)
        for group in block:
            rows = np.zeros(LANES, terms.dtype)
            for row in group:
                rows = rows + row
            lanes = lanes + rows
        totals = totals + lanes.astype(np.float64)
    total = np.float64(0.0)
    for lane in totals:
        total = total + lane
    return float(total)


def mix(x: int) -> int:
    x &= MASK
    x ^= x >> 32
    x = x * FIRST & MASK
    x ^= x >> 29
    x = x * THIRD & MASK
    return x ^ (x >> 32)


def hash_of(data: bytes, chunk: int) -> int:
    seed = mix(mix(chunk + GOLDEN) ^ (len(data) * FOURTH & MASK))
    lanes = [mix(seed + (i + 1) * GOLDEN) for i in range(8)]
    keys = [mix((seed ^ MASK) + (i + 1) * SECOND) for i in range(8)]
    steps = [mix((i + 1) * FOURTH) | 1 for i in range(8)]
    padded = data + bytes(-len(data) % 1024)
    for start in range(0, len(padded), 1024):
        words = np.frombuffer(padded[start : start + 1024], np.uint64)
        sums, products = [0] * 8, [0] * 8
        for position, word in enumerate(words):
            lane = position % 8
            x = int(word) ^ keys[lane]
            keys[lane] = keys[lane] + steps[lane] & MASK
            sums[lane] += x
            products[lane] += (x & 0xFFFFFFFF) * (x >> 32)
        for i in range(8):
            value = (lanes[i] ^ (sums[i] & MASK)) * ODD & MASK
            lanes[i] = (value ^ (value >> 29)) + products[i] & MASK
    return fold(seed, lanes)


def fold(before: int, values: Sequence[int]) -> int:
    for value in values:
        before = mix(before * ODD + value)
    return before


def hex_of(array: NDArray[np.generic]) -> str:
    return array.tobytes().hex() or "-"


def hex_double(value: float) -> str:
    return f"{int(np.float64(value).view(np.uint64)):016x}"


def draw(rng: np.random.Generator, count: int, dtype: str) -> NDArray[np.generic]:
    """Values over many exponents (subnormals of bf16 and f16 among them), with zeros of both signs."""
    values = rng.standard_normal(count) * np.exp2(rng.integers(-18, 6, count))
    values[rng.random(count) < 0.05] = 0.0
    values[rng.random(count) < 0.05] = -0.0
    return narrow(values, dtype)


def weighted_sum_case(rng: np.random.Generator, case: tuple[str, str, int, int]) -> str:
    dtype, out_dtype, width, count = case
    chunk = int(rng.integers(0, 1 << 40))
    real = np.float64 if dtype == "f64" else np.float32
    shares = rng.random(width)
    weights = (shares / shares.sum()).astype(np.float32) if width > 1 else np.ones(1, np.float32)
    inputs = [draw(rng, count, dtype) for _ in range(width)]
    wide = [widen(x, dtype) for x in inputs]
    total = wide[0] if width == 1 else real(weights[0]) * wide[0]
    for weight, x in zip(weights[1:], wide[1:], strict=True):
        total = total + real(weight) * x
    out = narrow(total, out_dtype)
    seen = widen(out, out_dtype)
    distances = [reduce((x - seen) * (x - seen)) for x in wide]
    fields = {
        "dtype": dtype,
        "out_dtype": out_dtype,
        "chunk": str(chunk),
        "weights": hex_of(weights),
        "inputs": ",".join(hex_of(x) for x in inputs),
        "out": hex_of(out),
        "norm": hex_double(reduce(seen * seen)),
        "distances": ",".join(hex_double(d) for d in distances),
        "hash": f"{hash_of(out.tobytes(), chunk):016x}",
    }
    return line("weighted_sum", fields)


def outer_case(rng: np.random.Generator, case: tuple[str, str, int, float, float]) -> str:
    rule, dtype, count, lr_given, momentum_given = case
    chunk = int(rng.integers(0, 1 << 40))
    lr, momentum = np.float32(lr_given), np.float32(momentum_given)
    before, consensus = draw(rng, count, dtype), draw(rng, count, dtype)
    velocity = draw(rng, count, "f32").astype(np.float32)
    wide_before, wide_consensus = widen(before, dtype), widen(consensus, dtype)
    theta, moved = consensus, velocity
    if rule != "none":
        g = (wide_before - wide_consensus).astype(np.float32)
        moved = momentum * velocity + g
        direction = g + momentum * moved if rule == "nesterov" else moved
        if (lr_given, momentum_given) != (1.0, 0.0):
            theta = narrow(wide_before - lr * direction, dtype)
    fields = {
        "rule": rule,
        "dtype": dtype,
        "chunk": str(chunk),
        "lr": hex_of(lr.reshape(1)),
        "momentum": hex_of(momentum.reshape(1)),
        "theta_prev": hex_of(before),
        "consensus": hex_of(consensus),
        "velocity": hex_of(velocity),
        "theta_out": hex_of(theta),
        "velocity_out": hex_of(moved),
        "hash": f"{hash_of(theta.tobytes(), chunk):016x}",
    }
    return line("outer_step", fields)


def blend_case(rng: np.random.Generator, case: tuple[str, str, int]) -> str:
    kind, dtype, count = case
    w, theta, snapshot = (draw(rng, count, dtype) for _ in range(3))
    still = rng.random(count) < 0.5
    snapshot = np.where(still, w, snapshot)
    wide_w, wide_theta, wide_snapshot = (widen(x, dtype) for x in (w, theta, snapshot))
    alpha = np.float32(0.3)
    if kind == "delta":
        moved = narrow(wide_theta + (wide_w - wide_snapshot), dtype)
        out = np.where(wide_w == wide_snapshot, theta, moved)
    else:
        real = wide_w.dtype.type
        out = narrow((real(1) - real(alpha)) * wide_w + real(alpha) * wide_theta, dtype)
    fields = {
        "kind": kind,
        "dtype": dtype,
        "alpha": hex_of(alpha.reshape(1)),
        "w": hex_of(w),
        "theta": hex_of(theta),
        "snapshot": hex_of(snapshot),
        "out": hex_of(out),
    }
    return line("blend", fields)


def gather_case(rng: np.random.Generator, case: tuple[str, int]) -> str:
    dtype, count = case
    chunk = int(rng.integers(0, 1 << 40))
    x = draw(rng, count, dtype)
    wide = widen(x, dtype)
    fields = {
        "dtype": dtype,
        "chunk": str(chunk),
        "src": hex_of(x),
        "norm": hex_double(reduce(wide * wide)),
        "hash": f"{hash_of(x.tobytes(), chunk):016x}",
    }
    return line("gather", fields)


def hash_case(rng: np.random.Generator, count: int) -> str:
    chunk = int(rng.integers(0, 1 << 40))
    data = rng.integers(0, 256, count).astype(np.uint8)
    return line("hash", {"chunk": str(chunk), "src": hex_of(data), "hash": f"{hash_of(data.tobytes(), chunk):016x}"})


def combine_case(rng: np.random.Generator, count: int) -> str:
    hashes = [int(h) for h in rng.integers(0, 1 << 63, count)]
    seed = mix(mix(count + GOLDEN))
    listed = ",".join(f"{h:016x}" for h in hashes) or "-"
    return line("combine", {"hashes": listed, "hash": f"{fold(seed, hashes):016x}"})


def line(name: str, fields: dict[str, str]) -> str:
    return name + "".join(f" {key}={value}" for key, value in fields.items()) + "\n"


def make(folder: Path) -> None:
    rng = np.random.default_rng(20260711)
    floats = ("f32", "bf16", "f16", "f64")
    pairs = [(i, o) for i in floats[:3] for o in floats[:3]] + [("f64", "f64")]
    sums = [weighted_sum_case(rng, (*pair, width, 33)) for pair in pairs for width in (1, 2, 3, 5)]
    sums += [
        weighted_sum_case(rng, ("f32", "f32", width, count)) for width, count in ((3, 0), (4, 1), (3, 1100), (9, 600))
    ]
    steps = [
        outer_case(rng, (rule, dtype, 35, *rates))
        for rule in ("none", "nesterov", "heavy_ball")
        for dtype in floats
        for rates in ((0.7, 0.9), (1.0, 0.0))
    ]
    blends = [blend_case(rng, (kind, dtype, 45)) for kind in ("delta", "elastic") for dtype in floats]
    gathers = [gather_case(rng, (dtype, count)) for dtype in floats for count in (1, 31, 600)]
    hashes = [hash_case(rng, count) for count in (0, 1, 7, 8, 63, 64, 65, 1023, 1024, 1025, 2500)]
    hashes += [combine_case(rng, count) for count in (0, 1, 2, 5)]
    files = {"weighted_sum": sums, "outer_step": steps, "blend": blends, "gather": gathers, "hash": hashes}
    for name, lines in files.items():
        (folder / f"{name}.txt").write_text("".join(lines), encoding="ascii")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
