"""Host memory from Python: ranks in processes of their own are averaged, committed and adopted."""

import array
import ctypes
import gc
import os
from collections.abc import Iterator

import pytest

from flodl import native
from flodl.errors import NativeError
from flodl.native import Endpoint, EventKind, HostMemory, Section, SharedMemory
from tests.unit.native_peer import DEADLINE_S, floats, start, wait_for, write


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    made = Endpoint()
    yield made
    made.close()


RANK = """
import array, ctypes, sys
from flodl.native import Endpoint, EventKind, RankPage, SharedMemory, by_address
endpoint = Endpoint()
link = endpoint.add_link(int(sys.argv[1]), 7)
running = True
while running:
    for event in endpoint.wait(60.0):
        running = running and event.kind != EventKind.link_closed
        if event.kind != EventKind.message:
            continue
        (descriptor,) = event.take_descriptors()
        order, _, values = event.payload.partition(b" ")
        if order == b"seal":
            memory = SharedMemory.adopt(descriptor, True)
            page = RankPage(memory)
            page.start_step()
            ctypes.memmove(memory.address + 4096, values, len(values))
            page.finish_step()
            endpoint.send(link, b"sealed")
        else:
            theta = SharedMemory.adopt(descriptor, False)
            copied = (ctypes.c_byte * theta.size)()
            digest = by_address.copy_hash(ctypes.addressof(copied), theta.address, int(values))
            endpoint.send(link, str(digest).encode() + b" " + bytes(copied)[: int(values)])
endpoint.close()
"""


def test_two_ranks_are_averaged_committed_and_adopted(endpoint: Endpoint) -> None:
    count = 300_000
    size = (4 * count + 63) // 64 * 64
    section = Section("parameter", "f32", 0, count)
    host = HostMemory(size, [section], "none", 1.0, 0.0, 2, endpoint)
    values = [array.array("f", [rank + i % 7 for i in range(count)]) for rank in (1, 3)]
    processes, links, ranks = [], [], []
    for own in values:
        process, link = start(endpoint, RANK)
        rank = host.open_rank()
        descriptor = host.rank_descriptor(rank)
        endpoint.send(link, b"seal " + own.tobytes(), [descriptor])
        os.close(descriptor)
        assert wait_for(endpoint, EventKind.message).payload == b"sealed"
        processes.append(process)
        links.append(link)
        ranks.append(rank)
    processes[1].kill()  # after its seal: it counts

    host.start_reduce(11, [(ranks[0], 0.25, 0.25), (ranks[1], 0.75, 0.75)])
    assert wait_for(endpoint, EventKind.task_done).id == 11
    reduced = host.reduce_result()
    expected = array.array("f", [2.5 + i % 7 for i in range(count)]).tobytes()
    assert (reduced.task, reduced.is_finite, reduced.first_nonfinite) == (11, [True, True], "")
    assert reduced.distance_sq == [2.25 * count, 0.25 * count]
    assert reduced.norm_sq == pytest.approx(sum((2.5 + i % 7) ** 2 for i in range(count)), rel=1e-9)
    assert reduced.seconds > 0.0
    assert (host.committed(), host.read_committed(0, 8)) == (0, bytes(8))

    host.start_commit(12, False)
    assert wait_for(endpoint, EventKind.task_done).id == 12
    assert host.commit_result().hash == reduced.hash
    assert (host.commit_result().task, host.committed()) == (12, 1)
    assert host.read_committed(0, 4 * count) == expected
    assert host.rank_steps(ranks[1]) == (1, 1)
    assert host.read_velocity() == b""

    descriptor = host.buffer_descriptor(host.committed())
    endpoint.send(links[0], f"adopt {4 * count}".encode(), [descriptor])
    os.close(descriptor)
    digest, _, adopted = wait_for(endpoint, EventKind.message).payload.partition(b" ")
    assert int(digest) == reduced.hash
    assert adopted == expected
    for process, link in zip(processes, links, strict=True):
        endpoint.close_link(link)
        process.wait(DEADLINE_S)
    host.close_rank(ranks[0])
    with pytest.raises(NativeError, match="no rank memory"):
        host.rank_steps(ranks[0])


def test_the_outer_step_and_the_hash_of_a_layout(endpoint: Endpoint) -> None:
    sections = [Section("parameter", "f32", 0, 2), Section("buffer", "f32", 64, 2), Section("largest", "i64", 128, 1)]
    host = HostMemory(192, sections, "nesterov", 0.5, 0.5, 1, endpoint)
    rank = host.open_rank()
    memory = SharedMemory.adopt(host.rank_descriptor(rank), True)
    for task, parameters in enumerate([(8.0, 4.0), (4.0, 4.0)]):
        write(memory, 4096, floats(*parameters))
        write(memory, 4096 + 64, floats(1.0, 2.0))
        write(memory, 4096 + 128, (5).to_bytes(8, "little"))
        host.start_reduce(task, [(rank, 1.0, 1.0)])
        wait_for(endpoint, EventKind.task_done)
        host.start_commit(task, task == 0)
        wait_for(endpoint, EventKind.task_done)
    # g = 8 - 4, v = g, theta = 8 - 0.5 (g + 0.5 v)
    assert host.read_velocity() == floats(4.0, 0.0)
    theta = host.read_committed(0, 192)
    assert theta[:8] == floats(5.0, 4.0)
    assert theta[64:72] == floats(1.0, 2.0)
    image = ctypes.create_string_buffer(theta, 192)
    copied = ctypes.create_string_buffer(192)
    there, here = ctypes.addressof(image), ctypes.addressof(copied)
    assert native.copy_layout(here, there, 192, sections) == host.commit_result().hash
    assert copied.raw == theta
    copied[130] = b"x"
    assert native.copy_layout(0, here, 192, sections) != host.commit_result().hash
    with pytest.raises(NativeError, match="overlaps"):
        native.copy_layout(there, there, 192, sections)


def test_wrong_uses_of_host_memory_are_refused(endpoint: Endpoint) -> None:
    section = Section("parameter", "f32", 0, 16)
    with pytest.raises(NativeError, match="rule"):
        Section("average", "f32", 0, 16)
    with pytest.raises(NativeError, match="reach beyond"):
        HostMemory(64, [Section("parameter", "f32", 0, 17)], "none", 1.0, 0.0, 1, endpoint)
    with pytest.raises(NativeError, match="threads"):
        HostMemory(64, [section], "none", 1.0, 0.0, 0, endpoint)
    host = HostMemory(64, [section], "none", 1.0, 0.0, 1, endpoint)
    with pytest.raises(NativeError, match="no rank memory"):
        host.start_reduce(1, [(5, 1.0, 1.0)])
    with pytest.raises(NativeError, match="nothing is pending"):
        host.start_commit(1, True)
    with pytest.raises(NativeError, match="past the end"):
        host.read_committed(60, 8)


def test_closing_the_endpoint_ends_its_host_memories() -> None:
    endpoint = Endpoint()
    host = HostMemory(64, [Section("parameter", "f32", 0, 16)], "none", 1.0, 0.0, 1, endpoint)
    rank = host.open_rank()
    host.start_reduce(1, [(rank, 1.0, 1.0)])
    endpoint.close()
    with pytest.raises(NativeError, match="endpoint is closed"):
        host.reduce_result()
    with pytest.raises(NativeError, match="closed"):
        HostMemory(64, [Section("parameter", "f32", 0, 16)], "none", 1.0, 0.0, 1, endpoint)


def test_a_host_memory_keeps_its_endpoint() -> None:
    host = HostMemory(64, [Section("parameter", "f32", 0, 16)], "none", 1.0, 0.0, 1, Endpoint())
    gc.collect()
    assert host.open_rank() == 1
    assert host.read_committed(0, 64) == bytes(64)


def test_a_velocity_is_written_back_and_goes_on(endpoint: Endpoint) -> None:
    sections = [Section("parameter", "f32", 0, 2)]
    host = HostMemory(64, sections, "heavy_ball", 1.0, 0.5, 1, endpoint)
    assert host.read_velocity() == floats(0.0, 0.0)
    host.write_velocity(floats(4.0, -2.0))
    assert host.read_velocity() == floats(4.0, -2.0)
    rank = host.open_rank()
    host.start_reduce(1, [(rank, 1.0, 1.0)])
    wait_for(endpoint, EventKind.task_done)
    host.start_commit(1, False)  # g = 0 - 0, so that v halves and theta goes back by it
    wait_for(endpoint, EventKind.task_done)
    assert host.read_velocity() == floats(2.0, -1.0)
    assert host.read_committed(0, 8) == floats(-2.0, 1.0)
    for wrong in (b"", floats(1.0), floats(1.0, 2.0, 3.0), b"1234567"):
        with pytest.raises(NativeError, match="velocity"):
            host.write_velocity(wrong)
    plain = HostMemory(64, sections, "none", 1.0, 0.0, 1, endpoint)
    with pytest.raises(NativeError, match="this layout has 0"):
        plain.write_velocity(floats(1.0, 2.0))
