"""Run by ./fdl and fdl.cmd with the interpreter they found: completes .venv where it is stale, then becomes its fdl.

Only the standard library is imported. Nothing is installed outside the checkout, save what system.may_install allows.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from checkout import Checkout, Stamp
from console import Console, SetupError
from lock import held
from stages import Setup
from system import Interpreter


def main() -> int:
    checkout = Checkout(Path(__file__).resolve().parents[2])
    python = Interpreter.current()
    is_dry = os.environ.get("FDL_DRY_RUN") == "1"
    digests = checkout.digests(python)
    if is_dry or not is_complete(checkout, digests):
        try:
            set_up(checkout, python, digests, is_dry)
        except SetupError as error:
            for line in str(error).splitlines():
                print(f"fdl: {line}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("fdl: setup interrupted; the next call goes on from here", file=sys.stderr)
            return 130
    return hand_over(checkout, is_dry)


def is_complete(checkout: Checkout, digests: dict[str, str]) -> bool:
    return checkout.entry.exists() and checkout.python.exists() and Stamp(checkout.venv).read() == digests


def set_up(checkout: Checkout, python: Interpreter, digests: dict[str, str], is_dry: bool) -> None:
    build = checkout.root / "build"
    log = build / "fdl-setup.log"
    if is_dry:
        Setup(checkout, python, Console(log, is_dry=True)).complete(digests)
        return
    with held(build / "fdl-setup.lock", Console(log, is_dry=True)):
        if not is_complete(checkout, digests):
            Setup(checkout, python, Console(log, is_dry=False)).complete(digests)


def hand_over(checkout: Checkout, is_dry: bool) -> int:
    command = [str(checkout.entry), *sys.argv[1:]]
    if is_dry:
        print("+ " + shlex.join(command))
        return 0
    if os.name != "nt":
        os.execv(command[0], command)
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
