"""A rank's link to its controller: messages in and out over the native endpoint."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from flodl.errors import AdmissionError, LinkError, WireError
from flodl.native import Endpoint, EventKind, SharedMemory
from flodl.protocol.messages import FromRank, Refused, Stop, ToRank, Welcome, decode_to_rank, encode

POLL_S = 3600.0
"""A waiting rank waits without limit: the end of the link is the notice. This only bounds one call."""


@dataclass(frozen=True)
class Admission:
    """What came with Welcome: the rank's own memory (writable), and the host's two buffers (read-only)."""

    welcome: Welcome
    rank: SharedMemory
    buffers: tuple[SharedMemory, SharedMemory]


class ControlLine:
    """Used by one thread. The endpoint's own thread keeps the heartbeat, so a long step is no silence."""

    def __init__(self, endpoint: Endpoint, link: int) -> None:
        self._endpoint = endpoint
        self._link = link
        self._inbox: deque[tuple[ToRank, list[int]]] = deque()

    def send(self, message: FromRank) -> None:
        """Queued; never blocks. Raises LinkError when the launcher is gone."""
        self._endpoint.send(self._link, encode(message))

    def flush(self, timeout_s: float) -> None:
        """Until everything sent is with the kernel."""
        self._endpoint.flush(self._link, timeout_s)

    def receive(self, wait: bool) -> list[ToRank]:
        """What has arrived; with `wait`, at least one. Raises LinkError when the launcher is gone."""
        self._listen(0.0)
        while wait and not self._inbox:
            self._listen(POLL_S)
        messages = [message for message, _ in self._inbox]
        self._inbox.clear()
        return messages

    def receive_admission(self) -> Admission | None:
        """Waits for Welcome; None if told to stop instead. Raises AdmissionError naming what differed."""
        while not self._inbox:
            self._listen(POLL_S)
        message, descriptors = self._inbox.popleft()
        match message:
            case Welcome():
                return _admission(message, descriptors)
            case Refused(differences):
                raise AdmissionError(
                    f"this rank differs from the run: {'; '.join(differences)}\n"
                    "Every rank must build the same parts and plan: nothing may depend on time, chance or the process.",
                    differences=differences,
                )
            case Stop():
                return None
            case _:
                raise WireError(f"the controller sent {type(message).__name__} before Welcome")

    def _listen(self, timeout_s: float) -> None:
        for event in self._endpoint.wait(timeout_s):
            if event.kind == EventKind.message:
                self._inbox.append((decode_to_rank(event.payload), event.take_descriptors()))
            elif event.kind == EventKind.link_closed:
                raise LinkError(f"the launcher is gone: {event.reason}\nResume the run from its last checkpoint.")


def _admission(welcome: Welcome, descriptors: list[int]) -> Admission:
    if len(descriptors) != 3:
        raise WireError(f"Welcome came with {len(descriptors)} descriptors instead of 3")
    own, first, second = descriptors
    buffers = (SharedMemory.adopt(first, False), SharedMemory.adopt(second, False))
    return Admission(welcome, SharedMemory.adopt(own, True), buffers)
