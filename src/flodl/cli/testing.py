"""`fdl test`: the parts of the project's own test suite, their counts and minutes. Needs a checkout of flodl."""

import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click

from flodl.errors import FlodlError

NO_TESTS_COLLECTED = 5  # pytest's exit code


@dataclass(frozen=True)
class Tally:
    """Tests by outcome. A check that is no test (a build, a linter) counts only when it fails, as one failure."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.passed + other.passed, self.failed + other.failed, self.skipped + other.skipped)

    def __str__(self) -> str:
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        return f"{self.passed} passed, {self.failed} failed{skipped}"


FAILURE = Tally(failed=1)


@dataclass(frozen=True)
class Suite:
    """A checkout and how its tests are run in it. Reports go to build/reports."""

    root: Path
    pytest_args: tuple[str, ...] = ()

    @property
    def reports(self) -> Path:
        return self.root / "build" / "reports"

    def environment(self) -> dict[str, str]:
        """The venv's programs first; one OpenMP thread per process unless the caller set another number."""
        env = dict(os.environ)
        env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
        env.setdefault("OMP_NUM_THREADS", "1")
        return env

    def call(self, *command: str) -> int:
        """Runs the command in the checkout with its output shown; the exit status."""
        click.secho("$ " + " ".join(command), dim=True)
        sys.stdout.flush()
        return subprocess.run(command, cwd=self.root, env=self.environment(), check=False).returncode

    def check(self, *command: str) -> Tally:
        """A command that is no test: nothing when it succeeds, a failure when it does not."""
        return FAILURE if self.call(*command) else Tally()

    def report(self, name: str) -> Path:
        """Where a JUnit report of that name goes; one of an earlier run is removed."""
        self.reports.mkdir(parents=True, exist_ok=True)
        path = self.reports / f"{name}.xml"
        path.unlink(missing_ok=True)
        return path


def read_junit(path: Path) -> Tally:
    """The counts of a JUnit report, as pytest and ctest write it. Zero if the file does not exist."""
    if not path.exists():
        return Tally()
    tally = Tally()
    top = ElementTree.parse(path).getroot()
    for suite in [top] if top.tag == "testsuite" else top.findall("testsuite"):
        count = {name: int(suite.get(name) or 0) for name in ("tests", "failures", "errors", "skipped", "disabled")}
        failed = count["failures"] + count["errors"]
        skipped = count["skipped"] + count["disabled"]
        tally += Tally(count["tests"] - failed - skipped, failed, skipped)
    return tally


def run_native(suite: Suite) -> Tally:
    """The native core with warnings as errors, and its tests."""
    for command in (["cmake", "--preset", "dev"], ["cmake", "--build", "--preset", "dev"]):
        if suite.call(*command):
            return FAILURE
    report = suite.report("native")
    code = suite.call("ctest", "--preset", "dev", "--output-junit", str(report))
    return _counted(read_junit(report), code)


def run_lint(suite: Suite) -> Tally:
    """Style and types, of Python and C++."""
    native = suite.root / "native"
    sources = (path for pattern in ("*.cc", "*.h", "*.cu") for path in native.rglob(pattern))
    formatted = sorted(str(path.relative_to(suite.root)) for path in sources if "third_party" not in path.parts)
    python = (sys.executable, "-m")
    return (
        suite.check(*python, "ruff", "check")
        + suite.check(*python, "ruff", "format", "--check")
        + suite.check("clang-format", "--dry-run", "-Werror", *formatted)
        + suite.check(*python, "mypy")
    )


def pytest_part(name: str, paths: Sequence[str]) -> Callable[[Suite], Tally]:
    """A part that gives these paths to one pytest."""

    def run(suite: Suite) -> Tally:
        report = suite.report(name)
        command = [sys.executable, "-m", "pytest", f"--junit-xml={report}", *suite.pytest_args, *paths]
        code = suite.call(*command)
        if code == NO_TESTS_COLLECTED and suite.pytest_args:
            code = 0
        return _counted(read_junit(report), code)

    return run


def _counted(tally: Tally, code: int) -> Tally:
    """The counts; a bad exit status that they do not explain (a crash, nothing collected) is a failure of its own."""
    return tally + FAILURE if code and not tally.failed else tally


PARTS: Mapping[str, Callable[[Suite], Tally]] = {
    "native": run_native,
    "lint": run_lint,
    "unit": pytest_part("unit", ["tests/test_architecture.py", "tests/unit", "tests/sim"]),
    "e2e": pytest_part("e2e", ["tests/e2e"]),
}


def find_checkout(package: Path, start: Path) -> Path:
    """The checkout that the package at this path is imported from; else the one that holds the start directory."""
    for folder in (*package.parents, start, *start.parents):
        pyproject = folder / "pyproject.toml"
        if pyproject.is_file() and (folder / "tests").is_dir():
            project = tomllib.loads(pyproject.read_text(encoding="utf-8")).get("project", {})
            if project.get("name") == "flodl":
                return folder
    raise FlodlError(
        f"fdl test: {start} is not inside a checkout of flodl\n"
        "The tests are not part of the installed package: clone the repository and call ./fdl test there."
    )


def missing_requirements(requirements: Iterable[str]) -> list[str]:
    """Those whose distribution is absent or below its lower bound."""
    return [text for text in requirements if not _is_met(text)]


def _is_met(requirement: str) -> bool:
    match = re.match(r"([A-Za-z0-9._-]+)(?:[^>]*>=\s*([0-9.]+))?", requirement)
    assert match is not None, requirement
    try:
        found = metadata.version(match[1])
    except metadata.PackageNotFoundError:
        return False
    return _release(found) >= _release(match[2] or "0")


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def install_groups(root: Path) -> None:
    """Installs what the dependency groups test and dev of the checkout still lack here. Raises FlodlError."""
    pyproject: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    groups = pyproject["dependency-groups"]
    wanted = missing_requirements([*groups["test"], *groups["dev"]])
    path = Suite(root).environment()["PATH"]
    wanted += [
        text for tool, text in (("cmake", "cmake>=3.24"), ("ninja", "ninja")) if not shutil.which(tool, path=path)
    ]
    if not wanted:
        return
    click.echo("installing what the tests need: " + ", ".join(wanted))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted]
    if subprocess.run(command, check=False).returncode:
        raise FlodlError(
            f"fdl test: pip could not install {', '.join(wanted)} into {sys.prefix}\n"
            "Call ./fdl test in the checkout, which uses a venv of its own, or install them by hand."
        )


@click.command()
@click.option("--part", "names", multiple=True, type=click.Choice(list(PARTS)), help="Only this part; may be repeated.")
@click.argument("pytest_args", nargs=-1, type=click.UNPROCESSED)
def test(names: tuple[str, ...], pytest_args: tuple[str, ...]) -> None:
    """Run the tests of a flodl checkout, part by part. What follows -- goes to pytest.

    The last line is "N passed, N failed[, N skipped]" over all parts; a build or a linter that fails counts as one
    failed. The exit status is 0 only when nothing failed.
    """
    suite = Suite(find_checkout(Path(__file__).resolve(), Path.cwd()), pytest_args)
    install_groups(suite.root)
    total = Tally()
    rows = []
    for name in [name for name in PARTS if not names or name in names]:
        click.secho(f"== {name}", bold=True)
        started = time.monotonic()
        tally = PARTS[name](suite)
        rows.append(f"{name:8} {(time.monotonic() - started) / 60:5.1f} min   {tally}")
        total += tally
    click.secho("== minutes", bold=True)
    click.echo("\n".join(rows))
    click.echo(str(total))
    if total.failed:
        raise SystemExit(1)
