"""What differs between two ranks' signatures of model and data, in words that name the tensor or the item."""

from __future__ import annotations

from flodl.protocol.messages import DataSpec, LayoutSpec, TensorSpec

NAMES_LISTED = 20
"""More differing tensors than this are counted, not named."""

ITEM_BYTES = {"f64": 8, "i64": 8, "f32": 4, "i32": 4, "bf16": 2, "f16": 2, "i16": 2, "i8": 1, "u8": 1, "boolean": 1}
"""Bytes per element of each dtype of a layout."""


def differences(ours: LayoutSpec | DataSpec, theirs: LayoutSpec | DataSpec) -> list[str]:
    """What `theirs` has that `ours` has not, one sentence each; empty where they agree.

    Raises TypeError when one is a model's and the other a data set's.
    """
    if isinstance(ours, LayoutSpec) and isinstance(theirs, LayoutSpec):
        return _model_differences(ours, theirs)
    if isinstance(ours, DataSpec) and isinstance(theirs, DataSpec):
        return _data_differences(ours, theirs)
    raise TypeError(f"a {type(ours).__name__} cannot be compared with a {type(theirs).__name__}")


def tensor_at(layout: LayoutSpec, offset: int) -> str:
    """The name of the tensor that holds this byte of the layout; '' where the byte is a gap or outside."""
    found = ""
    for tensor in sorted(layout.tensors, key=lambda t: t.offset):
        if tensor.offset > offset:
            break
        found = tensor.name if offset < tensor.offset + _bytes(tensor) else ""
    return found


def _bytes(tensor: TensorSpec) -> int:
    size = ITEM_BYTES[tensor.dtype]
    for extent in tensor.shape:
        size *= extent
    return size


def _model_differences(ours: LayoutSpec, theirs: LayoutSpec) -> list[str]:
    if ours == theirs:
        return []
    mine = {tensor.name: tensor for tensor in ours.tensors}
    other = {tensor.name: tensor for tensor in theirs.tensors}
    found = [f"tensor {name} is missing" for name in mine if name not in other]
    found += [f"tensor {name} is not in the run's model" for name in other if name not in mine]
    found += [_tensor_difference(mine[name], other[name]) for name in mine if name in other]
    found = [sentence for sentence in found if sentence]
    if not found and list(mine) != list(other):
        first = next(a for a, b in zip(mine, other, strict=True) if a != b)
        found = [f"the same tensors come in another order, from {first} on"]
    if ours.constants != theirs.constants:
        found.append("buffers that are not finite, never averaged and so to be equal from the start, differ")
    if not found:
        found = ["the same tensors lie at other places: the ranks run different versions of flodl or torch"]
    if len(found) > NAMES_LISTED:
        found = [*found[:NAMES_LISTED], f"and {len(found) - NAMES_LISTED} more"]
    return found


def _tensor_difference(ours: TensorSpec, theirs: TensorSpec) -> str:
    parts = []
    if ours.shape != theirs.shape:
        parts.append(f"has shape {list(theirs.shape)}, not {list(ours.shape)}")
    if ours.dtype != theirs.dtype:
        parts.append(f"is {theirs.dtype}, not {ours.dtype}")
    if ours.rule != theirs.rule:
        parts.append(f"is averaged as {theirs.rule}, not {ours.rule}")
    return f"tensor {ours.name} " + " and ".join(parts) if parts else ""


def _data_differences(ours: DataSpec, theirs: DataSpec) -> list[str]:
    found = []
    if ours.length != theirs.length:
        found.append(f"the data set has {theirs.length} items, not {ours.length}")
    # Where the time ran out, fewer items were looked at: those that both saw must agree.
    mine, other = _by_item(ours.structure), _by_item(theirs.structure)
    found += [
        f"data[{item}] is {other[item]}, not {mine[item]}"
        for item in mine
        if item in other and mine[item] != other[item]
    ]
    if not found and not (set(mine) & set(other)) and ours.structure != theirs.structure:
        found.append(f"the items are {theirs.structure!r}, not {ours.structure!r}")
    if not found and ours.content and theirs.content and ours.content != theirs.content:
        found += _content_differences(ours.content, theirs.content)
    if len(found) > NAMES_LISTED:
        found = [*found[:NAMES_LISTED], f"and {len(found) - NAMES_LISTED} more"]
    return found


def _content_differences(ours: str, theirs: str) -> list[str]:
    mine, other = _by_item(ours), _by_item(theirs)
    fields = [field for field in mine if field in other and mine[field] != other[field]]
    if not fields:
        return ["the content of the data differs"]
    return [f"data[{_item_of(field)}]{field.removeprefix(_item_of(field))} holds other values" for field in fields]


def _item_of(field: str) -> str:
    """The item's number in a field such as `17[0]['mask']`."""
    return field.partition("[")[0]


def _by_item(text: str) -> dict[str, str]:
    """Lines `key: value`, as rank/data_signature.py writes them."""
    pairs = (line.partition(": ") for line in text.splitlines())
    return {key: value for key, separator, value in pairs if separator}
