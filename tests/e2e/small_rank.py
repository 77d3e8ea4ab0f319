"""A rank without torch, for tests of processes: trains by adding 1 to every element of two tensors, once per batch.

Started by the launcher as a script. Its arguments say how it misbehaves, as key=value: rank=1 and life=0 choose whom
(life 0 is the rank's first process as counted in the run directory), deed= names what, at= the batch before which.
waits=12: the other ranks wait before their 12th batch until the culprit has been started again.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import NoReturn

from flodl.native import Endpoint, EventKind, RankPage, Section, SharedMemory, copy_layout
from flodl.plan.sources import Role, role
from flodl.protocol.messages import (
    Adopted,
    BatchRange,
    Commit,
    Continue,
    DataSpec,
    Failed,
    FromRank,
    Grant,
    Hello,
    LayoutSpec,
    Leaving,
    Progress,
    Recall,
    Recalled,
    Refused,
    Sealed,
    SealNow,
    SectionSpec,
    Seed,
    Stop,
    TensorSpec,
    Welcome,
    Window,
    WindowReport,
    decode_to_rank,
    encode,
)

ARENA = 4096
LAYOUT = LayoutSpec(
    128,
    (SectionSpec("parameter", "f32", 0, 17),),
    (TensorSpec("layer.weight", (5, 3), "f32", "parameter", 0), TensorSpec("bias", (), "f32", "parameter", 64)),
)
SECTIONS = [Section(s.rule, s.dtype, s.offset, s.count) for s in LAYOUT.sections]
ELEMENTS = (*range(15), 16)


class SmallRank:
    """One life of one rank."""

    def __init__(self, role: Role, deed: str, at: int) -> None:
        self.role, self.deed, self.at = role, deed, at
        self.culprit = -1  # whose second life the deed "wait" waits for
        self.batch_ms = float(os.environ.get("SMALL_RANK_MS", "1"))
        self.endpoint = Endpoint(0.1, 0.0)
        self.link = self.endpoint.add_link(role.link, role.generation)
        self.endpoint.set_lifeline(self.link)
        self.memory: SharedMemory | None = None
        self.buffers: list[SharedMemory] = []
        self.leases: deque[tuple[int, int]] = deque()
        self.window: Window | None = None
        self.round = self.step = self.batches = self.samples = 0

    def run(self) -> NoReturn:
        assert self.role.plan is not None
        data = DataSpec(64, "(f32[3], i64)")
        self.say(Hello(os.getpid(), f"cpu:{self.role.rank}", self.role.plan, LAYOUT, data, self.role.threads))
        while True:
            has_work = self.window is not None and (bool(self.leases) or self.batches == self.window.batches)
            for event in self.endpoint.wait(0.0 if has_work else 1.0):
                if event.kind == EventKind.message:
                    self.obey(decode_to_rank(event.payload), event.take_descriptors())
            if self.window is not None and self.window.batches is not None and self.batches >= self.window.batches:
                self.seal()
            elif self.window is not None and self.leases:
                self.train()

    def say(self, message: FromRank) -> None:
        self.endpoint.send(self.link, encode(message))

    def obey(self, message: object, descriptors: list[int]) -> None:
        match message:
            case Welcome():
                self.memory = SharedMemory.adopt(descriptors[0], True)
                self.buffers = [SharedMemory.adopt(descriptor, False) for descriptor in descriptors[1:]]
                self.page = RankPage(self.memory)
                self.values = (ctypes.c_float * 17).from_address(self.memory.address + ARENA)
            case Seed():
                self.say(Sealed(0, 0, 0, 0, WindowReport(0, 0.0, 0.0, 0.0)))
            case Commit():
                assert self.memory is not None
                source = self.buffers[message.buffer].address
                self.round = message.round
                seen = copy_layout(self.memory.address + ARENA, source, LAYOUT.bytes, SECTIONS)
                self.say(Adopted(message.round, self.step, seen))
                self.take(message.grant)
                self.window = message.window
            case Continue():
                self.take(message.grant)
                self.window = message.window
            case Grant():
                self.take(message.batches)
            case SealNow():
                # One that crossed this rank's own seal asks for nothing any more.
                if self.window is not None and self.window.round == message.round:
                    self.seal()
            case Recall():
                given_up = list(self.leases)[message.keep :]
                self.leases = deque(list(self.leases)[: message.keep])
                self.say(Recalled(*given_up[0]) if given_up else Recalled())
            case Refused():
                print("refused:", *message.differences)
                sys.exit(3)
            case Stop():
                self.stop()

    def take(self, ranges: tuple[BatchRange, ...]) -> None:
        for piece in ranges:
            self.leases.extend((piece.epoch, index) for index in range(piece.first, piece.first + piece.count))

    def train(self) -> None:
        if self.step == self.at:
            DEEDS[self.deed](self)
        self.page.start_step()
        self.leases.popleft()
        for element in ELEMENTS:
            self.values[element] += 1.0
        time.sleep(self.batch_ms / 1000.0)
        self.page.finish_step()
        self.step += 1
        self.batches += 1
        self.samples += 4
        if self.window is not None and self.window.batches is None:
            self.say(Progress(self.step, self.batches))

    def seal(self) -> None:
        report = WindowReport(max(0, self.batches - 1), self.batch_ms * (self.batches - 1), 0.0, self.batch_ms)
        self.say(Sealed(self.round + 1, self.step, self.batches, self.samples, report))
        self.window = None
        self.batches = self.samples = 0

    def stop(self) -> NoReturn:
        if self.deed == "ignore stop":
            sleep_for_ever()
        self.say(Leaving(self.step))
        self.endpoint.flush(self.link, 5.0)
        print(f"rank {self.role.rank} leaves after {self.step} batches")
        sys.exit(0)


def sleep_for_ever() -> NoReturn:
    while True:
        time.sleep(3600)


def _raise(rank: SmallRank) -> None:
    print("about to fail")
    error = f"ValueError: batch {rank.leases[0]} is bad"
    rank.say(Failed(error, f"Traceback of rank {rank.role.rank}:\n{error}", rank.leases[0]))
    rank.endpoint.flush(rank.link, 5.0)
    sys.exit(1)


def _kill(rank: SmallRank) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop_silently(rank: SmallRank) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _garbage(rank: SmallRank) -> None:
    rank.endpoint.send(rank.link, b"\x81\xa4type\xa5never")
    sleep_for_ever()


def _close_link(rank: SmallRank) -> None:
    # Without the lifeline's own end of file: a rank that lost its link and does not notice.
    rank.endpoint.close()
    sleep_for_ever()


def _leave_a_child(rank: SmallRank) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    Path(rank.role.run_directory, "child.pid").write_text(str(child.pid))
    os._exit(5)


def _wait_for_the_next_life(rank: SmallRank) -> None:
    while len(lives_of(rank.role, rank.culprit).read_bytes()) < 2:
        time.sleep(0.01)


def lives_of(role: Role, rank: int) -> Path:
    """A file with one byte per process that this rank had."""
    return Path(role.run_directory, f"lives-of-{rank}")


DEEDS = {
    "raise": _raise,
    "kill": _kill,
    "silence": _stop_silently,
    "garbage": _garbage,
    "close link": _close_link,
    "leave a child": _leave_a_child,
    "ignore stop": lambda rank: None,
    "wait": _wait_for_the_next_life,
}


def begin_life(role: Role) -> int:
    """How many processes this rank had before this one."""
    with open(lives_of(role, role.rank), "ab") as file:
        file.write(b".")
        return file.tell() - 1


def main() -> None:
    mine = role()
    if mine is None:
        raise SystemExit("this script is started by a launcher")
    wanted = dict(argument.split("=", 1) for argument in sys.argv[1:])
    culprit = int(wanted.get("rank", -1))
    is_culprit = mine.rank == culprit and wanted.get("life", "any") in ("any", str(begin_life(mine)))
    deed, at = (wanted.get("deed", ""), int(wanted.get("at", 0))) if is_culprit else ("", -1)
    if "waits" in wanted and mine.rank != culprit:
        deed, at = "wait", int(wanted["waits"])
    if deed == "import error":
        raise ImportError("no module named 'the users own fault'")
    if deed == "stop at once":
        os.kill(os.getpid(), signal.SIGSTOP)
    if deed == "end early":
        print("nothing to do here")
        return
    rank = SmallRank(mine, deed, at)
    rank.culprit = culprit
    rank.run()


if __name__ == "__main__":
    main()
