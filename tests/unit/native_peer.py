"""The other end for tests of the native core: processes on a link, and bytes in memory."""

import array
import ctypes
import os
import socket
import subprocess
import sys

from flodl.native import Endpoint, Event, EventKind, SharedMemory
from tests.unit.fresh_python import SOURCE

DEADLINE_S = 60.0


def wait_for(endpoint: Endpoint, kind: EventKind) -> Event:
    """The next event of this kind; the ones before it are of no interest to these tests."""
    while True:
        events = endpoint.wait(DEADLINE_S)
        assert events, f"no {kind} within {DEADLINE_S} s"
        for event in events:
            if event.kind == kind:
                return event


def write(memory: SharedMemory, offset: int, data: bytes) -> None:
    assert offset + len(data) <= memory.size
    ctypes.memmove(memory.address + offset, data, len(data))


def floats(*values: float) -> bytes:
    return array.array("f", values).tobytes()


def start(endpoint: Endpoint, script: str) -> tuple[subprocess.Popen[bytes], int]:
    """A process that runs `script` with its end of a link as sys.argv[1], and our link of generation 7."""
    ours, theirs = socket.socketpair()
    path = os.pathsep.join([SOURCE, *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        env={**os.environ, "PYTHONPATH": path},
    )
    theirs.close()
    return process, endpoint.add_link(ours.detach(), 7)
