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
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import build, engine, records, run
from .common import ROOT, UserError, json_lines, markdown_table, one_of, read_text, say, shown, write_text
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
SHORT = {"gemm_tiles_wgmma": "tiles_wgmma", "mmq_tiles": "mmq"}  # in names of gates
TYPES = (
    "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs",
)  # fmt: skip
ROWS_AT_ONCE = 8  # of mmvq_tiles: more go in groups of eight
MANY = "1,2,4,6,8,9,12,16,24,32,48,64,128,256,512"
# Rows that each kernel is measured at.
NT = {
    "mmvq_tiles": "1,2,3,4,5,6,7,8,16,24,32,48,64",
    "gemm_tiles_wgmma": MANY,
    "mmq_tiles": MANY,
    "f32_matmul": "1,2,4,8",
}
SIZES = "0.5b,1.5b,7b"
FEWEST = 3  # times of a launch in a trace; the first one also loads its kernel
# Kernels of a trace that bring activations to the form that the next product takes, and that finish the one before.
CONVERSIONS = ("rms_norm", "quantize_tile_acts", "quantize_q8_pad40", "quantize_q8_pad40_t", "acts_f16")
FINISHES = ("add_bias", "add_residual", "swiglu")
# Matrices of a layer that share their activations: one product, launched together by the kernels that can.
TOGETHER = (("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up"))
FARTHEST = 512  # rows up to which bounds are looked for
CLOSELY = 129  # from here on every eighth number is looked at


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
    parser.add_argument(
        "--nt", type=run.positive_list, metavar="N,..", help=f"rows to measure (up to 8, or {MANY}, by kernel)"
    )
    parser.add_argument("--sizes", default=SIZES, metavar="SIZE,..", help=f"whose shapes are measured ({SIZES})")
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


Shape = tuple[int, int]  # od, id


@dataclass
class Curves:
    """Median times in ns of one type: shape -> kernel -> nt -> ns."""

    type: str
    times: dict[Shape, dict[str, dict[int, float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(dict))
    )
    # Weights of the smallest and of the largest matrix of a launch, where they are not od * id.
    parts: dict[Shape, tuple[int, int]] = field(default_factory=dict)
    rows: dict[tuple[Shape, int], dict[str, float]] = field(default_factory=dict)  # what at() has found

    def only(self, shapes: Iterable[Shape]) -> Curves:
        return Curves(self.type, {s: self.times[s] for s in shapes}, self.parts, self.rows)

    def at(self, shape: Shape, nt: int) -> dict[str, float]:
        """The time of every kernel that has one."""
        if (shape, nt) not in self.rows:
            times = {k: self.time(shape, k, nt) for k in self.kernels(shape)}
            self.rows[shape, nt] = {k: t for k, t in times.items() if t is not None}
        return self.rows[shape, nt]

    def extent(self, shape: Shape, axis: str) -> tuple[int, int]:
        """The least and the most that a gate's bound on an axis is compared with, for the matrices of a launch."""
        od, id_ = shape
        return (id_, id_) if axis == "id" else self.parts.get(shape, (od * id_, od * id_))

    def kernels(self, shape: Shape) -> list[str]:
        return [kernel for kernel in RUNGS if kernel in self.times[shape]]

    def time(self, shape: Shape, kernel: str, nt: int) -> float | None:
        """Time for nt rows: measured, or between two measured ones on logarithmic axes; None outside what was measured.
        Groups of eight follow each other, and the last of them takes as long as a whole one."""
        points = self.times[shape].get(kernel, {})
        if kernel == "mmvq_tiles" and nt > ROWS_AT_ONCE:
            return _by_groups(points, nt)
        if nt in points:
            return points[nt]
        below = max((n for n in points if n < nt), default=None)
        above = min((n for n in points if n > nt), default=None)
        if below is None or above is None:
            return None
        part = math.log(nt / below) / math.log(above / below)
        return math.exp((1 - part) * math.log(points[below]) + part * math.log(points[above]))


def _by_groups(points: Mapping[int, float], nt: int) -> float | None:
    """Groups of eight add up, from where whole groups were measured, or from the last of them on."""
    groups = {n // ROWS_AT_ONCE: ns for n, ns in points.items() if n % ROWS_AT_ONCE == 0}
    wanted = -(-nt // ROWS_AT_ONCE)
    if 1 not in groups:
        return None
    low = max(n for n in groups if n <= wanted)
    high = min((n for n in groups if n >= wanted), default=None)
    if high is not None:
        return groups[low] + (groups[high] - groups[low]) * (wanted - low) / max(1, high - low)
    each = groups[1] if low == 1 else (groups[low] - groups[1]) / (low - 1)
    return groups[low] + each * (wanted - low)


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
        key = (shape["od"], shape["id"])
        curve.times[key][kernel][shape["nt"]] = record["time_ns"]["median"]
        if "least_od" in record.get("params", {}):
            curve.parts[key] = (record["params"]["least_od"] * key[1], record["params"]["most_od"] * key[1])
    return curves


def models(shapes: Iterable[Shape]) -> list[list[Shape]]:
    """Shapes by model: every product of one has its hidden size as od or id, so those with a size in common belong
    together."""
    found: list[list[Shape]] = []
    for shape in sorted(shapes):
        touching = [model for model in found if any(set(shape) & set(other) for other in model)]
        found = [model for model in found if model not in touching]
        found.append([*(other for model in touching for other in model), shape])
    return found


def cost(curves: Curves, kernel: str, nt: int, shapes: Sequence[Shape]) -> float | None:
    """How much longer these products of a model take with a kernel than each with its best: the logarithm, a mean over
    models.  So a shape weighs as much as its time, and a small model as much as a large one.  None where a shape has
    no time for the kernel."""
    logs = []
    for model in models(shapes):
        at = [curves.at(shape, nt) for shape in model]
        if any(kernel not in times for times in at):
            return None
        logs.append(math.log(sum(times[kernel] for times in at) / sum(min(times.values()) for times in at)))
    return sum(logs) / len(logs)


def spans(curves: Curves) -> list[Span]:
    """From one row to many: the kernel of the lowest cost, and where it changes.  float is no candidate here: it is the
    fallback, and id decides about it (short_rows)."""
    shapes = sorted(s for s in curves.times if len([k for k in curves.kernels(s) if k != "f32_matmul"]) > 0)
    candidates = [k for k in RUNGS if k != "f32_matmul" and any(k in curves.times[s] for s in shapes)]
    # A head's matrix has single rows only; it says nothing of borders between rows.
    shapes = [s for s in shapes if all(len(curves.times[s].get(k, ())) > 1 for k in candidates)]
    if not shapes or "mmvq_tiles" not in candidates or len(candidates) < 2:
        return []
    found: list[Span] = []
    decided = 0  # the last number of rows for which every candidate has a time
    for nt in (*range(1, CLOSELY), *range(CLOSELY, FARTHEST + 1, 8)):
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
            found.append(Span(best, decided + 1 if found and nt <= CLOSELY else nt, None))
        decided = nt
    closed = [Span(a.kernel, a.least, b.least - 1) for a, b in itertools.pairwise(found)]
    return [*closed, *found[-1:]]


NOISE = 0.01  # of the logarithm: one per cent


def chosen(found: Sequence[Span], nt: int) -> str:
    """The kernel for nt rows; before the first span that of decoding."""
    for span in found:
        if span.least <= nt and (span.most is None or nt <= span.most):
            return span.kernel
    return "mmvq_tiles"


Choice = Callable[[Shape], Sequence[Span]]  # the spans of a shape's class


def gain(curves: Curves, old: Choice, new: Choice) -> list[float]:
    """Logarithm of a model's time with the old choice over that with the new one, for every model and number of rows
    where they differ."""
    gains = []
    for model in models(curves.times):
        for nt in LOOKED_AT:
            before = after = 0.0
            differ = False
            for shape in model:
                a, b, times = chosen(old(shape), nt), chosen(new(shape), nt), curves.at(shape, nt)
                if a in times and b in times:  # a head's matrix has single rows only
                    before, after, differ = before + times[a], after + times[b], differ or a != b
            if differ:
                gains.append(math.log(before / after))
    return gains


LOOKED_AT = (*range(1, 33), 40, 48, 64, 96, 128, 192, 256, 384, 512)


@dataclass(frozen=True)
class Class:
    """Matrices whose borders are their own: those from `least` to `most` on an axis."""

    spans: tuple[Span, ...]
    axis: str = ""
    least: int = 1
    most: int | None = None


def classes(curves: Curves) -> list[Class]:
    """All matrices together, or the small and the large ones apart where that is better by more than noise.  A bound
    never lies between matrices that are launched together."""
    together = tuple(spans(curves))
    best, most = [Class(together)], 0.0
    for axis in ("id", "weights"):
        for bound in sorted({curves.extent(s, axis)[0] for s in curves.times})[1:]:
            if any(low < bound <= high for low, high in (curves.extent(s, axis) for s in curves.times)):
                continue
            small = curves.only(s for s in curves.times if curves.extent(s, axis)[0] < bound)
            large = curves.only(s for s in curves.times if curves.extent(s, axis)[0] >= bound)
            two = tuple(spans(small)), tuple(spans(large))
            if not all(two):
                continue
            gains = gain(curves, lambda _: together, lambda s, two=two, small=small: two[s not in small.times])
            if len(gains) >= FEWEST and sum(gains) > max(most, NOISE * len(gains)):
                most = sum(gains)
                best = [Class(two[0], axis, 1, bound - 1), Class(two[1], axis, bound, None)]
    return best


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
    together: dict[tuple[Span, str, int, int | None], list[str]] = defaultdict(list)
    for type_, curve in curves.items():
        for of in classes(curve):
            for span in of.spans:
                if TIERS[span.kernel] == 1:
                    together[(span, of.axis, of.least, of.most)].append(type_)
    tuned: list[dict[str, Any]] = []

    def add(kernel: str, types: Sequence[str], bounds: Mapping[str, Any], where: str, evidence: str) -> None:
        name = f"prefill.{SHORT.get(kernel, kernel)}{where}"
        while any(gate["name"] == name for gate in [*head, *tuned]):
            name += f".{types[0]}"
        gate = {"name": name, "kernel": kernel, "types": list(types), **bounds, "unless": off}
        tuned.append({**gate, "evidence": evidence} if evidence else gate)

    for (span, axis, least, most), types in sorted(
        together.items(), key=lambda item: (item[0][0].least, item[0][0].kernel, *item[0][1:3], item[1])
    ):
        where = "" if not axis else ".large" if most is None else ".small"
        bounds = {"nt": [span.least, span.most], **({axis: [least, most]} if axis else {})}
        add(span.kernel, types, bounds, where, f"lowest times of {', '.join(types)} over rows and shapes")
        if span.kernel == "gemm_tiles_wgmma":  # what the emulator of the device takes instead
            add("mmq_tiles", types, bounds, where, "")
    # What was not measured has the default's gates.
    rest = [t for t in TYPES if t not in curves]
    tail: list[dict[str, Any]] = []
    if rest:
        tail = [
            {
                "name": "prefill.tiles_wgmma.unmeasured",
                "kernel": "gemm_tiles_wgmma",
                "types": rest,
                "nt": [9, None],
                "unless": off,
            },
            {"name": "prefill.mmq.unmeasured", "kernel": "mmq_tiles", "types": rest, "nt": [9, None], "unless": off},
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


def kernel_at(gates: Mapping[str, Any], type_: str, nt: int, shape: Shape = (3584, 3584)) -> str:
    """What a table of gates chooses with no switch set: the first gate that takes a type, rows and a shape."""
    od, id_ = shape
    for gate in gates["gates"]:
        types = gate.get("types", "all")
        if gate.get("only") or not (types in ("all", "blocks") or type_ in types):
            continue
        if all(
            _has(gate.get(axis, [1, None]), value) for axis, value in (("nt", nt), ("id", id_), ("weights", od * id_))
        ):
            return str(gate["kernel"])
    raise UserError(f"no gate takes {type_} at nt {nt}")


def _has(bounds: Sequence[int | None], value: int) -> bool:
    least, most = bounds
    return (least or 1) <= value and (most is None or value <= most)


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
        for of in classes(curve):
            bound = f"from {of.least}" if of.most is None else f"to {of.most}"
            for span in of.spans:
                most = "" if span.most is None else str(span.most)
                rows.append([type_, f"{of.axis} {bound}" if of.axis else "all", span.kernel, str(span.least), most])
    return markdown_table(["type", "matrices", "kernel", "nt from", "to"], rows, right=(3, 4))


def forced(kernel: str) -> str:
    """A table of gates with which every product of blocks goes through one kernel."""
    gates: list[dict[str, Any]] = [{"name": "forced", "kernel": kernel, "types": "blocks"}]
    # A layer of f16 goes along. Its single rows stay f32: the engine does not fuse a token's launches otherwise.
    gates += [{"name": k, "kernel": k, "types": ["f16"], "nt": [2, None]} for k in ("gemm_f16_wgmma", "gemm_f16_mma")]
    return json.dumps({"schema": 1, "gates": [*gates, {"name": "float", "kernel": "f32_matmul", "types": "all"}]})


def measured(args: argparse.Namespace, types: Sequence[str]) -> tuple[str, list[Record]]:
    """The device, and times of every kernel on this GPU: prompts of many lengths through models of random weights, a
    layer of each type, read from traces.  Weights are cold: a whole model lies between two visits."""
    program = build.built_qwen(run.prepare(args), "gpu")
    folder = build.BUILD / "tune"
    folder.mkdir(parents=True, exist_ok=True)
    found: list[Record] = []
    device = ""
    for size in args.sizes.split(","):
        file = folder / f"{size}.gguf"
        # The first layer is nobody's: a pass begins while the device is idle.
        words = ["synthetic", size, "q8_0", str(file), "--layer-types", ",".join(["f16", *types])]
        say(f"making a model of {size}'s shapes, a layer of each type")
        engine.output(program, words)
        ods = {
            m["tensor"]: m["od"]
            for m in json.loads(engine.output(program, ["explain", str(file), "--json"]))["dispatch"]
        }
        for kernel, nt in NT.items():
            trace, gates = folder / f"{size}-{kernel}.json", folder / f"{kernel}.json"
            write_text(gates, forced(kernel))
            say(f"{size}: {kernel}")
            words = ["bench", str(file), "--on", "gpu", "-p", args.nt or nt, "-n", "0", "-r", "4", "-o", "record"]
            out = engine.output(program, words, {"LADDER_GATES": str(gates), "LADDER_TRACE": str(trace)})
            device = json_lines(out, "qwen bench")[0]["device"]
            found += records_of(trace, ods)
        file.unlink()
    return device, found


def records_of(trace: Path, ods: Mapping[str, int] | None = None) -> list[Record]:
    """A trace's products as records: the median of every kernel, shape and number of rows.  Matrices that share their
    activations are one product with all of their rows, in one launch or several, and groups of eight token rows are
    one product with all of theirs.  Kernels that a product needs before and after it count as its own.  With `ods`, a
    matrix's rows, a record says how large the smallest and the largest of the matrices are."""
    try:
        events = json.loads(read_text(trace))
    except json.JSONDecodeError as error:
        raise UserError(f"{shown(trace)}:{error.lineno}: not JSON: {error.msg}") from None
    products: list[_Product] = []
    before, open_ = 0.0, False  # conversions that wait for their product; whether the last one may go on
    for event in events:
        if event.get("cat") == "multiply":
            a = event["args"]
            one = _Product(event["name"], a["type"], a["id"], a.get("weights", "").split(" + "))
            if open_ and not before and products[-1].goes_on_with(one):
                one = products[-1]
            else:
                products.append(one)
            one.add(a["nt"], a["od"], before + 1e3 * event["dur"], a.get("weights", ""))
            before, open_ = 0.0, True
        elif event["name"] in CONVERSIONS:
            before += 1e3 * event["dur"]
        elif event["name"] in FINISHES and open_:
            products[-1].ns += 1e3 * event["dur"]
        elif event.get("ph") == "X":
            before, open_ = 0.0, False
    times: dict[tuple[str, str, int, int, int, tuple[int, ...]], list[float]] = defaultdict(list)
    for p in products:
        parts = tuple(sorted({ods[name] for name in p.names})) if ods else ()
        times[(p.kernel, p.type, p.nt, p.od, p.id, parts)].append(p.ns)
    rung_of = {f"{t}_{kernel}": name.format(type=t) for kernel, name in RUNGS.items() for t in TYPES}
    found: list[Record] = []
    for (name, type_, nt, od, id_, parts), every_ns in times.items():
        if name in rung_of and len(every_ns) >= FEWEST:
            record: Record = {"rung": rung_of[name], "type": type_, "executor": "gpu", "mode": "cold"}
            record["shape"] = {"nt": nt, "od": od, "id": id_}
            record["time_ns"] = {"median": statistics.median(every_ns)}
            if parts:
                record["params"] = {"least_od": parts[0], "most_od": parts[-1]}
            found.append(record)
    return found


@dataclass
class _Product:
    """Launches that are one product: of matrices that share their activations, and of all of their rows."""

    kernel: str
    type: str
    id: int
    names: list[str]
    ns: float = 0.0
    rows: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # token rows, by the matrices of a launch
    ods: dict[str, int] = field(default_factory=dict)

    def add(self, nt: int, od: int, ns: float, weights: str) -> None:
        self.ns += ns
        self.rows[weights] += nt
        self.ods[weights] = od
        self.names += [name for name in weights.split(" + ") if name not in self.names]

    @property
    def nt(self) -> int:
        return max(self.rows.values())

    @property
    def od(self) -> int:
        return sum(self.ods.values())

    def goes_on_with(self, other: _Product) -> bool:
        """More rows of the same matrices after whole groups, or another matrix of the same activations."""
        if (self.kernel, self.type, self.id) != (other.kernel, other.type, other.id):
            return False
        if set(other.names) <= set(self.names):
            return self.kernel.endswith("_mmvq_tiles") and self.nt % ROWS_AT_ONCE == 0
        roles = {name.removesuffix(".weight").split(".")[-1] for name in (*self.names, *other.names)}
        layers = {name.split(".")[1] for name in (*self.names, *other.names) if name.count(".") > 1}
        return len(layers) == 1 and any(roles <= set(group) for group in TOGETHER)


def command_tune(args: argparse.Namespace) -> int:
    types = args.type or list(TYPES)
    for type_ in types:
        if type_ not in TYPES:
            raise one_of("type", type_, TYPES)
    if args.measure:
        device, found = measured(args, types)
    elif args.traces:
        device = args.device or ""
        if not device:
            raise UserError("--traces: of which device? --device says it, such as nvidia-h200")
        found = [record for trace in args.traces for record in records_of(trace)]
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
