"""What ranks print, cut anywhere, comes out as whole prefixed lines; the raw bytes are in the log."""

import io
import itertools
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flodl.processes.output import PIECE_BYTES, TAIL_LINES, WORDS_CHARACTERS, Console, RankOutput, RawLog

TEXT = "first\nsecond, with ü\n\n  third\r\nlast without end"
SHOWN = "[rank 1] first\n[rank 1] second, with ü\n[rank 1] \n[rank 1]   third\n"


class Terminal(io.StringIO):
    """Remembers each write apart."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def write(self, text: str, /) -> int:
        self.writes.append(text)
        return super().write(text)


@pytest.fixture
def log(tmp_path: Path) -> RawLog:
    return RawLog(tmp_path / "rank-1.log")


@given(st.lists(st.integers(0, len(TEXT.encode())), max_size=8))
def test_any_cut_of_the_bytes_gives_the_same_lines(cuts: list[int]) -> None:
    data = TEXT.encode()
    places = sorted({0, len(data), *cuts})
    former, sys.stdout = sys.stdout, Terminal()
    try:
        output = RankOutput(1, RawLog(Path(os.devnull)), Console())
        for start, stop in itertools.pairwise(places):
            output.feed(data[start:stop])
        assert sys.stdout.getvalue() == SHOWN
        assert all(text.endswith("\n") for text in sys.stdout.writes)
        assert output.words().splitlines()[-1] == "last without end"
        output.close()
        assert sys.stdout.getvalue() == SHOWN + "[rank 1] last without end\n"
        output.close()
        assert sys.stdout.getvalue().count("last") == 1
    finally:
        sys.stdout = former


def test_a_progress_bar_shows_its_last_state_and_the_log_keeps_every_byte(
    capsys: pytest.CaptureFixture[str], log: RawLog
) -> None:
    output = RankOutput(1, log, Console())
    bar = b"\r 10%\r 50%\r100%\n"
    output.feed(bar)
    assert capsys.readouterr().out == "[rank 1] 100%\n"
    assert log.path.read_bytes() == bar


@pytest.mark.parametrize("extra", [0, 1, 10, PIECE_BYTES])
def test_a_line_without_end_is_cut_into_pieces(capsys: pytest.CaptureFixture[str], log: RawLog, extra: int) -> None:
    output = RankOutput(0, log, Console())
    size = PIECE_BYTES + extra
    for start in range(0, size, 1000):
        output.feed(b"x" * min(1000, size - start))
    output.feed(b"\nnext\n")
    lines = capsys.readouterr().out.splitlines()
    assert [len(line) - len("[rank 0] ") for line in lines] == [PIECE_BYTES, *([extra] if extra else []), 4]
    assert "".join(line.removeprefix("[rank 0] ") for line in lines) == "x" * size + "next"


def test_words_are_the_last_lines(capsys: pytest.CaptureFixture[str], log: RawLog) -> None:
    output = RankOutput(0, log, Console(is_quiet=True))
    for number in range(500):
        output.feed(f"line {number}\n".encode())
    assert output.words() == "\n".join(f"line {number}" for number in range(500 - TAIL_LINES, 500))
    assert capsys.readouterr().out == ""
    for _ in range(TAIL_LINES):
        output.feed(b"y" * PIECE_BYTES + b"\n")
    assert output.words() == ("y" * WORDS_CHARACTERS)


def test_both_generations_are_in_one_log(log: RawLog) -> None:
    for generation in range(2):
        output = RankOutput(1, log, Console(is_quiet=True))
        output.feed(f"life {generation}\n".encode())
        output.close()
        log.close()
    assert log.path.read_text() == "life 0\nlife 1\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_a_full_disk_under_the_log_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    warnings: list[str] = []
    log = RawLog(Path("/dev/full"), warnings.append)
    output = RankOutput(1, log, Console())
    output.feed(b"one\n")
    output.feed(b"two\n")
    log.close()
    assert capsys.readouterr().out == "[rank 1] one\n[rank 1] two\n"
    assert len(warnings) == 1
    assert "No space left on device" in warnings[0]


def test_beside_a_view_on_stdout_ranks_are_shown_on_stderr(capsys: pytest.CaptureFixture[str], log: RawLog) -> None:
    RankOutput(1, log, Console(is_on_stderr=True)).feed(b"one\n")
    assert capsys.readouterr() == ("", "[rank 1] one\n")


def test_a_terminal_that_went_away_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch, log: RawLog) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    pipe = os.fdopen(write_end, "w")
    monkeypatch.setattr(sys, "stdout", pipe)
    output = RankOutput(1, log, Console())
    output.feed(b"one\n")
    output.feed(b"two\n")
    assert output.words() == "one\ntwo"
    monkeypatch.undo()
    with pytest.raises(BrokenPipeError):
        pipe.close()


def test_a_terminal_of_another_encoding_shows_what_it_can(monkeypatch: pytest.MonkeyPatch, log: RawLog) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    RankOutput(1, log, Console()).feed("grün\n".encode())
    assert raw.getvalue() == b"[rank 1] gr?n\n"
