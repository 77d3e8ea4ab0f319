"""A model's state in one safetensors file, under the names of its state_dict; tied tensors once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from flodl.errors import CheckpointError

ALIASES = "aliases"
"""Metadata: a JSON object from each further name of a tied tensor to the name it is saved under."""


def save_consensus(model: nn.Module, path: Path) -> None:
    """All parameters and buffers, non-persistent ones too, row-major. The file appears whole or not at all."""
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    known: dict[tuple[object, ...], str] = {}
    for name, tensor in _named_tensors(model):
        key = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
        if tensor.numel() and key in known:
            aliases[name] = known[key]
            continue
        known[key] = name
        tensors[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(tensors, temporary, metadata={ALIASES: json.dumps(aliases)})
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(
            f"{path} cannot be written: {error}\nFree some space, or choose another directory.", path=str(path)
        ) from error


def _named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Every name of every parameter and buffer, in the order of the state_dict's modules."""
    found: list[tuple[str, torch.Tensor]] = []
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                found.append((f"{path}.{name}" if path else name, tensor))
    return found
