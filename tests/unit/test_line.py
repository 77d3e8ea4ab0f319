"""A rank's link: admission with its descriptors, what comes right behind it, refusal, and the launcher's end."""

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from flodl.errors import AdmissionError, LinkError, WireError
from flodl.native import Endpoint, EventKind, SharedMemory
from flodl.protocol.messages import (
    Commit,
    FromRank,
    Grant,
    Leaving,
    Refused,
    Stop,
    ToRank,
    Welcome,
    decode_from_rank,
    encode,
)
from flodl.rank.line import ControlLine


@dataclass
class Pair:
    """A rank's line and the launcher's end of it."""

    line: ControlLine
    rank: Endpoint
    launcher: Endpoint
    link: int

    def say(self, message: ToRank, descriptors: tuple[int, ...] = ()) -> None:
        self.launcher.send(self.link, encode(message), descriptors)

    def hear(self) -> FromRank:
        while True:
            for event in self.launcher.wait(10.0):
                if event.kind == EventKind.message:
                    return decode_from_rank(event.payload, "rank")


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    launcher, rank = Endpoint(), Endpoint()
    link = launcher.add_link(ours.detach(), 1)
    yield Pair(ControlLine(rank, rank.add_link(theirs.detach(), 1)), rank, launcher, link)
    rank.close()
    launcher.close()


def test_welcome_brings_memory_and_what_comes_behind_it_is_not_lost(pair: Pair) -> None:
    memories = [SharedMemory.create(8192 * (k + 1)) for k in range(3)]
    descriptors = tuple(memory.duplicate(writable=k == 0) for k, memory in enumerate(memories))
    pair.say(Welcome(2, 1, 40), descriptors)
    pair.say(Commit(3, 1, 9))
    pair.say(Grant(()))
    for descriptor in descriptors:
        os.close(descriptor)
    admission = pair.line.receive_admission()
    assert admission is not None
    assert admission.welcome == Welcome(2, 1, 40)
    assert [admission.rank.size, *(buffer.size for buffer in admission.buffers)] == [8192, 16384, 24576]
    received: list[ToRank] = []
    while len(received) < 2:
        received += pair.line.receive(wait=True)
    assert received == [Commit(3, 1, 9), Grant(())]
    assert pair.line.receive(wait=False) == []


def test_what_the_rank_says_arrives(pair: Pair) -> None:
    pair.line.send(Leaving(7))
    pair.line.flush(5.0)
    assert pair.hear() == Leaving(7)


def test_a_refusal_names_what_differs(pair: Pair) -> None:
    pair.say(Refused(("tensor w has shape [2], not [3]",)))
    with pytest.raises(AdmissionError, match=r"tensor w has shape \[2\], not \[3\]") as caught:
        pair.line.receive_admission()
    assert caught.value.differences == ("tensor w has shape [2], not [3]",)


def test_a_stop_before_admission_is_no_error(pair: Pair) -> None:
    pair.say(Stop("over"))
    assert pair.line.receive_admission() is None


def test_a_welcome_without_its_memory_is_refused(pair: Pair) -> None:
    pair.say(Welcome(0, 0, 1))
    with pytest.raises(WireError, match="0 descriptors instead of 3"):
        pair.line.receive_admission()


def test_the_launchers_end_is_noticed_while_waiting(pair: Pair) -> None:
    pair.launcher.close_link(pair.link)
    with pytest.raises(LinkError, match="the launcher is gone"):
        pair.line.receive(wait=True)
