"""The demo: what one fast device does alone, what it does with two slow ones beside it, and the figures of both."""

from __future__ import annotations

from collections.abc import Iterator

from flodl.bench.efficiency import Case, solo_rates
from flodl.bench.workloads import LENET_BATCH_SIZE
from flodl.devices.cpu import threads_per_rank
from flodl.result import RunResult
from flodl.trainer import Trainer

SLOW_RATIO = 4.7
PAD_TO_RAW = 3.0
"""Pads well over the real step, so that three ranks on two cores do not disturb each other and E is about scheduling."""


def run_demo(directory: str | None, epochs: int, mode: str) -> Iterator[str]:
    """Lines for the terminal, as they become known. Raises DataError where there are no images."""
    from flodl.bench.workloads import image_sets

    name, train, test = image_sets(directory)
    entry = "flodl.bench.workloads:lenet"
    batches = -(-len(train) // LENET_BATCH_SIZE)
    yield f"LeNet on {name}: {len(train)} images to learn, {len(test)} to test."
    case = Case("demo", mode, ("cpu",), entry, LENET_BATCH_SIZE, batches)
    raw_ms = 1000.0 / solo_rates(("cpu",), case, 1, steps=60)["cpu"]
    fast, slow = (f"emulated:{PAD_TO_RAW * raw_ms * ratio:.2f}ms" for ratio in (1.0, SLOW_RATIO))
    devices = (fast, slow, slow)
    rates = solo_rates(devices, case, threads_per_rank(3), steps=60)
    yield f"A real step takes {raw_ms:.1f} ms. Emulated: one device of {1000 / rates[fast]:.0f} ms, two of {1000 / rates[slow]:.0f} ms."

    settings = {"batch_size": LENET_BATCH_SIZE, "epochs": epochs, "seed": 0}
    alone = Trainer(entry=entry, mode="solo", devices=[fast], **settings).run()
    yield from _figures("alone", alone)
    together = Trainer(entry=entry, mode=mode, devices=list(devices), **settings).run()
    yield from _figures("three ranks", together)
    raw = together.raw
    possible = sum(
        rates[device] * (raw["training_s"] - sum(rank["pauses_s"].values()))
        for device, rank in zip(devices, raw["ranks"], strict=True)
    )
    wall = sum(rates[device] for device in devices) * together.wall_s
    shares = ", ".join(f"{100 * share:.1f} %" for share in together.shares)
    yield f"  shares {shares}; E {raw['batches'] / possible:.3f}, E_wall {raw['batches'] / wall:.3f}; {together.rounds} rounds"
    yield f"Three ranks were {alone.wall_s / together.wall_s:.2f} x as fast as the fast device alone."
    yield f"What each run did is in {alone.run_directory} and {together.run_directory}."


def _figures(name: str, result: RunResult) -> Iterator[str]:
    for epoch in result.metrics:
        accuracy = epoch.get("accuracy", epoch.get("metrics", {}).get("accuracy"))
        scored = "" if accuracy is None else f", accuracy {100 * accuracy:.1f} %"
        yield f"  {name}: epoch {epoch['epoch']}: loss {epoch['loss']:.4f}{scored}"
    yield f"  {name}: {result.wall_s:.1f} s"
