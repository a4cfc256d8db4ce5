"""What the project needs on this machine: how to tell whether it is there, and how to get what is missing.

Nothing is installed without saying so first.  Root is used only when the user is root already, or says yes at a
terminal.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .common import ROOT, UserError, capture, is_root, is_terminal, read_text, say, stream, write_text

VENV = ROOT / ".venv"
REQUIREMENTS = ROOT / "scripts" / "requirements.txt"
VENV_STAMP = VENV / "ladder-stamp"
SUBPROJECTS = ROOT / "harness" / "subprojects"  # Meson's wraps
BOOST_WHEEL = "cmeel-boost==1.90.0"
NO_APT = "LADDER_NO_APT"  # set to 1: never run apt-get, even as root


# --- the virtual environment ------------------------------------------------------------------------------------


def venv_python() -> Path:
    return VENV / "bin" / "python"


def venv_tool(name: str) -> Path:
    return VENV / "bin" / name


def _stamp() -> str:
    version = ".".join(map(str, sys.version_info[:2]))
    return hashlib.sha256(f"{version}\n{read_text(REQUIREMENTS)}".encode()).hexdigest()


def venv_is_current() -> bool:
    try:
        written = VENV_STAMP.read_text(encoding="utf-8").strip()
    except OSError:
        return False
    # Under the environment's own Python the version is the one that it was made with.
    return written == _stamp() and os.access(venv_python(), os.X_OK)


def ensure_venv() -> None:
    """Make .venv and install the pinned packages; does nothing, and needs no network, once that is done."""
    if venv_is_current():
        return
    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        install_packages(["python3-venv"], "python3 -m venv needs it")
        importlib.invalidate_caches()
        if importlib.util.find_spec("ensurepip") is None:
            raise UserError("python3 -m venv does not work here; install your system's python3-venv package")
    say(
        f"making a virtual environment in {VENV.relative_to(ROOT)} and installing scripts/requirements.txt into it "
        "from the Python package index"
    )
    if stream([sys.executable, "-m", "venv", "--clear", VENV]):
        raise UserError("python3 -m venv .venv failed (the lines above say why)")
    _pip_install(["-r", str(REQUIREMENTS)])
    write_text(VENV_STAMP, _stamp() + "\n")


def _pip_install(arguments: Sequence[str]) -> None:
    command = [venv_python(), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    if stream(command):
        raise UserError(
            f"pip install {' '.join(arguments)} failed (the lines above say why); "
            "the first run needs the Python package index, later runs need no network"
        )


def rerun_in_venv(argv: Sequence[str]) -> None:
    """Continue this command under .venv's Python (for commands that need packages).  Returns only if already there."""
    ensure_venv()
    if Path(sys.prefix).resolve() == VENV.resolve():
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(str(venv_python()), [str(venv_python()), str(ROOT / "scripts" / "ladder"), *argv])


# --- compilers and libraries --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tool:
    """A program that was found, and its version."""

    path: str
    version: str


def _version(path: str, pattern: str) -> str:
    _, out, err = capture([path, "--version"], timeout=30)
    found = re.search(pattern, out + err)
    return found[1] if found else ""


@cache
def cxx() -> Tool | None:
    """A C++20 compiler: $CXX, else g++ >= 11, else clang++ >= 14."""
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["g++", "clang++"]:
        path = shutil.which(name.split()[0])
        if not path:
            continue
        status, text, _ = capture([path, "--version"], timeout=30)
        if status:
            continue
        is_clang = "clang" in text
        version = (
            _version(path, r"version (\d[\d.]*)")
            if is_clang
            else capture([path, "-dumpfullversion"], timeout=30)[1].strip()
        )
        major = int(version.split(".")[0] or 0) if version else 0
        if wanted or major >= (14 if is_clang else 11):
            return Tool(path, f"{'clang' if is_clang else 'gcc'} {version}")
    return None


@cache
def nvcc() -> Tool | None:
    """The CUDA compiler: on PATH, under $CUDA_HOME, or in the toolkit's usual place."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = [shutil.which("nvcc"), f"{home}/bin/nvcc" if home else None, "/usr/local/cuda/bin/nvcc"]
    for place in places:
        if place and Path(place).exists():
            version = _version(place, r"V(\d+\.\d+(?:\.\d+)?)")
            return Tool(place, f"nvcc {version}".strip())
    return None


@cache
def ncu() -> Tool | None:
    """Nsight Compute's command line: on PATH, or where the toolkit and the stand-alone package put it, newest first."""
    places = [shutil.which("ncu")]
    for pattern in ("usr/local/cuda*/bin/ncu", "opt/nvidia/nsight-compute/*/ncu", "opt/nvidia/*/bin/ncu"):
        places += sorted(map(str, Path("/").glob(pattern)), key=_by_number, reverse=True)
    for place in places:
        if place and Path(place).exists():
            version = _version(place, r"Version (\d+\.\d+(?:\.\d+)?)")
            return Tool(place, f"ncu {version}".strip())
    return None


def _by_number(path: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", path)]


def _compiles(source: str, *flags: str) -> bool:
    compiler = cxx()
    if compiler is None:
        return False
    with tempfile.TemporaryDirectory(prefix="ladder-") as folder:
        path = Path(folder) / "probe.cpp"
        path.write_text(source, encoding="utf-8")
        status, _, _ = capture(
            [compiler.path, "-std=c++20", path, "-o", Path(folder) / "probe", *flags], cwd=Path(folder), timeout=120
        )
    return status == 0


@cache
def has_boost_context() -> bool:
    """Can the compiler build and link Boost.Context as the system has it?"""
    return _compiles(
        "#include <boost/context/fiber.hpp>\n"
        "int main() { boost::context::fiber f([](boost::context::fiber&& c) { return std::move(c); });\n"
        "  f = std::move(f).resume(); return 0; }\n",
        "-lboost_context",
    )


@cache
def has_doctest() -> bool:
    return _compiles("#define DOCTEST_CONFIG_IMPLEMENT\n#include <doctest/doctest.h>\nint main() {}\n", "-fsyntax-only")


@cache
def has_utf8proc() -> bool:
    return _compiles("#include <utf8proc.h>\nint main() { return utf8proc_category(65) != 1; }\n", "-lutf8proc")


@cache
def has_cli11() -> bool:
    return _compiles("#include <CLI/CLI.hpp>\nint main() { CLI::App app; }\n", "-fsyntax-only")


@dataclass(frozen=True)
class Wrapped:
    """A library that Meson fetches where the system has none."""

    name: str  # of the wrap, harness/subprojects/<name>.wrap
    shown: str  # as people write it
    package: str  # Debian's and Ubuntu's
    purpose: str
    fetched: str  # what is under harness/subprojects once Meson has it

    def on_system(self) -> bool:
        return {"doctest": has_doctest, "utf8proc": has_utf8proc, "cli11": has_cli11}[self.name]()

    def is_fetched(self) -> bool:
        return any(SUBPROJECTS.glob(self.fetched))


DOCTEST = Wrapped("doctest", "doctest", "doctest-dev", "for the C++ tests", "doctest-*/doctest")
UTF8PROC = Wrapped("utf8proc", "utf8proc", "libutf8proc-dev", "for the tokenizer", "utf8proc-*/meson.build")
CLI11 = Wrapped("cli11", "CLI11", "libcli11-dev", "for the command line of qwen", "CLI11-*/meson.build")
WRAPPED = (DOCTEST, UTF8PROC, CLI11)


def doctest_wrap_ready() -> bool:
    """Has Meson fetched doctest before (so that no network is needed)?"""
    return DOCTEST.is_fetched()


def fetch(library: Wrapped) -> None:
    """Have Meson download a library that neither the system nor an earlier download provides."""
    if library.on_system() or library.is_fetched():
        return
    wrap = f"harness/subprojects/{library.name}.wrap"
    say(f"no {library.shown} on this system: Meson downloads it ({wrap})")
    command = [venv_tool("meson"), "subprojects", "download", "--sourcedir", ROOT, library.name]
    status, out, err = capture(command, timeout=600)
    if status or not library.is_fetched():
        for line in (out + err).strip().splitlines()[-4:]:
            print(f"  {line}", file=sys.stderr)
        how = f"run: sudo apt-get install {library.package}" if is_debian() else "install your system's package for it"
        raise UserError(f"no {library.shown}, {library.purpose}, and its download failed ({wrap}); {how}")


def wheel_boost_prefix() -> Path | None:
    """Where the cmeel-boost wheel put Boost inside .venv, if it is installed."""
    for lib in sorted(VENV.glob("lib/python3*/site-packages/cmeel.prefix/lib/libboost_context.so")):
        return lib.parents[1]
    return None


def is_debian() -> bool:
    return shutil.which("apt-get") is not None


def install_packages(packages: Sequence[str], why: str) -> None:
    """Install Debian/Ubuntu packages: as root at once, otherwise only after a yes at a terminal."""
    if not try_install(packages, why):
        names = " ".join(packages)
        how = f"run: sudo apt-get install {names}" if is_debian() else f"install your system's packages for: {names}"
        raise UserError(f"missing {names} ({why}); {how}")


def try_install(packages: Sequence[str], why: str) -> bool:
    """As install_packages, but False instead of an error when it may not or cannot."""
    if not is_debian() or os.environ.get(NO_APT) == "1":
        return False
    prefix: list[str] = []
    if not is_root():
        if not is_terminal() or shutil.which("sudo") is None:
            return False
        print(
            f"ladder: {why}. May I run: sudo apt-get install {' '.join(packages)} ? [y/N] ",
            end="",
            file=sys.stderr,
            flush=True,
        )
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            return False
        prefix = ["sudo"]
    say(f"installing with apt-get: {' '.join(packages)} ({why})")
    install = [
        *prefix,
        "env",
        "DEBIAN_FRONTEND=noninteractive",
        "apt-get",
        "install",
        "-y",
        "-q",
        "--no-install-recommends",
        *packages,
    ]
    if _quiet(install) == 0:
        return True
    say("the package lists may be missing or old: apt-get update, then again")
    return _quiet([*prefix, "apt-get", "update", "-q"]) == 0 and stream(install) == 0


def _quiet(command: Sequence[str]) -> int:
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode


@dataclass(frozen=True)
class Libraries:
    """How Meson is to find what the build needs."""

    boost_prefix: Path | None  # None: the system's
    doctest: bool  # False: build without the C++ tests

    def meson_options(self) -> list[str]:
        return [f"-Dboost_prefix={self.boost_prefix or ''}", f"-Dtests={'enabled' if self.doctest else 'disabled'}"]


def ensure_libraries(need_tests: bool) -> Libraries:
    """Compiler and libraries: the system's, else apt-get where allowed, else the wheel and Meson's wraps."""
    wrapped = [library for library in WRAPPED if need_tests or library is not DOCTEST]
    probes: list[tuple[str, str, Callable[[], bool]]] = [
        ("g++", "a C++20 compiler", lambda: cxx() is not None),
        ("libboost-context-dev", "Boost.Context, for the emulator", has_boost_context),
        *((one.package, f"{one.shown}, {one.purpose}", one.on_system) for one in wrapped if not one.is_fetched()),
    ]
    missing = [(package, what) for package, what, there in probes if not there()]
    if missing and try_install([package for package, _ in missing], "needed: " + "; ".join(w for _, w in missing)):
        for probe in (cxx, has_boost_context, has_doctest, has_utf8proc, has_cli11):
            probe.cache_clear()
    if cxx() is None:
        how = "run: sudo apt-get install g++" if is_debian() else "install g++ >= 11 or clang++ >= 14"
        raise UserError(f"no C++20 compiler (g++ >= 11 or clang++ >= 14, or set CXX); {how}")
    prefix = None
    if not has_boost_context():
        prefix = wheel_boost_prefix()
        if prefix is None:
            say(f"no Boost.Context on this system: installing the wheel {BOOST_WHEEL} (36 MB) into .venv")
            _pip_install(["--no-deps", BOOST_WHEEL])
            prefix = wheel_boost_prefix()
        if prefix is None:
            raise UserError(f"{BOOST_WHEEL} brought no libboost_context.so; install libboost-context-dev")
    for library in wrapped:
        fetch(library)
    tests = need_tests or has_doctest() or doctest_wrap_ready()
    return Libraries(prefix, tests)


def tool_environment() -> dict[str, str]:
    """The environment for Meson and Ninja: .venv's tools first, the compiler that was chosen, and nvcc on PATH."""
    env = dict(os.environ)
    paths = [str(VENV / "bin")]
    compiler, cuda = cxx(), nvcc()
    if cuda and not shutil.which("nvcc"):
        paths.append(str(Path(cuda.path).parent))
    env["PATH"] = os.pathsep.join([*paths, env.get("PATH", "")])
    if compiler and "CXX" not in env:
        env["CXX"] = compiler.path
    return env


def host_memory_bytes() -> int | None:
    """Memory that a run may use without swapping, or None where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return None
    return None


def stamp_matches(path: Path, wanted: object) -> bool:
    """Does a JSON stamp file hold exactly this?"""
    try:
        return json.loads(path.read_text(encoding="utf-8")) == wanted
    except (OSError, ValueError):
        return False
