"""The model as one flat sequence: what travels, by which rule, where it lies, and what is refused by name."""

import math
import warnings

import pytest
import torch
from torch import nn

from flodl.averaging.arena import Arena, private_bytes
from flodl.averaging.layout import ALIGNMENT, ModelLayout, build_layout
from flodl.errors import PlanError, RunFailed
from flodl.protocol.messages import DataSpec, LayoutSpec
from flodl.protocol.signatures import NAMES_LISTED, differences, tensor_at


class Mixed(nn.Module):
    """Tied, frozen, 0-dim, empty, strided, double and bf16 parameters; every kind of buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.turned = nn.Parameter(torch.arange(12.0).reshape(3, 4).t())
        self.exact = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.coarse = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.full((2, 2), -math.inf))
        self.register_buffer("wide", torch.ones(1, 1).expand(2, 3))
        self.register_buffer("flags", torch.tensor([True, False]), persistent=False)


def with_complex() -> nn.Module:
    model = nn.Linear(1, 1)
    model.register_buffer("wave", torch.zeros(2, dtype=torch.complex64))
    return model


def overlapping() -> nn.Module:
    base = torch.zeros(8)
    return nn.ParameterList([nn.Parameter(base[:5]), nn.Parameter(base[4:])])


def spec_of(model: nn.Module) -> LayoutSpec:
    return build_layout(model).spec


def rules(layout: ModelLayout) -> dict[str, str]:
    return {tensor.name: tensor.rule for tensor in layout.spec.tensors}


def test_each_tensor_travels_by_its_own_rule() -> None:
    layout = build_layout(Mixed())
    assert rules(layout) == {
        "embed.weight": "parameter",
        "scale": "parameter",
        "empty": "parameter",
        "turned": "parameter",
        "exact": "parameter",
        "coarse": "parameter",
        "norm.weight": "parameter",
        "norm.bias": "parameter",
        "norm.running_mean": "buffer",
        "norm.running_var": "pooled_var",
        "norm.num_batches_tracked": "largest",
        "wide": "buffer",
        "flags": "largest",
    }
    assert [slot.name for slot in layout.constants] == ["mask"]
    assert layout.spec.constants


def test_tied_tensors_lie_once_and_keep_all_their_places() -> None:
    slots = {slot.name: slot for slot in build_layout(Mixed()).slots}
    assert [place.path for place in slots["embed.weight"].places] == ["embed.weight", "head.weight"]


def test_parameters_sharing_storage_without_being_one_object_are_tied() -> None:
    model = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    model[1].weight = nn.Parameter(model[0].weight.data)
    assert [tensor.name for tensor in spec_of(model).tensors] == ["0.weight"]


def test_tensors_are_aligned_and_sections_cover_them_without_overlap() -> None:
    spec = spec_of(Mixed())
    sizes = {"f64": 8, "i64": 8, "f32": 4, "bf16": 2, "boolean": 1}
    assert all(tensor.offset % ALIGNMENT == 0 for tensor in spec.tensors)
    ends = [section.offset + section.count * sizes[section.dtype] for section in spec.sections]
    assert all(end <= section.offset for end, section in zip(ends, spec.sections[1:], strict=False))
    assert ends[-1] <= spec.bytes
    assert spec.bytes % ALIGNMENT == 0
    for tensor in spec.tensors:
        size = math.prod(tensor.shape) * sizes[tensor.dtype]
        inside = [
            section
            for section, end in zip(spec.sections, ends, strict=True)
            if section.offset <= tensor.offset
            and tensor.offset + size <= end
            and (section.rule, section.dtype) == (tensor.rule, tensor.dtype)
        ]
        assert inside or size == 0, tensor


def test_running_variance_points_at_a_mean_section_of_the_same_shape() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(20))
    spec = spec_of(model)
    (variance,) = [section for section in spec.sections if section.rule == "pooled_var"]
    (mean,) = [section for section in spec.sections if section.offset == variance.mean_offset]
    assert (mean.rule, mean.dtype, mean.count) == ("buffer", variance.dtype, variance.count)
    offsets = {tensor.name: tensor.offset for tensor in spec.tensors}
    for name in ("1", "2"):
        within = offsets[f"{name}.running_mean"] - mean.offset
        assert within == offsets[f"{name}.running_var"] - variance.offset


def test_a_lone_running_var_is_an_ordinary_buffer() -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("running_var", torch.ones(2))
    assert rules(build_layout(model))["running_var"] == "buffer"


def test_a_constant_buffer_enters_the_signature_by_value() -> None:
    def made(value: float) -> LayoutSpec:
        model = nn.Linear(1, 1)
        model.register_buffer("mask", torch.tensor([0.0, value]))
        return spec_of(model)

    assert differences(made(-math.inf), made(-math.inf)) == []
    assert differences(made(-math.inf), made(math.inf)) == [
        "buffers that are not finite, never averaged and so to be equal from the start, differ"
    ]


def test_the_same_model_has_the_same_signature() -> None:
    assert spec_of(Mixed()) == spec_of(Mixed())


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: nn.LazyLinear(3), "weight has no shape yet"),
        (lambda: nn.Linear(2, 2, device="meta"), "weight is on the meta device"),
        (nn.Flatten, "no parameter requires a gradient"),
        (with_complex, "buffer wave is torch.complex64"),
        (overlapping, "0 and 1 share part of their memory"),
    ],
    ids=["lazy", "meta", "no parameter", "complex", "overlapping"],
)
def test_what_cannot_travel_is_refused_by_name(build, words) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(PlanError, match=words):
        build_layout(build())


def test_views_of_one_storage_that_do_not_overlap_are_fine() -> None:
    base = torch.arange(8.0)
    model = nn.ParameterList([nn.Parameter(base[:4]), nn.Parameter(base[4:])])
    assert [tensor.name for tensor in spec_of(model).tensors] == ["0", "1"]


def test_differences_name_the_tensor_and_what_differs() -> None:
    found = differences(spec_of(nn.Sequential(nn.Linear(2, 3))), spec_of(nn.Sequential(nn.Linear(2, 4))))
    assert found == [
        "tensor 0.weight has shape [4, 2], not [3, 2]",
        "tensor 0.bias has shape [4], not [3]",
    ]
    assert differences(spec_of(nn.Linear(2, 3)), spec_of(nn.Linear(2, 3, bias=False))) == ["tensor bias is missing"]
    assert "is f64, not f32" in differences(spec_of(nn.Linear(2, 3)), spec_of(nn.Linear(2, 3).double()))[0]


def test_at_most_twenty_differences_are_listed() -> None:
    many = spec_of(nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(50)]))
    found = differences(many, spec_of(nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(50)])))
    assert len(found) == NAMES_LISTED + 1
    assert found[-1] == "and 30 more"


def test_differences_of_data_name_length_item_and_field() -> None:
    ours = DataSpec(10, "3: tuple(int)\n7: tuple(int)", "3[0]: aa\n7['x']: bb")
    assert differences(ours, DataSpec(10, "3: tuple(int)", "")) == []  # fewer items were read in time
    assert differences(ours, DataSpec(11, ours.structure, ours.content)) == ["the data set has 11 items, not 10"]
    assert differences(ours, DataSpec(10, "3: tuple(int)\n7: str", "")) == ["data[7] is str, not tuple(int)"]
    other = DataSpec(10, ours.structure, "3[0]: aa\n7['x']: cc")
    assert differences(ours, other) == ["data[7]['x'] holds other values"]


def test_model_and_data_are_never_compared() -> None:
    with pytest.raises(TypeError, match="LayoutSpec cannot be compared with a DataSpec"):
        differences(spec_of(nn.Linear(1, 1)), DataSpec(1, ""))


def test_a_byte_of_the_layout_is_named_by_its_tensor() -> None:
    spec = spec_of(nn.Linear(2, 3))
    assert tensor_at(spec, 0) == "weight"
    assert tensor_at(spec, 23) == "weight"
    assert tensor_at(spec, 24) == ""  # the gap before the next multiple of 64
    assert tensor_at(spec, 64) == "bias"
    assert tensor_at(spec, spec.bytes) == ""


def test_a_constant_that_changes_is_told_of() -> None:
    layout = build_layout(model := Mixed())
    layout.refuse_changed_constants()
    model.mask[0] = 1.5
    with pytest.raises(RunFailed, match=r"not finite when the run formed has changed since, among mask"):
        layout.refuse_changed_constants()


def test_a_scripted_model_has_a_layout_and_an_arena() -> None:
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(plain)
    layouts = [build_layout(model) for model in (plain, scripted)]
    assert layouts[0].spec == layouts[1].spec
    arena = Arena(layouts[1], private_bytes(layouts[1].spec.bytes))
    scripted(torch.randn(5, 3))
    arena.gather_strays()
    arena.memory[: layouts[1].spec.bytes].zero_()
    assert not any(tensor.any() for tensor in scripted.parameters())
    with torch.no_grad():
        dict(scripted.named_parameters())["0.weight"].fill_(2.0)
    at = {slot.name: slot for slot in layouts[1].slots}["0.weight"]
    assert arena.memory[at.offset : at.offset + 48].view(torch.float32).eq(2.0).all()
