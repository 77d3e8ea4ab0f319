"""A Python process of its own with the tested flodl on its path, for what must be seen from outside."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import flodl

SOURCE = str(Path(flodl.__file__).parents[1])


def run_python(
    *arguments: str,
    directory: Path | None = None,
    environment: Mapping[str, str] | None = None,
    stdin: str = "",
) -> subprocess.CompletedProcess[str]:
    """Ends within a minute. pytest's own variable is not passed on: the process is no test."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    path = os.pathsep.join([SOURCE, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env={**inherited, "PYTHONPATH": path, **(environment or {})},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def output_of(*arguments: str, directory: Path | None = None, environment: Mapping[str, str] | None = None) -> str:
    """What a process that must end well wrote to its standard output."""
    done = run_python(*arguments, directory=directory, environment=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
