"""One setup at a time per checkout."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from console import Console, SetupError


@contextlib.contextmanager
def held(path: Path, console: Console) -> Iterator[None]:
    """Holds an exclusive lock on the file. The kernel drops it with its process, so that it is never stale."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise SetupError(f"cannot write to {path.parent}: {error}\nUse a checkout that you may write to.") from None
    with file:
        if not _lock(file.fileno(), waits=False):
            file.seek(0)
            console.say(f"waiting for the setup that process {file.read().strip() or '?'} runs here")
            _lock(file.fileno(), waits=True)
        file.seek(0)
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        yield


if os.name == "nt":
    import msvcrt

    # Locks a byte far behind the text: a locked region cannot be read by others on Windows.
    FAR = 1 << 20

    def _lock(descriptor: int, waits: bool) -> bool:
        os.lseek(descriptor, FAR, os.SEEK_SET)
        while True:
            try:
                msvcrt.locking(descriptor, msvcrt.LK_LOCK if waits else msvcrt.LK_NBLCK, 1)
                return True
            except OSError:
                if not waits:
                    return False
else:
    import fcntl

    def _lock(descriptor: int, waits: bool) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        return True
