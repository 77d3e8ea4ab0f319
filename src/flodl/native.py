"""The one importer of the extension: its names with types, and its kernels on CPU tensors.

A tensor crosses as an address, and the extension trusts it: `pointer` is where device, memory and autograd are checked.
`by_address` is the extension itself, for loops that have checked their tensors once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from flodl.errors import NativeError

INSTALL_PAGE = "docs/install/native.md"

try:
    from flodl import _native as by_address
    from flodl._native import (
        CommitResult,
        Endpoint,
        Event,
        EventKind,
        HostMemory,
        RankPage,
        ReduceResult,
        Section,
        SharedMemory,
        available_isas,
        build_info,
        copy_layout,
        isa,
    )
except ImportError as failure:
    raise NativeError(
        f"flodl's native extension cannot be imported: {failure}\n"
        f"Install a wheel for this platform and Python, or build one: {INSTALL_PAGE}",
        install_page=INSTALL_PAGE,
    ) from failure

__all__ = [
    "INSTALL_PAGE",
    "CommitResult",
    "Endpoint",
    "Event",
    "EventKind",
    "GatherResult",
    "HostMemory",
    "RankPage",
    "ReduceResult",
    "Section",
    "SharedMemory",
    "TensorLike",
    "WeightedSumResult",
    "available_isas",
    "blend_delta",
    "blend_elastic",
    "build_info",
    "by_address",
    "copy_hash",
    "copy_layout",
    "distance_sq",
    "gather",
    "isa",
    "outer_step",
    "pointer",
    "stream_probe",
    "weighted_sum",
]

_DTYPES = {
    "torch.float32": "f32",
    "torch.bfloat16": "bf16",
    "torch.float16": "f16",
    "torch.float64": "f64",
    "torch.int64": "i64",
    "torch.int32": "i32",
    "torch.int16": "i16",
    "torch.int8": "i8",
    "torch.uint8": "u8",
    "torch.bool": "boolean",
}
_DTYPE_BYTES = {"f64": 8, "i64": 8, "f32": 4, "i32": 4, "bf16": 2, "f16": 2, "i16": 2, "i8": 1, "u8": 1, "boolean": 1}


class _Device(Protocol):
    @property
    def type(self) -> str: ...


class TensorLike(Protocol):
    """What is asked of a torch tensor; torch itself is never imported here."""

    @property
    def dtype(self) -> object: ...
    @property
    def device(self) -> _Device: ...
    @property
    def layout(self) -> object: ...
    @property
    def requires_grad(self) -> bool: ...
    def is_conj(self) -> bool: ...
    def is_neg(self) -> bool: ...
    def is_contiguous(self) -> bool: ...
    def numel(self) -> int: ...
    def data_ptr(self) -> int: ...


class WeightedSumResult(NamedTuple):
    """Per input in order: whether all of it is finite, and sum (x - out)^2. Then sum out^2, and the hash of out."""

    is_finite: list[bool]
    distance_sq: list[float]
    norm_sq: float
    hash: int


class GatherResult(NamedTuple):
    """sum x^2, whether all of it is finite, and the hash."""

    norm_sq: float
    is_finite: bool
    hash: int


def pointer(tensor: TensorLike, *, writable: bool) -> tuple[int, str, int]:
    """(address, dtype name, elements) of a dense CPU tensor. The caller keeps the tensor alive while it is used.

    NativeError for anything whose memory is not simply its elements in order (strided views, sparse, meta, lazily
    conjugated or negated tensors), for other devices and dtypes, and, if `writable`, for a tensor that requires grad:
    autograd would not see the write, so whoever means it passes ``tensor.detach()``.
    """
    _refuse_unusual(tensor)
    dtype = _DTYPES.get(str(tensor.dtype))
    if dtype is None:
        raise NativeError(f"a tensor of {tensor.dtype} cannot be averaged\nSupported: {', '.join(sorted(_DTYPES))}.")
    if not tensor.is_contiguous():
        raise NativeError("a tensor that is not contiguous was given\nPass tensor.contiguous(), or its storage's view.")
    if writable and tensor.requires_grad:
        raise NativeError(
            "a tensor that requires grad would be written past autograd\nPass tensor.detach() where that is meant."
        )
    count = tensor.numel()
    address = tensor.data_ptr()
    if address == 0 and count > 0:
        raise NativeError("a tensor without memory was given\nPass a tensor that holds its elements.")
    return address, dtype, count


def _refuse_unusual(tensor: TensorLike) -> None:
    try:
        device = tensor.device.type
        layout = str(tensor.layout)
        is_lazy = tensor.is_conj() or tensor.is_neg()
    except AttributeError as failure:
        raise NativeError(f"{type(tensor).__name__} is no tensor\nPass a torch.Tensor on the CPU.") from failure
    if device != "cpu":
        raise NativeError(
            f"a tensor on device {device!r} was given; its memory cannot be read here\nCopy it to the CPU."
        )
    if layout != "torch.strided":
        raise NativeError(f"a tensor of layout {layout} was given\nPass a dense one: tensor.to_dense().")
    if is_lazy:
        raise NativeError(
            "a lazily conjugated or negated tensor was given\nPass tensor.resolve_conj() or tensor.resolve_neg()."
        )


def _same(count: int, dtype: str, **others: tuple[int, str, int]) -> None:
    for name, (_, other_dtype, other_count) in others.items():
        if (other_count, other_dtype) != (count, dtype):
            raise NativeError(
                f"{name} has {other_count} elements of {other_dtype}, where {count} of {dtype} are needed\n"
                "Pass tensors of one size and dtype."
            )


def weighted_sum(
    out: TensorLike, inputs: Sequence[TensorLike], weights: Sequence[float], *, streams: bool = False
) -> WeightedSumResult:
    """out = sum of weights[k] * inputs[k], each product and sum rounded apart in fp32 (f64 for f64), in order.

    Inputs share one dtype and size; `out` has that size and may be another of f32, bf16, f16. One input has weight 1.
    `streams` writes past the cache.
    """
    address, out_dtype, count = pointer(out, writable=True)
    places = [pointer(tensor, writable=False) for tensor in inputs]
    dtype = places[0][1] if places else out_dtype
    for k, place in enumerate(places):
        _same(count, dtype, **{f"input {k}": place})
    addresses = [place[0] for place in places]
    return WeightedSumResult(
        *by_address.weighted_sum(address, out_dtype, addresses, list(weights), dtype, count, streams)
    )


def outer_step(
    rule: str,
    tensors: tuple[TensorLike, TensorLike, TensorLike],
    *,
    lr: float,
    momentum: float,
    copies: Sequence[TensorLike] = (),
) -> int:
    """One outer step over (theta_prev, theta, velocity); returns the hash of the new theta.

    theta holds the consensus and gets the new theta, as do `copies`; velocity is f32. rule: nesterov or heavy_ball.
    """
    theta_prev, dtype, count = pointer(tensors[0], writable=False)
    theta = pointer(tensors[1], writable=True)
    velocity = pointer(tensors[2], writable=True)
    places = [pointer(copy, writable=True) for copy in copies]
    _same(count, dtype, theta=theta, **{f"copy {k}": place for k, place in enumerate(places)})
    _same(count, "f32", velocity=velocity)
    addresses = [place[0] for place in places]
    return by_address.outer_step(rule, lr, momentum, theta_prev, theta[0], velocity[0], dtype, count, addresses)


def blend_delta(w: TensorLike, theta: TensorLike, snapshot: TensorLike) -> None:
    """w = theta + (w - snapshot), in place; theta bit for bit where w equals snapshot."""
    address, dtype, count = pointer(w, writable=True)
    places = {"theta": pointer(theta, writable=False), "snapshot": pointer(snapshot, writable=False)}
    _same(count, dtype, **places)
    by_address.blend_delta(address, places["theta"][0], places["snapshot"][0], dtype, count)


def blend_elastic(w: TensorLike, theta: TensorLike, alpha: float) -> None:
    """w = (1 - alpha) w + alpha theta, in place."""
    address, dtype, count = pointer(w, writable=True)
    place = pointer(theta, writable=False)
    _same(count, dtype, theta=place)
    by_address.blend_elastic(address, place[0], alpha, dtype, count)


def copy_hash(dst: TensorLike | None, src: TensorLike, *, streams: bool = False) -> int:
    """Copies src to dst (None: nowhere) and returns the hash of the bytes."""
    address, dtype, count = pointer(src, writable=False)
    to = _destination(dst, dtype, count)
    return by_address.copy_hash(to, address, count * _DTYPE_BYTES[dtype], streams)


def gather(dst: TensorLike | None, src: TensorLike, *, streams: bool = False) -> GatherResult:
    """Copies src to dst (None: nowhere) and looks at it on the way. Integers count as finite and have no norm."""
    address, dtype, count = pointer(src, writable=False)
    to = _destination(dst, dtype, count)
    return GatherResult(*by_address.gather(to, address, dtype, count, streams))


def _destination(dst: TensorLike | None, dtype: str, count: int) -> int:
    if dst is None:
        return 0
    place = pointer(dst, writable=True)
    _same(count, dtype, dst=place)
    return place[0]


def distance_sq(a: TensorLike, b: TensorLike) -> float:
    """sum (a - b)^2."""
    address, dtype, count = pointer(a, writable=False)
    place = pointer(b, writable=False)
    _same(count, dtype, b=place)
    return by_address.distance_sq(address, place[0], dtype, count)


def stream_probe(kind: str, dst: TensorLike, src: TensorLike | None = None, *, threads: int, streams: int) -> float:
    """Seconds that a bare pass over memory takes: the bound of whatever reads and writes as much.

    kind: copy (dst = src, past the cache), update (dst read and written back in place, values kept) or read (dst is
    only read).
    threads: 1 to 256, in chunks of 1 MiB; streams: 1, or 4 places at a time in each chunk.
    """
    address, dtype, count = pointer(dst, writable=True)
    source = 0
    if src is not None:
        place = pointer(src, writable=False)
        _same(count, dtype, src=place)
        source = place[0]
    return by_address.stream_probe(kind, address, source, count * _DTYPE_BYTES[dtype], threads, streams)
