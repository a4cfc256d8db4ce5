"""Finding where kernels overtake each other, and writing the gates of a device: data/gates/<device>.json.

The kernels that the dispatch function chooses among are rungs of four chapters.  Their times over token rows and shapes
give one curve each: from records, or from traces of the final program, made now by sending prompts of every length
through each kernel.  A gate's bound is where another curve becomes the lowest.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import os
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import build, engine, records, run
from .common import ROOT, StepFailed, UserError, json_lines, markdown_table, one_of, read_text, say, shown, write_text
from .records import Record

GATES = ROOT / "data" / "gates"
# Kernel of the dispatch table -> the rung that measures it, for a type; in the order in which ties are decided.
RUNGS = {
    "mmvq_tiles": "{type}_q8_mmvq_tiles",
    "gemm_tiles_wgmma": "{type}_f16_wgmma",
    "mmq_tiles": "{type}_q8_mmq",
    "f32_matmul": "{type}_f32_matmul",
}
TIERS = {"mmvq_tiles": 2, "gemm_tiles_wgmma": 1, "mmq_tiles": 1, "f32_matmul": 3}
TYPES = (
    "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs",
)  # fmt: skip
ROWS_AT_ONCE = 8  # of mmvq_tiles: more go in groups of eight
NT = "2,4,8,9,12,16,24,32,48,64,128,256,512"
MODELS = "0.5b:Q4_0,0.5b:Q4_K_M,7b:Q4_0,7b:Q4_K_M"
FEWEST = 3  # times of a launch in a trace; the first one also loads its kernel
FARTHEST = 512  # rows up to which bounds are looked for


def add_tune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "type", nargs="*", metavar="TYPE", help="weight types, e.g. q4_0 q4_k (default: all with blocks)"
    )
    parser.add_argument(
        "--device", metavar="D", help="folder under data/runs (default: this machine's GPU, or the only one)"
    )
    parser.add_argument("--measure", action="store_true", help="measure now, on this GPU, instead of using records")
    parser.add_argument(
        "--traces", type=Path, action="append", metavar="FILE", help="use traces of the final program (LADDER_TRACE)"
    )
    parser.add_argument("--nt", type=run.positive_list, default=NT, metavar="N,..", help=f"rows to measure ({NT})")
    parser.add_argument("--model", default=MODELS, metavar="SIZE:TYPE,..", help=f"models to measure with ({MODELS})")
    parser.add_argument(
        "--records",
        type=Path,
        action="append",
        metavar="FILE",
        help="use this file instead of data/runs",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="where to write (default: data/gates/DEVICE.json)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what was found, write nothing")
    run.add_build_options(parser)
    parser.set_defaults(do=command_tune)


@dataclass
class Curves:
    """Median times in ns of one type: shape -> kernel -> nt -> ns."""

    type: str
    times: dict[tuple[int, int], dict[str, dict[int, float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(dict))
    )

    def kernels(self, shape: tuple[int, int]) -> list[str]:
        return [kernel for kernel in RUNGS if kernel in self.times[shape]]

    def time(self, shape: tuple[int, int], kernel: str, nt: int) -> float | None:
        """Time for nt rows: measured, or between two measured ones on logarithmic axes; None outside what was measured.
        Groups of eight follow each other."""
        points = self.times[shape].get(kernel, {})
        if kernel == "mmvq_tiles" and nt > ROWS_AT_ONCE:
            whole, rest = divmod(nt, ROWS_AT_ONCE)
            eight = points.get(ROWS_AT_ONCE)
            last = self.time(shape, kernel, rest) if rest else 0.0
            return None if eight is None or last is None else whole * eight + last
        if nt in points:
            return points[nt]
        below = max((n for n in points if n < nt), default=None)
        above = min((n for n in points if n > nt), default=None)
        if below is None or above is None:
            return None
        part = math.log(nt / below) / math.log(above / below)
        return math.exp((1 - part) * math.log(points[below]) + part * math.log(points[above]))


@dataclass(frozen=True)
class Span:
    """Rows for which a kernel is the best choice over all shapes."""

    kernel: str
    least: int
    most: int | None


def curves_of(found: Iterable[Record], types: Sequence[str]) -> dict[str, Curves]:
    """Newest cold times first; a shape recorded twice counts once."""
    kernel_of = {name.format(type=t): (kernel, t) for kernel, name in RUNGS.items() for t in types}
    curves: dict[str, Curves] = {}
    for record in sorted(found, key=lambda r: r.get("date", "")):
        kernel, type_ = kernel_of.get(record["rung"], (None, None))
        if kernel is None or "time_ns" not in record or record.get("executor") != "gpu" or record.get("mode") != "cold":
            continue
        if "compared_with" in record.get("params", {}):
            continue
        shape = record["shape"]
        curve = curves.setdefault(type_, Curves(type_))
        curve.times[(shape["od"], shape["id"])][kernel][shape["nt"]] = record["time_ns"]["median"]
    return curves


def cost(curves: Curves, kernel: str, nt: int, shapes: Sequence[tuple[int, int]]) -> float | None:
    """Mean logarithm of a kernel's time over the best kernel's; None where a shape has no time for it."""
    total = 0.0
    for shape in shapes:
        times = {k: curves.time(shape, k, nt) for k in curves.kernels(shape)}
        mine = times.get(kernel)
        if mine is None:
            return None
        total += math.log(mine / min(t for t in times.values() if t is not None))
    return total / len(shapes)


def spans(curves: Curves) -> list[Span]:
    """From one row to many: the kernel of the lowest cost, and where it changes.  float is no candidate here: it is the
    fallback, and id decides about it (short_rows)."""
    shapes = sorted(s for s in curves.times if len([k for k in curves.kernels(s) if k != "f32_matmul"]) > 0)
    candidates = [k for k in RUNGS if k != "f32_matmul" and any(k in curves.times[s] for s in shapes)]
    shapes = [s for s in shapes if all(k in curves.times[s] for k in candidates)]
    if not shapes or "mmvq_tiles" not in candidates or len(candidates) < 2:
        return []
    found: list[Span] = []
    decided = 0  # the last number of rows for which every candidate has a time
    for nt in range(1, FARTHEST + 1):
        costs = {k: cost(curves, k, nt, shapes) for k in candidates}
        known = {k: c for k, c in costs.items() if c is not None}
        # Up to eight rows are decoding's, where others may not have been measured.  Beyond, nobody wins by absence.
        if not known or (nt > ROWS_AT_ONCE and len(known) < len(candidates)):
            continue
        # The one that leads keeps its lead until another is better by more than noise.
        best = min(known, key=known.__getitem__)
        if found and found[-1].kernel in known and known[found[-1].kernel] <= known[best] + NOISE:
            best = found[-1].kernel
        if not found or best != found[-1].kernel:
            found.append(Span(best, decided + 1, None))
        decided = nt
    closed = [Span(a.kernel, a.least, b.least - 1) for a, b in itertools.pairwise(found)]
    return [*closed, *found[-1:]]


NOISE = 0.01  # of the logarithm: one per cent


def short_rows(curves: Curves) -> int | None:
    """The shortest row from which on mmvq_tiles beats f32 activations at one row; None if it always does, or nobody
    knows."""
    ratio: dict[int, list[float]] = defaultdict(list)
    for (_od, id_), kernels in curves.times.items():
        if 1 in kernels.get("mmvq_tiles", {}) and 1 in kernels.get("f32_matmul", {}):
            ratio[id_].append(kernels["mmvq_tiles"][1] / kernels["f32_matmul"][1])
    loses = [id_ for id_, ratios in ratio.items() if max(ratios) > 1]
    if not loses:
        return None
    return min((id_ for id_ in ratio if id_ > max(loses)), default=None)


def gates_of(curves: Mapping[str, Curves]) -> list[dict[str, Any]]:
    """The table: switches first, as in the default table; then a gate for each kernel and its rows, types together that
    share them."""
    off = ["LADDER_NO_PREFILL_GEMM=1"]
    no_mmvq = [f"LADDER_NO_{name}_MMVQ=1" for name in ("Q40", "Q80", "KQ")]
    head = [
        {
            "name": "prefill.mmq_forced",
            "kernel": "mmq_tiles",
            "types": "blocks",
            "nt": [9, None],
            "only": ["LADDER_MMQ=1"],
            "unless": off,
        },
        {
            "name": "prefill.f16_wgmma",
            "kernel": "gemm_f16_wgmma",
            "types": "blocks",
            "nt": [9, None],
            "only": ["LADDER_MMQ=0"],
            "unless": off,
        },
        {
            "name": "prefill.f16_mma",
            "kernel": "gemm_f16_mma",
            "types": "blocks",
            "nt": [9, None],
            "only": ["LADDER_MMQ=0"],
            "unless": off,
        },
        {
            "name": "prefill.f16_weights_wgmma",
            "kernel": "gemm_f16_wgmma",
            "types": ["f16"],
            "nt": [9, None],
            "unless": off,
        },
        {"name": "prefill.f16_weights_mma", "kernel": "gemm_f16_mma", "types": ["f16"], "nt": [9, None], "unless": off},
    ]
    together: dict[tuple[str, int, int | None], list[str]] = defaultdict(list)
    for type_, curve in curves.items():
        for span in spans(curve):
            if TIERS[span.kernel] == 1:
                together[(span.kernel, span.least, span.most)].append(type_)
    tuned = [
        {
            "name": f"prefill.{kernel}.{least}"
            + (f".{'.'.join(types)}" if sum(k[:2] == (kernel, least) for k in together) > 1 else ""),
            "kernel": kernel,
            "types": types,
            "nt": [least, most],
            "unless": off,
            "evidence": f"lowest times of {', '.join(types)} over rows and shapes",
        }
        for (kernel, least, most), types in sorted(together.items(), key=lambda item: (item[0][1], item[0][0]))
    ]
    # What was not measured has the default's gates.
    rest = [t for t in TYPES if t not in curves]
    tail: list[dict[str, Any]] = []
    if rest:
        tail = [
            {
                "name": "prefill.tiles_wgmma",
                "kernel": "gemm_tiles_wgmma",
                "types": rest,
                "nt": [9, None],
                "unless": off,
            },
            {"name": "prefill.mmq", "kernel": "mmq_tiles", "types": rest, "nt": [9, None], "unless": off},
        ]
    tail += [
        {
            "name": "decode.mmvq_v1",
            "kernel": "mmvq_multi",
            "types": "blocks",
            "only": ["LADDER_MMVQ_V1=1"],
            "unless": no_mmvq,
        },
    ]
    for type_, curve in curves.items():
        least = short_rows(curve)
        if least is not None:
            tail.append(
                {
                    "name": f"float.short_rows.{type_}",
                    "kernel": "f32_matmul",
                    "types": [type_],
                    "nt": [1, 8],
                    "id": [1, least - 1],
                    "evidence": f"f32 activations are faster below id {least} at one row",
                }
            )
    tail.append({"name": "decode.mmvq", "kernel": "mmvq_tiles", "types": "blocks", "unless": no_mmvq})
    tail.append({"name": "float", "kernel": "f32_matmul", "types": "all"})
    return [*head, *tuned, *tail]


def evidence_of(curves: Mapping[str, Curves]) -> dict[str, Any]:
    """Every time that a bound rests on, in us."""
    return {
        type_: {
            f"{od}x{id_}": {
                kernel: {str(nt): round(ns / 1e3, 3) for nt, ns in sorted(points.items())}
                for kernel, points in sorted(kernels.items())
            }
            for (od, id_), kernels in sorted(curve.times.items())
        }
        for type_, curve in curves.items()
    }


def text_of(device: str, curves: Mapping[str, Curves], date: str, git: str | None) -> str:
    """The file, one gate a line."""
    gates = ",\n".join("    " + json.dumps(gate) for gate in gates_of(curves))
    evidence = ",\n".join(f"    {json.dumps(t)}: {json.dumps(v)}" for t, v in evidence_of(curves).items())
    head = {"schema": 1, "device": device, "date": date, **({"git": git} if git else {})}
    head["note"] = "written by scripts/ladder tune; evidence: us of cold medians by type, od x id, kernel, nt"
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items())
    return f'{{\n{lines},\n  "gates": [\n{gates}\n  ],\n  "evidence": {{\n{evidence}\n  }}\n}}\n'


def table(curves: Mapping[str, Curves]) -> str:
    rows = []
    for type_, curve in curves.items():
        for span in spans(curve):
            most = "" if span.most is None else str(span.most)
            rows.append([type_, span.kernel, str(span.least), most, str(len(curve.times))])
    return markdown_table(["type", "kernel", "nt from", "to", "shapes"], rows, right=(2, 3, 4))


# How `qwen bench` is made to use one kernel for every number of rows.
FORCED = {
    "mmvq_tiles": {"LADDER_NO_PREFILL_GEMM": "1"},
    "gemm_tiles_wgmma": {"LADDER_SMALL_M_GEMM": "1"},
    "mmq_tiles": {"LADDER_SMALL_M_GEMM": "1", "LADDER_MMQ": "1"},
}


def measured(args: argparse.Namespace) -> tuple[str, list[Path]]:
    """Traces of models whose prompts of every length go through each kernel, on this GPU; and the device."""
    program = build.built_qwen(run.prepare(args), "gpu")
    folder = build.BUILD / "tune"
    folder.mkdir(parents=True, exist_ok=True)
    traces = []
    device = ""
    for model in args.model.split(","):
        file = engine.resolve(program, model)
        for kernel, variables in FORCED.items():
            path = folder / f"{model.replace(':', '-').lower()}-{kernel}.json"
            say(f"{model}: {kernel}")
            done = subprocess.run(
                [str(program), "bench", str(file), "--on", "gpu", "-p", args.nt, "-n", "2", "-r", "2", "-o", "record"],
                cwd=ROOT,
                check=False,
                text=True,
                stdout=subprocess.PIPE,
                env={**os.environ, "LADDER_GATES": "default", "LADDER_TRACE": str(path), **variables},
            )
            if done.returncode:
                raise StepFailed(f"qwen bench ended with status {done.returncode} (the line above says why)")
            device = json_lines(done.stdout, "qwen bench")[0]["device"]
            traces.append(path)
    return device, traces


def records_of(trace: Path) -> list[Record]:
    """A trace's products as records: the median of every kernel, shape and number of rows.  A launch that multiplies
    several matrices is one product with all of their rows."""
    try:
        events = json.loads(read_text(trace))
    except json.JSONDecodeError as error:
        raise UserError(f"{shown(trace)}:{error.lineno}: not JSON: {error.msg}") from None
    times: dict[tuple[str, str, int, int, int], list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "multiply":
            a = event["args"]
            times[(event["name"], a["type"], a["nt"], a["od"], a["id"])].append(1e3 * event["dur"])
    rung_of = {f"{t}_{kernel}": name.format(type=t) for kernel, name in RUNGS.items() for t in TYPES}
    found: list[Record] = []
    for (name, type_, nt, od, id_), every_ns in times.items():
        if name in rung_of and len(every_ns) >= FEWEST:
            record: Record = {"rung": rung_of[name], "type": type_, "executor": "gpu", "mode": "cold"}
            record["shape"] = {"nt": nt, "od": od, "id": id_}
            record["time_ns"] = {"median": statistics.median(every_ns)}
            found.append(record)
    return found


def command_tune(args: argparse.Namespace) -> int:
    types = args.type or list(TYPES)
    for type_ in types:
        if type_ not in TYPES:
            raise one_of("type", type_, TYPES)
    if args.measure or args.traces:
        device, traces = measured(args) if args.measure else (args.device or "", args.traces)
        if not device:
            raise UserError("--traces: of which device? --device says it, such as nvidia-h200")
        found = [record for trace in traces for record in records_of(trace)]
    elif args.records:
        found = [line.record for path in args.records for line in records.read_file(path)]
        device = args.device or next((r["device"] for r in found), "")
    else:
        devices = [d for d in records.devices_with_records() if (records.RUNS / d / "04-mmvq.jsonl").is_file()]
        gpus = [d for d in devices if any(r.record["executor"] == "gpu" for r in records.load_committed(d))]
        device = args.device or (gpus[0] if len(gpus) == 1 else "")
        if device not in gpus:
            raise one_of("device with records of a GPU", device, gpus)
        found = [line.record for line in records.load_committed(device)]
    curves = curves_of(found, types)
    curves = {t: curves[t] for t in types if t in curves and spans(curves[t])}
    if not curves:
        raise UserError(
            "no type has cold times of two kernels at the same shapes; measure them with scripts/ladder tune --measure "
            "on the GPU, or record chapters 04, 05 and 06"
        )
    print(table(curves))
    missing = [t for t in types if t not in curves]
    if missing:
        say(f"no times of: {', '.join(missing)}; these have the default's gates")
    if args.dry_run:
        return 0
    name = device_name(device)
    today = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    date = max((r["date"] for r in found if "date" in r), default=today)
    out = args.output or GATES / f"{device}.json"
    write_text(out, text_of(name, curves, date, records.git_revision()))
    say(f"{len(curves)} types, gates in {shown(out)}; a program built after this uses them")
    return 0


def device_name(slug: str) -> str:
    path = ROOT / "data" / "devices" / f"{slug}.json"
    return json.loads(read_text(path))["name"] if path.is_file() else slug
