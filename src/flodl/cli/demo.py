"""`fdl demo`: one model on real images, alone and then on three unequal ranks, in a few minutes."""

from __future__ import annotations

import os
import time

import click


@click.command()
@click.option("--data", "directory", type=click.Path(), help="A directory with the four files of Fashion-MNIST.")
@click.option("--epochs", type=click.IntRange(1, 1000), help="How often all images are learnt; each set has its own.")
@click.option(
    "--mode",
    default="cpu-cadence",
    show_default=True,
    type=click.Choice(["cpu-sync", "cpu-cadence", "cpu-async"]),
    help="How the three ranks keep pace.",
)
def demo(directory: str | None, epochs: int | None, mode: str) -> None:
    """Train LeNet on real images alone and on three emulated ranks of unequal speed.

    The three are this processor, each step padded: one fast device and two that take 4.7 times as long.
    """
    # Beside other work, torch's OpenMP threads should wait and not spin. Read when torch is loaded.
    os.putenv("GOMP_SPINCOUNT", "1000")
    from flodl.bench.demo import run_demo

    began = time.monotonic()
    run_demo(directory, epochs, mode, click.echo)
    click.echo(f"The demo took {time.monotonic() - began:.0f} s.")
