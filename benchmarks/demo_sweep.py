"""Which learning rate, which outer optimizer, how many epochs: the settings of `fdl demo`.

Trains LeNet alone and on three unequal emulated ranks with every setting below, and prints a table in Markdown:

    python benchmarks/demo_sweep.py [--images DIRECTORY] [--epochs 2] [--step-ms 6]

Pads are short, because accuracy depends on how the batches are dealt and not on how long they take.
"""

from __future__ import annotations

import argparse

from flodl.bench.demo_setting import Saving, Setting, accuracy_of, batches_of
from flodl.bench.efficiency import SLOW_RATIO
from flodl.bench.workloads import image_sets

LEARNING_RATES = (0.02, 0.05, 0.1)


def sweep(directory: str | None, epochs: int, step_ms: float) -> None:
    """Prints one line per setting as it is done."""
    name, train, _ = image_sets(directory)
    batches = batches_of(len(train))
    devices = tuple(f"emulated:{step_ms * ratio:.2f}ms" for ratio in (1.0, SLOW_RATIO, SLOW_RATIO))
    print(f"{name}, {epochs} epochs of {batches} batches, pads {', '.join(devices)}\n")
    print("| lr | alone | together | together, DiLoCo | rounds | shares |\n|---|---|---|---|---|---|")
    for lr in LEARNING_RATES:
        plain, outer = (
            Setting(name, directory, lr, has_outer, "cpu-cadence", devices, len(train), epochs * batches)
            for has_outer in (False, True)
        )
        alone, together = plain.train_alone(Saving()), plain.train_together(Saving())
        stepped = outer.train_together(Saving())
        right = " | ".join(f"{100 * (accuracy_of(result) or 0.0):.1f} %" for result in (alone, together, stepped))
        shares = " / ".join(f"{100 * share:.0f}" for share in together.shares)
        print(f"| {lr:g} | {right} | {together.rounds}, {stepped.rounds} | {shares} % |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", help="a directory with the files of Fashion-MNIST")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--step-ms", type=float, default=6.0)
    given = parser.parse_args()
    sweep(given.images, given.epochs, given.step_ms)
