"""`counters`: what the GPU's own counters say of a kernel, read with Nsight Compute, in the emulator's names.

A chapter binary with --check-only launches a rung twice at a shape: on small integers, then on random operands.  The
second launch is profiled and becomes a record with `counters` and without a time: a profiler replays a kernel once for
each group of counters and empties the caches before, so its clock says nothing about the kernel at work.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import build, records, run, setup
from .common import ROOT, StepFailed, UserError, one_of, say, shown
from .records import Record
from .sources import source_of

# --- the metrics ------------------------------------------------------------------------------------------------

_SECTOR_BYTES = 32
_SCALES: dict[str, dict[str, float]] = {
    "byte": {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12},
    "ns": {"ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9, "nsecond": 1, "usecond": 1e3, "msecond": 1e6, "second": 1e9},
    "%": {"%": 1},
}


@dataclass(frozen=True)
class Counter:
    """One entry of `counters`: the sum of metrics, times a factor.

    A metric may have a second spelling, after a bar, that other versions of the profiler use.
    """

    name: str
    metrics: tuple[str, ...]
    unit: str = ""  # a plain count
    factor: int = 1


def _global(what: str, *operations: str) -> tuple[str, ...]:
    return tuple(f"l1tex__t_{what}_pipe_lsu_mem_global_op_{operation}.sum" for operation in operations)


def _both(metric: str) -> tuple[str, ...]:
    """Loads and stores."""
    return (metric.replace("*", "ld"), metric.replace("*", "st"))


_EVERY_ACCESS = ("ld", "st", "atom", "red")
COUNTERS = (
    # The same names, and the same meaning, as the emulator's.
    Counter("requests", _global("requests", *_EVERY_ACCESS)),
    Counter("sectors", _global("sectors", *_EVERY_ACCESS)),
    Counter("past_l1_bytes", ("lts__t_sectors_srcunit_tex.sum",), factor=_SECTOR_BYTES),
    Counter("load_requests", _global("requests", "ld")),
    Counter("load_sectors", _global("sectors", "ld")),
    Counter("store_requests", _global("requests", "st")),
    Counter("store_sectors", _global("sectors", "st")),
    Counter("atomic_requests", _global("requests", "atom", "red")),
    Counter("shared_requests", _both("smsp__sass_inst_executed_op_shared_*.sum|smsp__inst_executed_op_shared_*.sum")),
    Counter("bank_passes", _both("l1tex__data_pipe_lsu_wavefronts_mem_shared_op_*.sum")),
    Counter("bank_conflicts", _both("l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_*.sum")),
    Counter("fma_f32", ("smsp__sass_thread_inst_executed_op_ffma_pred_on.sum",)),
    # What only hardware has.  The two counters above see every delay of the shared-memory pipe; these two follow from
    # the addresses alone.
    Counter("shared_wavefronts_by_address", ("memory_l1_wavefronts_shared",)),
    Counter("shared_wavefronts_ideal", ("memory_l1_wavefronts_shared_ideal",)),
    Counter("l1_data_passes", ("l1tex__data_pipe_lsu_wavefronts.sum",)),
    Counter("load_l1_hit_sectors", ("l1tex__t_sectors_pipe_lsu_mem_global_op_ld_lookup_hit.sum",)),
    Counter("l2_sectors", ("lts__t_sectors.sum",)),
    Counter("dram_read_bytes", ("dram__bytes_read.sum|dram__bytes_op_read.sum",), "byte"),
    Counter("dram_write_bytes", ("dram__bytes_write.sum|dram__bytes_op_write.sum",), "byte"),
    Counter("registers_per_thread", ("launch__registers_per_thread",)),
    Counter("occupancy_limit_blocks", ("launch__occupancy_limit_blocks",)),
    Counter("occupancy_limit_registers", ("launch__occupancy_limit_registers",)),
    Counter("occupancy_limit_shared_mem", ("launch__occupancy_limit_shared_mem",)),
    Counter("occupancy_limit_warps", ("launch__occupancy_limit_warps",)),
    Counter("occupancy_percent", ("sm__warps_active.avg.pct_of_peak_sustained_active",), "%"),
    Counter("profiled_time_ns", ("gpu__time_duration.sum",), "ns"),
)
# Where a kernel has none of these, the entries are absent, as the emulator leaves them out.
_SHARED = ("bank_passes", "bank_conflicts", "shared_wavefronts_by_address", "shared_wavefronts_ideal")
_ABSENT_WHEN_NONE = {"atomic_requests": (), "fma_f32": (), "shared_requests": _SHARED}
_ENDED = "The application returned an error code"


# --- the profiler's output ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """One profiled launch: the kernel's full name, and value and unit of every metric that has a value."""

    kernel: str
    values: dict[str, tuple[int | float, str]]


def parse_raw(text: str) -> list[Launch]:
    """`ncu --csv --page raw`: a line of names, a line of units, a line for each launch, between lines of messages."""
    rows = list(csv.reader(line for line in text.splitlines() if line.startswith('"')))
    start = next((i for i, row in enumerate(rows) if row[0] == "ID"), None)
    if start is None or len(rows) < start + 2:
        return []
    names, units = rows[start], rows[start + 1]
    if units[0] != "" or "Kernel Name" not in names or len(units) != len(names):
        raise StepFailed("ncu: its table has no line of units, so the numbers cannot be read")
    launches = []
    for row in rows[start + 2 :]:
        if len(row) != len(names):
            raise StepFailed(f"ncu: a line of its table has {len(row)} cells, the heading has {len(names)}")
        values = {}
        for name, unit, cell in zip(names, units, row, strict=True):
            number = _number(cell) if "__" in name or name.startswith("memory_") else None
            if number is not None:
                values[name] = (number, unit)
        launches.append(Launch(row[names.index("Kernel Name")], values))
    return launches


def _number(cell: str) -> int | float | None:
    """A number as ncu prints it, "1,234" or "12.5"; None for n/a and its like."""
    text = cell.replace(",", "")
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        value = float(text)
    except ValueError:
        return None
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() else value


def _scaled(metric: str, value: int | float, unit: str, wanted: str) -> int | float:
    """The value in the unit wanted."""
    if not wanted:
        if unit[:1] in ("K", "M", "G", "T"):
            raise StepFailed(f"ncu gives {metric} in {unit}; a plain count was asked for")
        return value
    if unit not in _SCALES[wanted]:
        raise StepFailed(f"ncu gives {metric} in {unit or 'no unit'}, which is none of {', '.join(_SCALES[wanted])}")
    scale = _SCALES[wanted][unit]
    return value if scale == 1 else round(value * scale)


# --- profiling ----------------------------------------------------------------------------------------------------


@dataclass
class Profiler:
    """Nsight Compute, and what it has refused so far: said once, then left out."""

    tool: setup.Tool
    refused: set[str] = field(default_factory=set)  # metrics that this ncu does not know
    warned: set[str] = field(default_factory=set)  # counters that are left out

    def spelling(self, metric: str) -> str | None:
        """The first spelling that has not been refused."""
        return next((name for name in metric.split("|") if name not in self.refused), None)

    def asked(self) -> list[str]:
        """The metrics of every counter that can still be had, each once."""
        found: dict[str, None] = {}
        for counter in COUNTERS:
            names = [self.spelling(metric) for metric in counter.metrics]
            if None not in names:
                found.update(dict.fromkeys(name for name in names if name))
        return list(found)

    def command(self, kernel: str, log: Path, call: Sequence[str]) -> list[str]:
        """Profile the second launch of this kernel alone: not the harness's own, nor those of longer names."""
        options = {
            "--clock-control": "none",  # clocks are the machine's business
            "--cache-control": "all",  # every pass starts with empty caches
            "--page": "raw",
            "--print-units": "base",
            "--log-file": str(log),
            "--kernel-name-base": "function",
            "--kernel-name": f"regex:^{kernel}$",
            "--launch-skip": "1",
            "--launch-count": "1",
            "--metrics": ",".join(self.asked()),
        }
        return [self.tool.path, "--csv", *(word for pair in options.items() for word in pair), *call]

    def profile(self, kernel: str, call: Sequence[str]) -> Launch:
        """Run the call under ncu, without the metrics that it does not know."""
        while self.asked():
            with tempfile.TemporaryDirectory(prefix="ladder-") as folder:
                log = Path(folder) / "ncu.log"
                try:
                    done = subprocess.run(
                        self.command(kernel, log, call),
                        cwd=ROOT,
                        check=False,
                        text=True,
                        capture_output=True,
                        env={**os.environ, "LC_ALL": "C"},
                    )
                except OSError as error:
                    raise UserError(f"{self.tool.path} cannot be run: {error.strerror or error}") from None
                told = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
            messages = told + done.stdout + done.stderr
            unknown = self._unknown(messages)
            if unknown:
                self.refused |= unknown
                self._warn_of_refused()
                continue
            launches = parse_raw(told)
            if len(launches) == 1 and done.returncode == 0 and _ENDED not in messages:
                return launches[0]
            raise _explained(messages, kernel, len(launches), done.returncode)
        raise UserError(f"{self.tool.version} knows none of the metrics that are asked for")

    def counters(self, launch: Launch) -> Record:
        """The `counters` of a record."""
        made: Record = {}
        for counter in COUNTERS:
            names = [self.spelling(metric) for metric in counter.metrics]
            total: int | float = 0
            for name in names:
                if name is None or name not in launch.values:
                    self._warn(counter.name, f"ncu has no value for {name}")
                    break
                value, unit = launch.values[name]
                total += _scaled(name, value, unit, counter.unit)
            else:
                made[counter.name] = total * counter.factor
        for name, with_it in _ABSENT_WHEN_NONE.items():
            if made.get(name) == 0:
                for gone in (name, *with_it):
                    made.pop(gone, None)
        if "sectors" in made and made.get("requests"):
            each = float(f"{made['sectors'] / made['requests']:.9g}")
            made = _after(made, "sectors", "sectors_per_request", each)
        return made

    def _unknown(self, messages: str) -> set[str]:
        """Those of the metrics asked for that an error line names as unknown."""
        lines = [line for line in messages.splitlines() if "==ERROR==" in line and "metric" in line]
        # The message may quote a pattern instead of the name: "regex:^name\.(sum|avg)$".
        bases = {name: re.compile(rf"(?<!\w){re.escape(name.split('.')[0])}(?!\w)") for name in self.asked()}
        return {name for name, base in bases.items() if any(base.search(line) for line in lines)}

    def _warn_of_refused(self) -> None:
        for counter in COUNTERS:
            for metric in counter.metrics:
                if self.spelling(metric) is None:
                    self._warn(counter.name, f"this ncu does not know {metric.replace('|', ' or ')}")

    def _warn(self, counter: str, why: str) -> None:
        if counter not in self.warned:
            self.warned.add(counter)
            say(f"{counter} is left out: {why}")


def _after(made: Record, where: str, name: str, value: float) -> Record:
    """The same with one more entry, behind a given one."""
    result: Record = {}
    for key, item in made.items():
        result[key] = item
        if key == where:
            result[name] = value
    return result


def _explained(messages: str, kernel: str, launches: int, status: int) -> Exception:
    """Why there is no result, in one line."""
    if "ERR_NVGPUCTRPERM" in messages:
        return UserError(
            "ncu may not read this GPU's counters (ERR_NVGPUCTRPERM): run as root, or have the driver allow it, "
            "see https://developer.nvidia.com/ERR_NVGPUCTRPERM"
        )
    errors = [line.split("==ERROR==", 1)[1].strip() for line in messages.splitlines() if "==ERROR==" in line]
    reasons = [line for line in errors if _ENDED not in line]
    if reasons:
        return UserError(f"ncu cannot profile here: {' '.join(reasons)}")
    if _ENDED in messages or status:
        return StepFailed(f"the program ended with an error under ncu, so {kernel} was not counted: {_last(messages)}")
    if launches > 1:
        return StepFailed(f"ncu profiled {launches} launches of {kernel} where one was asked for")
    return StepFailed(f"ncu saw no second launch of a kernel named {kernel}")


def _last(messages: str) -> str:
    """The last line that the program itself wrote."""
    own = [line.strip() for line in messages.splitlines() if line.strip() and not line.startswith("==")]
    return own[-1] if own else "it does not say why"


# --- the command --------------------------------------------------------------------------------------------------


def countable(chapter: build.Chapter, wanted: Sequence[str]) -> list[str]:
    """The rungs to count: those asked for, or all whose kernels are this project's own."""
    own = [rung["rung"] for rung in build.listed(chapter.cuda, optional=True)]
    for name in wanted:
        if name not in own:
            raise one_of(f"rung with a kernel of its own in {shown(chapter.cuda)}:", name, own)
    return list(wanted) or own


def kernel_of(chapter: build.Chapter, rung: str) -> str:
    """The kernel's function name: the rung's id, or for a variant the id of the rung whose code it is."""
    source = next((known.get("source") for known in chapter.rungs if known["rung"] == rung), None)
    return source_of(rung, "gpu", source).name


def checked(binary: Path, arguments: Sequence[str]) -> tuple[int, list[Record], str]:
    """Run a binary's checks without a profiler: exit status, its records, and what it wrote to stderr."""
    with tempfile.TemporaryDirectory(prefix="ladder-") as folder:
        out = Path(folder) / "records.jsonl"
        call = [shown(binary), *arguments, "--check-only", "--json", str(out)]
        try:
            done = subprocess.run(call, cwd=ROOT, check=False, text=True, capture_output=True)
        except OSError as error:
            raise StepFailed(f"{shown(binary)} cannot be run: {error.strerror or error}") from None
        made = records.parse(out.read_text(encoding="utf-8"), shown(binary)) if out.exists() else []
    return done.returncode, made, done.stderr


def points_of(chapter: build.Chapter, rungs: Sequence[str], arguments: Sequence[str]) -> tuple[int, list[Record]]:
    """Every rung and shape that passes its check: what is wrong is not worth counting."""
    status, made, errors = checked(chapter.cuda, ["--rung", ",".join(rungs), *arguments])
    lines = errors.strip().splitlines()
    said = lines[-1].partition(": ")[2] or lines[-1] if lines else f"exit status {status}"
    if status == 2:
        raise UserError(said)
    if status not in (0, 1) or (status and not made):
        raise StepFailed(f"{shown(chapter.cuda)} --check-only: {said}")
    if not made or any("shape" not in record for record in made):
        raise UserError(f"{chapter.name} has no shapes to count at: counters are for rungs that compute a matmul")
    return status, made


def shape_options(record: Record) -> list[str]:
    shape = record["shape"]
    matrix = ["--layer", record["layer"]] if "layer" in record else ["--od", str(shape["od"]), "--id", str(shape["id"])]
    return [*matrix, "--nt", str(shape["nt"])]


def count(profiler: Profiler, chapter: build.Chapter, point: Record) -> Record:
    """The point's record with counters."""
    rung = point["rung"]
    call = [shown(chapter.cuda), "--rung", rung, *shape_options(point), "--check-only"]
    launch = profiler.profile(kernel_of(chapter, rung), call)
    return {**point, "counters": profiler.counters(launch)}


def summary(record: Record) -> str:
    """One line for people."""
    shape, c = record["shape"], record["counters"]
    where = record.get("layer") or f"{shape['od']}x{shape['id']}"
    parts = [f"{record['rung']:<18} {where:<15} nt {shape['nt']:<4}"]
    if "sectors_per_request" in c:
        parts.append(f"{c['requests']:>11,} requests, {c['sectors_per_request']:5.2f} sectors each")
    if "dram_read_bytes" in c and "bytes" in record:
        read, declared = c["dram_read_bytes"] / 1e6, record["bytes"]["total"] / 1e6
        parts.append(f"{read:.1f} MB read from DRAM, {declared:.1f} MB declared")
    if "bank_conflicts" in c:
        parts.append(f"{c['bank_conflicts']} bank conflicts")
    return ", ".join(parts)


def command_counters(args: argparse.Namespace) -> int:
    arguments = run.binary_arguments(args)
    targets = run.split_targets(args.target)
    tool = setup.ncu()
    if tool is None:
        raise UserError(
            "no Nsight Compute (ncu) on PATH, in /usr/local/cuda*/bin or in /opt/nvidia: it comes with the CUDA Toolkit"
        )
    folder = run.prepare(args)
    profiler = Profiler(tool)
    worst = 0
    for chapter, wanted in build.resolve(targets, folder):
        if chapter.gpu_device is None:
            raise UserError(f"counters need a GPU: {run.why_no_gpu(chapter)}")
        status, points = points_of(chapter, countable(chapter, wanted), arguments)
        if status:
            worst = max(worst, status)
            say(f"{chapter.name}: a check failed; what did pass is counted, the rest is not")
        command = run.command_line("counters", targets, arguments)
        tools = ", ".join(part for part in (build.toolchain("gpu", folder), tool.version) if part)
        sources = records.sources_of(chapter.rungs)
        for point in points:
            made = count(profiler, chapter, point)
            if not made["counters"]:
                raise StepFailed(f"ncu has no value for any counter of {made['rung']}")
            (record,) = records.annotate([made], sources, command, tools)
            wrong = records.problems(record, committed=True)
            if wrong:
                raise StepFailed(f"{record['rung']} cannot be recorded: it {wrong[0]}")
            path = args.runs / record["device"] / f"{chapter.name}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            run.emit([record], str(path))
            print(summary(record), flush=True)
        say(f"{len(points)} records added to {shown(path)}")
    return worst
