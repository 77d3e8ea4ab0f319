"""The demo: what one fast device does alone, what it does with two slow ones beside it, and a checkpoint of that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from flodl.bench.demo_checkpoint import (
    Folders,
    command_of,
    find_start,
    is_replaced,
    mark_folder,
    near,
    newest_folder,
    prove,
    read_setting,
    settled_batches,
    with_more_epochs,
)
from flodl.bench.demo_figures import Figures, percent, run_figures
from flodl.bench.demo_setting import RECIPES, SMALL_SET, Recipe, Saving, Setting, accuracy_of, batches_of
from flodl.bench.efficiency import PAD_TO_RAW, SLOW_RATIO, Case, measure_alone
from flodl.bench.workloads import LENET_BATCH_SIZE, image_sets, lenet_entry
from flodl.datasets.fashion import OFFICIAL, FetchError, Source, cache_directory, fetch, installed_directory
from flodl.datasets.idx import DataError
from flodl.devices.cpu import threads_per_rank

SOLO_STEPS = 60
SOLO_S = 6.0
"""A device alone is measured for SOLO_STEPS, or for fewer where these would take longer than this."""
LEAST_SOLO_STEPS = 12
TRAINING_S = 80.0
"""Both runs together are planned for no longer, on a slow machine with fewer images."""
DEFAULT_MODE = "cpu-cadence"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Wish:
    """What the caller chose; None where the demo is to. directory: of the images. checkpoint: a folder."""

    directory: str | None = None
    epochs: int | None = None
    mode: str | None = None
    checkpoint: str | None = None
    may_fetch: bool = False
    source: Source = OFFICIAL


def run_demo(wish: Wish, say: Say) -> dict[str, Any]:
    """Says each line as it becomes known. Returns every figure.

    Raises DataError without images, PlanError for a folder that is another's, CheckpointError where nothing resumes.
    """
    folders = Folders.beside(Path.cwd(), wish.checkpoint)
    if is_replaced(folders.checkpoint):
        say(f"The checkpoints of an earlier demo in {folders.checkpoint} are replaced.")
    directory = _find_images(wish, say)
    name, train, test = image_sets(directory)
    recipe = RECIPES.get(name, SMALL_SET)
    recipe = Recipe(wish.epochs or recipe.epochs, recipe.lr, recipe.has_outer)
    where = f" from {directory}" if directory else ""
    say(f"LeNet on {name}{where}: {len(train)} images to learn, {len(test)} to test, {_times(recipe.epochs)} over.")
    setting = _fit(Choice(name, directory, recipe, wish.mode or DEFAULT_MODE, len(train)), say)
    mark_folder(folders.checkpoint, setting)
    figures = _train(setting, folders, say)
    figures.say(say)
    proof = prove(setting, folders, figures.together, test)
    say("")
    say(f"Checkpoint of round {proof.round} in {near(folders.checkpoint)}: read back, the same parameters bit for bit,")
    say(f"{percent(proof.accuracy)} right again; three new ranks went on from it for {proof.further_batches} batches.")
    say(f"One more epoch from there: {command_of(folders.checkpoint)}")
    say(f"What each run did is in {near(folders.home)}.")
    checkpoint = {"directory": str(folders.checkpoint), **proof.as_dict(), "command": command_of(folders.checkpoint)}
    sizes = {"train_images": len(train), "test_images": len(test)}
    return {"setting": msgspec.to_builtins(setting), **sizes, **figures.as_dict(), "checkpoint": checkpoint}


def resume_demo(wish: Wish, folder: str, say: Say) -> dict[str, Any]:
    """Goes on from a demo's newest whole checkpoint, also of the newest demo here ("" for folder), for wish.epochs.

    Saves to the same folder. Raises CheckpointError where there is none, DataError where its images are gone.
    """
    checkpoint = Path(folder).expanduser().absolute() if folder else newest_folder(Path.cwd())
    before = read_setting(checkpoint)
    directory = before.directory if wish.directory is None else _find_images(wish, say)
    name, train, _ = image_sets(directory)
    if name != before.data:
        raise DataError(f"{checkpoint} is of a demo on {before.data}, and what is found now is {name}")
    setting = msgspec.structs.replace(before, directory=directory, mode=wish.mode or before.mode)
    start = find_start(checkpoint)
    setting = with_more_epochs(setting, start, wish.epochs or 1)
    left = setting.batches - settled_batches(start)
    say(f"LeNet on {name} goes on from round {start.document.round} in {near(checkpoint)},")
    say(f"for {left} batches more, to the end of epoch {setting.batches // setting.batches_per_epoch}:")
    folders = Folders.beside(Path.cwd(), str(checkpoint))
    result = setting.train_together(Saving(folders.run("together"), str(checkpoint), resume=True), _Progress(say))
    mark_folder(checkpoint, setting)
    say(
        f"{result.raw['batches']} batches in {result.raw['training_s']:.1f} s, {result.rounds} rounds, shares "
        f"{' / '.join(percent(share) for share in result.shares)}; now {percent(accuracy_of(result))} right."
    )
    say(f"One more epoch from there: {command_of(checkpoint)}")
    found = {"directory": str(checkpoint), "command": command_of(checkpoint)}
    return {
        "setting": msgspec.to_builtins(setting),
        "train_images": len(train),
        "resumed_from": result.resumed_from,
        "together": run_figures(result),
        "checkpoint": found,
    }


def _find_images(wish: Wish, say: Say) -> str | None:
    """The directory that every process reads them from; None: none has Fashion-MNIST, so the digits it is."""
    if wish.directory is not None:
        return str(Path(wish.directory).expanduser().absolute())
    found = installed_directory()
    if found is None and wish.may_fetch:
        source, found = wish.source, cache_directory()
        say(f"Fashion-MNIST is fetched once, {source.megabytes:.0f} MB from {source.address} to {found}.")
        try:
            fetch(source, found)
        except FetchError as error:
            say(f"scikit-learn's digits instead of Fashion-MNIST: {str(error).partition(chr(10))[0]}")
            found = None
    elif found is None:
        say("scikit-learn's digits instead of Fashion-MNIST, which is not here: --fetch brings it, --data names it.")
    return None if found is None else str(found)


def _times(epochs: int) -> str:
    return {1: "once", 2: "twice"}.get(epochs, f"{epochs} times")


@dataclass(frozen=True)
class Choice:
    """What is trained, before anything was measured. images: to learn."""

    name: str
    directory: str | None
    recipe: Recipe
    mode: str
    images: int


def _fit(choice: Choice, say: Say) -> Setting:
    """Devices that are this processor, padded, and as many images as there is time for."""
    per_epoch, recipe = batches_of(choice.images), choice.recipe
    probe = Case("demo", "solo", ("cpu",), _probe(recipe.lr, choice.directory), LENET_BATCH_SIZE, per_epoch)
    raw_ms = measure_alone(probe, "cpu", 1, SOLO_STEPS).raw_ms
    fast_ms, slow_ms = PAD_TO_RAW * raw_ms, SLOW_RATIO * PAD_TO_RAW * raw_ms
    say(
        f"A step takes {raw_ms:.1f} ms of this processor. Three emulated devices are it, padded: "
        f"one of {fast_ms:.0f} ms a step, two of {slow_ms:.0f} ms."
    )
    return Setting(
        data=choice.name,
        directory=choice.directory,
        lr=recipe.lr,
        has_outer=recipe.has_outer,
        mode=choice.mode,
        devices=(f"emulated:{fast_ms:.2f}ms", *[f"emulated:{slow_ms:.2f}ms"] * 2),
        images=choice.images,
        batches=_batches_in_time(recipe.epochs * per_epoch, fast_ms, say),
    )


def _probe(lr: float, directory: str | None) -> str:
    return lenet_entry(lr, directory, is_tested=False)


def _rates(setting: Setting) -> dict[str, float]:
    """Steps per second of each device alone, with the threads that it has beside the others."""
    entry, per_epoch = _probe(setting.lr, setting.directory), setting.batches_per_epoch
    case = Case("demo", "solo", setting.devices, entry, LENET_BATCH_SIZE, per_epoch)
    threads = threads_per_rank(len(setting.devices))
    return {
        device: measure_alone(case, device, threads, _solo_steps(device)).rate
        for device in dict.fromkeys(setting.devices)
    }


def _solo_steps(device: str) -> int:
    step_s = float(device.removeprefix("emulated:").removesuffix("ms")) / 1e3
    return max(LEAST_SOLO_STEPS, min(SOLO_STEPS, int(SOLO_S / step_s)))


def _batches_in_time(wanted: int, fast_ms: float, say: Say) -> int:
    """As many as both runs can do in TRAINING_S; fewer than wanted only where this machine is slow."""
    speed_up = 1.0 + 2.0 / SLOW_RATIO
    possible = max(1, int(TRAINING_S / (fast_ms / 1e3 * (1.0 + 1.0 / speed_up))))
    if possible < wanted:
        say(f"This machine is slow or busy: {possible * LENET_BATCH_SIZE} images are trained instead of all.")
    return min(wanted, possible)


def _train(setting: Setting, folders: Folders, say: Say) -> Figures:
    rates = _rates(setting)
    fastest, every = rates[setting.devices[0]], sum(rates[device] for device in setting.devices)
    say(f"The fast device alone, for about {setting.batches / fastest:.0f} s:")
    alone = setting.train_alone(Saving(folders.run("alone")))
    for epoch in alone.metrics:
        if "accuracy" in epoch:
            say(f"  epoch {epoch['epoch'] + 1}: {percent(epoch['accuracy'])} right, loss {epoch['loss']:.3f}")
    say(f"The three together ({setting.mode}), for about {setting.batches / every:.0f} s:")
    saving = Saving(folders.run("together"), str(folders.checkpoint))
    return Figures(setting, alone, setting.train_together(saving, _Progress(say)), rates)


@dataclass
class _Progress:
    """The view of a run that says each test as it ends."""

    say: Say

    def record(self, record: dict[str, Any]) -> None:
        if record["kind"] == "evaluation":
            right = percent(record["metrics"].get("accuracy"))
            self.say(f"  epoch {record['epoch'] + 1}: {right} right, after {record['time_s']:.1f} s")
        elif record["kind"] == "phase" and record["phase"] == "training":
            self.say(f"  all three are there after {record['time_s']:.1f} s")

    def close(self) -> None:
        """Nothing is open."""
