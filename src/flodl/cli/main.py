"""The root of `fdl`: the table of subcommands, the version, and how an error is shown."""

import difflib
import importlib
import importlib.metadata
from dataclasses import dataclass
from typing import Any

import click

from flodl.errors import FlodlError


@dataclass(frozen=True)
class Subcommand:
    """target: "module:function" of a click command, imported when the subcommand is called; summary: for --help."""

    target: str
    summary: str

    def load(self) -> click.Command:
        module, _, function = self.target.partition(":")
        command = getattr(importlib.import_module(module), function)
        assert isinstance(command, click.Command), self.target
        return command


SUBCOMMANDS = {
    "bench": Subcommand("flodl.cli.bench:bench", "Measure flodl on this machine."),
    "demo": Subcommand("flodl.cli.demo:demo", "Train LeNet on real images, alone and on three unequal ranks."),
    "test": Subcommand("flodl.cli.testing:test", "Run the tests of a flodl checkout, part by part."),
}


class LazyGroup(click.Group):
    """A group whose help is drawn from the table, so that `fdl --help` imports no subcommand."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return SUBCOMMANDS[cmd_name].load() if cmd_name in SUBCOMMANDS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in SUBCOMMANDS and not name.startswith("-"):
            near = difflib.get_close_matches(name, SUBCOMMANDS, n=1)
            advice = f"Did you mean '{near[0]}'?" if near else f"There are: {', '.join(sorted(SUBCOMMANDS))}."
            raise click.UsageError(f"No command '{name}'. {advice}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, SUBCOMMANDS[name].summary) for name in self.list_commands(ctx)])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except FlodlError as error:
            if ctx.params["traceback"]:
                raise
            click.echo(f"fdl: {error}", err=True)
            ctx.exit(1)


def version_line() -> str:
    """`flodl 0.1.0 (native core: avx2)`, or why there is no native core."""
    try:
        version = importlib.metadata.version("flodl")
    except importlib.metadata.PackageNotFoundError:
        version = "(source tree, not installed)"
    try:
        native = importlib.import_module("flodl.native")
        return f"flodl {version} (native core: {native.isa()})"
    except (FlodlError, ImportError) as error:
        reason = str(error).splitlines()[0]
        return f"flodl {version} (no native core: {reason})"


def _show_version(ctx: click.Context, _parameter: click.Parameter, is_asked: bool) -> None:
    if is_asked and not ctx.resilient_parsing:
        click.echo(version_line())
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show the version."
)
@click.option("--traceback", is_flag=True, envvar="FDL_TRACEBACK", help="Show where in the code an error arose.")
def root(traceback: bool) -> None:
    """Train a PyTorch model on devices of unequal speed, and look after the runs."""


def main() -> None:
    """The console script."""
    root.main(prog_name="fdl")
