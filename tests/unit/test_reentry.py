"""Programs that are started again, seen from outside: each rank runs the user's script up to its own run().

The launcher is a small one that starts one rank, and neither it nor the rank needs torch.
"""

import json
from pathlib import Path

import pytest

from tests.unit.fresh_python import output_of, run_python

ENGINE = """
import json, multiprocessing, os, subprocess, sys, types
from dataclasses import dataclass
from typing import Any

import flodl
from flodl.plan import Role, inside, plan_to_dict

@dataclass
class LaunchRequest:
    plan: Any
    dataset_length: int
    run: str
    run_directory: str
    command: tuple
    directory: str
    environment: dict
    entry: Any
    earlier: tuple
    ordinal: int
    view: Any
    evaluates: bool
    quiet: bool
    recording: Any = None
    start: Any = None
    script_s: float = 0.0

def launch(request):
    # One rank, one life: its last line of output is the result.
    role = Role(request.run, 1, 0, request.ordinal, 0, request.run_directory, request.entry,
                plan_to_dict(request.plan), earlier=request.earlier)
    environment = {**request.environment, "FLODL_ROLE": role.to_json()}
    done = subprocess.run(request.command, cwd=request.directory, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    result = json.loads(done.stdout.splitlines()[-1])
    with open(os.path.join(request.run_directory, "result.json"), "w") as file:
        json.dump(result, file)
    return result

def run_rank(plan, parts, role):
    same = plan_to_dict(plan) == role.plan
    print(json.dumps({"ordinal": role.ordinal, "same": same, "argv": sys.argv[1:], "inside": inside()[1],
                      "directory": os.getcwd(), "rounds": 5 + role.ordinal}))
    sys.exit(0)

def run_solo(plan, parts, directory, tell=None, start=None):
    # As a loader with a spawned worker does; the result is the worker's exit code.
    worker = multiprocessing.get_context("spawn").Process(target=print, args=("worked",))
    worker.start()
    worker.join()
    if "--fail" in sys.argv:
        raise {"ValueError": ValueError, "Own": Own}[sys.argv[2]]("the first run failed\\nas it was told to")
    return {"rounds": worker.exitcode}

class Own(flodl.CheckpointError):
    pass

def fake(name, **contents):
    sys.modules[name] = types.SimpleNamespace(**contents)

fake("flodl.rank.checks", check_parts=lambda parts: None, check_devices=lambda plan: None,
     check_fit=lambda plan, length: None)
fake("flodl.rank.process", run_rank=run_rank)
fake("flodl.rank.solo", run_solo=run_solo)
fake("flodl.processes.launcher", launch=launch, LaunchRequest=LaunchRequest)

def trainer(**settings):
    return flodl.Trainer(model=object, optimizer=len, loss=len, data=[0] * 8,
                         **{"batch_size": 2, "devices": ["cpu"] * 2, **settings})
"""
TWICE = """
import engine, json, os
if __name__ == "__main__":
    os.chdir("/")
    os.environ["CHANGED"] = "yes"
    first = engine.trainer().run()
    second = engine.trainer(batch_size=4).run()
    print(json.dumps([first.raw, second.raw]))
"""
CAUGHT = """
import engine, json, os, sys
import flodl

def attempt(kind, **settings):
    try:
        return engine.trainer(**settings).run().rounds
    except kind as error:
        return [type(error).__name__, str(error)]

if __name__ == "__main__":
    first = {"--refuse": lambda: attempt(flodl.CheckpointError, checkpoint="ck", resume=True),
             "--fail": lambda: attempt((ValueError, flodl.CheckpointError), devices="cpu")}[sys.argv[1]]()
    if flodl.plan.role() is not None:
        with open("seen", "w") as file:
            json.dump(first, file)
    print(json.dumps([first, engine.trainer().run().rounds]))
"""
UNGUARDED = """
import engine
print("ended with", engine.trainer(devices=DEVICES).run().rounds)
"""
GUARDED = """
import engine
if __name__ == "__main__":
    print("ended with", engine.trainer(devices=DEVICES).run().rounds)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "engine.py").write_text(ENGINE)
    (tmp_path / "twice.py").write_text(TWICE)
    return tmp_path


@pytest.mark.parametrize("how", [("twice.py",), ("-m", "twice")], ids=" ".join)
def test_each_call_of_a_program_gets_its_own_ranks(folder: Path, how: tuple[str, ...]) -> None:
    arguments = ["two words", 'it\'s "quoted"', "$HOME"]
    first, second = json.loads(output_of(*how, *arguments, directory=folder))
    for ordinal, seen in enumerate((first, second)):
        wall_s = seen.pop("wall_s")
        assert wall_s > 0.0
        assert seen == {
            "ordinal": ordinal,
            "same": True,
            "argv": arguments,
            "inside": 1,
            "directory": "/",
            "rounds": 5 + ordinal,
        }
    assert len(list((folder / "runs").iterdir())) == 2


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        (("--refuse",), "CheckpointError", "there is no checkpoint in "),
        (("--fail", "ValueError"), "ValueError", "the first run failed\nas it was told to"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_a_program_caught_from_a_call_its_ranks_catch_there(
    folder: Path, how: tuple[str, ...], kind: str, words: str
) -> None:
    (folder / "caught.py").write_text(CAUGHT)
    first, second = json.loads(output_of("caught.py", *how, directory=folder).splitlines()[-1])
    assert (first[0], second) == (kind, 6)
    assert first[1].startswith(words)
    assert json.loads((folder / "seen").read_text()) == first


def test_a_program_without_the_guard_works_where_nothing_imports_it(folder: Path) -> None:
    (folder / "bare.py").write_text(UNGUARDED.replace("DEVICES", "['cpu'] * 2"))
    assert output_of("bare.py", directory=folder) == "ended with 5"


def test_a_child_that_imports_the_program_is_told_of_the_guard(folder: Path) -> None:
    (folder / "bare.py").write_text(UNGUARDED.replace("DEVICES", "'cpu'"))
    (folder / "guarded.py").write_text(GUARDED.replace("DEVICES", "'cpu'"))
    assert output_of("guarded.py", directory=folder) == "worked\nended with 0"
    done = run_python("bare.py", directory=folder)
    assert done.stdout == "ended with 1\n"
    assert "run() was reached while multiprocessing imports the script" in done.stderr
    assert 'Put the statements that the script runs under `if __name__ == "__main__":`' in done.stderr
