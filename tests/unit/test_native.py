"""The extension as Python sees it: its stub, errors, links and memory."""

import ast
import gc
import inspect
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import flodl
from flodl import errors, native
from flodl.errors import LinkError, NativeError
from flodl.native import Endpoint, EventKind, RankPage, SharedMemory
from tests.unit.fresh_python import output_of, run_python
from tests.unit.native_peer import DEADLINE_S, start, wait_for, write


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    made = Endpoint()
    yield made
    made.close()


# The stub


def parameters_of_stub(function: ast.FunctionDef) -> list[tuple[str, bool]]:
    arguments = function.args
    assert not arguments.vararg
    assert not arguments.kwarg
    assert not arguments.kwonlyargs
    required = len(arguments.args) - len(arguments.defaults)
    return [(argument.arg, i >= required) for i, argument in enumerate(arguments.args)]


def parameters_of_module(function: object) -> list[tuple[str, bool]]:
    ((signature, _, _),) = function.__nb_signature__  # type: ignore[attr-defined]
    # Defaults stand in it as \0, \1 ...; the rest is the syntax of a stub.
    parsed = ast.parse(re.sub(r"\\\d+", "...", signature) + ": ...").body[0]
    assert isinstance(parsed, ast.FunctionDef)
    return parameters_of_stub(parsed)


def members_of_stub(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    return {statement.name: statement for statement in body if isinstance(statement, ast.FunctionDef | ast.ClassDef)}


def test_the_stub_says_what_the_module_has() -> None:
    stub = Path(flodl.__file__).with_name("_native.pyi")
    declared = members_of_stub(ast.parse(stub.read_text(encoding="utf-8")).body)
    module = native.by_address
    assert set(declared) == {name for name in dir(module) if not name.startswith("_")}
    for name, statement in declared.items():
        found = getattr(module, name)
        if isinstance(statement, ast.FunctionDef):
            assert parameters_of_module(found) == parameters_of_stub(statement), name
        elif isinstance(statement, ast.ClassDef) and name != "EventKind":
            check_class(found, statement)


def check_class(found: type, statement: ast.ClassDef) -> None:
    declared = members_of_stub(statement.body)
    public = {name for name in vars(found) if not name.startswith("_")}
    assert {name for name in declared if name != "__init__"} == public, statement.name
    for name, member in declared.items():
        assert isinstance(member, ast.FunctionDef)
        decorators = {ast.unparse(decorator) for decorator in member.decorator_list}
        is_property = isinstance(inspect.getattr_static(found, name), property)
        assert is_property == ("property" in decorators), f"{statement.name}.{name}"
        if is_property:
            assert getattr(found, name).fset is None, f"{statement.name}.{name}"
        else:
            given = parameters_of_module(getattr(found, name))
            assert given == parameters_of_stub(member), f"{statement.name}.{name}"
            assert (given[:1] == [("self", False)]) == ("staticmethod" not in decorators), f"{statement.name}.{name}"


def test_the_stub_names_every_event_kind() -> None:
    stub = ast.parse(Path(flodl.__file__).with_name("_native.pyi").read_text(encoding="utf-8"))
    (kinds,) = (node for node in stub.body if isinstance(node, ast.ClassDef) and node.name == "EventKind")
    assert [ast.unparse(node.targets[0]) for node in kinds.body if isinstance(node, ast.Assign)] == [
        kind.name for kind in EventKind
    ]


# Errors


def test_a_missing_extension_names_the_install_page() -> None:
    script = (
        "import sys; sys.modules['flodl._native'] = None\n"
        "from flodl.errors import NativeError\n"
        "try:\n    from flodl import native\n"
        "except NativeError as error:\n    print(error.install_page); print(error)"
    )
    page, what, remedy = output_of("-c", script).splitlines()
    assert page == native.INSTALL_PAGE
    assert "flodl._native" in what
    assert page in remedy


def test_every_error_has_a_stable_code_and_two_lines() -> None:
    classes = [
        member for member in vars(errors).values() if inspect.isclass(member) and issubclass(member, errors.FlodlError)
    ]
    assert {error.__name__: error.code for error in classes} == {
        "FlodlError": "FDL-ERROR",
        "PlanError": "FDL-PLAN",
        "WireError": "FDL-WIRE",
        "LinkError": "FDL-LINK",
        "AdmissionError": "FDL-ADMISSION",
        "RoundAborted": "FDL-ROUND",
        "RunFailed": "FDL-RUN",
        "NativeError": "FDL-NATIVE",
        "CheckpointError": "FDL-CHECKPOINT",
    }
    for error in classes:
        first, second = str(error("what failed")).splitlines()
        assert first == "what failed"
        assert second
        assert str(error("what failed\nwhat to do")) == "what failed\nwhat to do"


def test_a_link_that_is_gone_is_a_link_error(endpoint: Endpoint) -> None:
    ours, theirs = socket.socketpair()
    link = endpoint.add_link(ours.detach(), 1)
    theirs.close()
    closed = wait_for(endpoint, EventKind.link_closed)
    assert closed.id == link
    with pytest.raises(LinkError):
        endpoint.send(link, b"too late")


def test_bytes_that_are_no_frame_close_the_link_and_say_why(endpoint: Endpoint) -> None:
    ours, theirs = socket.socketpair()
    link = endpoint.add_link(ours.detach(), 1)
    theirs.sendall(b"GET / HTTP/1.1\r\n\r\n")
    closed = wait_for(endpoint, EventKind.link_closed)
    assert closed.id == link
    assert "magic" in closed.reason
    theirs.close()


# Memory


def test_shared_memory_is_one_memory() -> None:
    memory = SharedMemory.create(10_000)
    assert memory.size == 10_000
    assert memory.read(0, 10_000) == bytes(10_000)
    memory.prefault()
    other = SharedMemory.adopt(memory.duplicate(True), True)
    write(other, 9_990, b"0123456789")
    assert memory.read(9_990, 10) == b"0123456789"
    assert memory.read(10_000, 0) == b""


@pytest.mark.parametrize(("offset", "size"), [(0, 10_001), (10_001, 0), (9_999, 2), (2**63, 2**63)])
def test_reading_past_the_end_is_refused(offset: int, size: int) -> None:
    memory = SharedMemory.create(10_000)
    with pytest.raises(NativeError, match="past the end"):
        memory.read(offset, size)


def test_memory_given_for_reading_cannot_be_written() -> None:
    memory = SharedMemory.create(4096)
    with pytest.raises(NativeError):
        SharedMemory.adopt(memory.duplicate(False), True)
    received = SharedMemory.adopt(memory.duplicate(False), False)
    with pytest.raises(NativeError):
        received.duplicate(True)
    page = RankPage(received)
    assert page.steps_started == 0
    with pytest.raises(NativeError, match="read-only"):
        page.start_step()


def test_a_rank_page_counts_and_holds_its_memory() -> None:
    memory = SharedMemory.create(4096)
    seen = RankPage(SharedMemory.adopt(memory.duplicate(False), False))
    page = RankPage(memory)
    del memory
    gc.collect()
    page.start_step()
    page.start_step()
    page.finish_step()
    assert (seen.steps_started, seen.steps_finished) == (2, 1)
    with pytest.raises(NativeError, match="smaller"):
        RankPage(SharedMemory.create(64))


# Endpoint

ECHO = """
import ctypes, sys
from flodl.native import Endpoint, EventKind, SharedMemory
endpoint = Endpoint()
link = endpoint.add_link(int(sys.argv[1]), 7)
running = True
while running:
    for event in endpoint.wait(60.0):
        if event.kind == EventKind.message:
            (descriptor,) = event.take_descriptors()
            memory = SharedMemory.adopt(descriptor, True)
            ctypes.memmove(memory.address, b"written there", 13)
            answer = SharedMemory.create(4096)
            ctypes.memmove(answer.address, event.payload[::-1], len(event.payload))
            endpoint.send(link, b"done " + event.payload, [answer.descriptor])
        running = running and event.kind != EventKind.link_closed
endpoint.close()
"""


def test_messages_and_descriptors_go_between_processes(endpoint: Endpoint) -> None:
    process, link = start(endpoint, ECHO)
    memory = SharedMemory.create(4096)
    endpoint.send(link, b"a payload \x00 of bytes", [memory.descriptor])
    endpoint.flush(link, DEADLINE_S)
    answer = wait_for(endpoint, EventKind.message)
    assert (answer.id, answer.generation, answer.payload) == (link, 7, b"done a payload \x00 of bytes")
    assert memory.read(0, 13) == b"written there"
    (descriptor,) = answer.take_descriptors()
    assert answer.take_descriptors() == []
    assert SharedMemory.adopt(descriptor, False).read(0, 20) == b"a payload \x00 of bytes"[::-1]
    endpoint.close_link(link)
    assert process.wait(DEADLINE_S) == 0


def test_descriptors_that_nobody_takes_are_closed_with_the_event(endpoint: Endpoint) -> None:
    ours, theirs = socket.socketpair()
    peer = Endpoint()
    link = peer.add_link(theirs.detach(), 1)
    endpoint.add_link(ours.detach(), 1)
    reading, writing = os.pipe()
    peer.send(link, b"take it", [writing])
    os.close(writing)
    event = wait_for(endpoint, EventKind.message)
    os.set_blocking(reading, False)
    with pytest.raises(BlockingIOError):  # the event holds the only writing end
        os.read(reading, 1)
    del event
    gc.collect()
    assert os.read(reading, 1) == b""
    os.close(reading)
    peer.close()


def test_waiting_holds_no_gil_and_can_be_woken(endpoint: Endpoint) -> None:
    seen: list[EventKind] = []
    thread = threading.Thread(target=lambda: seen.extend(event.kind for event in endpoint.wait(DEADLINE_S)))
    thread.start()
    endpoint.wake()  # would never run if the thread kept the GIL for its minute
    thread.join(DEADLINE_S / 2)
    assert not thread.is_alive()
    assert seen == [EventKind.woken]


def test_a_stream_a_child_and_a_signal_are_events(endpoint: Endpoint) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "print('hello', flush=True); raise SystemExit(3)"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    stream = endpoint.add_stream(os.dup(process.stdout.fileno()))
    endpoint.watch_child(process.pid, False)
    os.write(endpoint.signal_descriptor(), bytes([12]))
    expected = {EventKind.stream_closed, EventKind.child_exited, EventKind.signal}
    text = b""
    while expected:
        events = endpoint.wait(DEADLINE_S)
        assert events
        for event in events:
            if event.kind == EventKind.stream_data:
                assert event.id == stream
                text += event.payload
            if event.kind == EventKind.child_exited:
                assert (event.id, event.status) == (process.pid, 3)
            if event.kind == EventKind.signal:
                assert event.id == 12
            expected.discard(event.kind)
    assert text == b"hello\n"
    process.returncode = 3  # reaped by the endpoint
    process.stdout.close()


def test_a_closed_endpoint_says_so() -> None:
    endpoint = Endpoint(heartbeat_s=0.5, silence_s=2.0)
    endpoint.close()
    endpoint.close()
    for call in (lambda: endpoint.wait(0.0), endpoint.wake, lambda: endpoint.send(1, b"")):
        with pytest.raises(NativeError, match="closed"):
            call()


def test_nothing_is_leaked_at_exit() -> None:
    script = (
        "from flodl.native import *\n"
        "endpoint = Endpoint()\n"
        "host = HostMemory(64, [Section('parameter', 'f32', 0, 16)], 'none', 1.0, 0.0, 1, endpoint)\n"
        "page = RankPage(SharedMemory.create(4096))\n"
        "host.start_reduce(1, [(host.open_rank(), 1.0, 1.0)])\n"
        "events = endpoint.wait(60.0)\n"
        "result = host.reduce_result()\n"
    )
    done = run_python("-c", script)
    assert (done.returncode, done.stderr) == (0, "")
