"""The bootstrap: what ./fdl plans and says on systems that are not this one. Nothing is installed here."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHELL = shutil.which("dash") or "sh"
BASE_PYTHON = getattr(sys, "_base_executable", sys.executable)
OS_RELEASES = {
    "debian": 'ID=debian\nVERSION_ID="12"\n',
    "ubuntu": 'ID=ubuntu\nID_LIKE=debian\nVERSION_ID="24.04"\n',
    "fedora": "ID=fedora\nVERSION_ID=43\n",
    "rocky": 'ID="rocky"\nID_LIKE="rhel centos fedora"\nVERSION_ID="9.5"\n',
    "rocky8": 'ID="rocky"\nID_LIKE="rhel centos fedora"\nVERSION_ID="8.10"\n',
    "arch": "ID=arch\n",
    "alpine": "ID=alpine\nVERSION_ID=3.22.0\n",
    "other": "ID=plan9\n",
}
# What fdl itself calls. The compilers are left out on purpose.
PLAIN_TOOLS = ("dirname", "readlink", "sed", "tr", "uname", "sh")

pytestmark = pytest.mark.skipif(os.name != "posix", reason="fdl is a shell script")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the bootstrap reads of a checkout, at a path with a blank."""
    root = tmp_path / "my checkout"
    (root / "native" / "core").mkdir(parents=True)
    (root / "cmake").mkdir()
    (root / "src" / "flodl").mkdir(parents=True)
    (root / "src" / "flodl" / "__init__.py").write_text("")
    (root / "native" / "core" / "pool.cc").write_text("int x;\n")
    (root / "CMakeLists.txt").write_text("project(flodl)\n")
    for name in ("fdl", "pyproject.toml"):
        shutil.copy2(ROOT / name, root / name)
    shutil.copytree(ROOT / "tools", root / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    return root


def fake_path(folder: Path, **programs: str) -> str:
    """A PATH with the plain tools and these programs, each given as the body of a shell script."""
    folder.mkdir()
    for tool in PLAIN_TOOLS:
        found = shutil.which(tool)
        assert found is not None, tool
        (folder / tool).symlink_to(found)
    for name, body in programs.items():
        path = folder / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    return str(folder)


def release(folder: Path, name: str) -> str:
    path = folder / f"{name}-release"
    path.write_text(OS_RELEASES[name])
    return str(path)


def run_fdl(root: Path, env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SHELL, str(root / "fdl"), *arguments],
        env={"FDL_DRY_RUN": "1", "HOME": "/nonexistent", **env},
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def with_python(body: str = "") -> str:
    """The body of a python3 that is this interpreter."""
    return f'{body}\nexec "{BASE_PYTHON}" "$@"'


def bootstrap_code(checkout: Path, code: str, **env: str) -> str:
    """What this code prints when it is run with the bootstrap's modules in reach."""
    prelude = f"import sys; sys.path.insert(0, {str(checkout / 'tools' / 'bootstrap')!r})\n"
    done = subprocess.run(
        [BASE_PYTHON, "-I", "-S", "-B", "-c", prelude + code], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", [name for name in ("sh", "dash", "bash") if shutil.which(name)])
def test_the_shell_script_parses(name: str) -> None:
    subprocess.run([name, "-n", str(ROOT / "fdl")], check=True)


def test_the_batch_file_has_windows_line_ends() -> None:
    text = (ROOT / "fdl.cmd").read_bytes()
    assert text.count(b"\r\n") == text.count(b"\n") > 20


def test_a_dry_run_plans_the_stages_in_order_and_touches_nothing(checkout: Path, tmp_path: Path) -> None:
    path = fake_path(tmp_path / "bin", python3=with_python(), **{"c++": "exit 0", "ninja": "exit 0"})
    before = sorted(checkout.rglob("*"))
    done = run_fdl(checkout, {"PATH": path, "FDL_NO_SYSTEM_PACKAGES": "1"}, "demo", "--ranks", "3")
    assert done.returncode == 0, done.stderr
    steps = [r"-m venv '.*my checkout/\.venv'", r"scikit-build-core.*nanobind.*cmake>=3\.24", r"torch==", r"--editable"]
    lines = done.stdout.splitlines()
    assert len(lines) == len(steps) + 1
    for line, step in zip(lines, steps, strict=False):
        assert re.search(step, line), (line, step)
    assert lines[-1].endswith("my checkout/.venv/bin/fdl' demo --ranks 3")
    assert sorted(checkout.rglob("*")) == before


def test_a_symbolic_link_leads_to_the_checkout(checkout: Path, tmp_path: Path) -> None:
    path = fake_path(tmp_path / "bin", python3=with_python(), **{"c++": "exit 0"})
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "fdl").symlink_to(checkout / "fdl")
    done = run_fdl(tmp_path / "elsewhere", {"PATH": path, "FDL_NO_SYSTEM_PACKAGES": "1"}, "demo")
    assert done.returncode == 0, done.stderr
    assert f"{checkout}/.venv" in done.stdout


@pytest.mark.parametrize(
    ("system", "line"),
    [
        ("debian", "apt-get update && apt-get install -y --no-install-recommends g++"),
        ("ubuntu", "apt-get update && apt-get install -y --no-install-recommends g++"),
        ("fedora", "dnf install -y gcc-c++"),
        ("rocky", "dnf install -y gcc-c++"),
        ("rocky8", "dnf install -y gcc-toolset-13-gcc-c++   (then: export CXX="),
        ("arch", "pacman -S --needed gcc"),
        ("alpine", "apk add g++"),
        ("other", "install a C++20 compiler with what this system uses"),
    ],
)
def test_a_missing_compiler_is_named_before_anything_is_installed(
    checkout: Path, tmp_path: Path, system: str, line: str
) -> None:
    path = fake_path(tmp_path / "bin", python3=with_python())
    env = {"PATH": path, "FDL_OS_RELEASE": release(tmp_path, system), "FDL_NO_SYSTEM_PACKAGES": "1"}
    done = run_fdl(checkout, env, "--version")
    assert done.returncode == 1
    assert "missing: a C++20 compiler" in done.stderr
    assert f"fdl: Install with:  {line}" in done.stderr
    assert done.stdout == ""


def test_a_compiler_that_knows_no_cxx20_counts_as_missing(checkout: Path, tmp_path: Path) -> None:
    old = 'case "$*" in *-std=c++20*) exit 1 ;; esac'
    path = fake_path(tmp_path / "bin", python3=with_python(), **{"c++": old})
    done = run_fdl(checkout, {"PATH": path, "FDL_NO_SYSTEM_PACKAGES": "1"})
    assert done.returncode == 1
    assert "missing: a C++20 compiler" in done.stderr


def test_a_missing_venv_module_is_named(checkout: Path, tmp_path: Path) -> None:
    # The bootstrap asks the interpreter's own path, so the stand-in tells it that this is the path.
    name = tmp_path / "bin" / "python3"
    no_venv = 'case "$*" in *ensurepip*) exit 1 ;; esac'
    path = fake_path(tmp_path / "bin", python3=with_python(no_venv), **{"c++": "exit 0"})
    code = (
        "from system import Interpreter, Need, System, missing\n"
        f"python = Interpreter({str(name)!r}, (3, 11, 2), 'python3')\n"
        "needs = missing(python)\n"
        "print(*[need.name for need in needs])\n"
        "print(System('debian').install_line(needs, python))"
    )
    names, line = bootstrap_code(checkout, code, PATH=path).splitlines()
    assert names.split()[0] == "venv"
    assert "compiler" not in names
    assert "python3-venv" in line


def test_the_packages_follow_the_interpreter(checkout: Path) -> None:
    code = (
        "from system import Interpreter, Need, System\n"
        "for package in ('python3', 'python3.13'):\n"
        "    print(*System('debian').packages(list(Need), Interpreter('/usr/bin/x', (3, 13, 0), package)))\n"
        "print(*System('arch').packages(list(Need), Interpreter('/usr/bin/x', (3, 13, 0), 'python3')))"
    )
    assert bootstrap_code(checkout, code).splitlines() == [
        "python3-venv g++ python3-dev",
        "python3.13-venv g++ python3.13-dev",
        "python gcc",
    ]


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root installs packages")
def test_root_installs_packages_only_where_nobody_can_be_asked_and_nobody_forbade_it(
    checkout: Path, tmp_path: Path
) -> None:
    path = fake_path(tmp_path / "bin", python3=with_python(), **{"apt-get": "exit 0"})
    env = {"PATH": path, "FDL_OS_RELEASE": release(tmp_path, "debian")}
    done = run_fdl(checkout, env)
    assert "installing g++ with apt-get (FDL_NO_SYSTEM_PACKAGES=1 forbids it)" in done.stderr
    planned = done.stdout.splitlines()
    assert planned[:2] == ["+ apt-get update -q", "+ apt-get install -qy --no-install-recommends g++"]
    fedora = run_fdl(checkout, {**env, "FDL_OS_RELEASE": release(tmp_path, "fedora")})
    assert fedora.returncode == 1
    assert fedora.stdout == ""


@pytest.mark.parametrize(
    ("system", "line"),
    [
        ("debian", "apt-get install -y python3 python3-venv"),
        ("fedora", "dnf install -y python3"),
        ("rocky", "dnf install -y python3.12"),
        ("arch", "pacman -S --needed python"),
        ("alpine", "apk add python3"),
    ],
)
def test_a_python_that_is_too_old_is_named(checkout: Path, tmp_path: Path, system: str, line: str) -> None:
    old = 'case "$*" in *print*) echo 3.9.2 ;; *) exit 1 ;; esac'
    path = fake_path(tmp_path / "bin", python3=old)
    done = run_fdl(checkout, {"PATH": path, "FDL_OS_RELEASE": release(tmp_path, system)}, "demo")
    assert done.returncode == 1
    assert "flodl needs Python 3.11 or newer; python3 is 3.9.2." in done.stderr
    assert f"Install one:  {line}\n" in done.stderr.replace("   (Ubuntu 22.04: python3.11 python3.11-venv)", "")


def test_no_python_at_all_is_said(checkout: Path, tmp_path: Path) -> None:
    done = run_fdl(checkout, {"PATH": fake_path(tmp_path / "bin")})
    assert done.returncode == 1
    assert "no Python is on the PATH" in done.stderr


def test_a_newer_python_beside_an_old_one_is_found(checkout: Path, tmp_path: Path) -> None:
    path = fake_path(tmp_path / "bin", python3="exit 1", **{"python3.12": with_python(), "c++": "exit 0"})
    done = run_fdl(checkout, {"PATH": path, "FDL_NO_SYSTEM_PACKAGES": "1"})
    assert done.returncode == 0, done.stderr


def test_fdl_python_is_not_second_guessed(checkout: Path, tmp_path: Path) -> None:
    old = 'case "$*" in *print*) echo 3.10.1 ;; *) exit 1 ;; esac'
    path = fake_path(tmp_path / "bin", python3=with_python(), mine=old, **{"c++": "exit 0"})
    env = {"PATH": path, "FDL_NO_SYSTEM_PACKAGES": "1"}
    refused = run_fdl(checkout, {**env, "FDL_PYTHON": "mine"})
    assert refused.returncode == 1
    assert "mine is 3.10.1" in refused.stderr
    assert run_fdl(checkout, {**env, "FDL_PYTHON": BASE_PYTHON}).returncode == 0


def test_where_torch_comes_from(checkout: Path) -> None:
    code = (
        "from torch_source import tested_version, torch_sources\n"
        "from pathlib import Path\n"
        f"version = tested_version(Path({str(checkout / 'tools' / 'tested-torch.txt')!r}))\n"
        "for platform, device in (('linux', ''), ('linux', 'nvidia'), ('darwin', ''), ('win32', '')):\n"
        "    sources = torch_sources(version, platform, device)\n"
        "    print(*[source.pip_args[-1].replace(version, 'V') for source in sources])\n"
    )
    expected = ["torch==V+cpu torch==V+cpu torch==V", "torch==V", "torch==V", "torch==V"]
    assert bootstrap_code(checkout, code).splitlines() == expected
    asked = bootstrap_code(checkout, code, FDL_TORCH="--index-url https://example.org/rocm torch")
    assert asked.splitlines() == ["torch"] * 4


@pytest.mark.parametrize(
    ("change", "stage"),
    [
        ("native/core/pool.cc", "core"),
        ("cmake/New.cmake", "core"),
        ("src/flodl/added.py", ""),
        ("pyproject.toml", "environment"),
        ("tools/tested-torch.txt", "environment"),
        ("native/tests/pool_test.cc", ""),
        ("README.md", ""),
    ],
)
def test_what_a_change_makes_stale(checkout: Path, change: str, stage: str) -> None:
    code = (
        "import json\n"
        "from pathlib import Path\n"
        "from checkout import Checkout\n"
        "from system import Interpreter\n"
        f"checkout = Checkout(Path({str(checkout)!r}))\n"
        "print(json.dumps(checkout.digests(Interpreter('/usr/bin/python3', (3, 11, 2), 'python3'))))"
    )
    before = bootstrap_code(checkout, code)
    path = checkout / change
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write("\n")
    after = bootstrap_code(checkout, code)
    digests = zip(before.strip("{}").split(", "), after.strip("{}").split(", "), strict=True)
    changed = [old.split(":")[0].strip('"') for old, new in digests if old != new]
    assert changed == ([stage] if stage else [])


def test_a_failed_command_shows_the_end_of_the_log_and_where_it_is(checkout: Path, tmp_path: Path) -> None:
    code = (
        "import os\n"
        "from pathlib import Path\n"
        "from console import Console, SetupError\n"
        f"console = Console(Path({str(tmp_path / 'logs' / 'setup.log')!r}), is_dry=False)\n"
        "try:\n"
        "    console.run(['sh', '-c', 'seq 100; exit 3'], dict(os.environ), 'it failed')\n"
        "except SetupError as error:\n"
        "    print(error)"
    )
    lines = bootstrap_code(checkout, code, PATH=os.environ["PATH"]).splitlines()
    assert lines[0] == "it failed"
    assert len(lines) == 32
    assert lines[-3] == "  | 100"
    assert "(exit 3 after" in lines[-2]
    assert lines[-1].endswith("logs/setup.log")


def test_a_second_setup_waits_for_the_first(checkout: Path, tmp_path: Path) -> None:
    prelude = (
        f"import sys; sys.path.insert(0, {str(checkout / 'tools' / 'bootstrap')!r})\n"
        "from pathlib import Path\n"
        "from console import Console\n"
        "from lock import held\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "console = Console(folder / 'log', is_dry=True)\n"
    )
    first = prelude + "with held(folder / 'lock', console):\n    print('held', flush=True)\n    sys.stdin.read()"
    second = prelude + "with held(folder / 'lock', console):\n    print('held', flush=True)"
    pipe = subprocess.PIPE
    with subprocess.Popen([BASE_PYTHON, "-I", "-c", first], stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with subprocess.Popen([BASE_PYTHON, "-I", "-c", second], stdout=pipe, stderr=pipe, text=True) as waiter:
            assert waiter.stderr is not None
            assert waiter.stderr.readline() == f"fdl: waiting for the setup that process {holder.pid} runs here\n"
            assert waiter.poll() is None
            holder.kill()  # a holder that dies leaves no lock behind
            assert waiter.communicate(timeout=30)[0] == "held\n"
            assert waiter.returncode == 0
