"""What a run gives back, and how it is read again from its directory."""

from __future__ import annotations

import builtins
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flodl import errors
from flodl.errors import CheckpointError, RunFailed
from flodl.plan.sources import EarlierCall

if TYPE_CHECKING:
    from torch import nn

    from flodl.rank.parts import Parts

RESULT = "result.json"
CONSENSUS = "consensus.safetensors"
_MOST_NAMES = 20
_MOST_WORDS = 500
"""Characters of an earlier call's error that ranks are told: all calls go through one environment variable."""


@dataclass(repr=False)
class RunResult:
    """One finished run.

    metrics: one dict per epoch: epoch (from 0; words for people count from 1), loss (mean over its samples), samples,
    and what evaluate returned.
    shares: each rank's part of all contributed batches, by rank; they sum to 1. rounds: averages committed.
    E: efficiency, None where the ranks' own rates were not measured; E_wall: the same with every pause counted.
    recomputed: batches trained again after a death. degraded: what went less well than planned, in sentences.
    reasons: the decisions of the run, in sentences. wall_s: seconds from run() to the end.
    resumed_from: path and round of the checkpoint that it went on from; metrics then begin with the epochs before it.
    raw: everything that result.json holds.
    """

    metrics: list[dict[str, Any]]
    shares: list[float]
    E: float | None
    E_wall: float | None
    rounds: int
    recomputed: int
    degraded: list[str]
    reasons: list[str]
    wall_s: float
    run_directory: str
    raw: dict[str, Any] = field(default_factory=dict)
    resumed_from: dict[str, Any] | None = None
    _parts: Parts | None = None
    _seed: int = 0
    _model: nn.Module | None = None

    @property
    def model(self) -> nn.Module:
        """The model with the final average, on the processor, in train mode as model() left it. Built at first use.

        Raises CheckpointError where the file is missing or holds another model.
        """
        if self._model is None:
            if self._parts is None:
                raise CheckpointError(
                    "this result was read without the parts of its run, so its model cannot be built\n"
                    f"Load {os.path.join(self.run_directory, CONSENSUS)} into a model of yours."
                )
            self._model = _load_model(self._parts, self._seed, os.path.join(self.run_directory, CONSENSUS))
        return self._model

    def summary(self) -> str:
        """A few lines for people."""
        lines = [f"{self.rounds} rounds in {self.wall_s:.1f} s" if self.rounds else f"{self.wall_s:.1f} s"]
        lines += [_epoch_line(epoch) for epoch in self.metrics]
        if len(self.shares) > 1:
            lines.append("shares " + " / ".join(f"{100 * share:.1f} %" for share in self.shares))
        if self.E is not None:
            lines.append(f"E {self.E:.3f} of what these devices do alone, while they train")
        if self.E_wall is not None:
            lines.append(f"E_wall {self.E_wall:.3f} with start-up, evaluation and saving")
        if self.resumed_from:
            nothing = "" if self.raw.get("batches") != 0 else "; nothing was left to train"
            lines.append(f"went on from round {self.resumed_from['round']} in {self.resumed_from['path']}{nothing}")
        if self.recomputed:
            lines.append(f"{self.recomputed} batches trained again")
        lines += [f"degraded: {sentence}" for sentence in self.degraded]
        return "\n".join([*lines, f"all of it in {self.run_directory}"])

    def __repr__(self) -> str:
        last = _epoch_line(self.metrics[-1]) if self.metrics else "no epoch"
        state = f", degraded by {len(self.degraded)} events" if self.degraded else ""
        return f"<RunResult {last}; {self.rounds} rounds, {self.wall_s:.1f} s{state}; {self.run_directory}>"


def make_result(raw: Mapping[str, Any], run_directory: str, parts: Parts | None = None, seed: int = 0) -> RunResult:
    """From the dict that a run ends with. Keys that it lacks count as nothing measured."""
    ranks = raw.get("ranks") or []
    return RunResult(
        metrics=[_flat_epoch(epoch) for epoch in raw.get("metrics") or raw.get("epochs") or []],
        shares=[float(share) for share in raw.get("shares") or [rank["share"] for rank in ranks]],
        E=raw.get("E"),
        E_wall=raw.get("E_wall"),
        rounds=int(raw.get("rounds") or 0),
        recomputed=int(raw.get("recomputed") or 0),
        degraded=_sentences(raw.get("degraded")),
        reasons=_sentences(raw.get("reasons")),
        wall_s=float(raw.get("wall_s") or 0.0),
        run_directory=run_directory,
        raw=dict(raw),
        resumed_from=raw.get("resumed_from"),
        _parts=parts,
        _seed=seed,
    )


def stored_result(run_directory: str, parts: Parts | None = None, seed: int = 0) -> RunResult:
    """The result of an earlier run from its directory. Raises what the run itself raised in its launcher.

    RunFailed with the run's own reason where it failed or could not be saved, KeyboardInterrupt where it was ended.
    """
    path = os.path.join(run_directory, RESULT)
    try:
        with open(path, encoding="utf-8") as file:
            raw = json.load(file)
    except (OSError, ValueError) as error:
        raise RunFailed(
            f"the run in {run_directory} left no result: {error}\nIts schedule.jsonl and logs tell how far it came.",
            reason=str(error),
            log_path=run_directory,
        ) from None
    if raw.get("interrupted"):
        raise KeyboardInterrupt(f"the run in {run_directory} was interrupted by {raw['interrupted']}")
    if raw.get("phase") == "failed" or raw.get("save_error"):
        reason = str(raw.get("save_error") or raw.get("reason", ""))
        raise RunFailed(f"the run in {run_directory} failed: {reason}", reason=reason, log_path=run_directory)
    return make_result(raw, run_directory, parts, seed)


def failed_call(directory: str, error: BaseException) -> EarlierCall:
    """What ranks are told of a call that raised: the nearest class of flodl's or of Python's own, and the words."""
    named = (kind.__name__ for kind in type(error).__mro__ if _class_of(kind.__name__) is kind)
    return EarlierCall(directory, next(named, RunFailed.__name__), str(error)[:_MOST_WORDS])


def error_of(call: EarlierCall) -> BaseException:
    """The error of a call that raised in the launcher, for a rank to raise where the script made that call."""
    try:
        return (_class_of(call.error) or RunFailed)(call.message)
    except TypeError:  # UnicodeDecodeError and the like are not made of words
        return RunFailed(call.message, reason=call.message, log_path=call.directory)


def _class_of(name: str) -> type[BaseException] | None:
    """None for Exception and BaseException, which say nothing."""
    found = getattr(errors, name, None) or getattr(builtins, name, None)
    is_error = isinstance(found, type) and issubclass(found, BaseException)
    return found if is_error and found not in (Exception, BaseException) else None


def _flat_epoch(epoch: Mapping[str, Any]) -> dict[str, Any]:
    """The user's metrics beside the run's own. A loss of theirs is `loss`, and `train_loss` the run's, always."""
    own = {name: value for name, value in epoch.items() if name != "metrics"}
    return {**own, "train_loss": own.get("loss"), **(epoch.get("metrics") or {})}


def _sentences(value: Any) -> list[str]:
    return [str(sentence) for sentence in value] if isinstance(value, list | tuple) else []


def _epoch_line(epoch: Mapping[str, Any]) -> str:
    number = epoch.get("epoch")
    words = [f"epoch {number + 1 if isinstance(number, int) else '?'}"]
    for name, value in epoch.items():
        is_shown = name not in ("epoch", "samples", "round") and not (name == "train_loss" and value == epoch["loss"])
        if is_shown and isinstance(value, int | float):
            words.append(f"{name} {value:.4g}")
    return ", ".join(words)


def _load_model(parts: Parts, seed: int, path: str) -> nn.Module:
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from flodl.rank.seeds import derive, plant, undisturbed

    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the final average cannot be read: {path}: {error}", path=path) from error
    with undisturbed():
        plant(derive(seed, "model"))
        model = parts.model()
    places = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    wrong = [
        f"{name} {tuple(tensor.shape)} ({'no such tensor' if name not in places else tuple(places[name].shape)})"
        for name, tensor in tensors.items()
        if name not in places or places[name].shape != tensor.shape
    ]
    if wrong:
        more = f" and {len(wrong) - _MOST_NAMES} more" if len(wrong) > _MOST_NAMES else ""
        raise CheckpointError(
            f"{path} holds another model than model() builds now: {', '.join(wrong[:_MOST_NAMES])}{more}\n"
            "Build the result's model with the code that the run had.",
            path=path,
        )
    with torch.no_grad():
        for name, tensor in tensors.items():
            places[name].copy_(tensor)
    return model
