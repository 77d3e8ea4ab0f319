"""The codec of control messages."""

import typing

import msgspec
import pytest

from flodl.errors import WireError
from flodl.protocol import messages
from flodl.protocol.messages import (
    Adopted,
    BatchRange,
    Commit,
    Continue,
    Failed,
    FromRank,
    Recall,
    Recalled,
    Sealed,
    Stop,
    ToRank,
    Window,
    WindowReport,
    decode_from_rank,
    decode_to_rank,
    encode,
)

FROM_RANK: list[FromRank] = [
    Adopted(3, 17, 2**64 - 1, 2),
    Sealed(3, 17, 4, 31, WindowReport(3, 30.5, 1.25, 99.0, 1), ((0, 12.5, 31),), 0.5),
    Recalled(),
    Recalled(1, 7),
    Failed("ValueError: ä", "Traceback", (0, 3)),
    Failed("ValueError", "Traceback"),
]
TO_RANK: list[ToRank] = [
    Commit(3, 1, 2**64 - 1, Window(4, 10, 2), (BatchRange(0, 1, 2), BatchRange(1, 0, 3)), True, (0, 1)),
    Commit(3, 0, 0),
    Continue(Window(4, None)),
    Recall(5),
    Stop("done"),
]


@pytest.mark.parametrize("message", FROM_RANK, ids=repr)
def test_what_a_rank_says_arrives_as_it_was(message: FromRank) -> None:
    assert decode_from_rank(encode(message), "rank 0") == message


@pytest.mark.parametrize("message", TO_RANK, ids=repr)
def test_what_a_rank_is_told_arrives_as_it_was(message: ToRank) -> None:
    assert decode_to_rank(encode(message)) == message


def test_every_message_has_a_tag_of_its_own_in_its_direction() -> None:
    for union in (FromRank, ToRank):
        tags = [kind.__struct_config__.tag for kind in typing.get_args(union)]
        assert len(set(tags)) == len(tags)
        assert all(isinstance(tag, str) for tag in tags)


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x80", encode(Stop("x")), encode(Adopted(1, 2, 3))[:-1]])
def test_what_is_no_message_of_a_rank_is_a_wire_error_that_names_the_peer(payload: bytes) -> None:
    with pytest.raises(WireError, match="rank 7 sent a message of") as caught:
        decode_from_rank(payload, "rank 7")
    assert "same flodl version" in str(caught.value)


def test_a_direction_is_not_confused() -> None:
    with pytest.raises(WireError):
        decode_to_rank(encode(Adopted(1, 2, 3)))


def test_a_field_of_a_newer_version_is_ignored() -> None:
    newer = msgspec.msgpack.encode({"type": "stop", "reason": "x", "colour": "red"})
    assert decode_to_rank(newer) == Stop("x")


def test_a_field_of_the_wrong_type_is_refused() -> None:
    wrong = msgspec.msgpack.encode({"type": "adopted", "round": "three", "step": 0, "hash": 0})
    with pytest.raises(WireError, match="round"):
        decode_from_rank(wrong, "rank 0")


def test_messages_are_values() -> None:
    assert Commit(1, 0, 9) == Commit(1, 0, 9)
    assert hash(BatchRange(0, 1, 2)) == hash(BatchRange(0, 1, 2))
    with pytest.raises(AttributeError):
        messages.Stop("x").reason = "y"  # type: ignore[misc]
