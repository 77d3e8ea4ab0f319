"""The stages of a setup, in order: system packages, venv, dependencies, core."""

import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field

import system as system_module
from checkout import Checkout, Stamp
from console import Console, SetupError, child_environment
from system import Interpreter, Need, System
from torch_source import accelerator, tested_version, torch_sources

LOWEST_CMAKE = (3, 24)


@dataclass(frozen=True)
class Setup:
    checkout: Checkout
    python: Interpreter
    console: Console
    system: System = field(default_factory=System.detect)

    def complete(self, digests: dict[str, str]) -> None:
        """Runs the stages whose digest is not the stamp's. Raises SetupError."""
        started = time.monotonic()
        stamp = Stamp(self.checkout.venv)
        done = stamp.read()
        self.console.say(f"setting up {self.checkout.venv} (Python {self.python.label}; log: {self.console.log})")
        self._meet_needs(system_module.missing(self.python))
        if done.get("base") != digests["base"]:
            done = {}
            self._make_venv()
        stages = {"base": digests["base"]}
        if done.get("environment") != digests["environment"]:
            self._write(stamp, stages)
            self._install_build_tools()
            self._install_torch()
            self._install_flodl(with_dependencies=True)
        elif done.get("core") != digests["core"]:
            stages["environment"] = digests["environment"]
            self._write(stamp, stages)
            self._install_flodl(with_dependencies=False)
        self._write(stamp, digests)
        if not self.console.is_dry:
            self.console.say(f"ready after {time.monotonic() - started:.0f} s")

    def _write(self, stamp: Stamp, stages: dict[str, str]) -> None:
        if not self.console.is_dry:
            stamp.write(stages)

    def _meet_needs(self, needs: list[Need]) -> None:
        if not needs:
            return
        names = "; ".join(need.value for need in needs)
        line = self.system.install_line(needs, self.python)
        if not system_module.may_install(self.system):
            raise SetupError(f"missing: {names}\nInstall with:  {line}")
        packages = self.system.packages(needs, self.python)
        self.console.say(f"missing: {names}")
        self.console.say(f"installing {' '.join(packages)} with apt-get (FDL_NO_SYSTEM_PACKAGES=1 forbids it)")
        env = child_environment(self.checkout.bin_dir) | {"DEBIAN_FRONTEND": "noninteractive"}
        failure = f"apt-get could not install {' '.join(packages)}\nTry by hand:  {line}"
        self.console.run(["apt-get", "update", "-q"], env, failure)
        self.console.run(["apt-get", "install", "-qy", "--no-install-recommends", *packages], env, failure)
        left = [] if self.console.is_dry else system_module.missing(self.python)
        if left:
            raise SetupError(f"still missing: {'; '.join(need.value for need in left)}\n{self._advice(left)}")

    def _advice(self, left: list[Need]) -> str:
        if Need.compiler in left:
            return "The compiler here is older than C++20: name a newer one with CXX=/path/to/c++"
        return f"{self.python.path} is not this system's own Python: set FDL_PYTHON=/usr/bin/python3"

    def _make_venv(self) -> None:
        """Keeps a .venv that somebody made with the same Python; replaces one that does not run or has moved."""
        checkout = self.checkout
        command = [self.python.path, "-m", "venv", str(checkout.venv)]
        if checkout.venv.exists():
            is_moved = bool(Stamp(checkout.venv).read())
            if not is_moved and self._venv_runs():
                return
            command.insert(3, "--clear")
        self.console.say("making .venv")
        self.console.run(command, child_environment(checkout.bin_dir), "the venv could not be made")

    def _venv_runs(self) -> bool:
        version = f"sys.version_info[:3] == {self.python.version}"
        probe = [str(self.checkout.python), "-I", "-c", f"import sys, pip; sys.exit(not {version})"]
        try:
            return subprocess.run(probe, capture_output=True, check=False).returncode == 0
        except OSError:
            return False

    def _pip(self, *arguments: str) -> list[str]:
        return [str(self.checkout.python), "-m", "pip", "install", "--no-input", *arguments]

    def _install_build_tools(self) -> None:
        wanted = list(self.checkout.pyproject["build-system"]["requires"])
        if not _has_cmake():
            wanted.append("cmake>=" + ".".join(map(str, LOWEST_CMAKE)))
        if shutil.which("ninja") is None:
            wanted.append("ninja>=1.10")
        self.console.say("installing the build tools: " + ", ".join(wanted))
        env = child_environment(self.checkout.bin_dir)
        self.console.run(self._pip(*wanted), env, "the build tools could not be installed")

    def _install_torch(self) -> None:
        version = tested_version(self.checkout.tested_torch)
        env = child_environment(self.checkout.bin_dir)
        sources = torch_sources(version, sys.platform, accelerator())
        if "FDL_TORCH" not in env and self._installed_torch() == version:
            return
        for source in sources:
            self.console.say(f"installing torch {version}: {source.why}")
            if self.console.attempt(self._pip(*source.pip_args), env):
                return
        raise SetupError(
            f"torch {version} could not be installed for Python {self.python.label} on {sys.platform}\n"
            f"{self.console.tail()}\n"
            "flodl is tested with this torch on CPython 3.11 to 3.14 and glibc Linux. Name another interpreter with\n"
            "FDL_PYTHON=/path/to/python, or another torch (2.6 or newer) with FDL_TORCH='torch==X.Y.Z'."
        )

    def _installed_torch(self) -> str:
        """The version in the venv without its local part; '' if there is none."""
        probe = "from importlib.metadata import version; print(version('torch').partition('+')[0])"
        try:
            command = [str(self.checkout.python), "-I", "-c", probe]
            return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        except OSError:
            return ""

    def _install_flodl(self, with_dependencies: bool) -> None:
        target = str(self.checkout.root)
        if with_dependencies:
            self.console.say("building flodl's native core and installing flodl with what it needs; takes minutes")
            arguments = ["--no-build-isolation", "--editable", f"{target}[torch,demo]"]
        else:
            self.console.say("building flodl's native core; takes a minute or two")
            arguments = ["--no-build-isolation", "--no-deps", "--editable", target]
        env = child_environment(self.checkout.bin_dir)
        self.console.run(self._pip(*arguments), env, "flodl could not be built and installed")


def _has_cmake() -> bool:
    cmake = shutil.which("cmake")
    if cmake is None:
        return False
    text = subprocess.run([cmake, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"(\d+)\.(\d+)", text)
    return found is not None and (int(found[1]), int(found[2])) >= LOWEST_CMAKE
