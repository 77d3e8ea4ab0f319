"""The user's parts: callables and data that a process holds and never sends anywhere."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flodl.errors import PlanError
from flodl.plan.build import setting_names
from flodl.plan.refusal import missing, refused
from flodl.plan.section import refuse_unknown

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

_ENTRY_ALLOWED = '"package.module:function", where function() returns a dict with model, optimizer, loss and data'
_WANTED = {
    "model": "a function or class that returns the module: model=lambda: Net(...)",
    "optimizer": "a function of the parameters: optimizer=lambda p: torch.optim.SGD(p, lr=0.1)",
    "loss": "a function of model and batch that returns the mean loss as a scalar tensor",
}
MAP_STYLE = "a map-style data set, with __getitem__ and __len__"
_CALLBACK = "a function of BatchInfo, or an object with on_batch(BatchInfo) or on_evaluated(epoch, metrics)"


@dataclass(frozen=True)
class Parts:
    """Checked for shape only; what needs torch is checked by flodl.rank.checks.

    model: () -> nn.Module, built anew in every process under the seed.
    optimizer: list of the trained parameters -> torch Optimizer.
    loss: (model, batch) -> scalar tensor, the mean over the batch's samples.
    data: a map-style data set. evaluate: (model, loader over eval_data) -> dict of numbers.
    scheduler: position in samples -> factor of the learning rate, or optimizer -> torch LRScheduler.
    collate, worker_init: as in torch's DataLoader.
    """

    model: Callable[[], nn.Module]
    optimizer: Callable[[list[nn.Parameter]], Optimizer]
    loss: Callable[[nn.Module, Any], Tensor]
    data: Any
    evaluate: Callable[[nn.Module, Any], Mapping[str, float]] | None = None
    eval_data: Any = None
    scheduler: Callable[[Any], Any] | None = None
    callbacks: tuple[Any, ...] = ()
    collate: Callable[[list[Any]], Any] | None = None
    worker_init: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        for name, words in _WANTED.items():
            if not callable(getattr(self, name)):
                raise refused(name, getattr(self, name), words)
        if self.data is None:
            raise refused("data", None, MAP_STYLE)
        for name in ("evaluate", "scheduler", "collate", "worker_init"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise refused(name, value, "None, or a function")
        if not isinstance(self.callbacks, list | tuple):
            raise refused("callbacks", self.callbacks, f"a list; each {_CALLBACK}")
        for place, callback in enumerate(self.callbacks):
            if not (callable(callback) or hasattr(callback, "on_batch") or hasattr(callback, "on_evaluated")):
                raise refused(f"callbacks[{place}]", callback, _CALLBACK)
        object.__setattr__(self, "callbacks", tuple(self.callbacks))
        if self.evaluate is not None and self.eval_data is None:
            raise missing("eval_data", "the data set that evaluate(model, loader) is given, or no evaluate")
        if self.evaluate is None and self.eval_data is not None:
            raise missing("evaluate", "a function evaluate(model, loader) -> dict of numbers, or no eval_data")


def part_names() -> tuple[str, ...]:
    """The names of all parts, in order."""
    return tuple(field.name for field in dataclasses.fields(Parts))


def build_parts(given: Mapping[str, Any]) -> Parts:
    """Parts by name. Raises PlanError for one that is missing or unknown."""
    refuse_unknown(given, part_names(), "the parts")
    for field in dataclasses.fields(Parts):
        if field.default is dataclasses.MISSING and field.name not in given:
            raise missing(field.name, _WANTED.get(field.name, MAP_STYLE))
    return Parts(**given)


def check_entry(entry: object) -> str:
    """Raises PlanError unless it has the form "package.module:function"."""
    if isinstance(entry, str) and entry.startswith("__main__:"):
        why = "a rank's __main__ is another: the function must be in a file that can be imported"
        raise refused("entry", entry, _ENTRY_ALLOWED, why=why)
    if isinstance(entry, str):
        module, colon, function = entry.partition(":")
        names = [*module.split("."), *function.split(".")]
        if colon and all(name.isidentifier() for name in names):
            return entry
    raise refused("entry", entry, _ENTRY_ALLOWED)


def parts_from_entry(entry: str) -> Parts:
    """Imports the module, calls the function, and takes the parts that it returns.

    Raises PlanError where there is no such function or it returns something else; what it raises itself passes through.
    """
    module_name, _, path = check_entry(entry).partition(":")
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # One that the module itself misses is the user's own fault to see, with its own traceback.
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise
        raise refused("entry", entry, _ENTRY_ALLOWED, why=f"there is no module {error.name} on sys.path") from None
    for name in path.split("."):
        if not hasattr(target, name):
            raise refused("entry", entry, _ENTRY_ALLOWED, why=f"{module_name} has no {path}")
        target = getattr(target, name)
    if not callable(target):
        raise refused("entry", entry, _ENTRY_ALLOWED, why=f"{path} cannot be called")
    given = target()
    if not isinstance(given, Mapping):
        raise refused("entry", entry, _ENTRY_ALLOWED, why=f"{path}() returned {type(given).__name__}, not a dict")
    for name in given:
        if name in setting_names():
            raise PlanError(
                f"{name} is a setting of the run, and {path}() returned it with the parts\n"
                f"Give it to the trainer: Trainer(entry={entry!r}, {name}=...).",
                field=str(name),
                value=given[name],
            )
    return build_parts(given)
