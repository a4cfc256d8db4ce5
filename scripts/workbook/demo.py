"""`demo`: the main job in one command."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from . import records, run, setup
from .build import BUILD, Chapter, chapters, ensure_build, qwen
from .common import ROOT, StepFailed, markdown_table, say, shown
from .records import Record

OUT = BUILD / "demo"
MODEL = ROOT / "data" / "models" / "tales-f16.gguf"
STORY = "Once upon a time there was a little"
STORY_TOKENS = 120
CLIMB = ("00", "01", "02", "03")
# Real Qwen2.5 matmuls: one that fits into most caches, one that fits into none.
LAYERS = ("0.5b.ffn_down", "7b.ffn_down")
ROWS = {"gpu": "1,2,4,8,16,64", "cpu": "1,2,4,8,16,64"}
TIME_LIMIT_MS = {"gpu": "300", "cpu": "300"}
# The float64 reference and the checks hold the matrix and its products beside the operands.
BYTES_PER_WEIGHT = 4 * 4


def command_demo(args: argparse.Namespace) -> int:
    setup.rerun_in_venv(sys.argv[1:])  # the plots need Matplotlib
    started = time.monotonic()
    ensure_build()
    climbed = [c for c in chapters() if c.number in CLIMB]
    executor = best_executor(climbed)
    device = next((d for c in climbed if (d := run.device_of(c, executor))), {})
    name = device.get("device", executor)
    say(f"built after {time.monotonic() - started:.0f} s; climbing on {name} ({executor})")
    if executor != "gpu":
        say("no GPU here that the CUDA binaries can use: the CPU twins give the times, the emulator checks the kernels")
    OUT.mkdir(parents=True, exist_ok=True)
    file = OUT / "records.jsonl"
    file.write_text("", encoding="utf-8")
    made: list[Record] = []
    for chapter in climbed:
        made += climb(chapter, executor, args.quick)
    checks: list[Record] = []
    if executor != "gpu":
        for chapter in climbed:
            checks += emulate(chapter)
    run.emit([*made, *checks], str(file))
    print()
    print(roofline_table(made))
    print_checks(checks)
    draw(made, file)
    tell_a_story()
    print(f"\ndone in {time.monotonic() - started:.0f} s; records in {shown(file)}")
    return 0


def best_executor(climbed: Sequence[Chapter]) -> str:
    for executor in ("gpu", "cpu"):
        if any(executor in run.executors_here(chapter) for chapter in climbed):
            return executor
    raise StepFailed("nothing that is built can run here (scripts/ladder doctor says why)")


def climb(chapter: Chapter, executor: str, quick: bool) -> list[Record]:
    """Measure one chapter; a failed check ends the demo."""
    here = [rung["rung"] for rung in chapter.rungs if executor in rung["executors"]]
    if not here:
        say(f"{chapter.name}: nothing of it runs on {executor}")
        return []
    made: list[Record] = []
    for arguments in plans(chapter, executor, quick):
        print(f"\n== {chapter.name} {' '.join(arguments)}".rstrip(), flush=True)
        options = ["--on", executor, *arguments]
        command = run.command_line("run", [chapter.name], options)
        status, new = run.run_chapter(chapter, [], executor, options, command)
        if status:
            raise StepFailed(f"{chapter.name} failed with status {status} (the lines above say why)")
        made += new
    return made


def plans(chapter: Chapter, executor: str, quick: bool) -> list[list[str]]:
    """Options of each run of a chapter: probes take none, matmuls one run a layer that fits into memory."""
    limit = ["--time-limit-ms", TIME_LIMIT_MS[executor]]
    if chapter.number == "00":
        return [limit]
    known = {layer["layer"]: layer for layer in run.layers(chapter)}
    rows = "1" if quick else ROWS[executor]
    found = []
    for name in LAYERS[:1] if quick else LAYERS:
        if name not in known:
            continue
        need = known[name]["od"] * known[name]["id"] * BYTES_PER_WEIGHT
        free = free_bytes(chapter, executor)
        if free is not None and need > free:
            say(
                f"{chapter.name}: {name} skipped, it needs about {need / 1e9:.1f} GB of memory, "
                f"{free / 1e9:.1f} GB are free"
            )
            continue
        nt = rows
        if chapter.number == "01" and executor != "gpu" and not quick:
            nt = "1,4"  # the scalar twin streams the weights once a token: many tokens only cost time there
        if chapter.number == "03":
            nt = "1"  # a rung for each storage type: decode shows what they are about
        found.append(["--layer", name, "--nt", nt, *limit])
    return found


def free_bytes(chapter: Chapter, executor: str) -> int | None:
    host = setup.host_memory_bytes()
    if executor != "gpu":
        return host
    device = run.device_of(chapter, "gpu") or {}
    return device.get("total_bytes", host)


def emulate(chapter: Chapter) -> list[Record]:
    """Check every kernel of a chapter on the emulator, at a real layer and one odd shape."""
    here = [rung["rung"] for rung in chapter.rungs if "emulator" in rung["executors"]]
    if not here:
        return []
    shapes: list[list[str]] = [[]] if chapter.number == "00" else [["--layer", LAYERS[0], "--nt", "1"]]
    made: list[Record] = []
    for shape in shapes:
        options = ["--on", "emulator", "--check-only", *shape]
        print(f"\n== {chapter.name} {' '.join(options)}", flush=True)
        status, new = run.run_chapter(
            chapter, [], "emulator", options, run.command_line("run", [chapter.name], options)
        )
        if status:
            raise StepFailed(f"{chapter.name} failed on the emulator with status {status} (the lines above say why)")
        made += new
    return made


def tell_a_story() -> None:
    """The final program continues a story, on the GPU if there is one, else on the CPU."""
    command = [qwen(), "run", MODEL, STORY, "-n", str(STORY_TOKENS), "--temp", "0.6", "--seed", "1"]
    print(
        f"\n== {' '.join(shown(part) if isinstance(part, Path) else shlex.quote(part) for part in command)}", flush=True
    )
    done = subprocess.run([str(part) for part in command], cwd=ROOT, check=False)
    if done.returncode:
        raise StepFailed(f"qwen failed with status {done.returncode} (the lines above say why)")


def roofline_table(made: Sequence[Record]) -> str:
    """Every timed rung as one row; of a probe's points, those that it calls the ceiling."""
    ceilings = {record["rung"] for record in made if record.get("params", {}).get("best")}
    rows = []
    for record in made:
        if "time_ns" not in record:
            continue
        if record["rung"] in ceilings and not record["params"].get("best"):
            continue
        shape = record.get("shape")
        where = f"{record.get('layer') or ''} nt {shape['nt']}".strip() if shape else _params(record)
        valid = "" if record.get("valid", True) else f"not valid: {record['why_not']}"
        rows.append(
            [
                record["rung"],
                where,
                _time(record["time_ns"]["median"]),
                f"{record['gbps']:.1f}" if "gbps" in record else "",
                f"{record['gops']:.1f}" if "gops" in record else "",
                f"{record['intensity']:.2f}" if "intensity" in record else "",
                f"{record['percent_of_roof']:.1f}" if "percent_of_roof" in record else "",
                record.get("bound", ""),
                valid,
            ]
        )
    header = ["rung", "layer or parameters", "time", "GB/s", "Gop/s", "op/B", "% of roof", "bound", ""]
    return markdown_table(header, rows, range(2, 7))


def _params(record: Record) -> str:
    return " ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in record.get("params", {}).items()
        if not isinstance(value, bool)
    )


def _time(ns: float) -> str:
    for limit, scale, unit in ((1e3, 1, "ns"), (1e6, 1e3, "us"), (1e9, 1e6, "ms")):
        if ns < limit:
            return f"{ns / scale:.1f} {unit}"
    return f"{ns / 1e9:.2f} s"


def print_checks(checks: Sequence[Record]) -> None:
    if not checks:
        return
    rungs = list(dict.fromkeys(record["rung"] for record in checks))
    print(f"\nThe same CUDA kernels on the emulator: {len(checks)} checks passed ({', '.join(rungs)}).")


def draw(made: Sequence[Record], file: Path) -> None:
    """The three plots, as SVG and PNG."""
    from . import plots

    lines = [line for line in records.read_file(file)]
    if not any("shape" in record for record in made):
        say("no matmul was measured, so there is nothing to plot")
        return
    device = plots.pick_device(lines, None)
    print()
    for kind in plots.KINDS:
        choice = plots.choose(lines, kind, device)
        if kind == "ladder":
            choice = plots.choose(lines, kind, device, choice.layer, nt=[plots.smallest_nt(choice)])
        figure = plots.draw(choice)
        for suffix in (".svg", ".png"):
            plots.save(figure, OUT / f"{kind}{suffix}", plots.fingerprint(choice))
        plots.plt.close(figure)
        print(f"{kind:<10} {shown(OUT / f'{kind}.svg')} and .png")
