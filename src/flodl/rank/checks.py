"""What a run needs of the user's parts, each refused with one clear message before the first step.

The launcher checks what costs nothing (check_parts, check_fit); a rank checks what it built.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from flodl.plan import Plan, parse_device, sources
from flodl.plan.refusal import refused
from flodl.rank.parts import MAP_STYLE, Parts

_WRAPPERS = frozenset(
    {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"}
)
_WRAPPERS_FROM = frozenset({"torch", "deepspeed", "fairscale"})
_MOST_NAMES = 5


def check_parts(parts: Parts) -> None:
    """Instances given where a function that makes them is wanted, and data sets of the wrong kind. Raises PlanError."""
    if isinstance(parts.model, nn.Module):
        allowed = f"a function or class that returns the module: model=lambda: {type(parts.model).__name__}(...)"
        why = "it is a module already, and every rank builds its own under the seed"
        raise refused("model", type(parts.model).__name__ + " instance", allowed, why=why)
    if isinstance(parts.optimizer, torch.optim.Optimizer) or (
        isinstance(parts.optimizer, type) and issubclass(parts.optimizer, torch.optim.LBFGS)
    ):
        allowed = "a function of the parameters that returns one whose step() needs no closure"
        raise refused("optimizer", parts.optimizer, f"{allowed}: optimizer=lambda p: torch.optim.SGD(p, lr=0.1)")
    if isinstance(parts.loss, type) and issubclass(parts.loss, nn.Module):
        raise refused("loss", parts.loss, "a function of model and batch: loss=lambda m, b: criterion(m(b[0]), b[1])")
    if isinstance(parts.loss, nn.modules.loss._Loss):
        kind = type(parts.loss).__name__
        allowed = "a function of model and batch: loss=lambda m, b: criterion(m(b[0]), b[1])"
        raise refused("loss", f"{kind} instance", allowed, why="it is a function of outputs and targets")
    check_data(parts.data, "data")
    if parts.eval_data is not None:
        check_data(parts.eval_data, "eval_data")


def check_data(data: Any, field: str) -> int:
    """The data set's length, at least 1. Raises PlanError saying why this one cannot be used."""
    kind = type(data).__name__
    if isinstance(data, IterableDataset):
        why = "it is iterable: without a number for each sample nothing can be dealt out exactly once"
        raise refused(field, kind, MAP_STYLE, why=why)
    if isinstance(data, DataLoader):
        raise refused(field, kind, f"{MAP_STYLE}: {field}=loader.dataset", why="flodl makes the loaders itself")
    if isinstance(data, Mapping | str | bytes) or not hasattr(data, "__getitem__"):
        raise refused(field, kind, MAP_STYLE, why="its items have no numbers from 0 to len - 1")
    if isinstance(data, tuple) and data and all(isinstance(part, torch.Tensor) for part in data):
        why = f"a tuple of {len(data)} tensors has {len(data)} items, not as many as there are samples"
        raise refused(field, kind, f"{MAP_STYLE}: {field}=TensorDataset(...) of these", why=why)
    try:
        length = len(data)
    except (TypeError, ValueError, OverflowError, NotImplementedError, AttributeError) as error:
        raise refused(field, kind, MAP_STYLE, why=f"its length is unknown ({error})") from error
    if length < 1:
        raise refused(field, kind, "at least one sample", why="it is empty")
    return length


def check_fit(plan: Plan, length: int) -> None:
    """Whether this plan can train a data set of this length. Raises PlanError; warns where ranks will stay idle."""
    world = plan.cluster.world_size
    if world > length:
        why = f"{world} ranks are more than the data set has samples"
        allowed = f"at most {length} {'ranks, one per sample' if length > 1 else 'rank: there is one sample'}"
        raise refused("devices", list(plan.cluster.devices), allowed, why=why)
    if plan.data.batch_size > length:
        raise refused("batch_size", plan.data.batch_size, f"at most {length}, the length of the data set")
    batches = plan.data.batches_per_epoch(length)
    if world > batches:
        warnings.warn(
            f"an epoch is {batches} batches for {world} ranks, so some do nothing; a smaller batch_size helps",
            stacklevel=5,
        )


def check_devices(plan: Plan) -> None:
    """Whether this machine has the GPUs that the plan names. Raises PlanError naming those that it has."""
    for word in plan.cluster.devices:
        device = parse_device(word)
        if device.kind != "cuda":
            continue
        count = sources.count_gpus()
        if device.index >= count:
            there = ", ".join(f'"cuda:{index}"' for index in range(count))
            why = f"torch can use {count or 'no'} {'GPU' if count < 2 else 'GPUs'} here"
            raise refused("devices", word, f"{there} or " * bool(count) + '"cpu"', why=why)


def check_model(model: object) -> nn.Module:
    """What model() returned, if it can be trained and averaged. Raises PlanError naming the tensor or the class."""
    if not isinstance(model, nn.Module):
        raise refused("model", type(model).__name__, "a function that returns a torch nn.Module", why="that came back")
    for path, module in model.named_modules():
        if (wrapper := _wrapper(module)) is not None:
            why = f"{path or 'the model'} is wrapped in {wrapper}, and flodl does the averaging"
            raise refused("model", wrapper, "the plain module, unwrapped", why=why)
    parameters = list(model.named_parameters())
    if not parameters:
        raise refused("model", type(model).__name__, "a module with parameters", why="it has no parameters")
    _refuse_lazy(model)
    trained = [(name, tensor) for name, tensor in parameters if tensor.requires_grad]
    if not trained:
        allowed = "a module with at least one parameter whose requires_grad is True"
        raise refused("model", type(model).__name__, allowed, why="every parameter is frozen")
    for name, tensor in trained:
        if (what := _unusual(tensor)) is not None:
            allowed = "dense float32, float64, float16 or bfloat16 parameters; frozen ones may be anything"
            raise refused("model", type(model).__name__, allowed, why=f"parameter {name} is {what}")
    return model


def make_optimizer(parts: Parts, model: nn.Module) -> torch.optim.Optimizer:
    """The user's optimizer over the model's trained parameters, checked. Raises PlanError."""
    parameters = [tensor for tensor in model.parameters() if tensor.requires_grad]
    try:
        made = parts.optimizer(parameters)
    except AttributeError as error:
        if error.obj is not parameters:
            raise
        allowed = "a function of the list of trained parameters: optimizer=lambda p: torch.optim.SGD(p, lr=0.1)"
        why = f"it is called with that list, not with the model ({error})"
        raise refused("optimizer", parts.optimizer, allowed, why=why) from error
    return check_optimizer(made, model)


def check_optimizer(made: object, model: nn.Module) -> torch.optim.Optimizer:
    """What optimizer(parameters) returned. Raises PlanError; warns where it leaves trained parameters out."""
    allowed = "a function that returns a torch.optim.Optimizer over the parameters that it is given"
    if not isinstance(made, torch.optim.Optimizer):
        raise refused("optimizer", type(made).__name__, allowed, why="that came back")
    if isinstance(made, torch.optim.LBFGS):
        raise refused("optimizer", "LBFGS", "an optimizer whose step() needs no closure")
    names = {id(tensor): name for name, tensor in model.named_parameters(remove_duplicate=False)}
    held = [tensor for group in made.param_groups for tensor in group["params"]]
    strangers = [tuple(tensor.shape) for tensor in held if id(tensor) not in names]
    if strangers:
        why = f"{len(strangers)} of its parameters are not the model's, the first of shape {strangers[0]}"
        raise refused("optimizer", type(made).__name__, allowed, why=why)
    known = {id(tensor) for tensor in held}
    left_out = [name for name, tensor in model.named_parameters() if tensor.requires_grad and id(tensor) not in known]
    if left_out:
        more = f" and {len(left_out) - _MOST_NAMES} more" if len(left_out) > _MOST_NAMES else ""
        warnings.warn(
            f"the optimizer leaves out {', '.join(left_out[:_MOST_NAMES])}{more}: "
            "these require gradients and will never change",
            stacklevel=2,
        )
    return made


def check_loss(value: object) -> torch.Tensor:
    """What loss(model, batch) returned. Raises PlanError naming what came back. NaN is let through."""
    allowed = "a scalar tensor computed from the model's parameters, the mean over the batch"
    if not isinstance(value, torch.Tensor):
        raise refused("loss", type(value).__name__, allowed, why="that came back instead of a tensor")
    if value.numel() != 1:
        raise refused("loss", f"tensor of shape {tuple(value.shape)}", allowed, why="take the mean over the samples")
    if not value.is_floating_point():
        raise refused("loss", f"tensor of {value.dtype}", allowed, why="it is not a real floating-point number")
    if not value.requires_grad:
        why = "it has no gradient: it was detached, computed under no_grad, or does not depend on the model"
        raise refused("loss", "tensor without gradient", allowed, why=why)
    return value


def _wrapper(module: nn.Module) -> str | None:
    """The wrapper's class, by name: importing torch.distributed to ask would cost a second in every rank."""
    for kind in type(module).__mro__:
        if kind.__name__ in _WRAPPERS and kind.__module__.partition(".")[0] in _WRAPPERS_FROM:
            return kind.__name__
    return None


def _refuse_lazy(model: nn.Module) -> None:
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    lazy = [name for name, tensor in tensors if nn.parameter.is_lazy(tensor)]
    if lazy:
        more = f" and {len(lazy) - _MOST_NAMES} more" if len(lazy) > _MOST_NAMES else ""
        why = f"{', '.join(lazy[:_MOST_NAMES])}{more} have no shape yet"
        allowed = "a module whose lazy layers have seen data: run one batch through it in model()"
        raise refused("model", type(model).__name__, allowed, why=why)


def _unusual(tensor: torch.Tensor) -> str | None:
    if tensor.is_meta:
        return "on the meta device, without values"
    if type(tensor).__name__ == "DTensor":
        return "a distributed tensor"
    if tensor.is_quantized:
        return f"quantized ({tensor.dtype})"
    if tensor.layout != torch.strided:
        return f"sparse ({tensor.layout})"
    if tensor.is_complex():
        return f"complex ({tensor.dtype})"
    if tensor.dtype not in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        return str(tensor.dtype)
    return None
