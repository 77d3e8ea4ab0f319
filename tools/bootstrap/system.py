"""What a setup needs from the system beside Python, and the line that installs it on this kind of system."""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

CXX_PROBE = "#include <concepts>\n#include <span>\nint main() { return 0; }\n"


class Need(Enum):
    venv = "Python's venv module (ensurepip)"
    compiler = "a C++20 compiler"
    headers = "Python's header files (Python.h)"


@dataclass(frozen=True)
class System:
    """family: debian, fedora, rhel, arch, alpine, suse, macos, windows or unknown; release: VERSION_ID or ''."""

    family: str
    release: str = ""

    @staticmethod
    def detect(env: Mapping[str, str] = os.environ) -> "System":
        if sys.platform == "win32":
            return System("windows")
        if sys.platform == "darwin":
            return System("macos")
        path = Path(env.get("FDL_OS_RELEASE", "/etc/os-release"))
        fields: dict[str, str] = {}
        if path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                name, _, value = line.partition("=")
                fields[name.strip()] = value.strip().strip("\"'")
        words = [fields.get("ID", ""), *fields.get("ID_LIKE", "").split()]
        names = {"ubuntu": "debian", "centos": "rhel", "opensuse": "suse"}
        for word in words:
            family = names.get(word, word)
            if family in {"debian", "fedora", "rhel", "arch", "alpine", "suse"}:
                is_clone = family == "fedora" and fields.get("ID") != "fedora"
                return System("rhel" if is_clone else family, fields.get("VERSION_ID", ""))
        return System("unknown")

    def packages(self, needs: Sequence[Need], python: "Interpreter") -> list[str]:
        """The system's packages for these needs; empty where they come another way."""
        debian = {Need.venv: f"{python.package}-venv", Need.compiler: "g++", Need.headers: f"{python.package}-dev"}
        redhat = {Need.venv: python.package, Need.compiler: "gcc-c++", Need.headers: f"{python.package}-devel"}
        if self.family == "rhel" and self.release.startswith("8"):
            redhat[Need.compiler] = "gcc-toolset-13-gcc-c++"
        tables = {
            "debian": debian,
            "fedora": redhat,
            "rhel": redhat,
            "suse": redhat,
            "arch": {Need.venv: "python", Need.compiler: "gcc", Need.headers: "python"},
            "alpine": {Need.venv: "python3", Need.compiler: "g++", Need.headers: "python3-dev"},
        }
        table = tables.get(self.family, {})
        return list(dict.fromkeys(table[need] for need in needs if need in table))

    def install_line(self, needs: Sequence[Need], python: "Interpreter") -> str:
        """One line a person can paste; a sentence where there is no such line."""
        commands = {
            "debian": "apt-get update && apt-get install -y --no-install-recommends",
            "fedora": "dnf install -y",
            "rhel": "dnf install -y",
            "arch": "pacman -S --needed",
            "alpine": "apk add",
            "suse": "zypper install -y",
        }
        if self.family == "macos":
            return "xcode-select --install"
        if self.family == "windows":
            return (
                "winget install --id Microsoft.VisualStudio.2022.BuildTools --override "
                '"--quiet --wait --add Microsoft.VisualStudio.Workload.VCTools --includeRecommended"'
            )
        if self.family not in commands:
            return "install " + " and ".join(need.value for need in needs) + " with what this system uses for packages"
        line = f"{commands[self.family]} {' '.join(self.packages(needs, python))}"
        if "gcc-toolset" in line:
            line += "   (then: export CXX=/opt/rh/gcc-toolset-13/root/usr/bin/g++)"
        return line


@dataclass(frozen=True)
class Interpreter:
    """The base interpreter of the venv. package: the stem of its packages' names in a distribution."""

    path: str
    version: tuple[int, int, int]
    package: str

    @staticmethod
    def current() -> "Interpreter":
        path = getattr(sys, "_base_executable", None) or sys.executable
        version = sys.version_info[:3]
        default = os.path.realpath("/usr/bin/python3")
        is_default = os.path.basename(default) in {"python3", f"python3.{version[1]}"}
        return Interpreter(path, version, "python3" if is_default else f"python3.{version[1]}")

    @property
    def label(self) -> str:
        return ".".join(map(str, self.version))


def has_venv(python: Interpreter) -> bool:
    probe = [python.path, "-I", "-c", "import ensurepip, venv"]
    return subprocess.run(probe, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode == 0


def has_headers() -> bool:
    return Path(sysconfig.get_path("include"), "Python.h").is_file()


def has_compiler(env: Mapping[str, str] = os.environ) -> bool:
    """Whether CMake will find a compiler that knows C++20. CXX counts as CMake counts it: alone, if it is set."""
    if sys.platform == "win32":
        return _has_msvc(env)
    if sys.platform == "darwin" and subprocess.run(["xcode-select", "-p"], capture_output=True, check=False).returncode:
        return False  # without the command line tools /usr/bin/c++ only opens a dialog
    named = shlex.split(env.get("CXX", ""))
    path = env.get("PATH", os.defpath)
    # The first one found is the one CMake takes, whether or not it is new enough.
    for command in [named] if named else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0], path=path):
            probe = [*command, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
            return subprocess.run(probe, input=CXX_PROBE.encode(), capture_output=True, check=False).returncode == 0
    return False


def _has_msvc(env: Mapping[str, str]) -> bool:
    folder = env.get("ProgramFiles(x86)", r"C:\Program Files (x86)")
    vswhere = Path(folder, "Microsoft Visual Studio", "Installer", "vswhere.exe")
    if not vswhere.is_file():
        return False
    tools = "Microsoft.VisualStudio.Component.VC.Tools.x86.x64"
    query = [str(vswhere), "-latest", "-products", "*", "-requires", tools, "-property", "installationPath"]
    return bool(subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip())


def missing(python: Interpreter) -> list[Need]:
    found = {Need.venv: has_venv(python), Need.compiler: has_compiler(), Need.headers: has_headers()}
    return [need for need in Need if not found[need]]


def may_install(system: System, env: Mapping[str, str] = os.environ) -> bool:
    """Root on a Debian-like system where nobody sits at the keyboard, unless FDL_NO_SYSTEM_PACKAGES=1."""
    if env.get("FDL_NO_SYSTEM_PACKAGES") == "1" or system.family != "debian" or os.name != "posix":
        return False
    if os.geteuid() != 0 or shutil.which("apt-get", path=env.get("PATH", os.defpath)) is None:
        return False
    in_container = Path("/.dockerenv").exists() or Path("/run/.containerenv").exists() or "container" in env
    is_batch = "CI" in env or env.get("DEBIAN_FRONTEND") == "noninteractive"
    return in_container or is_batch or not sys.stdin or not sys.stdin.isatty()
