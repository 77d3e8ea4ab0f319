"""`fdl demo`: one model on real images, alone and then on three unequal ranks, in a few minutes."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import click


@click.command()
@click.option("--data", "directory", type=click.Path(), help="A directory with the four files of Fashion-MNIST.")
@click.option(
    "--fetch/--no-fetch", default=None, help="Fetch Fashion-MNIST where it is missing. Default: on a terminal."
)
@click.option(
    "--epochs", type=click.IntRange(1, 1000), help="How often all images are learnt. Default: by the set; 1 more."
)
@click.option(
    "--mode",
    type=click.Choice(["cpu-sync", "cpu-cadence", "cpu-async"]),
    help="How the three ranks keep pace. Default: cpu-cadence, or as before.",
)
@click.option("--checkpoint", type=click.Path(), help="Save there. Default: a new folder under runs/.")
@click.option(
    "--resume",
    is_flag=False,
    flag_value="",
    metavar="[FOLDER]",
    help="Go on from the checkpoints of an earlier demo; without a folder, of the newest one under runs/.",
)
@click.option("--quiet", is_flag=True, help="Print nothing but warnings and errors.")
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, writable=True), help="Write the figures to a file."
)
def demo(
    directory: str | None,
    fetch: bool | None,
    epochs: int | None,
    mode: str | None,
    checkpoint: str | None,
    resume: str | None,
    quiet: bool,
    json_path: str | None,
) -> None:
    """Train LeNet on real images alone and on three emulated ranks of unequal speed.

    The three are this processor, each step padded: one fast device and two that take 4.7 times as long. The images are
    Fashion-MNIST from --data, from Debian's package dataset-fashion-mnist or fetched once into the cache; else the
    digits that scikit-learn ships.
    """
    if resume is not None and checkpoint is not None:
        raise click.UsageError("--resume saves where it resumes from: leave out --checkpoint.")
    # Beside other work, torch's OpenMP threads should wait and not spin. Read when torch is loaded.
    os.putenv("GOMP_SPINCOUNT", "1000")
    from flodl.trainer import require_torch

    require_torch()
    from flodl.bench.demo import Wish, resume_demo, run_demo
    from flodl.bench.demo_figures import write_figures

    say = _nothing if quiet else click.echo
    wish = Wish(directory, epochs, mode, checkpoint, may_fetch=sys.stdout.isatty() if fetch is None else fetch)
    began = time.monotonic()
    figures = run_demo(wish, say) if resume is None else resume_demo(wish, resume, say)
    wall_s = time.monotonic() - began
    if json_path is not None:
        write_figures(Path(json_path), {**figures, "wall_s": wall_s})
    say(f"The demo took {wall_s:.0f} s.")


def _nothing(_: str) -> None:
    """What a quiet demo says."""
