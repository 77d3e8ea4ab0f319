"""The checkout whose .venv is kept complete: its paths, and the digests that say when a part of it is stale."""

import hashlib
import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from system import Interpreter


@dataclass(frozen=True)
class Checkout:
    root: Path

    @property
    def venv(self) -> Path:
        return self.root / ".venv"

    @property
    def bin_dir(self) -> Path:
        return self.venv / ("Scripts" if os.name == "nt" else "bin")

    @property
    def python(self) -> Path:
        return self.bin_dir / ("python.exe" if os.name == "nt" else "python")

    @property
    def entry(self) -> Path:
        return self.bin_dir / ("fdl.exe" if os.name == "nt" else "fdl")

    @property
    def tested_torch(self) -> Path:
        return self.root / "tools" / "tested-torch.txt"

    @property
    def pyproject(self) -> dict[str, Any]:
        return tomllib.loads((self.root / "pyproject.toml").read_text(encoding="utf-8"))

    def core_sources(self) -> list[Path]:
        """What the native core is built from; its tests are not part of it."""
        found = [self.root / "CMakeLists.txt"]
        for folder in ("cmake", "native"):
            found += (path for path in (self.root / folder).rglob("*") if path.is_file())
        tests = self.root / "native" / "tests"
        return sorted(path for path in found if tests not in path.parents)

    def digests(self, python: Interpreter, env: Mapping[str, str] = os.environ) -> dict[str, str]:
        """base: a new venv is needed; environment: pip has to run; core: flodl has to be built and installed."""
        setup = sorted(Path(__file__).parent.glob("*.py"))
        return {
            "base": _digest([f"{self.root}\n{python.label}"], []),
            "environment": _digest(
                [env.get("FDL_TORCH", "")], [self.root / "pyproject.toml", self.tested_torch, *setup]
            ),
            "core": _digest([], self.core_sources()),
        }


def _digest(words: Iterable[str], files: Iterable[Path]) -> str:
    total = hashlib.sha256()
    for word in words:
        total.update(word.encode() + b"\0")
    for path in files:
        total.update(str(path).encode() + b"\0" + (path.read_bytes() if path.exists() else b"") + b"\0")
    return total.hexdigest()


class Stamp:
    """What the venv was made from, one digest per stage; written after the stage, so that a setup cut short resumes."""

    def __init__(self, venv: Path) -> None:
        self._path = venv / "fdl-stamp.json"

    def read(self) -> dict[str, str]:
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def write(self, stages: Mapping[str, str]) -> None:
        draft = self._path.with_suffix(".new")
        draft.write_text(json.dumps(dict(stages), indent=1), encoding="utf-8")
        draft.replace(self._path)
