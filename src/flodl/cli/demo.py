"""`fdl demo`: one model on real images, alone and then on three unequal ranks, in a few minutes."""

from __future__ import annotations

import time

import click


@click.command()
@click.option("--data", "directory", type=click.Path(), help="A directory with the files of Fashion-MNIST.")
@click.option("--epochs", default=2, show_default=True, type=click.IntRange(1, 50))
@click.option("--mode", default="cpu-cadence", show_default=True, help="How the three ranks keep pace.")
def demo(directory: str | None, epochs: int, mode: str) -> None:
    """Train LeNet on real images alone and on three emulated ranks of unequal speed.

    The three are this processor, each step padded: one fast device and two that take 4.7 times as long.
    """
    from flodl.bench.demo import run_demo

    began = time.monotonic()
    for line in run_demo(directory, epochs, mode):
        click.echo(line)
    click.echo(f"The demo took {time.monotonic() - began:.0f} s.")
