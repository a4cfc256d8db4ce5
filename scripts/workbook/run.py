"""Running chapter binaries: which one, with which options, and what becomes of the records."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import emulate, records, setup
from .build import BUILD, Chapter, chapters, ensure_build, listed, resolve, toolchain
from .common import ROOT, StepFailed, UserError, capture, json_lines, one_of, say, shown

SHAPE_OPTIONS = ("layer", "od", "id", "nt", "mode", "threads", "time_limit_ms")


# --- options ----------------------------------------------------------------------------------------------------


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'"{text}" is not a whole number above 0')
    return int(text)


def positive_list(text: str) -> str:
    """Whole numbers above 0, separated by commas; passed on as written."""
    for part in text.split(","):
        positive(part)
    return text


def mode_list(text: str) -> str:
    for part in text.split(","):
        if part not in ("cold", "hot"):
            raise argparse.ArgumentTypeError(f'"{part}" is not a mode (cold, hot)')
    return text


def add_shape_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layer", metavar="NAME[,NAME..]", help="shapes of real layers, e.g. 7b.ffn_down (see list)")
    parser.add_argument("--od", type=positive, metavar="N", help="output features (with --id, instead of --layer)")
    parser.add_argument("--id", type=positive, metavar="N", help="input features")
    parser.add_argument("--nt", type=positive_list, metavar="N[,N..]", help="numbers of token rows, e.g. 1,8,64")


def add_build_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-build",
        action="store_true",
        help="use the binaries as they are (needs neither Meson nor a virtual environment)",
    )
    parser.add_argument(
        "--build-dir", type=Path, default=BUILD, metavar="DIR", help="where the binaries are (default: build)"
    )


def add_run_options(parser: argparse.ArgumentParser, with_check: bool = True) -> None:
    """The options that `run`, `record` and `compare` hand to a chapter binary."""
    parser.add_argument(
        "--on",
        choices=records.EXECUTORS,
        metavar="gpu|emulator|cpu",
        help="where to run (default: the best that this machine has)",
    )
    add_shape_options(parser)
    parser.add_argument("--mode", type=mode_list, metavar="cold,hot", help="operands from memory, or back to back")
    parser.add_argument("--threads", type=positive, metavar="N", help="threads of the CPU twin (default: all)")
    parser.add_argument("--time-limit-ms", type=positive, metavar="N", help="time for one measurement")
    if with_check:
        parser.add_argument("--check-only", action="store_true", help="check the results, measure nothing")
    add_build_options(parser)


def binary_arguments(args: argparse.Namespace) -> list[str]:
    """The part of the command line that a chapter binary understands too."""
    if (args.od is None) != (args.id is None):
        raise UserError("--od and --id go together")
    if args.od is not None and args.layer:
        raise UserError("give either --layer or --od and --id, not both")
    given: list[str] = []
    for name in ("on", *SHAPE_OPTIONS):
        value = getattr(args, name, None)
        if value is not None:
            given += [f"--{name.replace('_', '-')}", str(value)]
    if getattr(args, "check_only", False):
        given.append("--check-only")
    return given


def prepare(args: argparse.Namespace) -> Path:
    """Build unless told not to; returns the folder that holds the binaries."""
    folder: Path = args.build_dir
    if not folder.is_absolute():
        folder = ROOT / folder
    if args.no_build or folder.resolve() != BUILD.resolve():
        if not folder.is_dir():
            raise UserError(f"no folder {shown(folder)}: nothing is built there")
    else:
        ensure_build()
    return folder


# --- choosing a binary ------------------------------------------------------------------------------------------


def why_no_gpu(chapter: Chapter) -> str:
    """The reason that `--on gpu` cannot work here, and what would change it."""
    if not setup.nvcc() and not chapter.cuda.exists():
        return "no CUDA binary is built: nvcc is not installed (scripts/ladder doctor says how to get it)"
    if not chapter.cuda.exists():
        return f"no CUDA binary is built: {shown(chapter.cuda)} is not there"
    _, _, errors = capture([chapter.cuda, "--device"], timeout=120)
    lines = errors.strip().splitlines()
    reason = lines[-1].removeprefix(f"{chapter.cuda}: ") if lines else "it does not say why"
    return f"the CUDA binary finds no usable GPU: {reason}"


def choose(chapter: Chapter, on: str | None, wanted: Sequence[str] = ()) -> tuple[Path, str]:
    """The binary to run, and "gpu" or "host".  A peer's kernel is only in the binary that was linked with it."""
    if on == "gpu" and chapter.gpu_device is None:
        raise UserError(f"--on gpu: {why_no_gpu(chapter)}")
    if on in (None, "gpu") and chapter.gpu_device is not None:
        for binary in (chapter.cuda, *chapter.peers):
            if set(wanted) <= {rung["rung"] for rung in listed(binary, optional=True)}:
                return binary, "gpu"
        if on == "gpu":
            raise UserError(f"no CUDA binary of {chapter.name} has all of: {', '.join(wanted)}")
    if not chapter.host.exists():
        raise UserError(f"{shown(chapter.host)} is not built")
    return chapter.host, "host"


def executors_here(chapter: Chapter) -> list[str]:
    """Executors that this machine can use for this chapter, the best first."""
    named = [executor for rung in chapter.rungs for executor in rung["executors"]]
    usable = [e for e in records.EXECUTORS if e in named and (e != "gpu" or chapter.gpu_device is not None)]
    return sorted(usable, key=["gpu", "cpu", "emulator"].index)


def check_executors(chapter: Chapter, wanted: Sequence[str], on: str | None) -> None:
    """A rung asked for by name must run on the executor asked for."""
    for rung in chapter.rungs:
        if rung["rung"] in wanted and on and on not in rung["executors"]:
            raise UserError(f"{rung['rung']} does not run on {on} (it runs on {', '.join(rung['executors'])})")


# --- running ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def watched_clocks() -> Iterator[dict[str, Any]]:
    """Sample the GPU's clocks while a block runs; the dict is filled when it ends (empty without nvidia-smi)."""
    seen: dict[str, Any] = {}
    query = "clocks.sm,clocks.mem,clocks_event_reasons.active,utilization.gpu"
    with tempfile.TemporaryFile("w+") as out:
        try:
            watcher = subprocess.Popen(
                ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "--id=0", "-lms", "500"],
                stdout=out,
                stderr=subprocess.DEVNULL,
            )
        except OSError:
            watcher = None
        try:
            yield seen
        finally:
            if watcher is not None:
                watcher.terminate()
                watcher.wait()
                out.seek(0)
                seen.update(_clock_summary(out.read()))


def _clock_summary(text: str) -> dict[str, Any]:
    """Clocks of the samples in which the GPU was busy, and every reason the driver gave for slowing it."""
    slowing = {0x4: "power", 0x8: "hardware", 0x20: "heat", 0x40: "heat", 0x80: "hardware"}
    sm, memory, reasons = [], [], set()
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        try:
            sm_mhz, memory_mhz, active, busy = int(cells[0]), int(cells[1]), int(cells[2], 16), int(cells[3])
        except (ValueError, IndexError):
            continue
        if busy == 0:
            continue
        sm.append(sm_mhz)
        memory.append(memory_mhz)
        reasons |= {reason for bit, reason in slowing.items() if active & bit}
    if not sm:
        return {}
    summary: dict[str, Any] = {
        "sm_mhz_median": int(statistics.median(sm)),
        "sm_mhz_min": min(sm),
        "sm_mhz_max": max(sm),
        "memory_mhz": int(statistics.median(memory)),
        "throttled": bool(reasons),
    }
    if reasons:
        summary["throttle_reasons"] = " ".join(sorted(reasons))
    return summary


def run_chapter(
    chapter: Chapter,
    rungs: Sequence[str],
    on: str | None,
    arguments: Sequence[str],
    command: str,
    quiet: bool = False,
    pair: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> tuple[int, list[records.Record]]:
    """Run one chapter binary.  Returns its exit status and its records, annotated.

    Its table goes to stdout as it comes (not if `quiet`).  `pair`: compare these two instead of running `rungs`.
    `variables` are added to the environment.
    """
    check_executors(chapter, [*rungs, *pair], on)
    binary, kind = choose(chapter, on, [*rungs, *pair])
    if pair:
        arguments = ["--compare", ",".join(pair), *arguments]
    given = [*(["--rung", ",".join(rungs)] if rungs else []), *arguments]
    with tempfile.TemporaryDirectory(prefix="ladder-") as folder:
        out = Path(folder) / "records.jsonl"
        call = [shown(binary), *given, "--json", str(out)]
        with watched_clocks() if kind == "gpu" else contextlib.nullcontext({}) as clocks:
            try:
                done = subprocess.run(
                    call,
                    cwd=ROOT,
                    check=False,
                    text=True,
                    stdout=subprocess.DEVNULL if quiet else None,
                    env={**os.environ, **(variables or {})},
                )
            except OSError as error:
                raise StepFailed(f"{shown(binary)} cannot be run: {error.strerror or error}") from None
        raw = records.parse(out.read_text(encoding="utf-8"), shown(binary)) if out.exists() else []
    if done.returncode < 0:
        raise StepFailed(f"{shown(binary)} was ended by signal {-done.returncode}")
    sources = records.sources_of(chapter.rungs)
    executor = raw[0]["executor"] if raw else "cpu"
    return done.returncode, records.annotate(raw, sources, command, toolchain(executor, chapter.build), clocks)


def command_line(verb: str, targets: Sequence[str], arguments: Sequence[str]) -> str:
    """The command as a reader would type it to get the same records."""
    return shlex.join(["scripts/ladder", verb, *targets, *arguments])


def split_targets(targets: Sequence[str]) -> list[str]:
    found = [part for target in targets for part in target.split(",") if part]
    if not found:
        raise UserError("name a rung or a chapter (scripts/ladder list shows them)")
    return found


def command_run(args: argparse.Namespace) -> int:
    arguments = binary_arguments(args)
    printed = emulate.report_arguments(args, args.on)
    targets = split_targets(args.target)
    if args.json:
        check_json_target(args.json)
    folder = prepare(args)
    worst = 0
    for chapter, rungs in resolve(targets, folder):
        command = command_line("run", targets, [*arguments, *emulate.model_arguments(args)])
        variables = emulate.environment(args, [chapter.cuda]) if args.on == "emulator" else {}
        status, made = run_chapter(chapter, rungs, args.on, [*arguments, *printed], command, variables=variables)
        worst = max(worst, status)
        if args.on == "emulator" and not args.check_only:
            emulate.print_bytes(made)
        if args.json:
            emit(made, args.json)
    return worst


def check_json_target(path: str) -> None:
    """Find out before the measurement whether its result can be written."""
    if path == "-":
        return
    target = Path(path)
    if target.is_dir() or not target.parent.is_dir():
        raise UserError(f"--json: cannot write {path}: " + ("it is a folder" if target.is_dir() else "no such folder"))


def emit(made: Sequence[records.Record], path: str) -> None:
    """Append records to a file, or print them."""
    text = "".join(records.to_line(record) for record in made)
    if path == "-":
        print(text, end="", flush=True)
        return
    try:
        with Path(path).open("a", encoding="utf-8") as out:
            out.write(text)
    except OSError as error:
        raise UserError(f"--json: cannot write {path}: {error.strerror}") from None


def command_record(args: argparse.Namespace) -> int:
    arguments = binary_arguments(args)
    folder = prepare(args)
    targets = split_targets(args.target) if args.target else [chapter.name for chapter in chapters(folder)]
    worst = 0
    emulate.report_arguments(args, args.on)
    for chapter, rungs in resolve(targets, folder):
        command = command_line("record", targets, [*arguments, *emulate.model_arguments(args)])
        variables = emulate.environment(args, [chapter.cuda]) if args.on == "emulator" else {}
        status, made = run_chapter(chapter, rungs, args.on, arguments, command, variables=variables)
        worst = max(worst, status)
        if status:
            say(f"{chapter.name}: exit status {status}; what did pass is recorded, the rest is not")
        for record in made:
            wrong = records.problems(record, committed=True)
            if wrong:
                raise StepFailed(f"{record['rung']} cannot be recorded: it {wrong[0]}")
        for device in sorted({record["device"] for record in made}):
            mine = [record for record in made if record["device"] == device]
            path = args.runs / device / f"{chapter.name}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            emit(mine, str(path))
            say(f"{len(mine)} records added to {shown(path)}")
        if not made:
            say(f"{chapter.name}: nothing to record")
    return worst


def command_compare(args: argparse.Namespace) -> int:
    arguments = binary_arguments(args)
    if args.json:
        check_json_target(args.json)
    if args.a == args.b:
        raise UserError(f"compare needs two different rungs, both are {args.a}")
    folder = prepare(args)
    known = chapters(folder)
    everything = [rung["rung"] for chapter in known for rung in chapter.rungs]
    for name in (args.a, args.b):
        if name not in everything:
            raise one_of("rung", name, everything)
    for chapter in known:
        here = [rung["rung"] for rung in chapter.rungs]
        if args.a in here and args.b in here:
            command = command_line("compare", [args.a, args.b], arguments)
            status, made = run_chapter(chapter, [], args.on, arguments, command, pair=[args.a, args.b])
            if args.json:
                emit(made, args.json)
            return status
    raise UserError(f"{args.a} and {args.b} are in different chapters; only rungs of one binary can be interleaved")


def layers(chapter: Chapter) -> list[dict[str, Any]]:
    """The named shapes that a chapter binary knows."""
    for binary in (chapter.host, chapter.cuda):
        if binary.exists():
            status, text, _ = capture([binary, "--layers"], timeout=60)
            if status == 0:
                return json_lines(text, f"{shown(binary)} --layers")
    return []


def device_of(chapter: Chapter, on: str) -> dict[str, Any] | None:
    """The device behind an executor, as the binary describes it."""
    if on == "gpu":
        return chapter.gpu_device
    if not chapter.host.exists():
        return None
    status, text, _ = capture([chapter.host, "--device", "--on", on], timeout=60)
    return json_lines(text, shown(chapter.host))[0] if status == 0 and text.strip() else None
