"""What a process learns from outside: its role, its mark, its start, and whether it can be started again."""

import json
import os
import signal
import sys
import types
from pathlib import Path

import pytest

from flodl.errors import PlanError
from flodl.plan import program, sources
from flodl.plan.program import Program, parse_command_line
from flodl.plan.sources import EarlierCall, Inside, Role, Started
from tests.unit.fresh_python import output_of, run_python

ROLE = Role(
    run="20261130-1",
    rank=2,
    generation=1,
    ordinal=1,
    link=7,
    run_directory="/runs/x",
    plan={"mode": "cpu-sync", "cluster": {"devices": ["cpu", "cpu"]}},
    threads=3,
    sys_path=("/a b", "/c"),
    earlier=(EarlierCall("/runs/earlier"), EarlierCall("", "PlanError", "devices = 0")),
)

TAKE = """
import json, os
import flodl
from flodl.plan import inside, role, sources
taken = role()
read, write = os.pipe()
child = os.fork()
if child == 0:
    os.write(write, json.dumps([role() is None, inside().pid == os.getppid()]).encode())
    os._exit(0)
os.waitpid(child, 0)
print(json.dumps({
    "role": json.loads(taken.to_json()),
    "variable": os.environ.get("FLODL_ROLE"),
    "mark": os.environ["FLODL_INSIDE"] == f"20261130-1:2:{os.getpid()}",
    "inside": inside()[:2],
    "child": json.loads(os.read(read, 100)),
}))
"""

START = """
import os, sys, json
os.environ["SET_BEFORE"] = "1"
import flodl
from flodl.plan import inside, role, started
os.chdir("/")
os.environ["SET_AFTER"] = "1"
sys.argv.append("changed")
start = started()
print(json.dumps([start.directory, start.argv[1:], "SET_BEFORE" in start.environment, "SET_AFTER" in start.environment,
    role(), inside()]))
"""

AGAIN = """
import sys
import flodl
from flodl.plan import program

def show(prefix=""):
    print(prefix + (program.why_not_again() or repr(program.command_again()[1:])), flush=True)

if __name__ == "__main__":
    if "--child" in sys.argv:
        import multiprocessing
        process = multiprocessing.get_context(sys.argv[2]).Process(target=show, args=(sys.argv[2] + ": ",))
        process.start()
        process.join()
    elif "--unlink" in sys.argv:
        import os
        os.remove(__file__)
        show()
    else:
        show()
"""


def test_a_role_survives_the_environment() -> None:
    assert Role.from_json(ROLE.to_json()) == ROLE
    assert Role.from_json(
        json.dumps({"run": "r", "rank": 0, "generation": 0, "ordinal": 0, "link": 3, "run_directory": "d"})
    )


def test_a_role_is_taken_once_and_leaves_a_mark() -> None:
    seen = json.loads(output_of("-c", TAKE, environment={sources.ROLE: ROLE.to_json()}))
    assert Role.from_json(json.dumps(seen["role"])) == ROLE
    assert seen["variable"] is None
    assert seen["mark"] is True
    assert seen["inside"] == ["20261130-1", 2]
    assert seen["child"] == [True, True], "a forked child has the mark and no role"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"run": "x"}', '{"colour": "red"}'])
def test_a_role_that_flodl_did_not_write(text: str) -> None:
    with pytest.raises(PlanError, match="FLODL_ROLE"):
        Role.from_json(text)


def test_an_import_with_such_a_role_fails_by_name() -> None:
    done = run_python("-c", "import flodl", environment={sources.ROLE: "{"})
    assert done.returncode == 1
    assert "PlanError: FLODL_ROLE = '{'" in done.stderr


def test_the_start_is_as_it_was_at_import(tmp_path: Path) -> None:
    script = tmp_path / "start.py"
    script.write_text(START)
    seen = json.loads(output_of("-u", "start.py", "a b", directory=tmp_path))
    assert seen == [str(tmp_path.resolve()), ["-u", "start.py", "a b"], True, False, None, None]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks /proc")
def test_the_age_of_a_process_begins_before_the_import() -> None:
    code = "import time; time.sleep(0.3); import flodl; print(flodl.plan.sources.running_s())"
    assert 0.3 < float(output_of("-c", code)) < 30.0


WAITING = """
import json, os, socket, subprocess, sys, time
from flodl.plan import Role
ours, theirs = socket.socketpair()
role = Role("r", 0, 0, 0, theirs.fileno(), "d")
code = "import flodl, os, time; print(os.getpid(), flush=True); time.sleep(600)"
if sys.argv[1] == "gone":
    ours.close()
child = subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()], stdout=subprocess.PIPE,
                         env={**os.environ, "FLODL_ROLE": role.to_json()})
print(child.stdout.readline().decode(), flush=True)
if sys.argv[1] == "gone":
    print(child.wait(), flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel tells of a parent's death")
def test_a_rank_that_runs_the_users_code_ends_with_its_launcher() -> None:
    done = run_python("-c", WAITING, "lives")
    # The rank has the launcher's stderr: run_python came back before its limit because the rank has ended.
    assert (done.returncode, done.stdout.strip().isdecimal()) == (-signal.SIGKILL, True), done.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel tells of a parent's death")
def test_a_rank_whose_launcher_is_gone_runs_nothing_of_the_users() -> None:
    assert run_python("-c", WAITING, "gone").stdout.split() == ["-9"]


@pytest.mark.parametrize(
    ("text", "mark"), [("run:3:99", Inside("run", 3, 99)), ("a:b:3:99", Inside("a:b", 3, 99)), (None, None)]
)
def test_the_mark(monkeypatch: pytest.MonkeyPatch, text: str | None, mark: Inside | None) -> None:
    monkeypatch.delenv(sources.INSIDE, raising=False)
    if text is not None:
        monkeypatch.setenv(sources.INSIDE, text)
    assert sources.inside() == mark


@pytest.mark.parametrize("text", ["", "3:99", "run:x:99", "run:3:", "run:-1:99"])
def test_a_mark_that_flodl_did_not_make(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(sources.INSIDE, text)
    with pytest.raises(PlanError, match="FLODL_INSIDE"):
        sources.inside()


def test_gpus_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 2)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))  # type: ignore[arg-type]
    assert sources.count_gpus() == 2
    cuda.is_available = lambda: False
    assert sources.count_gpus() == 0
    monkeypatch.setitem(sys.modules, "torch", None)  # type: ignore[arg-type]
    assert sources.count_gpus() == 0


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["train.py"], Program("script", "train.py")),
        (["train.py", "-m", "x y"], Program("script", "train.py", (), ("-m", "x y"))),
        (["-u", "-X", "dev", "train.py"], Program("script", "train.py", ("-u", "-X", "dev"))),
        (["-Werror", "-OO", "train.py"], Program("script", "train.py", ("-W", "error", "-OO"))),
        (["-m", "pkg.train", "--lr", "1"], Program("module", "pkg.train", (), ("--lr", "1"))),
        (["-umpkg.train"], Program("module", "pkg.train", ("-u",))),
        (["-i", "train.py"], Program("script", "train.py")),
        (["-ui", "train.py"], Program("script", "train.py", ("-u",))),
        (["-c", "print(1)", "a"], Program("command", "print(1)", (), ("a",))),
        (["-cprint(1)"], Program("command", "print(1)")),
        (["-Bc", "print(1)"], Program("command", "print(1)", ("-B",))),
        ([], Program("stdin")),
        (["-", "a"], Program("stdin", "", (), ("a",))),
        (["-q"], Program("stdin", "", ("-q",))),
        (["--", "-odd.py"], Program("script", "-odd.py")),
        (
            ["--check-hash-based-pycs", "always", "train.py"],
            Program("script", "train.py", ("--check-hash-based-pycs", "always")),
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value.kind,
)
def test_command_lines(argv: list[str], expected: Program) -> None:
    assert parse_command_line(["python", *argv]) == expected


@pytest.mark.parametrize(
    "argv", [["-u", "-X", "dev", "a.py", "-m"], ["-Wignore", "-m", "pkg", "a b", "'\""]], ids=" ".join
)
def test_a_command_line_means_the_same_again(argv: list[str]) -> None:
    first = parse_command_line(["python", *argv])
    assert parse_command_line(first.command("/usr/bin/python")) == first


@pytest.fixture
def again(tmp_path: Path) -> Path:
    (tmp_path / "pkg").mkdir()
    for path in (tmp_path / "again.py", tmp_path / "pkg" / "tool.py", tmp_path / "a dir" / "__main__.py"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(AGAIN)
    return tmp_path


def test_scripts_and_modules_can_be_started_again(again: Path) -> None:
    assert output_of("-u", "again.py", "it's", directory=again) == "('-u', 'again.py', \"it's\")"
    assert output_of("-m", "pkg.tool", "x y", directory=again) == "('-m', 'pkg.tool', 'x y')"
    assert output_of("a dir", directory=again) == "('a dir',)"


def test_what_does_not_lead_back_is_named(again: Path) -> None:
    assert output_of("-c", AGAIN) == "this program was given to python -c"
    assert "standard input" in run_python("-", stdin=AGAIN).stdout
    prompt = run_python(
        "-i", "-c", "import sys; sys.ps1", stdin="from flodl.plan import program\nprint(program.why_not_again())\n"
    )
    assert "interactive prompt" in prompt.stdout
    assert (
        "started by pdb" in run_python("-m", "pdb", "-c", "continue", "again.py", directory=again, stdin="q\n").stdout
    )
    assert "cannot be read a second time" in output_of("again.py", "--unlink", directory=again)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_of_multiprocessing_is_not_its_parent(again: Path, method: str) -> None:
    seen = output_of("again.py", "--child", method, directory=again)
    assert seen.startswith(f"{method}: ")
    assert "started by multiprocessing" in seen


def _started_as(monkeypatch: pytest.MonkeyPatch, *argv: str) -> None:
    monkeypatch.setattr(sources, "started", lambda: Started(os.getcwd(), ("python", *argv), {}))
    monkeypatch.setattr(sources, "running_test", lambda: None)


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (("/usr/bin/pytest", "-q"), "started by pytest"),
        (("-m", "pytest"), "started by pytest"),
        (("-m", "unittest", "tests"), "started by unittest"),
        (("C:\\py\\Scripts\\pytest.exe",), "started by pytest"),
        (("-m", "ipykernel_launcher", "-f", "kernel.json"), "notebook"),
        (("-m", "IPython"), "notebook"),
        (("/usr/bin/ipython",), "notebook"),
    ],
    ids=str,
)
def test_runners_of_other_programs(monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...], reason: str) -> None:
    _started_as(monkeypatch, *argv)
    assert reason in program.why_not_again()


def test_pytest_names_the_running_test() -> None:
    assert "pytest is running" in program.why_not_again()
    assert "test_pytest_names_the_running_test" in program.why_not_again()


def test_ipython_counts_while_it_has_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    _started_as(monkeypatch, __file__)
    main = types.ModuleType("__main__")
    main.__file__ = __file__
    shells: list[object] = [None]
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shells[-1]))  # type: ignore[arg-type]
    assert program.why_not_again(main) == ""
    shells.append(object())
    assert "IPython" in program.why_not_again(main)


def test_an_embedded_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    _started_as(monkeypatch, __file__)
    assert "embedded" in program.why_not_again(types.ModuleType("__main__"))
    main = types.ModuleType("__main__")
    main.__file__ = __file__
    monkeypatch.setattr(sys, "executable", "")
    assert "embedded" in program.why_not_again(main)


def test_a_start_folder_that_is_gone(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    code = "import os, sys; os.chdir(sys.argv[1]); os.rmdir(sys.argv[1]); "
    code += "import flodl; print(flodl.plan.started().directory)"
    assert output_of("-c", code, str(gone), environment={"PWD": "/somewhere"}) == "/somewhere"
