"""`list` and `doctor`: what is here, what will run, and how to get the rest."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from . import devices, records, run, setup
from .build import CHAPTERS, chapters
from .common import ROOT, UserError, markdown_table, shown
from .sources import source_of

_RUNG_HEADER = re.compile(r"RUNG\s+(?P<id>\w+)[^:]*:\s*(?P<title>.+?)\s*(?:PREV\b|$)")


@dataclass(frozen=True)
class RungText:
    """What the sources say about a rung, without a build."""

    rung: str
    chapter: str
    title: str
    source: str


@cache
def rungs_from_sources() -> list[RungText]:
    """Rungs by chapter and order of registration: anchors whose name a chapter's .cu registers as a string.

    Variants without an anchor of their own are known only to the built binary.
    """
    from .sources import all_anchors

    anchors = {}
    for anchor in all_anchors():
        if anchor.path.is_relative_to(CHAPTERS) or (
            anchor.path.is_relative_to(ROOT / "kernels") and not anchor.path.is_relative_to(ROOT / "kernels" / "cpu")
        ):
            anchors.setdefault(anchor.name, anchor)
    found = []
    for chapter in chapters():
        for path in sorted((CHAPTERS / chapter.name).glob("*.cu")):
            text = path.read_text(encoding="utf-8")
            seen = dict.fromkeys(re.findall(r'"([a-z][a-z0-9_]*)"', text))
            for name in seen:
                if name in anchors:
                    anchor = anchors[name]
                    found.append(RungText(name, chapter.name, title_of(name, anchor.path, text), shown(anchor.path)))
    return found


def title_of(rung: str, path: Path, registration: str) -> str:
    """The idea in a few words: from the kernel's RUNG header line, else from the registration."""
    for line in path.read_text(encoding="utf-8").splitlines():
        header = _RUNG_HEADER.search(line)
        if header and header["id"] == rung:
            return header["title"].rstrip(" .")
    given = re.search(rf'"{re.escape(rung)}"\s*,\s*"((?:[^"\\]|\\.)+)"', registration)
    return given[1] if given else ""


def command_list(args: argparse.Namespace) -> int:
    folder = args.build_dir if args.build_dir.is_absolute() else ROOT / args.build_dir
    known = chapters(folder)
    rows: list[dict[str, object]] = []
    unbuilt = []
    for chapter in known:
        if chapter.rungs:
            rows += [
                {
                    "rung": r["rung"],
                    "chapter": chapter.name,
                    "title": r.get("title", ""),
                    "executors": r["executors"],
                    "source": r.get("source", ""),
                }
                for r in chapter.rungs
            ]
            continue
        unbuilt.append(chapter.name)
        rows += [
            {"rung": r.rung, "chapter": r.chapter, "title": r.title, "source": r.source}
            for r in rungs_from_sources()
            if r.chapter == chapter.name
        ]
    shapes = next((found for found in map(run.layers, known) if found), [])
    if args.json:
        for row in rows:
            print(json.dumps(row))
        for shape in shapes:
            print(json.dumps(shape))
        return 0
    table = [[str(r["chapter"]), str(r["rung"]), _words(r.get("executors")) or "?", str(r["title"])] for r in rows]
    print(markdown_table(["chapter", "rung", "executors", "what it is"], table))
    if shapes:
        print(f"\nshapes for --layer ({len(shapes)}; od output features, id input features):\n")
        sizes: dict[str, list[str]] = {}
        for shape in shapes:
            size, _, matmul = shape["layer"].rpartition(".")
            sizes.setdefault(size, []).append(f"{matmul} {shape['od']}x{shape['id']}")
        for size, items in sizes.items():
            print(f"  {size:>5}: " + ", ".join(items))
    if unbuilt:
        print(
            f"\nnot built: {', '.join(unbuilt)}; its rungs are read from the sources. Executors, variants and shapes "
            "show after a build (scripts/ladder test, demo or run build)"
        )
    usable = [e for e in ("gpu", "cpu", "emulator") if any(e in run.executors_here(c) for c in known)]
    print(f"\nexecutors that work here: {', '.join(usable) or 'unknown until a build'}")
    return 0


def _words(items: object) -> str:
    return " ".join(name for name in ("gpu", "cpu", "emulator") if name in items) if isinstance(items, list) else ""


def command_doctor(_: argparse.Namespace) -> int:
    """Say what was found, what will run, and how to get the rest.  Changes nothing."""
    print("tools")
    _line("Python", f"{platform.python_version()} ({sys.executable})")
    _line(".venv", "ready" if setup.venv_is_current() else "not made yet: the first command that needs it makes it")
    compiler = setup.cxx()
    _line(
        "C++20 compiler",
        compiler.version
        if compiler
        else "missing: g++ >= 11 or clang++ >= 14 (Debian, Ubuntu: sudo apt-get install g++)",
    )
    if compiler:
        if setup.has_boost_context():
            boost = "the system's"
        elif setup.wheel_boost_prefix():
            boost = "the wheel in .venv"
        else:
            boost = (
                "not on this system: a wheel will be installed into .venv "
                "(or: sudo apt-get install libboost-context-dev)"
            )
        _line("Boost.Context", boost)
        for library in setup.WRAPPED:
            _line(
                library.shown,
                "the system's"
                if library.on_system()
                else "fetched by Meson"
                if library.is_fetched()
                else f"not on this system: Meson will fetch it, {library.purpose} "
                f"(or: sudo apt-get install {library.package})",
            )
    cuda = setup.nvcc()
    _line(
        "CUDA compiler",
        f"{cuda.version} ({cuda.path})"
        if cuda
        else "none: GPU code is not built. Get the CUDA Toolkit, 12.4 or newer: https://developer.nvidia.com/cuda-downloads",
    )
    profiler = setup.ncu()
    _line(
        "Nsight Compute",
        f"{profiler.version} ({profiler.path})" if profiler else "none: scripts/ladder counters will not run",
    )
    print("machine")
    _line("CPU", f"{_cpu_name()}, {os.cpu_count()} hardware threads")
    memory = setup.host_memory_bytes()
    if memory:
        _line("memory", f"{memory / 1e9:.1f} GB available")
    gpus = devices.nvidia_smi()
    for gpu in gpus:
        spec = devices.spec_for(gpu["name"])
        known = (
            f"spec in {shown(devices.DEVICES / (spec['slug'] + '.json'))}"
            if spec
            else "no spec in data/devices: only measured roofs are drawn"
        )
        _line(
            "GPU",
            f"{gpu['name']}, compute capability {gpu['compute_cap']}, {gpu['memory.total']}, "
            f"driver {gpu['driver_version']}; {known}",
        )
    if not gpus:
        _line("GPU", "none that nvidia-smi lists")
    print("what will run here")
    known_chapters = chapters()
    built = [chapter for chapter in known_chapters if chapter.rungs]
    if not built:
        _line("gpu", "likely, after a build" if gpus and cuda else _why_not_gpu(bool(gpus), bool(cuda)))
        _line("cpu, emulator", "yes, after a build" if compiler else "no: they need a C++ compiler")
    reasons: dict[str, list[str]] = {}
    for chapter in built:
        here = run.executors_here(chapter)
        _line(chapter.name, ", ".join(here) or "nothing")
        if "gpu" not in here:
            reasons.setdefault(run.why_no_gpu(chapter), []).append(chapter.number)
    for reason, numbers in reasons.items():
        _line("no gpu", f"{reason} (chapters {', '.join(numbers)})")
    for device in records.devices_with_records():
        _line("records", f"{device}: {len(records.load_committed(device))}")
    return 0


def _line(name: str, text: str) -> None:
    print(f"  {name:<16} {text}")


def _why_not_gpu(gpu: bool, cuda: bool) -> str:
    missing = [
        what for there, what in ((gpu, "an NVIDIA GPU with its driver"), (cuda, "the CUDA Toolkit")) if not there
    ]
    return f"no: it needs {' and '.join(missing)}"


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def chapter_of(rung: str) -> str:
    """The chapter that registers a rung, from the sources."""
    for known in rungs_from_sources():
        if known.rung == rung:
            return known.chapter
    try:
        anchor = source_of(rung)
    except UserError:
        return ""
    return next((r.chapter for r in rungs_from_sources() if r.rung == anchor.name), "")
