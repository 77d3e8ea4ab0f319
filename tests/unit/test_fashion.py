"""Fetching Fashion-MNIST, from a server on this machine: what is kept, and what is refused with its reason."""

import gzip
import hashlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import pytest

from flodl.datasets import fashion
from flodl.datasets.fashion import OFFICIAL, FetchError, FileSpec, Source, cache_directory, fetch
from flodl.plan import sources

CONTENTS = {f"{stem}.gz": gzip.compress(stem.encode() * 40, mtime=0) for stem in fashion.FILES.values()}
FIRST, SECOND, *_ = CONTENTS


class Answer(NamedTuple):
    """status, promised size and body; is_held: says nothing more until the test is over."""

    body: bytes
    status: int = 200
    promised: int | None = None
    is_held: bool = False


@dataclass
class Served:
    """What a server answers by name, and what it was asked."""

    source: Source
    answers: dict[str, Answer]
    asked: list[str] = field(default_factory=list)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server of all four files."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    is_over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.removeprefix("/data/")
            found.asked.append(name)
            answer = found.answers.get(name, Answer(b"", 404))
            self.send_response(answer.status)
            self.send_header("Content-Length", str(len(answer.body) if answer.promised is None else answer.promised))
            self.end_headers()
            self.wfile.write(answer.body)
            if answer.is_held:
                self.wfile.flush()
                is_over.wait()

        def log_message(self, *_: object) -> None:
            """The test's own output is enough."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    files = tuple(FileSpec(name, hashlib.sha256(body).hexdigest(), len(body)) for name, body in CONTENTS.items())
    source = Source(f"http://127.0.0.1:{server.server_port}/data/", files)
    found = Served(source, {name: Answer(body) for name, body in CONTENTS.items()})
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield found
    finally:
        is_over.set()
        server.shutdown()
        thread.join()
        server.server_close()


def refusal(source: Source, directory: Path) -> str:
    """Why it could not be fetched; nothing half-written is left."""
    with pytest.raises(FetchError) as refused:
        fetch(source, directory)
    assert not list(directory.glob("*.tmp"))
    what, remedy = str(refused.value).splitlines()
    assert "name a directory" in remedy
    return what


def test_four_files_are_fetched_once(served: Served, tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "cache"
    fetch(served.source, directory)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == CONTENTS
    assert served.asked == list(CONTENTS)
    fetch(served.source, directory)
    assert served.asked == list(CONTENTS)


def test_a_file_of_another_digest_is_refused_and_what_came_before_it_stays(served: Served, tmp_path: Path) -> None:
    body = bytearray(CONTENTS[SECOND])
    body[-1] ^= 1
    served.answers[SECOND] = Answer(bytes(body))
    assert refusal(served.source, tmp_path).startswith(f"{served.source.address}{SECOND} is not the file")
    assert [path.name for path in tmp_path.iterdir()] == [FIRST]
    served.answers[SECOND] = Answer(CONTENTS[SECOND])
    fetch(served.source, tmp_path)
    assert served.asked.count(FIRST) == 1
    assert len(list(tmp_path.iterdir())) == 4


def test_what_lies_there_with_another_digest_is_replaced(served: Served, tmp_path: Path) -> None:
    (tmp_path / SECOND).write_bytes(b"something else")
    fetch(served.source, tmp_path)
    assert (tmp_path / SECOND).read_bytes() == CONTENTS[SECOND]


@pytest.mark.parametrize("promised", [None, len(CONTENTS[FIRST])])
def test_a_file_that_was_cut_off_is_refused_whether_or_not_it_says_so(
    served: Served, tmp_path: Path, promised: int | None
) -> None:
    served.answers[FIRST] = Answer(CONTENTS[FIRST][:10], promised=promised)
    assert f"was cut off after 10 of {len(CONTENTS[FIRST])} bytes" in refusal(served.source, tmp_path)


def test_no_more_is_read_than_was_promised(served: Served, tmp_path: Path) -> None:
    served.answers[FIRST] = Answer(CONTENTS[FIRST] + b"x", promised=1 << 40, is_held=True)
    assert "is not the file that was wanted" in refusal(served.source, tmp_path)


def test_what_the_server_refuses_is_told(served: Served, tmp_path: Path) -> None:
    del served.answers[FIRST]
    assert "cannot be fetched: " in refusal(served.source, tmp_path)
    served.answers[FIRST] = Answer(b"", status=503)
    refusal(served.source, tmp_path)


def test_a_server_that_is_gone_is_told(served: Served, tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as closed:
        port = closed.server_port
    source = replace(served.source, address=f"http://127.0.0.1:{port}/")
    assert "refused" in refusal(source, tmp_path)
    assert served.asked == []


def test_a_server_that_falls_silent_is_waited_for_so_long_only(served: Served, tmp_path: Path) -> None:
    served.answers[FIRST] = Answer(CONTENTS[FIRST][:10], promised=len(CONTENTS[FIRST]), is_held=True)
    assert "timed out" in refusal(replace(served.source, silent_s=0.2), tmp_path)


def test_a_server_that_trickles_is_left_after_the_time_for_all(served: Served, tmp_path: Path) -> None:
    clock = iter([0.0, 100.0, 119.0, 121.0])
    with pytest.raises(FetchError, match="came too slowly"):
        fetch(served.source, tmp_path, lambda: next(clock))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([FIRST, SECOND])


def test_a_folder_that_cannot_be_made_is_named(served: Served, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert str(tmp_path / "file" / "cache") in refusal(served.source, tmp_path / "file" / "cache")


def test_an_address_without_a_host_is_no_crash(served: Served, tmp_path: Path) -> None:
    refusal(replace(served.source, address="http://"), tmp_path)


def test_the_official_files_are_the_four_that_are_read() -> None:
    assert {file.name for file in OFFICIAL.files} == set(CONTENTS)
    assert len({file.sha256 for file in OFFICIAL.files}) == 4
    assert all(len(bytes.fromhex(file.sha256)) == 32 for file in OFFICIAL.files)
    assert OFFICIAL.address.startswith("https://")
    assert 30 < OFFICIAL.megabytes < 32


def test_the_cache_lies_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def places(**environment: str) -> Path:
        monkeypatch.setattr(sources, "started", lambda: sources.Started("/", (), environment))
        return cache_directory()

    monkeypatch.setenv("HOME", str(tmp_path))
    assert places(XDG_CACHE_HOME="/caches") == Path("/caches/flodl/fashion-mnist")
    assert places(XDG_CACHE_HOME="relative") == tmp_path / ".cache/flodl/fashion-mnist"
    assert places() == tmp_path / ".cache/flodl/fashion-mnist"
