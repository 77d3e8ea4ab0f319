"""Tensors as pointers: what crosses, what is refused, and the kernels on tensors."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from flodl import native
from flodl.errors import NativeError

torch = pytest.importorskip("torch")


def test_a_pointer_is_the_tensor_itself() -> None:
    for dtype, name in (
        (torch.float32, "f32"),
        (torch.bfloat16, "bf16"),
        (torch.float16, "f16"),
        (torch.bool, "boolean"),
    ):
        tensor = torch.ones(3, 5, dtype=dtype)
        assert native.pointer(tensor, writable=True) == (tensor.data_ptr(), name, 15)
    assert native.pointer(torch.empty(0), writable=True)[2] == 0
    view = torch.arange(10.0)[4:]
    assert native.pointer(view, writable=True) == (view.data_ptr(), "f32", 6)


UNUSUAL: dict[str, tuple[Callable[[], Any], str]] = {
    "transposed": (lambda: torch.ones(4, 4).t(), "not contiguous"),
    "strided": (lambda: torch.ones(8)[::2], "not contiguous"),
    "sparse": (lambda: torch.ones(4, 4).to_sparse(), "sparse"),
    "meta": (lambda: torch.ones(4, device="meta"), "'meta'"),
    "conjugated": (lambda: torch.ones(4, dtype=torch.complex64).conj(), "conjugated"),
    "negated": (lambda: torch.imag(torch.ones(1, dtype=torch.complex64).conj()), "negated"),
    "complex": (lambda: torch.ones(4, dtype=torch.complex64), "complex64"),
    "float8": (lambda: torch.ones(4).to(torch.float8_e4m3fn), "float8"),
    "list": (lambda: [1.0, 2.0], "list is no tensor"),
    "gpu": (
        lambda: SimpleNamespace(device=SimpleNamespace(type="cuda"), layout="", is_conj=bool, is_neg=bool),
        "'cuda'",
    ),
}


@pytest.mark.parametrize("case", UNUSUAL)
@pytest.mark.parametrize("writable", [False, True])
def test_pointers_that_would_lie_are_refused(case: str, writable: bool) -> None:
    make, words = UNUSUAL[case]
    with pytest.raises(NativeError, match=words):
        native.pointer(make(), writable=writable)


def test_a_tensor_that_requires_grad_is_read_but_not_written() -> None:
    leaf = torch.ones(4, requires_grad=True)
    result = leaf * 2
    for tensor in (leaf, result, torch.nn.Parameter(torch.ones(4))):
        assert native.pointer(tensor, writable=False)[2] == 4
        with pytest.raises(NativeError, match="requires grad"):
            native.pointer(tensor, writable=True)
        with pytest.raises(NativeError, match="requires grad"):
            native.copy_hash(tensor, torch.zeros(4))
        assert native.pointer(tensor.detach(), writable=True)[0] == tensor.data_ptr()
    assert leaf.tolist() == [1.0] * 4


def test_the_kernels_work_on_tensors() -> None:
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])
    out = torch.zeros(2)
    summed = native.weighted_sum(out, [a, b], [0.5, 0.5])
    assert out.tolist() == [2.0, 4.0]
    assert (summed.is_finite, summed.distance_sq, summed.norm_sq) == ([True, True], [5.0, 5.0], 20.0)
    half = torch.zeros(2, dtype=torch.bfloat16)
    native.weighted_sum(half, [a, b], [0.5, 0.5])
    assert half.tolist() == [2.0, 4.0]

    theta, velocity, copy = out.clone(), torch.zeros(2), torch.zeros(2)
    native.outer_step("heavy_ball", (a, theta, velocity), lr=0.5, momentum=0.9, copies=[copy])
    assert velocity.tolist() == [-1.0, -2.0]
    assert theta.tolist() == copy.tolist() == [1.5, 3.0]

    w = torch.tensor([5.0, 2.0])
    native.blend_delta(w, b, torch.tensor([4.0, 2.0]))
    assert w.tolist() == [4.0, 6.0]
    native.blend_elastic(w, a, 0.5)
    assert w.tolist() == [2.5, 4.0]

    copied = torch.zeros(2)
    assert native.copy_hash(copied, w) == native.copy_hash(None, w) == native.gather(None, copied).hash
    assert copied.tolist() == [2.5, 4.0]
    looked = native.gather(copied, b)
    assert (looked.norm_sq, looked.is_finite, copied.tolist()) == (45.0, True, [3.0, 6.0])
    assert native.distance_sq(a, b) == 20.0
    integers = torch.zeros(3, dtype=torch.int64)
    native.copy_hash(integers, torch.tensor([1, -2, 3]))
    assert integers.tolist() == [1, -2, 3]


def test_sizes_and_dtypes_must_agree() -> None:
    two, three, half = torch.ones(2), torch.ones(3), torch.ones(2, dtype=torch.float16)
    for call in (
        lambda: native.weighted_sum(two, [torch.ones(2), three], [0.5, 0.5]),
        lambda: native.weighted_sum(two, [torch.ones(2), half], [0.5, 0.5]),
        lambda: native.outer_step("nesterov", (half, half.clone(), half.clone()), lr=1.0, momentum=0.0),
        lambda: native.blend_delta(two, three, three),
        lambda: native.blend_elastic(two, half, 0.5),
        lambda: native.copy_hash(two, three),
        lambda: native.gather(two, half),
        lambda: native.distance_sq(two, three),
    ):
        with pytest.raises(NativeError, match="are needed"):
            call()
