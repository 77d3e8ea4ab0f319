"""A torch model as one flat sequence of bytes: which tensors travel, by which rule, and where each one lies.

Order: trainable parameters as named_parameters() gives them, then floating buffers, then integer ones; grouped into
sections of one rule and dtype, each tensor at a multiple of 64 bytes, gaps zero. Tied tensors lie once. Every tensor
lies row-major, whatever its strides were: the layout's bytes then mean the same to whoever knows shape and dtype only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import nn

from flodl.errors import PlanError, RunFailed
from flodl.protocol.messages import LayoutSpec, SectionSpec, TensorSpec

ALIGNMENT = 64
DTYPES: dict[torch.dtype, str] = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float64: "f64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "boolean",
}


@dataclass(frozen=True)
class Place:
    """Where a module refers to a tensor: `module.<name>`, full name `path`."""

    module: nn.Module
    name: str
    path: str
    is_parameter: bool

    def tensor(self) -> torch.Tensor | None:
        """What stands there now; None if it was removed."""
        table = self.module._parameters if self.is_parameter else self.module._buffers
        return table[self.name] if self.name in table else None  # noqa: SIM401  (a scripted module's has no get)


@dataclass
class Slot:
    """One tensor that travels. `places`: all that refer to it, the first gives the name."""

    tensor: torch.Tensor
    places: list[Place]
    rule: str
    offset: int = 0

    @property
    def name(self) -> str:
        return self.places[0].path

    @property
    def bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


@dataclass(frozen=True)
class ModelLayout:
    """The layout of one model. `slots` in the order of `spec.tensors`; `constants`: buffers never averaged."""

    spec: LayoutSpec
    slots: tuple[Slot, ...]
    constants: tuple[Slot, ...] = ()

    def refuse_changed_constants(self) -> None:
        """Raises RunFailed where a buffer that was not finite when the layout was made is another one now."""
        if self.spec.constants != _constants_digest(self.constants):
            names = ", ".join(slot.name for slot in self.constants)
            raise RunFailed(
                f"a buffer that was not finite when the run formed has changed since, among {names}\n"
                "Such a buffer is a constant, never averaged: let those that training changes begin finite, or run a "
                "batch through the model in the function that builds it."
            )


@dataclass
class _Group:
    """Tensors that will make one section. `means`: for running variances, the group of their running means."""

    rule: str
    dtype: torch.dtype
    slots: list[Slot] = field(default_factory=list)
    means: _Group | None = None
    offset: int = 0


def build_layout(model: nn.Module) -> ModelLayout:
    """The layout of a model whose parameters lie on one device, dense and initialised.

    Raises PlanError naming the tensor that cannot travel, or saying that nothing can be trained.
    """
    parameters = _tied(_places(model, parameters=True))
    trained = [slot for slot in parameters if _is_trained(slot)]
    if not trained:
        raise PlanError(
            "model: no parameter requires a gradient, so there is nothing to train\n"
            "Return a model with at least one parameter whose requires_grad is True."
        )
    known = {_identity(slot.tensor): slot for slot in parameters if slot.tensor.numel()}
    buffers, constants = _split_constants(_tied(_places(model, parameters=False), known))
    groups = _grouped([*trained, *buffers], _running_pairs(buffers))
    _refuse_overlap([*parameters, *buffers])
    spec, slots = _assign(groups)
    digest = _constants_digest(constants)
    spec = LayoutSpec(spec.bytes, spec.sections, spec.tensors, digest)
    return ModelLayout(spec, slots, tuple(constants))


def _places(model: nn.Module, parameters: bool) -> Iterator[Place]:
    """Every reference to a parameter or buffer, ties included, in the order of named_parameters()."""
    for path, module in model.named_modules():
        for name, tensor in (module._parameters if parameters else module._buffers).items():
            if tensor is not None:
                yield Place(module, name, f"{path}.{name}" if path else name, parameters)


def _tied(places: Iterable[Place], known: dict[tuple[object, ...], Slot] | None = None) -> list[Slot]:
    """One slot per distinct memory. A buffer that is a parameter's memory (`known`) joins the parameter's slot."""
    slots: dict[tuple[object, ...], Slot] = {}
    for place in places:
        tensor = place.tensor()
        assert tensor is not None
        _refuse_unusable(place, tensor)
        key = _identity(tensor) if tensor.numel() else ("empty", id(tensor))
        slot = (known or {}).get(key) or slots.get(key)
        if slot is not None:
            slot.places.append(place)
            continue
        slots[key] = Slot(tensor, [place], "parameter" if place.is_parameter else "")
    return list(slots.values())


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    return (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def _is_trained(slot: Slot) -> bool:
    """Any tied reference that requires a gradient makes the tensor travel."""
    return any(p.is_parameter and (t := p.tensor()) is not None and t.requires_grad for p in slot.places)


def _refuse_unusable(place: Place, tensor: torch.Tensor) -> None:
    kind = "parameter" if place.is_parameter else "buffer"
    if isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)):
        raise PlanError(
            f"model: {kind} {place.path} has no shape yet\n"
            "Run one batch through the model inside the function that builds it: lazy modules take their shapes then."
        )
    if tensor.is_meta:
        raise PlanError(f"model: {kind} {place.path} is on the meta device\nBuild the model with real values.")
    if tensor.layout != torch.strided:
        raise PlanError(f"model: {kind} {place.path} is {tensor.layout}\nOnly dense tensors can be averaged.")
    if (not place.is_parameter or tensor.requires_grad) and tensor.dtype not in DTYPES:
        raise PlanError(f"model: {kind} {place.path} is {tensor.dtype}\nAllowed are {', '.join(map(str, DTYPES))}.")


def _split_constants(buffers: list[Slot]) -> tuple[list[Slot], list[Slot]]:
    """Buffers that are averaged, and those that are not finite when the run forms."""
    averaged: list[Slot] = []
    constants: list[Slot] = []
    for slot in buffers:
        is_floating = slot.tensor.is_floating_point()
        slot.rule = "buffer" if is_floating else "largest"
        is_finite = not is_floating or bool(torch.isfinite(slot.tensor).all())
        (averaged if is_finite else constants).append(slot)
    return averaged, constants


def _running_pairs(buffers: list[Slot]) -> list[tuple[Slot, Slot]]:
    """(running_mean, running_var) of one module, where shapes and floating dtypes agree."""
    at = {(id(place.module), place.name): slot for slot in buffers for place in slot.places[:1]}
    pairs = []
    for slot in buffers:
        place = slot.places[0]
        mean = at.get((id(place.module), "running_mean"))
        if place.name != "running_var" or mean is None or slot.rule != "buffer":
            continue
        if mean.tensor.shape == slot.tensor.shape and mean.tensor.dtype == slot.tensor.dtype:
            pairs.append((mean, slot))
    return pairs


def _grouped(slots: list[Slot], pairs: list[tuple[Slot, Slot]]) -> list[_Group]:
    groups: dict[tuple[str, torch.dtype], _Group] = {}
    paired = {id(slot) for pair in pairs for slot in pair}
    for slot in slots:
        if id(slot) not in paired:
            key = (slot.rule, slot.tensor.dtype)
            groups.setdefault(key, _Group(*key)).slots.append(slot)
    means: dict[torch.dtype, _Group] = {}
    variances: dict[torch.dtype, _Group] = {}
    for mean, variance in pairs:
        dtype = mean.tensor.dtype
        means.setdefault(dtype, _Group("buffer", dtype)).slots.append(mean)
        variance.rule = "pooled_var"
        variances.setdefault(dtype, _Group("pooled_var", dtype, means=means[dtype])).slots.append(variance)
    ordered = [*groups.values(), *means.values(), *variances.values()]
    rank = {"parameter": 0, "buffer": 1, "pooled_var": 2, "largest": 3}
    return sorted(ordered, key=lambda group: rank[group.rule])


def _refuse_overlap(slots: list[Slot]) -> None:
    """Tensors that share part of their memory would come apart in an arena."""
    extents = sorted(((*extent, slot) for slot in slots if (extent := _extent(slot)) is not None), key=lambda e: e[:2])
    for (_, end, first), (start, _, second) in pairwise(extents):
        if start < end and any(s.rule != "parameter" or _is_trained(s) for s in (first, second)):
            raise PlanError(
                f"model: {first.name} and {second.name} share part of their memory\n"
                "Tie whole tensors, or give each its own memory; views that do not overlap are fine."
            )


def _extent(slot: Slot) -> tuple[int, int] | None:
    """[start, end) of the memory that a tensor spans; None if it is empty, or a buffer that is copied apart anyway."""
    tensor = slot.tensor
    if tensor.numel() == 0 or (slot.rule != "parameter" and not _is_dense(tensor)):
        return None
    span = 1 + sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory, each once, in some order of dimensions."""
    expected = 1
    for stride, extent in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= extent
    return True


def _assign(groups: list[_Group]) -> tuple[LayoutSpec, tuple[Slot, ...]]:
    """Gives every slot its offset. A section counts its inner gaps; an empty one is left out."""
    sections: list[SectionSpec] = []
    tensors: list[TensorSpec] = []
    slots: list[Slot] = []
    offset = 0
    for group in groups:
        group.offset = offset
        name = DTYPES[group.dtype]
        end = offset
        for slot in group.slots:
            slot.offset = offset
            tensors.append(TensorSpec(slot.name, tuple(slot.tensor.shape), name, slot.rule, offset))
            slots.append(slot)
            end = offset + slot.bytes if slot.bytes else end
            offset = _aligned(offset + slot.bytes)
        if end > group.offset:
            count = (end - group.offset) // group.dtype.itemsize
            mean_offset = group.means.offset if group.means else 0
            sections.append(SectionSpec(group.rule, name, group.offset, count, mean_offset))
    return LayoutSpec(offset, tuple(sections), tuple(tensors)), tuple(slots)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _constants_digest(constants: Sequence[Slot]) -> str:
    """Names, shapes and values of the buffers that are never averaged; '' without any."""
    if not constants:
        return ""
    digest = hashlib.blake2b(digest_size=16)
    for slot in constants:
        found = slot.places[0].tensor()
        if found is None:
            continue
        tensor = found.detach().cpu().contiguous()
        digest.update(repr((slot.name, tuple(tensor.shape), str(tensor.dtype))).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
