"""What ranks compare of their data: structure and content of 16 seeded items, in words that can name a difference."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flodl.errors import RunFailed
from flodl.protocol.messages import DataSpec
from flodl.rank.seeds import derive, plant, undisturbed

ITEMS = 16
FIELDS_PER_ITEM = 32
"""More leaves than this in one item are digested together."""
BUDGET_S = 5.0


@dataclass(frozen=True)
class DataSignature:
    """spec: what is compared. reason: why its content is empty, if it is."""

    spec: DataSpec
    reason: str = ""


def data_signature(data: Any, seed: int, check: str = "content", budget_s: float = BUDGET_S) -> DataSignature:
    """Reads up to 16 items under a fixed RNG; the generators go on as if nothing had been drawn.

    check: 'content' or 'structure'. A data set with a method flodl_signature() -> str gives its own content.
    One line `index: structure` per item, one line `index path: digest` per field. Raises RunFailed naming an item that
    cannot be read.
    """
    length = len(data)
    offers = getattr(data, "flodl_signature", None)
    structures: list[str] = []
    contents: list[str] = []
    reason = "" if check == "content" else "only the structure is compared"
    ends = time.monotonic() + budget_s
    with undisturbed():
        for index in _chosen(length, seed):
            if structures and time.monotonic() > ends:
                reason = reason or f"reading {len(structures)} items took {budget_s:g} s"
                break
            item = _read(data, index, seed)
            structures.append(f"{index}: {structure(item)}")
            if not reason and offers is None:
                reason = _add_content(contents, data, (index, item), seed)
    content = "" if reason else "\n".join(contents)
    if offers is not None and check == "content":
        content = hashlib.blake2b(str(offers()).encode(), digest_size=16).hexdigest()
    return DataSignature(DataSpec(length, "\n".join(structures), content), reason)


def structure(value: Any) -> str:
    """Types, shapes and dtypes of an item, as one readable line."""
    if isinstance(value, torch.Tensor):
        return f"tensor({str(value.dtype).removeprefix('torch.')}{list(value.shape)})"
    if _is_array(value):
        return f"array({value.dtype}{list(value.shape)})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {structure(value[key])}" for key in sorted(value, key=repr)) + "}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}({', '.join(structure(part) for part in value)})"
    if hasattr(value, "size") and hasattr(value, "mode"):
        return f"{type(value).__name__}({value.mode}, {value.size})"
    return type(value).__name__


def _chosen(length: int, seed: int) -> list[int]:
    if length <= ITEMS:
        return list(range(length))
    return sorted(random.Random(derive(seed, "signature")).sample(range(length), ITEMS))


def _read(data: Any, index: int, seed: int) -> Any:
    plant(derive(seed, "signature", index))
    try:
        return data[index]
    except Exception as error:
        raise RunFailed(
            f"data[{index}] raised {type(error).__name__}: {error}\n"
            "Every item from 0 to len(data) - 1 must be readable."
        ) from error


def _add_content(contents: list[str], data: Any, read: tuple[int, Any], seed: int) -> str:
    """Appends the item's fields; a reason if its content cannot be compared."""
    index, item = read
    fields = _digests(item)
    if fields is None:
        return f"data[{index}] holds a {structure(item)}, whose content cannot be read"
    if not contents and _digests(_read(data, index, seed)) != fields:
        return f"data[{index}] is another each time it is read, under the same seed"
    contents += [f"{index}{path}: {digest}" for path, digest in fields.items()]
    return ""


def _digests(item: Any) -> dict[str, str] | None:
    """Digest per field path; None if a field is of an unknown kind."""
    fields: dict[str, bytes] = {}
    for path, value in _leaves(item, ""):
        raw = _bytes(value)
        if raw is None:
            return None
        fields[path] = hashlib.blake2b(raw, digest_size=8).digest()
    if len(fields) > FIELDS_PER_ITEM:
        return {"": hashlib.blake2b(b"".join(fields.values()), digest_size=8).hexdigest()}
    return {path: digest.hex() for path, digest in fields.items()}


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            yield from _leaves(value[key], f"{path}[{key!r}]")
    elif isinstance(value, tuple | list):
        for number, part in enumerate(value):
            yield from _leaves(part, f"{path}[{number}]")
    else:
        yield path, value


def _bytes(value: Any) -> bytes | None:
    """A canonical encoding that starts with the type; None for what has none."""
    head = structure(value).encode() + b"\0"
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            return None
        dense = value.detach().cpu().contiguous().reshape(-1)
        return head + (dense.view(torch.uint8).numpy().tobytes() if dense.numel() else b"")
    if _is_array(value) and value.dtype != object:
        return head + bytes(value.tobytes())
    if value is None or isinstance(value, bool | int | float | complex | str):
        return head + repr(value).encode()
    if isinstance(value, bytes | bytearray):
        return head + bytes(value)
    if hasattr(value, "mode") and hasattr(value, "tobytes"):  # a PIL image
        return head + bytes(value.tobytes())
    return None


def _is_array(value: Any) -> bool:
    return hasattr(value, "__array_interface__") and hasattr(value, "dtype") and hasattr(value, "tobytes")
