"""The program that this process runs: how it was started, and whether starting it again leads to the same call."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from types import ModuleType

from flodl.plan import sources

# What runs other programs' functions or cells. Started again, each would do all of its own work before it came back
# to the call, or never come back.
RUNNERS = frozenset(
    {
        "bpython",
        "code",
        "debugpy",
        "doctest",
        "idlelib",
        "ipykernel",
        "ipykernel_launcher",
        "ipython",
        "jupyter",
        "nose2",
        "pdb",
        "ptpython",
        "py.test",
        "pytest",
        "unittest",
    }
)
_VALUE_LETTERS = "cmWX"
_LONG_VALUE_OPTION = "--check-hash-based-pycs"


@dataclass(frozen=True)
class Program:
    """kind: script, module, command (-c) or stdin. options: the interpreter's; arguments: the program's own."""

    kind: str
    name: str = ""
    options: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()

    def command(self, executable: str) -> tuple[str, ...]:
        """The command line that starts it again; for a script or a module."""
        start = ("-m", self.name) if self.kind == "module" else (self.name,)
        return (executable, *self.options, *start, *self.arguments)


def parse_command_line(argv: Sequence[str]) -> Program:
    """argv: as in sys.orig_argv. `-i` is left out of the options: a prompt after the program is no part of it."""
    options: list[str] = []
    at = 1
    while at < len(argv):
        word = argv[at]
        at += 1
        if word == "--":
            break
        if word == "-":
            return Program("stdin", options=tuple(options), arguments=tuple(argv[at:]))
        if not word.startswith("-"):
            at -= 1
            break
        if word.startswith("--"):
            options.append(word)
            if word == _LONG_VALUE_OPTION:
                options += argv[at : at + 1]
                at += 1
            continue
        flags, letter, value = _split_letters(word)
        if flags:
            options.append("-" + flags)
        if letter and not value:
            value = argv[at] if at < len(argv) else ""
            at += 1
        if letter in ("c", "m"):
            kind = "module" if letter == "m" else "command"
            return Program(kind, value, tuple(options), tuple(argv[at:]))
        if letter:
            options += ["-" + letter, value]
    if at >= len(argv):
        return Program("stdin", options=tuple(options))
    return Program("script", argv[at], tuple(options), tuple(argv[at + 1 :]))


def _split_letters(word: str) -> tuple[str, str, str]:
    """ "-uWerror" is ("u", "W", "error"): flags without i, an option that takes a value, what is joined to it."""
    for place, letter in enumerate(word[1:], start=1):
        if letter in _VALUE_LETTERS:
            return word[1:place].replace("i", ""), letter, word[place + 1 :]
    return word[1:].replace("i", ""), "", ""


def why_not_again(main: ModuleType | None = None) -> str:
    """Why starting this program again would not lead back to the present call; "" where it would.

    main: the module `__main__`, for tests.
    """
    start = sources.started()
    program = parse_command_line(start.argv)
    if _is_ipython_running() or _runner(program) in ("ipykernel", "ipykernel_launcher", "jupyter", "ipython"):
        return "this is a notebook or an IPython session"
    if "multiprocessing" in sys.modules and sys.modules["multiprocessing"].parent_process() is not None:
        return "this process was started by multiprocessing, and its program is its parent's"
    if (test := sources.running_test()) is not None:
        return f"pytest is running {test}"
    if _runner(program) in RUNNERS:
        return f"this program was started by {_runner(program)}"
    if hasattr(sys, "ps1") or program.kind == "stdin":
        return "this is an interactive prompt, or a program read from standard input"
    if program.kind == "command":
        return "this program was given to python -c"
    return _why_not_found_again(program, main or sys.modules["__main__"], start.directory)


def _why_not_found_again(program: Program, main: ModuleType, directory: str) -> str:
    has_source = getattr(main, "__file__", None) is not None or getattr(main, "__spec__", None) is not None
    if not sys.executable or not has_source or getattr(sys, "frozen", False):
        return "Python is embedded in another program"
    if program.kind == "script":
        path = os.path.join(directory, program.name)
        if not (os.path.isfile(path) or os.path.isdir(path)):
            return f"the script {path} cannot be read a second time"
    return ""


def is_being_prepared() -> bool:
    """Whether multiprocessing is importing the script anew in a child of its own, to find a function there."""
    if "multiprocessing" not in sys.modules:
        return False
    return bool(getattr(sys.modules["multiprocessing"].current_process(), "_inheriting", False))


def command_again() -> tuple[str, ...]:
    """The command line that starts this program again, from the folder it was started in."""
    return parse_command_line(sources.started().argv).command(sys.executable)


def _runner(program: Program) -> str:
    if program.kind == "module":
        return program.name.partition(".")[0].lower()
    if program.kind == "script":
        name = PurePath(program.name.replace("\\", "/")).name.lower()
        return name.removesuffix(".exe").removesuffix("-script.py").removesuffix(".py")
    return ""


def _is_ipython_running() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return shell is not None and shell() is not None
