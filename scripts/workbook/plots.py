"""Pictures of records: roofline, intensity and time against nt, and the ladder.

Output is a pure function of the records and the options: no dates of drawing, no random ids, one font.  Colours are
those of Okabe and Ito, which stay apart for colour-blind readers; every series also has its own marker or hatch.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display is needed, or touched

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from . import devices, records
from .common import ROOT, UserError, one_of, say, shown
from .records import Line, Record

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7A6A00")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
HATCHES = ("", "//", "..", "xx", "\\\\", "--", "++", "oo")
STYLE: dict[str, Any] = {
    "svg.hashsalt": "the-matmul-ladder",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 12,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "figure.dpi": 100,
    "savefig.dpi": 150,
}


@dataclass(frozen=True)
class Ceiling:
    """A horizontal roof: a peak of one unit."""

    title: str
    gops: float
    unit: str
    source: str  # measured or spec


@dataclass
class Roofs:
    """What a device can do at most, as measured (chapter 00) and as published."""

    measured_gbps: float | None = None
    spec_gbps: float | None = None
    peaks: list[Ceiling] = field(default_factory=list)

    def best_gbps(self) -> float | None:
        return self.measured_gbps or self.spec_gbps

    def of_unit(self, unit: str) -> list[Ceiling]:
        return [peak for peak in self.peaks if peak.unit == unit]


def roofs_of(device: str, lines: Iterable[Line]) -> Roofs:
    """Roofs of a device: the best chapter-00 probes among its records, and its spec file if there is one."""
    found = Roofs()
    measured: dict[str, Ceiling] = {}
    for line in lines:
        record = line.record
        if record["executor"] == "emulator" or record.get("valid") is False:
            continue
        if record["rung"] == "roof_read" and "gbps" in record:
            found.measured_gbps = max(found.measured_gbps or 0, record["gbps"])
        name = devices.PEAK_RUNGS.get(record["rung"])
        if name and "gops" in record:
            title = devices.PROBE_TITLES.get(record["rung"], devices.PEAK_TITLES[name])
            old = measured.get(title)
            if old is None or record["gops"] > old.gops:
                measured[title] = Ceiling(title, record["gops"], record["work"]["unit"], "measured")
    if found.measured_gbps is None or not measured:
        # Every timed record also carries the roofs that were measured in its own run.
        for line in lines:
            roof = line.record.get("roof", {})
            if roof.get("source") != "measured":
                continue
            if "bandwidth_gbps" in roof and not _has_probe(lines, "roof_read"):
                found.measured_gbps = max(found.measured_gbps or 0, roof["bandwidth_gbps"])
            if "peak_gops" in roof and not any(c.unit == roof.get("unit", "flop") for c in measured.values()):
                unit = roof.get("unit", "flop")
                title = "f32 FMA" if unit == "flop" else "int8 dot"
                measured[title] = Ceiling(title, roof["peak_gops"], unit, "measured")
    found.peaks += measured.values()
    spec = devices.spec_for(device)
    if spec:
        found.spec_gbps = float(spec["bandwidth_gbps"])
        for name, peak in spec["peaks"].items():
            found.peaks.append(Ceiling(devices.PEAK_TITLES[name], float(peak["gops"]), peak["unit"], "spec"))
    return found


def _has_probe(lines: Iterable[Line], rung: str) -> bool:
    return any(line.record["rung"] == rung and "gbps" in line.record for line in lines)


# --- choosing what to draw ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """The records of one picture."""

    kind: str
    device: str
    layer: str
    mode: str
    points: tuple[Line, ...]  # the rungs' measurements
    everything: tuple[Line, ...]  # all the device's records (roofs come from here)
    others: tuple[str, ...]  # layers that have records but are not drawn

    def rungs(self) -> list[str]:
        return list(dict.fromkeys(_series(line.record) for line in self.points))

    def drawn(self) -> list[Line]:
        """Every record that the picture depends on."""
        return [*self.points, *(line for line in self.everything if line.record["rung"] in _ROOF_RUNGS)]


_ROOF_RUNGS = {"roof_read", *devices.PEAK_RUNGS}


def _series(record: Record) -> str:
    """The label of a series: the rung, and the type where it is not in the rung's name."""
    return str(record["rung"])


def _is_point(record: Record) -> bool:
    return "shape" in record and "time_ns" in record and "gops" in record and record["executor"] != "emulator"


def layer_name(record: Record) -> str:
    shape = record["shape"]
    return record.get("layer") or f"{shape['od']}x{shape['id']}"


def choose(
    lines: Sequence[Line],
    kind: str,
    device: str,
    layer: str | None = None,
    mode: str = "cold",
    nt: Sequence[int] | None = None,
    rungs: Sequence[str] | None = None,
) -> Choice:
    """Pick the records of a picture; an error names what there is when nothing fits."""
    mine = [line for line in records.latest(lines) if line.record["device"] == device]
    points = [line for line in records.one_per_point(mine) if _is_point(line.record)]
    if not points:
        raise UserError(f"no timed records of any rung for {device}")
    in_mode = [line for line in points if line.record.get("mode") == mode]
    if not in_mode:
        raise one_of(f"record of {device} in mode", mode, {str(line.record.get("mode")) for line in points})
    known = list(dict.fromkeys(layer_name(line.record) for line in in_mode))
    if layer is None:
        layer = max(known, key=lambda name: _layer_rank(name, in_mode))
    elif layer not in known:
        raise one_of(f"record of {device} for layer", layer, sorted(known))
    chosen = [line for line in in_mode if layer_name(line.record) == layer]
    if rungs is not None:
        have = {line.record["rung"] for line in chosen}
        for rung in rungs:
            if rung not in have:
                raise one_of(f"record of {device}, {layer}, for rung", rung, sorted(have))
        chosen = [line for line in chosen if line.record["rung"] in rungs]
    elif kind == "intensity":
        chosen = _curves(chosen)
    if nt is not None:
        rows = sorted({line.record["shape"]["nt"] for line in chosen})
        for wanted in nt:
            if wanted not in rows:
                raise one_of(f"record of {device}, {layer}, for nt", str(wanted), map(str, rows))
        chosen = [line for line in chosen if line.record["shape"]["nt"] in nt]
    others = tuple(name for name in known if name != layer)
    return Choice(kind, device, layer, mode, tuple(chosen), tuple(mine), others)


def _curves(points: list[Line]) -> list[Line]:
    """Rungs of the storage type that has most rungs with several nt: curves that can be compared, over one floor.  All
    points if there is no curve."""
    rows: dict[tuple[str, str], set[int]] = {}
    for line in points:
        rows.setdefault((line.record.get("type", ""), line.record["rung"]), set()).add(line.record["shape"]["nt"])
    curves = [name for name, found in rows.items() if len(found) > 1]
    if not curves:
        return points
    types = [type_ for type_, _ in curves]
    usual = max(dict.fromkeys(types), key=types.count)
    return [line for line in points if (line.record.get("type", ""), line.record["rung"]) in curves
            and line.record.get("type", "") == usual]  # fmt: skip


def _layer_rank(name: str, points: Sequence[Line]) -> tuple[int, float]:
    """More rungs first, then more bytes: the layer where the rungs differ by what they are meant to differ by."""
    mine = [line.record for line in points if layer_name(line.record) == name]
    return len({record["rung"] for record in mine}), max(r["shape"]["od"] * r["shape"]["id"] for r in mine)


def fingerprint(choice: Choice) -> str:
    """sha256 over everything that a picture depends on: records, device spec and this file."""
    content = {
        "kind": choice.kind,
        "device": choice.device,
        "layer": choice.layer,
        "mode": choice.mode,
        "records": [line.record for line in choice.drawn()],
        "spec": devices.spec_for(choice.device),
        "code": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
        "matplotlib": matplotlib.__version__,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# --- parts of a picture -------------------------------------------------------------------------------------------


def _style(names: Sequence[str], name: str) -> tuple[str, str]:
    index = list(names).index(name)
    # After one round of colours the markers move on by one, so that no pair comes twice soon.
    return COLOURS[index % len(COLOURS)], MARKERS[(index + index // len(COLOURS)) % len(MARKERS)]


def _plain(value: float, _: object = None) -> str:
    """1000 as 1000, 0.01 as 0.01: no powers to decipher."""
    return f"{value:g}" if 1e-4 <= abs(value) < 1e6 else f"{value:.0e}"


def _log_axis(axis: Any) -> None:
    axis.set_major_formatter(FuncFormatter(_plain))
    axis.set_minor_formatter(NullFormatter())


def _nt_axis(axes: Axes, rows: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(rows)
    crowded = {b for a, b in itertools.pairwise(rows) if b / a < 1.3}  # 8 and 9: their numbers would read 89
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: "" if value in crowded else f"{value:.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    if len(rows) > 1:
        axes.set_xlim(rows[0] / 1.2, rows[-1] * 1.2)


def _device_title(device: str) -> str:
    spec = devices.spec_for(device)
    return spec["name"] if spec else device


def _dates(choice: Choice) -> str:
    days = sorted({line.record["date"][:10] for line in choice.drawn() if "date" in line.record})
    if not days:
        return "undated records"
    return f"records of {days[0]}" + (f" to {days[-1]}" if days[-1] != days[0] else "")


def _caption(figure: Figure, choice: Choice, notes: Sequence[str]) -> None:
    """Device, dates and every reservation, below the axes."""
    executor = "/".join(sorted({line.record["executor"] for line in choice.points}))
    what = (
        f"{_device_title(choice.device)} ({executor}), {_dates(choice)}. "
        f"Layer {choice.layer}, {choice.mode} operands, medians."
    )
    width = int(figure.get_figwidth() * 13.5)
    lines = [line for note in [what, *notes] for line in textwrap.wrap(note, width)]
    figure.text(0.01, 0.01, "\n".join(lines), ha="left", va="bottom", fontsize=8, color="#444444")
    figure.subplots_adjust(bottom=(0.62 + 0.135 * len(lines)) / figure.get_figheight())


def _invalid_notes(choice: Choice) -> list[str]:
    """One line for each reason for which points are drawn hollow."""
    by_reason: dict[str, list[str]] = {}
    for line in choice.points:
        if line.record.get("valid") is False:
            where = f"{line.record['rung']} nt {line.record['shape']['nt']}"
            by_reason.setdefault(line.record["why_not"], []).append(where)
    notes = []
    for reason, where in by_reason.items():
        some = ", ".join(where[:3]) + (f" and {len(where) - 3} more" if len(where) > 3 else "")
        notes.append(f"Hollow: not valid under this roof ({some}): {reason}.")
    return notes


def _spread_labels(axes: Axes, labels: Sequence[tuple[float, float, str, str]], log: bool = True) -> None:
    """Write labels right of their points, moved apart vertically so that none covers another."""
    if not labels:
        return
    low, high = axes.get_ylim()
    position = (lambda y: math.log(y / low) / math.log(high / low)) if log else (lambda y: (y - low) / (high - low))
    height = axes.get_figure().get_figheight() * axes.get_position().height
    step = 0.155 / height
    placed: list[float] = []
    for x, y, text, colour in sorted(labels, key=lambda item: item[1]):
        at = position(y)
        if placed and at - placed[-1] < step:
            at = placed[-1] + step
        placed.append(at)
        where = low * (high / low) ** at if log else low + (high - low) * at
        axes.annotate(
            text,
            (x, y),
            xytext=(x, where),
            textcoords="data",
            fontsize=8,
            color=colour,
            va="center",
            annotation_clip=False,
            bbox={"boxstyle": "square,pad=0.1", "fc": "white", "ec": "none", "alpha": 0.75},
        )


# --- roofline -----------------------------------------------------------------------------------------------------

_UNIT_AXIS = {"flop": "FLOP/s", "int8_op": "int8 op/s"}
_INTENSITY_AXIS = {
    "flop": "arithmetic intensity, FLOP per byte",
    "int8_op": "arithmetic intensity, int8 operations per byte",
}


def roofline(choice: Choice) -> Figure:
    """Every rung under the roofs, log-log; one panel a unit, since operations of different units do not compare."""
    units = [unit for unit in _UNIT_AXIS if any(line.record["work"]["unit"] == unit for line in choice.points)]
    roofs = roofs_of(choice.device, choice.everything)
    figure, grid = plt.subplots(1, len(units), figsize=(3.2 + 8.0 * len(units), 6.6), squeeze=False)
    width = figure.get_figwidth()
    figure.subplots_adjust(left=0.9 / width, right=1 - 4.5 / width, top=0.91, wspace=0.5)
    for axes, unit in zip(grid[0], units, strict=True):
        _roofline_panel(axes, choice, roofs, unit)
    handles: dict[str, Any] = {}
    for axes in grid[0]:
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(
        handles.values(), handles.keys(), loc="upper left", fontsize=8.5, bbox_to_anchor=(1 - 2.5 / width, 0.92)
    )
    figure.suptitle(f"Roofline: {_device_title(choice.device)}, {choice.layer}", x=0.9 / width, ha="left")
    notes = ["Numbers below points are nt, the token rows. Solid roofs are measured."]
    if any(peak.source == "spec" for peak in roofs.peaks):
        notes = [notes[0][:-1] + ", dashed ones published by the vendor."]
    _caption(figure, choice, notes + _invalid_notes(choice))
    return figure


def _roofline_panel(axes: Axes, choice: Choice, roofs: Roofs, unit: str) -> None:
    points = [line.record for line in choice.points if line.record["work"]["unit"] == unit]
    peaks = roofs.of_unit(unit)
    used = _used_peak(points, peaks)
    bandwidths = [gbps for gbps in (roofs.measured_gbps, roofs.spec_gbps) if gbps]
    xs = [record["intensity"] for record in points]
    ridges = [peak.gops / gbps for peak in peaks for gbps in bandwidths[:1]]
    low = 2 ** math.floor(math.log2(min(xs)) - 1)
    high = 2 ** math.ceil(math.log2(max(xs + ridges)) + 1.4)
    top_peak = max([peak.gops for peak in peaks] + [record["gops"] for record in points])
    prefix, scale = ("T", 1e3) if top_peak >= 1e4 else ("G", 1.0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    bottom = min([record["gops"] for record in points] + [gbps * low for gbps in bandwidths]) / 2
    axes.set_xlim(low, high)
    axes.set_ylim(bottom, top_peak * 2.2)
    for gbps, source in ((roofs.measured_gbps, "measured"), (roofs.spec_gbps, "spec")):
        if not gbps:
            continue
        roof = max([p.gops for p in peaks if p.source == source] or [p.gops for p in peaks] or [top_peak])
        end = min(high, roof / gbps)
        axes.plot(
            [low, end],
            [gbps * low, gbps * end],
            color="#333333" if source == "measured" else "#999999",
            linestyle="-" if source == "measured" else "--",
            linewidth=1.6 if source == "measured" else 1.1,
            label=f"memory, {source}: {_gbps(gbps)}",
            zorder=2,
        )
    labels = []
    for peak in sorted(peaks, key=lambda p: (p.gops, p.source)):
        gbps = (roofs.measured_gbps if peak.source == "measured" else roofs.spec_gbps) or roofs.best_gbps()
        start = max(low, peak.gops / gbps) if gbps else low
        strong = peak.source == "measured"
        axes.plot(
            [start, high],
            [peak.gops, peak.gops],
            color="#333333" if strong else "#999999",
            linestyle="-" if strong else "--",
            linewidth=1.6 if peak is used else 1.1,
            zorder=2,
        )
        labels.append(
            (
                high * 1.06,
                peak.gops,
                f"{peak.title} {_rate(peak.gops, unit)}" + ("" if strong else " (spec)"),
                "#222222" if strong else "#777777",
            )
        )
    names = choice.rungs()
    for name in dict.fromkeys(_series(record) for record in points):
        colour, marker = _style(names, name)
        mine = sorted((r for r in points if _series(r) == name), key=lambda r: r["shape"]["nt"])
        axes.plot(
            [r["intensity"] for r in mine], [r["gops"] for r in mine], color=colour, linewidth=0.9, alpha=0.6, zorder=3
        )
        for valid in (True, False):
            some = [r for r in mine if r.get("valid", True) is valid]
            axes.plot(
                [r["intensity"] for r in some],
                [r["gops"] for r in some],
                linestyle="none",
                marker=marker,
                markersize=6.5,
                markeredgecolor=colour,
                markerfacecolor=colour if valid else "white",
                label=name if some and (valid or all(not r.get("valid", True) for r in mine)) else None,
                zorder=4,
            )
    _number_points(axes, points)
    _spread_labels(axes, labels)
    axes.xaxis.set_major_formatter(FuncFormatter(_fraction))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value / scale)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(_INTENSITY_AXIS[unit])
    axes.set_ylabel(_rate_unit(unit, prefix))


def _number_points(axes: Axes, points: Sequence[Record]) -> None:
    """Write nt once a column of points, below the lowest, where no roof runs."""
    lowest: dict[int, Record] = {}
    for record in points:
        nt = record["shape"]["nt"]
        if nt not in lowest or record["gops"] < lowest[nt]["gops"]:
            lowest[nt] = record
    last = -math.inf
    for nt, record in sorted(lowest.items()):
        x = math.log2(record["intensity"])
        if x - last < 0.45:
            continue
        text = f"nt {nt}" if last == -math.inf else f"{nt}"
        last = x
        axes.annotate(
            text,
            (record["intensity"], record["gops"]),
            xytext=(0, -9),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=8,
            color="#333333",
        )


def _used_peak(points: Sequence[Record], peaks: Sequence[Ceiling]) -> Ceiling | None:
    """The peak that the rungs' own unit of execution has: the one nearest to the peak in their records."""
    wanted = [record["roof"]["peak_gops"] for record in points if "peak_gops" in record.get("roof", {})]
    measured = [peak for peak in peaks if peak.source == "measured"]
    if not wanted or not measured:
        return None
    return min(measured, key=lambda peak: abs(math.log(peak.gops / wanted[-1])))


def _fraction(value: float, _: object = None) -> str:
    return f"1/{1 / value:.0f}" if value < 1 else f"{value:.0f}"


def _gbps(gbps: float) -> str:
    return f"{gbps / 1000:.2f} TB/s" if gbps >= 1000 else f"{gbps:.1f} GB/s"


def _rate_unit(unit: str, prefix: str) -> str:
    """TFLOP/s, Gop/s (int8)."""
    return f"{prefix}FLOP/s" if unit == "flop" else f"{prefix}op/s (int8)"


def _rate(gops: float, unit: str) -> str:
    return f"{gops / 1e3:.3g} {_rate_unit(unit, 'T')}" if gops >= 1e3 else f"{gops:.3g} {_rate_unit(unit, 'G')}"


# --- intensity and time against nt ----------------------------------------------------------------------------------


def intensity(choice: Choice) -> Figure:
    """Arithmetic intensity, time, and time per token row against nt, with the ridges and the floor."""
    roofs = roofs_of(choice.device, choice.everything)
    rows = sorted({line.record["shape"]["nt"] for line in choice.points})
    figure, (top, middle, bottom) = plt.subplots(3, 1, figsize=(9.6, 10.6), sharex=True)
    figure.subplots_adjust(left=0.10, right=1 - 2.7 / figure.get_figwidth(), top=0.94, hspace=0.12)
    _intensity_panel(top, choice, roofs)
    shortest = min(line.record["time_ns"]["median"] for line in choice.points)
    unit, to_unit = ("ms", 1e6) if shortest > 1e6 else ("µs", 1e3)
    names = choice.rungs()
    for axes, per_row in ((middle, False), (bottom, True)):
        for name in names:
            colour, marker = _style(names, name)
            mine = sorted(
                (line.record for line in choice.points if _series(line.record) == name), key=lambda r: r["shape"]["nt"]
            )
            scale = [to_unit * (r["shape"]["nt"] if per_row else 1) for r in mine]
            nts = [r["shape"]["nt"] for r in mine]
            times = [r["time_ns"]["median"] / s for r, s in zip(mine, scale, strict=True)]
            axes.fill_between(
                nts,
                [r["time_ns"]["q1"] / s for r, s in zip(mine, scale, strict=True)],
                [r["time_ns"]["q3"] / s for r, s in zip(mine, scale, strict=True)],
                color=colour,
                alpha=0.18,
                linewidth=0,
            )
            axes.plot(nts, times, color=colour, linewidth=1.3)
            for valid in (True, False):
                some = [(n, t) for n, t, r in zip(nts, times, mine, strict=True) if r.get("valid", True) is valid]
                axes.plot(
                    [n for n, _ in some],
                    [t for _, t in some],
                    linestyle="none",
                    marker=marker,
                    markersize=6,
                    markeredgecolor=colour,
                    markerfacecolor=colour if valid else "white",
                    label=name if axes is middle and some and valid else None,
                )
        floor = _floor(choice)
        if floor:
            axes.plot(
                list(floor),
                [t / (to_unit * (nt if per_row else 1)) for nt, t in floor.items()],
                color="#333333",
                linestyle=":",
                linewidth=1.5,
                label="floor: the roofs allow no less" if axes is middle else None,
            )
        axes.set_yscale("log")
        _log_axis(axes.yaxis)
    changes = crossovers(line.record for line in choice.points)
    for axes in (middle, bottom):
        for _, _, left, right in changes:
            axes.axvline(math.sqrt(left * right), color="#999999", linestyle="--", linewidth=0.9, zorder=0)
    middle.set_ylabel(f"time, {unit}")
    bottom.set_ylabel(f"time per token row, {unit}")
    bottom.set_xlabel("nt, token rows")
    for axes in (top, middle, bottom):
        _nt_axis(axes, rows)
    middle.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), fontsize=8.5)
    figure.suptitle(f"Intensity and time against nt: {_device_title(choice.device)}, {choice.layer}", x=0.10, ha="left")
    notes = ["Below a ridge a kernel waits for memory, above it for arithmetic. Bands are quartiles."]
    if changes:
        told = ", ".join(f"{winner} from nt {right}" for _, winner, _, right in changes)
        notes.append(f"Dashed: another rung becomes the fastest. {changes[0][0]} at first, then {told}.")
    _caption(figure, choice, notes + _invalid_notes(choice))
    return figure


def crossovers(records: Iterable[Record]) -> list[tuple[str, str, int, int]]:
    """Where another series becomes the fastest: (before, after, last nt of before, first nt of after), by nt."""
    best: dict[int, Record] = {}
    for record in records:
        nt = record["shape"]["nt"]
        if nt not in best or record["time_ns"]["median"] < best[nt]["time_ns"]["median"]:
            best[nt] = record
    rows = sorted(best)
    return [
        (_series(best[left]), _series(best[right]), left, right)
        for left, right in itertools.pairwise(rows)
        if _series(best[left]) != _series(best[right])
    ]


def _intensity_panel(axes: Axes, choice: Choice, roofs: Roofs) -> None:
    """One curve for all rungs that move the same bytes for the same work, and the ridges of the peaks."""
    curves: dict[tuple[tuple[int, float], ...], list[str]] = {}
    for name in choice.rungs():
        mine = [line.record for line in choice.points if _series(line.record) == name]
        curve = tuple(sorted((r["shape"]["nt"], r["intensity"]) for r in mine))
        curves.setdefault(curve, []).append(name)
    merged: list[tuple[dict[int, float], list[str]]] = []
    for curve, names in curves.items():  # a rung measured at fewer nt lies on the same curve
        values = dict(curve)
        for other, others in merged:
            if all(other.get(nt, value) == value for nt, value in values.items()):
                other.update(values)
                others += names
                break
        else:
            merged.append((values, list(names)))
    order = choice.rungs()
    for values, names in merged:
        colour, marker = _style(order, names[0])
        rows = sorted(values)
        label = "\n".join(textwrap.wrap(", ".join(names), 34))
        axes.plot(
            rows, [values[nt] for nt in rows], color=colour, marker=marker, markersize=5, linewidth=1.4, label=label
        )
    axes.set_yscale("log", base=2)
    gbps = roofs.best_gbps()
    units = {line.record["work"]["unit"] for line in choice.points}
    labels = []
    best: dict[str, Ceiling] = {}
    for peak in roofs.peaks:
        if peak.unit in units and (peak.title not in best or peak.source == "measured"):
            best[peak.title] = peak
    low, high = axes.get_ylim()
    ridges = {title: peak.gops / gbps for title, peak in best.items()} if gbps else {}
    axes.set_ylim(low, max([high, *[ridge * 1.5 for ridge in ridges.values()]]))
    right = max(line.record["shape"]["nt"] for line in choice.points) * 1.28
    for title, ridge in ridges.items():
        axes.axhline(
            ridge, color="#555555", linestyle="-." if best[title].source == "measured" else "--", linewidth=1.0
        )
        labels.append(
            (
                right,
                ridge,
                f"ridge of {title}: {ridge:.3g}" + ("" if best[title].source == "measured" else " (spec)"),
                "#333333",
            )
        )
    _spread_labels(axes, labels)
    axes.yaxis.set_major_formatter(FuncFormatter(_fraction))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("operations per byte")
    axes.legend(loc="lower right", fontsize=8)


def _floor(choice: Choice) -> dict[int, float]:
    """nt -> the least time in ns that the roofs recorded with the points allow, by the unit that is fastest."""
    floor: dict[int, float] = {}
    for line in choice.points:
        record = line.record
        roof = record.get("roof", {})
        parts = []
        if "bandwidth_gbps" in roof and "bytes" in record:
            parts.append(record["bytes"]["total"] / roof["bandwidth_gbps"])
        if "peak_gops" in roof:
            parts.append(record["work"]["count"] / roof["peak_gops"])
        if parts:
            nt = record["shape"]["nt"]
            floor[nt] = min(max(parts), floor.get(nt, math.inf))
    return dict(sorted(floor.items()))


# --- the ladder -----------------------------------------------------------------------------------------------------


def ladder(choice: Choice) -> Figure:
    """Percent of the roof, rung by rung; one bar a token-row count where several are drawn."""
    names = choice.rungs()
    rows = sorted({line.record["shape"]["nt"] for line in choice.points})
    height = 0.9 + len(names) * (0.16 + 0.24 * len(rows))
    figure, axes = plt.subplots(figsize=(9.6, max(3.2, height + 1.6)))
    figure.subplots_adjust(left=0.20, right=0.86, top=1 - 0.5 / figure.get_figheight())
    thickness = 0.8 / len(rows)
    widest = 100.0
    for line in choice.points:
        record = line.record
        percent = record.get("percent_of_roof")
        if percent is None:
            continue
        widest = max(widest, percent)
        lane = rows.index(record["shape"]["nt"])
        y = names.index(_series(record)) + (lane - (len(rows) - 1) / 2) * thickness
        valid = record.get("valid", True)
        colour = COLOURS[lane % len(COLOURS)]
        time = record["time_ns"]
        axes.barh(
            y,
            percent,
            height=thickness * 0.86,
            facecolor=colour if valid else "white",
            edgecolor=colour,
            hatch=None if valid else "////",
            linewidth=1.0,
            label=f"nt {rows[lane]}" if _first(choice, record) else None,
        )
        spread = [[percent - percent * time["median"] / time["q3"]], [percent * time["median"] / time["q1"] - percent]]
        axes.errorbar(percent, y, xerr=spread, color="#222222", linewidth=0.9, capsize=2)
        bytes_bound = record.get("bound") != "compute" and "gbps" in record
        rate = _gbps(record["gbps"]) if bytes_bound else _rate(record["gops"], record["work"]["unit"])
        inside = percent > 45 and valid
        end = percent * time["median"] / (time["q3"] if inside else time["q1"])
        axes.annotate(
            f"{percent:.1f} %, {rate}",
            (end, y),
            xytext=(-6 if inside else 5, 0),
            textcoords="offset points",
            va="center",
            ha="right" if inside else "left",
            fontsize=8,
            color="white" if inside else "#222222",
            bbox=None if inside else {"boxstyle": "square,pad=0.1", "fc": "white", "ec": "none", "alpha": 0.8},
        )
    axes.axvline(100, color="#333333", linewidth=1.4)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.set_xlim(0, widest * 1.02)
    axes.set_xlabel("percent of the roof measured in the same run")
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.suptitle(
        f"The ladder: {_device_title(choice.device)}, {choice.layer}, {_rows_text(rows)}", x=0.02, ha="left"
    )
    if len(rows) > 1:
        axes.legend(loc="upper left", bbox_to_anchor=(1.05, 1.0), fontsize=8.5)
    hollow = [note.replace("Hollow", "Hatched") for note in _invalid_notes(choice)]
    _caption(figure, choice, ["Whiskers are quartiles.", *hollow])
    return figure


def _first(choice: Choice, record: Record) -> bool:
    """Is this the first bar of its nt?  (It then carries the legend's entry.)"""
    same = [
        line.record
        for line in choice.points
        if line.record["shape"]["nt"] == record["shape"]["nt"] and "percent_of_roof" in line.record
    ]
    return same[0] is record


def _rows_text(rows: Sequence[int]) -> str:
    return f"nt {rows[0]}" if len(rows) == 1 else f"nt {', '.join(map(str, rows))}"


KINDS = {"roofline": roofline, "intensity": intensity, "ladder": ladder}


def draw(choice: Choice) -> Figure:
    with matplotlib.rc_context(STYLE):
        return KINDS[choice.kind](choice)


def save(figure: Figure, path: Path, mark: str = "") -> None:
    """Write .svg or .png, the same bytes every time.  `mark` goes into the SVG's description."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context(STYLE):
            metadata = (
                {"Date": None, "Creator": None, "Description": mark or None}
                if path.suffix == ".svg"
                else {"Software": None}
            )
            figure.savefig(path, metadata=metadata)
    except OSError as error:
        raise UserError(f"cannot write {shown(path)}: {error.strerror or error}") from None


# --- the command ----------------------------------------------------------------------------------------------------


def pick_device(lines: Sequence[Line], wanted: str | None) -> str:
    """The device asked for; else the only one; else this machine's; else the first GPU's."""
    known = list(dict.fromkeys(line.record["device"] for line in lines if _is_point(line.record)))
    if not known:
        raise UserError("no timed records to draw (scripts/ladder record makes some, or name a file with --records)")
    if wanted is not None:
        return devices.require(wanted, known)
    here = [devices.slugify(gpu["name"]) for gpu in devices.nvidia_smi()]
    gpus = [
        line.record["device"] for line in lines if line.record["executor"] == "gpu" and line.record["device"] in known
    ]
    device = next((slug for slug in here if slug in known), gpus[0] if gpus else known[0])
    if len(known) > 1:
        say(f"drawing {device}; there are also {', '.join(name for name in known if name != device)} (--device)")
    return device


def command_plot(args: argparse.Namespace) -> int:
    out: Path | None = args.output
    if out is not None and out.suffix not in (".svg", ".png"):
        raise UserError(f"-o {out}: the name must end in .svg or .png")
    if args.records:
        lines = [line for path in args.records for line in records.read_file(path)]
    else:
        if args.device is not None:
            devices.require(args.device, records.devices_with_records())
        lines = records.load_committed(args.device)
    device = pick_device(lines, args.device)
    rows = [int(part) for part in args.nt.split(",")] if args.nt else None
    choice = choose(lines, args.kind, device, args.layer, args.mode, rows)
    if args.kind == "ladder" and rows is None:
        choice = choose(lines, args.kind, device, choice.layer, args.mode, [smallest_nt(choice)])
    figure = draw(choice)
    mark = fingerprint(choice)
    targets = (
        [out] if out else [ROOT / "build" / "plots" / f"{args.kind}-{device}{suffix}" for suffix in (".svg", ".png")]
    )
    for target in targets:
        save(figure, target, mark)
        print(shown(target))
    plt.close(figure)
    return 0


def smallest_nt(choice: Choice) -> int:
    return min(line.record["shape"]["nt"] for line in choice.points)
