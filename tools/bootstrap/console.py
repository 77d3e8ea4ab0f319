"""What a setup shows: short lines on stderr, everything else in a log file."""

import os
import shlex
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

TAIL_LINES = 30


class SetupError(Exception):
    """What failed, and on the following lines what to do."""


class Console:
    """Runs commands into the log. A dry run prints them on stdout instead and runs none."""

    def __init__(self, log: Path, is_dry: bool) -> None:
        self.log = log
        self.is_dry = is_dry
        if not is_dry:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text("", encoding="utf-8")

    def say(self, text: str) -> None:
        for line in text.splitlines():
            print(f"fdl: {line}", file=sys.stderr, flush=True)

    def attempt(self, command: Sequence[str], env: Mapping[str, str]) -> bool:
        """Runs the command; True when it exited with 0."""
        if self.is_dry:
            print("+ " + shlex.join(command), flush=True)
            return True
        started = time.monotonic()
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"\n+ {shlex.join(command)}\n")
            log.flush()
            try:
                code = subprocess.run(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=dict(env), check=False
                ).returncode
            except OSError as error:
                log.write(f"{error}\n")
                code = 127
            log.write(f"(exit {code} after {time.monotonic() - started:.1f} s)\n")
        return code == 0

    def run(self, command: Sequence[str], env: Mapping[str, str], failure: str) -> None:
        """Runs the command; raises SetupError with the end of the log when it fails."""
        if not self.attempt(command, env):
            raise SetupError(f"{failure}\n{self.tail()}")

    def tail(self) -> str:
        """The log's last lines, and where the log is."""
        if self.is_dry:
            return ""
        with self.log.open(encoding="utf-8", errors="replace") as log:
            lines = deque((line.rstrip() for line in log), maxlen=TAIL_LINES)
        return "\n".join([*(f"  | {line}" for line in lines), f"The whole log: {self.log}"])


def child_environment(bin_dir: Path) -> dict[str, str]:
    """The environment of pip and the compiler: the venv's programs first, no foreign Python path, no --user."""
    env = {name: value for name, value in os.environ.items() if name not in {"PYTHONHOME", "PYTHONPATH"}}
    env["PATH"] = os.pathsep.join([str(bin_dir), env.get("PATH", os.defpath)])
    env["PIP_USER"] = "0"
    env["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    return env
