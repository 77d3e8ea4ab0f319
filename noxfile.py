"""Checks that need an environment of their own. `./fdl test` is the everyday one; these go beside it."""

import os
import shutil

import nox

nox.needs_version = ">=2025.5"
nox.options.sessions = ["lint", "types", "tests"]
nox.options.reuse_venv = "yes"

PROJECT = nox.project.load_toml("pyproject.toml")
TESTED_TORCH = "tools/tested-torch.txt"
BUILD_TOOLS = ("cmake>=3.24", "ninja")
SANITIZERS = ("asan", "ubsan", "tsan")


def find_clang() -> str:
    """clang++, or the newest that bears its version in its name, as Debian's do; empty if there is none."""
    names = ("clang++", *(f"clang++-{version}" for version in range(30, 13, -1)))
    return next((found for name in names if (found := shutil.which(name))), "")


def group(name: str) -> list[str]:
    """The requirements of one dependency group."""
    return nox.project.dependency_groups(PROJECT, name)


@nox.session
def tests(session: nox.Session) -> None:
    """The Python tests against a wheel built here. Arguments go to pytest."""
    session.install("-r", TESTED_TORCH, *group("test"))
    session.install(".[torch,demo]")
    session.run("pytest", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session
def lint(session: nox.Session) -> None:
    """Style of Python and C++."""
    session.install(*(text for text in group("dev") if text.startswith(("ruff", "clang-format"))))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    listed = session.run("git", "ls-files", "native/*.cc", "native/*.h", external=True, silent=True) or ""
    sources = [path for path in listed.splitlines() if "third_party" not in path]
    session.run("clang-format", "--dry-run", "-Werror", *sources)


@nox.session
def types(session: nox.Session) -> None:
    """mypy --strict over the package."""
    session.install("-r", TESTED_TORCH, *group("test"), *PROJECT["project"]["dependencies"])
    session.install(*(text for text in group("dev") if text.startswith("mypy")))
    session.run("mypy")


@nox.session
@nox.parametrize("preset", SANITIZERS)
def sanitize(session: nox.Session, preset: str) -> None:
    """The native tests under one sanitizer, with clang if it is here."""
    session.install(*BUILD_TOOLS)
    clang = find_clang()
    env = {"CXX": clang} if clang and "CXX" not in os.environ else {}
    session.run("cmake", "--preset", preset, env=env)
    session.run("cmake", "--build", "--preset", preset)
    session.run("ctest", "--preset", preset)


@nox.session
def fuzz(session: nox.Session) -> None:
    """The frame fuzzer for so many minutes: nox -s fuzz -- 10. Needs clang with libFuzzer."""
    session.install(*BUILD_TOOLS)
    clang = find_clang()
    if not clang:
        session.error("no clang++ here; on Debian: apt-get install clang libclang-rt-dev")
    seconds = round(float(session.posargs[0]) * 60) if session.posargs else 60
    session.run("cmake", "--preset", "fuzz", env={"CXX": clang})
    session.run("cmake", "--build", "--preset", "fuzz")
    session.run("build/fuzz/native/tests/frame_fuzzer", f"-max_total_time={seconds}", external=True)


@nox.session
def torture(session: nox.Session) -> None:
    """A hundred runs with a kill and thirty with a stop at random moments; prints the stalls."""
    session.install("-r", TESTED_TORCH, *group("test"))
    session.install(".[torch]")
    session.run("pytest", "-s", "-m", "torture", "tests/e2e", *session.posargs, env={"OMP_NUM_THREADS": "1"})
