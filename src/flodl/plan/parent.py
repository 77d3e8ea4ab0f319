"""The process that started this one: what a rank and its loader processes do to end with it.

Only Linux tells a process of its parent's death. Elsewhere a rank has its lifeline, from run() on, and no more.
"""

from __future__ import annotations

import os
import select
import signal
import stat
import sys

_PR_SET_PDEATHSIG = 1


def signal_at_parents_death(number: int) -> None:
    """The kernel sends this process the signal when the *thread* that started it has ended; Linux, else nothing.

    Counts for the calling thread until it is called there again; a forked child does not inherit it. A parent that has
    ended before sends nothing: look for it afterwards.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number), *[ctypes.c_ulong(0)] * 3)


def end_with_launcher(link: int) -> None:
    """Called in a rank before any of the user's code: it is killed when its launcher ends, at once if that is gone.

    link: the rank's end of the socket pair; the launcher's end is open exactly as long as the launcher lives.
    """
    signal_at_parents_death(signal.SIGKILL)
    if _is_hung_up(link):
        os.kill(os.getpid(), signal.SIGKILL)


def end_with_parent(pid: int) -> None:
    """The same in a direct child of process `pid`."""
    signal_at_parents_death(signal.SIGKILL)
    if os.getppid() != pid:
        os._exit(1)


def _is_hung_up(descriptor: int) -> bool:
    """Whether it is a socket whose other end is closed."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
    except OSError:
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & select.POLLHUP for _, event in poll.poll(0))
