"""Every message between a rank and the controller, and its one codec (msgpack by msgspec, tagged by name).

Unknown fields are ignored, so that a newer peer may add some; an unknown message is a WireError.
Batches are named by (epoch, index); a batch's position is epoch · N + index · batch_size samples.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from flodl.errors import WireError


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor that travels. dtype as in layout.h; offset in bytes from the start of the layout."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    rule: str
    offset: int


class SectionSpec(msgspec.Struct, frozen=True):
    """A run of tensors with one dtype and one rule (layout.h). count in elements, offsets in bytes."""

    rule: str
    dtype: str
    offset: int
    count: int
    mean_offset: int = 0


class LayoutSpec(msgspec.Struct, frozen=True):
    """The model as one flat sequence, and (as the model signature) what every rank must agree on."""

    bytes: int
    sections: tuple[SectionSpec, ...]
    tensors: tuple[TensorSpec, ...]
    constants: str = ""  # digest of buffers that are not finite and therefore never averaged


class DataSpec(msgspec.Struct, frozen=True):
    """What every rank must agree on about its data: length, structure of 16 seeded items, digest of their content."""

    length: int
    structure: str
    content: str = ""


class BatchRange(msgspec.Struct, frozen=True, array_like=True):
    """Batches first … first + count − 1 of one epoch."""

    epoch: int
    first: int
    count: int


class WindowReport(msgspec.Struct, frozen=True):
    """What one window cost a rank. Milliseconds; the first batch is accounted apart; pauses are in neither."""

    batches: int  # after the first
    compute_ms: float
    data_ms: float
    first_ms: float
    raw_over_pad: int = 0  # emulated devices: steps whose real work took longer than the pad


# ---- rank → controller -------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """The first message: this rank has built its parts and waits for its memory."""

    pid: int
    device: str
    plan: dict[str, Any]
    layout: LayoutSpec
    data: DataSpec
    threads: int = 1


class Adopted(msgspec.Struct, tag="adopted", frozen=True):
    """θ of this round stands in the rank's parameters. hash: of θ as the rank read it, 0 where it did not look."""

    round: int
    step: int
    hash: int
    kept_steps: int = 0  # async: steps made since the snapshot that the blend kept


class Sealed(msgspec.Struct, tag="sealed", frozen=True):
    """The rank's contribution to this round stands still. batches, samples: since its previous snapshot."""

    round: int
    step: int
    batches: int
    samples: int
    report: WindowReport
    losses: tuple[tuple[int, float, int], ...] = ()  # (epoch, summed loss · samples, samples)
    factor: float = 1.0  # the schedule's value at the last batch, relative to the base learning rate
    suspects: tuple[tuple[int, int], ...] = ()  # the first batch whose loss was not finite and the one before it


class Progress(msgspec.Struct, tag="progress", frozen=True):
    """batches: trained since the previous snapshot. Sent after each batch of an open window, else now and then."""

    step: int
    batches: int
    loss: float = 0.0


class Recalled(msgspec.Struct, tag="recalled", frozen=True):
    """The rank gives up all leases from this batch on, in the order granted; None: everything was started."""

    epoch: int | None = None
    index: int | None = None


class Paused(msgspec.Struct, tag="paused", frozen=True):
    """A declared pause begins: the rank makes no progress and is not blamed (compile, evaluate, save)."""

    kind: str


class Resumed(msgspec.Struct, tag="resumed", frozen=True):
    """A declared pause ended after this many seconds."""

    kind: str
    seconds: float


class Evaluated(msgspec.Struct, tag="evaluated", frozen=True):
    """Metrics of the committed θ of this round, as the user's evaluate returned them."""

    epoch: int
    round: int
    metrics: dict[str, float]
    seconds: float


class Saved(msgspec.Struct, tag="saved", frozen=True):
    """A part of a checkpoint is on disk, or could not be written. path: the file's name; digest: its sha256."""

    round: int
    path: str
    digest: str
    size: int = 0  # in bytes
    error: str = ""  # why it is not on disk; '' if it is


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The rank ends with an exception. batch: the one it worked on, if any."""

    error: str
    traceback: str
    batch: tuple[int, int] | None = None


class Leaving(msgspec.Struct, tag="leaving", frozen=True):
    """The rank was told to stop, has flushed everything and exits with 0. Only ever sent on that path."""

    step: int


# ---- controller → rank -------------------------------------------------------------------------------------------


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """Admission. Comes with three descriptors: the rank's memory (writable), buffer 0, buffer 1 (read-only)."""

    rank: int
    generation: int
    batches_per_epoch: int


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """No admission; differences name what is not as with the others. The rank exits."""

    differences: tuple[str, ...]


class Restore(msgspec.Struct, tag="restore", frozen=True):
    """Go on from this checkpoint: take the optimizer's state from it, and, before a Seed, the model's."""

    path: str
    consensus: bool = False


class Seed(msgspec.Struct, tag="seed", frozen=True):
    """Seal the state that the model was built with, as round 0."""

    round: int = 0


class Grant(msgspec.Struct, tag="grant", frozen=True):
    """More leases, to be trained in this order after those already held."""

    batches: tuple[BatchRange, ...]


class Window(msgspec.Struct, frozen=True):
    """What to do until the next snapshot. batches counts from the previous snapshot; None: open, until SealNow."""

    round: int
    batches: int | None
    run_ahead: int = 0  # how many batches to train after the seal while the round runs
    saves: bool = False  # async: the round may be saved, so a copy of the optimizer's state is kept at its seal


class Commit(msgspec.Struct, tag="commit", frozen=True):
    """Round is committed: θ stands in `buffer`. Adopt it at the next step boundary, then follow `window`.

    adopt_at: in a replay, the rank's own step number at which to adopt; up to it the rank trains on as it may.
    """

    round: int
    buffer: int
    hash: int
    window: Window | None = None
    grant: tuple[BatchRange, ...] = ()
    excluded: bool = False  # this rank's contribution was not finite: overwrite and clear the optimizer's state
    evaluate: tuple[int, ...] = ()  # epochs whose evaluation this rank does now, on the adopted θ
    save: str = ""  # the folder to write this rank's part of a checkpoint of this round to, before adopting
    saves_consensus: bool = False  # and the committed θ
    adopt_at: int = 0


class Continue(msgspec.Struct, tag="continue", frozen=True):
    """A window for a rank that adopted without one (a joiner), or another window on top after an aborted round."""

    window: Window
    grant: tuple[BatchRange, ...] = ()


class SealNow(msgspec.Struct, tag="seal_now", frozen=True):
    """Ends an open window at the next step boundary."""

    round: int


class Recall(msgspec.Struct, tag="recall", frozen=True):
    """Give up leases beyond the first `keep` not yet started."""

    keep: int


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """End at the next step boundary: flush, send Leaving, exit."""

    reason: str


FromRank = Hello | Adopted | Sealed | Progress | Recalled | Paused | Resumed | Evaluated | Saved | Failed | Leaving
ToRank = Welcome | Refused | Restore | Seed | Grant | Commit | Continue | SealNow | Recall | Stop

Message = TypeVar("Message")
_encoder = msgspec.msgpack.Encoder()
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)


def encode(message: FromRank | ToRank) -> bytes:
    """The payload of one control frame."""
    return _encoder.encode(message)


def decode_from_rank(payload: bytes, peer: str) -> FromRank:
    """Raises WireError naming the peer."""
    return _decode(_from_rank, payload, peer)


def decode_to_rank(payload: bytes, peer: str = "controller") -> ToRank:
    """Raises WireError naming the peer."""
    return _decode(_to_rank, payload, peer)


def _decode(decoder: msgspec.msgpack.Decoder[Message], payload: bytes, peer: str) -> Message:
    try:
        return decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise WireError(
            f"{peer} sent a message of {len(payload)} bytes that is none of this version's: {error}\n"
            "All processes of a run must use the same flodl version."
        ) from error
