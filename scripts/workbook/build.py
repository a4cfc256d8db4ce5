"""Configuring and building with Meson, and finding what was built."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from . import setup
from .common import ROOT, StepFailed, UserError, capture, json_lines, one_of, say, shown, write_text

CHAPTERS = ROOT / "chapters"
BUILD = ROOT / "build"


# --- chapters and their binaries --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chapter:
    """A folder chapters/NN-name with one .cu, and the two binaries that are built from it."""

    name: str
    stem: str
    build: Path

    @property
    def number(self) -> str:
        return self.name.split("-")[0]

    @property
    def source(self) -> Path:
        return CHAPTERS / self.name / f"{self.stem}.cu"

    @property
    def host(self) -> Path:
        return self.build / "chapters" / self.stem

    @property
    def cuda(self) -> Path:
        return self.build / "chapters" / f"{self.stem}_cuda"

    @property
    def peers(self) -> list[Path]:
        """Further CUDA binaries from the same source, each with somebody else's kernel linked in (_cublas)."""
        if not self.host.parent.is_dir():
            return []
        names = sorted(self.host.parent.glob(f"{self.stem}_*"))
        return [p for p in names if p != self.cuda and p.is_file() and "." not in p.name and os.access(p, os.X_OK)]

    def answers_to(self, name: str) -> bool:
        """02, 2, 02-vector-gemv, vector-gemv and vector_gemv all name the chapter."""
        rest = self.name.partition("-")[2]
        return name in (self.name, self.stem, rest, self.number) or (name.isdigit() and int(name) == int(self.number))

    @cached_property
    def gpu_device(self) -> dict[str, Any] | None:
        """The GPU as the CUDA binary describes it; None if there is no binary or no GPU that it can use."""
        if not self.cuda.exists():
            return None
        status, text, _ = capture([self.cuda, "--device"], timeout=120)
        if status:
            return None
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return None

    @cached_property
    def rungs(self) -> list[dict[str, Any]]:
        """The rungs of whichever binaries are built, host and CUDA executors merged; empty if neither is."""
        merged: dict[str, dict[str, Any]] = {}
        for binary in (self.host, self.cuda, *self.peers):
            for rung in listed(binary, optional=binary != self.host):
                known = merged.setdefault(rung["rung"], {**rung, "executors": []})
                known["executors"] += [e for e in rung["executors"] if e not in known["executors"]]
        return list(merged.values())


@cache
def listed(binary: Path, optional: bool) -> list[dict[str, Any]]:
    """A binary's own --list; empty if it is not built, or is `optional` and cannot start (CUDA without a driver)."""
    if not binary.exists():
        return []
    status, text, errors = capture([binary, "--list"], timeout=120)
    if status == 0:
        return json_lines(text, f"{shown(binary)} --list")
    if optional:
        return []
    reason = (errors or text).strip().splitlines()
    raise StepFailed(f"{shown(binary)} --list failed: {reason[-1] if reason else f'exit status {status}'}")


def chapters(build: Path = BUILD) -> list[Chapter]:
    """Every chapter folder that holds a .cu, in order.  A program of several sources has a main.cpp, and no rungs."""
    found = []
    for folder in sorted(CHAPTERS.glob("[0-9][0-9]-*")):
        if (folder / "main.cpp").exists():
            continue
        found += [Chapter(folder.name, source.stem, build) for source in sorted(folder.glob("*.cu"))]
    return found


def chapter_named(name: str, build: Path = BUILD) -> Chapter:
    known = chapters(build)
    for chapter in known:
        if chapter.answers_to(name):
            return chapter
    raise one_of("chapter", name, [chapter.name for chapter in known])


def resolve(targets: list[str], build: Path = BUILD) -> list[tuple[Chapter, list[str]]]:
    """Group rung ids and chapter names by chapter, in chapter order.  An empty list means the chapter's default."""
    known = chapters(build)
    if not known:
        raise UserError("no chapters here (chapters/NN-name/*.cu)")
    wanted: dict[str, list[str]] = {}
    for target in targets:
        whole = next((chapter for chapter in known if chapter.answers_to(target)), None)
        if whole:
            wanted.setdefault(whole.name, [])
            continue
        owner = next((c for c in known if any(rung["rung"] == target for rung in c.rungs)), None)
        if owner is None:
            unbuilt = [c.name for c in known if not c.host.exists() and not c.cuda.exists()]
            if unbuilt:
                raise UserError(f'no rung "{target}" in what is built; not built: {", ".join(unbuilt)}')
            raise one_of(
                "rung or chapter", target, [c.name for c in known] + [r["rung"] for c in known for r in c.rungs]
            )
        wanted.setdefault(owner.name, []).append(target)
    return [(chapter, wanted[chapter.name]) for chapter in known if chapter.name in wanted]


# --- configuring and compiling ------------------------------------------------------------------------------------


def ensure_build(need_tests: bool = False) -> None:
    """Virtual environment, libraries, configured build folder, compiled targets.  Says what it does."""
    setup.ensure_venv()
    libraries = setup.ensure_libraries(need_tests)
    configure(libraries, need_tests)
    compile_targets(everything=need_tests)


def configure(libraries: setup.Libraries, need_tests: bool) -> None:
    if not (ROOT / "meson.build").exists():
        raise UserError("no meson.build here: this is not a complete checkout")
    compiler, cuda = setup.cxx(), setup.nvcc()
    stamp_file = BUILD / "ladder-stamp.json"
    wanted = {
        "cxx": compiler and [compiler.path, compiler.version],
        "nvcc": cuda and [cuda.path, cuda.version],
        "options": libraries.meson_options(),
    }
    configured = (BUILD / "build.ninja").exists()
    if configured and setup.stamp_matches(stamp_file, wanted):
        return
    if configured and not need_tests and _differs_only_in_tests(stamp_file, wanted):
        return
    cuda_says = (
        f"with {cuda.version}" if cuda else "without CUDA: no nvcc found (scripts/ladder doctor says how to get it)"
    )
    say(f"configuring build/ with {compiler.version if compiler else 'no compiler'}, {cuda_says}")
    command = [str(setup.venv_tool("meson")), "setup", str(BUILD), str(ROOT), *libraries.meson_options()]
    if configured:
        command.append("--reconfigure")
    if _run_logged(command, BUILD.parent / "build" / "ladder-setup.log"):
        raise StepFailed("meson setup failed; the whole output is in build/ladder-setup.log")
    write_text(stamp_file, json.dumps(wanted, indent=2) + "\n")


def _differs_only_in_tests(stamp_file: Path, wanted: dict[str, Any]) -> bool:
    """A folder configured for tests also serves commands that need none."""
    with_tests = [o for o in wanted["options"] if not o.startswith("-Dtests=")] + ["-Dtests=enabled"]
    return setup.stamp_matches(stamp_file, {**wanted, "options": with_tests})


def _run_logged(command: list[str], log: Path) -> int:
    """Run quietly with the output in a log; show the end of it if the command fails."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=setup.tool_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    write_text(log, done.stdout)
    notes = [line for line in done.stdout.splitlines() if line.startswith(("Message:", "WARNING:"))]
    shown_lines = done.stdout.splitlines()[-12:] if done.returncode else notes
    for line in shown_lines:
        print(f"  {line}", file=sys.stderr, flush=True)
    return done.returncode


def qwen(build: Path = BUILD) -> Path:
    """The final program; `qwen_cuda` beside it is the same with the GPU, and each starts the other where needed."""
    return build / "chapters" / "09-qwen" / "qwen"


def qwen_cuda(build: Path = BUILD) -> Path:
    return qwen(build).with_name("qwen_cuda")


def built_qwen(build: Path, on: str | None) -> Path:
    """The final program as it is built here.  For the GPU alone `qwen_cuda` will do: it has every command."""
    host, cuda = qwen(build), qwen_cuda(build)
    if host.exists():
        return host
    if not cuda.exists():
        raise UserError(f"no {shown(host)} and no {cuda.name} beside it; scripts/ladder test builds them")
    if on == "gpu":
        return cuda
    asked = f"--on {on}" if on else "a run without --on"
    raise UserError(f"no {shown(host)}, which {asked} needs; {cuda.name} is there, it takes --on gpu")


def binary_targets() -> list[str]:
    """Ninja targets of the chapter binaries, so that running a rung does not build every test first."""
    try:
        targets = json.loads((BUILD / "meson-info" / "intro-targets.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    wanted = {str(path.resolve()) for chapter in chapters() for path in (chapter.host, chapter.cuda)}
    wanted |= {str(path.resolve()) for path in (qwen(), qwen_cuda())}
    return [
        str(Path(name).resolve().relative_to(BUILD.resolve()))
        for target in targets
        for name in target["filename"]
        if str(Path(name).resolve()) in wanted
    ]


def compile_targets(everything: bool) -> None:
    """Build the chapter binaries, or everything.  Ninja's lines go to stderr; silent when nothing is to be done."""
    targets = [] if everything else binary_targets()
    command = [str(setup.venv_tool("ninja")), "-C", str(BUILD), *targets]
    announced = False
    process = subprocess.Popen(
        command, cwd=ROOT, env=setup.tool_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("ninja: Entering") or "no work to do" in line:
                continue
            if not announced:
                say("building")
                announced = True
            sys.stderr.write("  " + line)
            sys.stderr.flush()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
    if process.wait():
        raise StepFailed("the build failed (the lines above say where)")


# --- what built it ------------------------------------------------------------------------------------------------


def toolchain(executor: str, build: Path = BUILD) -> str | None:
    """The compilers behind a binary, from Meson's notes in the build folder, else from this machine's."""
    names = {"gcc": "gcc", "clang": "clang", "nvcc": "nvcc"}
    found: dict[str, str] = {}
    try:
        notes = json.loads((build / "meson-info" / "intro-compilers.json").read_text(encoding="utf-8"))
        for language, compiler in notes.get("host", {}).items():
            found[language] = f"{names.get(compiler['id'], compiler['id'])} {compiler['version']}"
    except (OSError, ValueError, KeyError):
        pass
    host, cuda = setup.cxx(), setup.nvcc()
    if "cpp" not in found and host:
        found["cpp"] = host.version
    if "cuda" not in found and cuda:
        found["cuda"] = cuda.version
    parts = [found[language] for language in (("cuda", "cpp") if executor == "gpu" else ("cpp",)) if language in found]
    return ", ".join(parts) or None


def meson_test_log() -> list[dict[str, Any]]:
    """One object a C++ test, from the last `meson test`."""
    path = BUILD / "meson-logs" / "testlog.json"
    if not path.exists():
        return []
    return json_lines(path.read_text(encoding="utf-8", errors="replace"), shown(path))


def doctest_counts(text: str) -> tuple[int, int, int] | None:
    """(passed, failed, skipped) test cases from doctest's closing line, if there is one."""
    found = re.search(r"test cases:\s*(\d+)\s*\|\s*(\d+) passed\s*\|\s*(\d+) failed(?:\s*\|\s*(\d+) skipped)?", text)
    return (int(found[2]), int(found[3]), int(found[4] or 0)) if found else None
