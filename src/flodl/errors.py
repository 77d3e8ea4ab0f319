"""What flodl raises. The first line says what failed and where, the second what to do; ``code`` is stable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class FlodlError(Exception):
    """Base of every error that flodl raises on purpose.

    A message of one line gets the remedy of its class as the second one.
    """

    code: ClassVar[str] = "FDL-ERROR"
    remedy: ClassVar[str] = "The documentation lists this error by its code."

    def __init__(self, message: str) -> None:
        super().__init__(message if "\n" in message else f"{message}\n{self.remedy}")


class PlanError(FlodlError):
    """A plan that cannot be run: one field and its value are at fault."""

    code = "FDL-PLAN"
    remedy = "Change this field of the plan."

    def __init__(self, message: str, *, field: str = "", value: object = None, allowed: Sequence[object] = ()) -> None:
        super().__init__(message)
        self.field = field
        self.value = value
        self.allowed = tuple(allowed)


class WireError(FlodlError):
    """A peer sent bytes that no sender of ours produces. ``offset`` counts bytes of the frame; -1: unknown."""

    code = "FDL-WIRE"
    remedy = "Check that all hosts run the same version of flodl and that nothing else connects to its port."

    def __init__(self, message: str, *, peer: str = "", kind: str = "", offset: int = -1) -> None:
        super().__init__(message)
        self.peer = peer
        self.kind = kind
        self.offset = offset


class LinkError(FlodlError):
    """A connection is gone. Worth another try."""

    code = "FDL-LINK"
    remedy = "Connect again; if it keeps failing, check that the other process lives and can be reached."


class AdmissionError(FlodlError):
    """A host or rank was refused: what must agree does not. ``differences`` names each item."""

    code = "FDL-ADMISSION"
    remedy = "Make the named items equal on all hosts and join again."

    def __init__(self, message: str, *, differences: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.differences = tuple(differences)


class RoundAborted(FlodlError):
    """A round ended without a commit; nothing changed. ``cohort`` lists the ranks that took part."""

    code = "FDL-ROUND"
    remedy = "Training goes on from the last committed round."

    def __init__(self, message: str, *, reason: str = "", cohort: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.reason = reason
        self.cohort = tuple(cohort)


class RunFailed(FlodlError):
    """The run ended without its result. ``rank_traceback`` is the text of the rank's own exception, if one was seen."""

    code = "FDL-RUN"
    remedy = "Read the log, then resume from the last checkpoint."

    def __init__(self, message: str, *, reason: str = "", log_path: str = "", rank_traceback: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.log_path = log_path
        self.rank_traceback = rank_traceback


class NativeError(FlodlError):
    """The native core is missing, was called wrongly, or the system refused it something.

    ``install_page`` is set where the remedy is another installation.
    """

    code = "FDL-NATIVE"
    remedy = "If the message names neither memory nor the operating system, this is a fault in the calling code."

    def __init__(self, message: str, *, install_page: str = "") -> None:
        super().__init__(message)
        self.install_page = install_page


class CheckpointError(FlodlError):
    """A checkpoint cannot be written, or what was read is not a whole one. ``path`` is the file or directory."""

    code = "FDL-CHECKPOINT"
    remedy = "Resume from an earlier checkpoint of the run."

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path
