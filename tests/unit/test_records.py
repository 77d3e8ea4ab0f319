"""Lines of a run's story: nothing torn but the last one, and a full disk costs nothing that fits in memory."""

import errno
import math
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flodl.errors import CheckpointError
from flodl.records import schedule
from flodl.records.record import RecordLine, decode_line, encode_line
from flodl.records.schedule import LineWriter, cut_torn_line, read_lines


class NarrowDisk:
    """A file on a disk with so many bytes left."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.held = bytearray()
        self.is_closed = False

    def write(self, data: memoryview, /) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = bytes(data[: self.room])
        self.held += taken
        self.room -= len(taken)
        return len(taken)

    def fileno(self) -> int:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    def close(self) -> None:
        self.is_closed = True


def lines_of(count: int) -> list[dict[str, Any]]:
    return [{"kind": "lease", "rank": number, "batches": [[0, number, 3]]} for number in range(count)]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "schedule.jsonl"
    writer = LineWriter.open(path)
    for line in lines_of(5):
        writer.write(line)
    assert path.read_bytes() == b""
    assert writer.flush(sync=True)
    assert list(read_lines(path)) == lines_of(5)
    writer.write({"kind": "end"})
    writer.close()
    writer.close()
    assert list(read_lines(path)) == [*lines_of(5), {"kind": "end"}]


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_torn_last_line_is_left_out_and_cut_off_by_the_next_writer(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "journal.jsonl"
    whole = b"".join(encode_line(line) for line in lines_of(3))
    path.write_bytes(whole + encode_line({"round": 3})[:cut])
    assert list(read_lines(path)) == (lines_of(3) if cut < 12 else [])
    writer = LineWriter.open(path)
    writer.write({"round": 4})
    writer.close()
    expected = [*lines_of(3), {"round": 4}]
    if cut == len(encode_line({"round": 3})):
        expected.insert(3, {"round": 3})
    assert list(read_lines(path)) == expected


def test_a_file_that_is_one_torn_line_becomes_empty(tmp_path: Path) -> None:
    path = tmp_path / "schedule.jsonl"
    path.write_bytes(b"x" * 200_000)
    assert cut_torn_line(path) == 200_000
    assert path.read_bytes() == b""
    assert cut_torn_line(tmp_path / "missing") == 0


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "schedule.jsonl"
    path.write_bytes(b'{"kind":"a"}\n{"kind":\n{"kind":"c"}\n')
    reader = read_lines(path)
    assert next(reader) == {"kind": "a"}
    with pytest.raises(CheckpointError, match=r"schedule\.jsonl, line 2 is no record"):
        next(reader)


@pytest.mark.parametrize("room", [1, 10, 47, 48, 49, 100])
def test_a_full_disk_is_said_once_and_later_takes_everything_that_was_missing(tmp_path: Path, room: int) -> None:
    disk = NarrowDisk(room)
    warnings: list[str] = []
    writer = LineWriter(tmp_path / "schedule.jsonl", disk, warnings.append)
    for line in lines_of(4):
        writer.write(line)
    assert not writer.flush()
    assert not writer.flush()
    assert len(warnings) == 1
    assert "No space left on device" in warnings[0]
    assert "schedule.jsonl" in warnings[0]
    disk.room = 10_000
    writer.write({"kind": "end"})
    assert writer.flush()
    assert writer.pending_bytes == 0
    assert bytes(disk.held) == b"".join(encode_line(line) for line in [*lines_of(4), {"kind": "end"}])
    writer.close()
    assert disk.is_closed


def test_what_a_full_disk_makes_lost_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "PENDING_BYTES", 100)
    disk = NarrowDisk(0)
    writer = LineWriter(tmp_path / "schedule.jsonl", disk, lambda _: None)
    for line in lines_of(20):
        writer.write(line)
    assert not writer.flush()
    kept = writer.pending_bytes // len(encode_line(lines_of(1)[0]))
    assert 0 < kept < 20
    disk.room = 100_000
    assert writer.flush()
    held = [decode_line(line) for line in bytes(disk.held).splitlines()]
    assert held == [*lines_of(kept), {"kind": "lost", "lines": 20 - kept}]


def test_a_failed_sync_is_no_exception(tmp_path: Path) -> None:
    warnings: list[str] = []
    writer = LineWriter(tmp_path / "journal.jsonl", NarrowDisk(1000), warnings.append)
    writer.write({"round": 1})
    assert not writer.flush(sync=True)
    assert len(warnings) == 1


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_real_file_that_may_not_grow_is_completed_when_it_may(tmp_path: Path) -> None:
    path = tmp_path / "schedule.jsonl"
    warnings: list[str] = []
    writer = LineWriter.open(path, warnings.append)
    for line in lines_of(10):
        writer.write(line)
    with largest_file(101):
        assert not writer.flush()
        assert path.stat().st_size == 101
        assert list(read_lines(path)) == lines_of(2)
    writer.close()
    assert list(read_lines(path)) == lines_of(10)
    assert len(warnings) == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_a_warning_that_finds_no_room_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full)
        schedule.warn_on_stderr("the disk is full")
        monkeypatch.undo()
        with pytest.raises(OSError, match="No space left"):
            full.flush()  # what it still holds would be said once more as the file closes
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), full.fileno())
    monkeypatch.setattr(sys, "stderr", full)
    schedule.warn_on_stderr("and closed")


def test_a_record_is_one_json_object() -> None:
    line = RecordLine(1.23456789, "seal", {"rank": 2, "loss": math.nan, "kind": "odd", "batches": ((0, 1, 2),)})
    assert decode_line(encode_line(line.as_dict())) == {
        "time_s": 1.234568,
        "kind": "seal",
        "rank": 2,
        "loss": None,
        "kind_": "odd",
        "batches": [[0, 1, 2]],
    }
    for wrong in (b"[1]\n", b"{}x\n", b"\xff\n", b"\n"):
        with pytest.raises(ValueError, match=r".+"):
            decode_line(wrong)
