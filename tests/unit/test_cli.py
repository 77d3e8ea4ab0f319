"""The root of `fdl`: what it imports, what it says about a wrong name, how it shows an error."""

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from flodl.cli import main as cli
from flodl.errors import FlodlError


@click.command()
def broken() -> None:
    raise FlodlError("the roof leaks at the north end\nPut a bucket under it.")


@pytest.fixture
def with_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.SUBCOMMANDS, "broken", cli.Subcommand(f"{__name__}:broken", "Fails."))
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])


def test_help_shows_the_table_and_imports_no_subcommand() -> None:
    code = (
        "import sys\n"
        "sys.argv = ['fdl', '--help']\n"
        "from flodl.cli.main import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0, end.code\n"
        "heavy = {'torch', 'numpy', 'sklearn', 'rich', 'flodl.trainer', 'flodl._native', 'flodl.cli.testing'}\n"
        "print('loaded:', sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == "Usage: fdl [OPTIONS] COMMAND [ARGS]..."
    assert any(line.split()[:1] == ["test"] for line in lines)
    assert lines[-1] == "loaded: []"


@pytest.mark.parametrize("name", sorted(cli.SUBCOMMANDS))
def test_every_subcommand_of_the_table_loads_and_has_help(name: str) -> None:
    result = CliRunner().invoke(cli.root, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"Usage: root {name}")


def test_the_version_names_the_native_core() -> None:
    result = CliRunner().invoke(cli.root, ["--version"])
    assert result.exit_code == 0
    assert result.output == cli.version_line() + "\n"
    assert result.output.startswith("flodl ")
    assert "(native core: " in result.output


def test_a_wrong_name_gets_the_nearest_one() -> None:
    result = CliRunner().invoke(cli.root, ["tset"])
    assert result.exit_code == 2
    assert "No command 'tset'. Did you mean 'test'?" in result.output


def test_a_name_like_no_other_gets_the_list() -> None:
    result = CliRunner().invoke(cli.root, ["quux"])
    assert result.exit_code == 2
    assert f"There are: {', '.join(sorted(cli.SUBCOMMANDS))}." in result.output


@pytest.mark.usefixtures("with_broken")
def test_an_error_of_flodl_is_two_lines_without_a_traceback() -> None:
    result = CliRunner().invoke(cli.root, ["broken"], env={"FDL_TRACEBACK": None})
    assert result.exit_code == 1
    assert result.output == "fdl: the roof leaks at the north end\nPut a bucket under it.\n"


@pytest.mark.usefixtures("with_broken")
@pytest.mark.parametrize(("arguments", "env"), [(["--traceback"], {}), ([], {"FDL_TRACEBACK": "1"})])
def test_the_traceback_is_there_for_who_asks(arguments: list[str], env: dict[str, str]) -> None:
    result = CliRunner().invoke(cli.root, [*arguments, "broken"], env=env)
    assert isinstance(result.exception, FlodlError)
