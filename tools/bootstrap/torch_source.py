"""Where the tested torch comes from on this machine, in the order in which it is tried."""

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# PyTorch's own index of builds without GPU libraries: on Linux the ordinary build brings some gigabytes of them.
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True)
class TorchSource:
    pip_args: tuple[str, ...]
    why: str


def tested_version(requirement_file: Path) -> str:
    """The version in tools/tested-torch.txt, whose one line is a pip requirement: torch==X.Y.Z."""
    return requirement_file.read_text(encoding="utf-8").strip().removeprefix("torch==")


def accelerator(platform: str = sys.platform) -> str:
    """nvidia, amd or '': by the driver's device files, without loading anything."""
    if platform == "linux":
        if Path("/dev/nvidiactl").exists() or Path("/usr/lib/wsl/lib/nvidia-smi").exists():
            return "nvidia"
        if Path("/dev/kfd").exists():
            return "amd"
    return ""


def torch_sources(version: str, platform: str, device: str, env: Mapping[str, str] = os.environ) -> list[TorchSource]:
    """FDL_TORCH, pip arguments such as 'torch==2.12.0' or '--index-url URL torch', goes before everything else."""
    asked = shlex.split(env.get("FDL_TORCH", ""))
    if asked:
        return [TorchSource(tuple(asked), "as FDL_TORCH says")]
    ordinary = f"torch=={version}"
    if platform != "linux":
        return [TorchSource((ordinary,), "the ordinary build for this system")]
    if device == "nvidia":
        return [TorchSource((ordinary,), "the CUDA build, because an NVIDIA driver is here")]
    why = "the CPU build, because no NVIDIA driver is here"
    if device == "amd":
        why += "; for ROCm set FDL_TORCH='--index-url URL torch' with the URL that pytorch.org gives for it"
    cpu = f"{ordinary}+cpu"
    return [
        TorchSource((cpu,), why),
        TorchSource(("--index-url", CPU_INDEX, "--retries", "1", "--timeout", "15", cpu), why),
        TorchSource((ordinary,), "the ordinary build, because no CPU build could be had; on Linux it is large"),
    ]
