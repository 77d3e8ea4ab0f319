"""Where checkpoints are kept, how many, and what a run begins from."""

from __future__ import annotations

from dataclasses import dataclass

from flodl.plan.limits import Choice, Either, Flag, Folder, Maybe, Whole
from flodl.plan.refusal import refused
from flodl.plan.section import Section, setting


@dataclass(frozen=True)
class CheckpointPlan(Section):
    """Folders are absolute. resume: False, "auto" (if there is one), True (there must be one), or another folder."""

    directory: str | None = setting(
        Maybe(Folder("a folder's path"), "no checkpoints"),
        "The folder for checkpoints; one that is not empty needs resume or overwrite.",
        default=None,
        name="checkpoint",
    )
    resume: bool | str = setting(
        Either(Either(Flag(), Choice(("auto",))), Folder("the path of a checkpoint folder")),
        'Go on from the newest whole checkpoint: "auto" if there is one, True if there must be one.',
        default=False,
    )
    overwrite: bool = setting(
        Flag(), "Start anew in a folder that holds checkpoints, which are replaced as new ones come.", default=False
    )
    keep: int = setting(
        Whole(1, 1000), "How many of the newest checkpoints are kept.", default=3, name="checkpoint_keep"
    )
    every_epochs: int = setting(
        Whole(1), "Epochs from one checkpoint to the next.", default=1, name="checkpoint_every_epochs"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, path in (("checkpoint", self.directory), ("resume", self.resume)):
            if isinstance(path, str) and not _is_utf8(path):  # surrogates stand for bytes that are not
                raise refused(name, path, "a path that is UTF-8 from the root on", why="checkpoints hold it as UTF-8")
        if self.directory is None and self.resume in (True, "auto"):
            raise refused("resume", self.resume, "False without checkpoint=..., or the path of a checkpoint folder")
        if self.directory is None and self.overwrite:
            raise refused("overwrite", True, "False without checkpoint=...")
        if self.overwrite and self.resume is not False:
            raise refused("overwrite", True, f"False together with resume={self.resume!r}: one keeps, one replaces")


def _is_utf8(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True
