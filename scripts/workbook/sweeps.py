"""Pictures of experiments that vary one thing: times side by side, a ratio against the length of a row, hot and cold.

Each takes records that the page names, and like plots.py is a pure function of them.  Nothing is drawn that a record
does not say; a point that is missing is an error.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from . import devices
from .common import UserError
from .plots import COLOURS, MARKERS, STYLE, layer_name
from .records import Record

_RATIOS = (0.1, 0.15, 0.2, 0.25, 0.33, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 5, 7, 10)

Find = Callable[..., list[Record]]  # records that fit conditions, one a point


@dataclass(frozen=True)
class Sweep:
    """What a picture shows: the function that draws it, and everything that it depends on."""

    draw: Callable[[], Figure]
    records: list[Record]
    words: list[str]  # labels that do not follow from the records


def fingerprint(sweep: Sweep) -> str:
    """sha256 over everything that a picture depends on."""
    folder = Path(__file__).parent
    code = [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in ("sweeps.py", "plots.py")]
    content = [code, sweep.records, sweep.words, [devices.spec_for(slug) for slug in _devices(sweep.records)]]
    return hashlib.sha256(json.dumps([*content, matplotlib.__version__], sort_keys=True).encode()).hexdigest()


def _devices(found: Iterable[Record]) -> list[str]:
    return sorted({record["device"] for record in found})


def _caption(figure: Figure, found: Sequence[Record], notes: Sequence[str]) -> None:
    """Device, dates and reservations, below the axes."""
    names = [(devices.spec_for(slug) or {"name": slug})["name"] for slug in _devices(found)]
    days = sorted({record["date"][:10] for record in found if "date" in record})
    when = f", records of {days[0]}{f' to {days[-1]}' if days[-1] != days[0] else ''}" if days else ", undated records"
    reasons: dict[str, None] = dict.fromkeys(r["why_not"] for r in found if r.get("valid") is False)
    hollow = [f"Hollow: not valid under the memory roof: {reason}." for reason in reasons]
    width = int(figure.get_figwidth() * 13.5)
    lines = [part for note in [f"{', '.join(names)}{when}.", *notes, *hollow] for part in textwrap.wrap(note, width)]
    figure.text(0.01, 0.01, "\n".join(lines), ha="left", va="bottom", fontsize=8, color="#444444")
    figure.subplots_adjust(bottom=(0.75 + 0.135 * len(lines)) / figure.get_figheight())


def _one(found: list[Record], asked: str) -> Record:
    if len(found) != 1:
        raise UserError(f"sweep: {len(found) or 'no'} record{'s' if len(found) > 1 else ''} with {asked}")
    return found[0]


def _micros(record: Record) -> float:
    return record["time_ns"]["median"] / 1e3


# --- bars -----------------------------------------------------------------------------------------------------------


def bars(
    find: Find,
    rungs: Sequence[str],
    at: Sequence[dict[str, Any]],
    under: Callable[[Record], str] | None = None,
    skip: Sequence[tuple[str, dict[str, Any]]] = (),
    same_scale: bool = False,
    **common: Any,
) -> Sweep:
    """Times of several rungs beside each other, a group of bars for each place in `at` (dict(layer=..) or
    dict(od=.., id=..)).  `under` writes a line below each bar; `skip` names the pairs that cannot be.
    `same_scale` is for groups that are to be compared with each other, too."""
    groups: list[list[Record]] = []
    for place in at:
        group = []
        for rung in rungs:
            if (rung, place) not in skip:
                asked = {**common, **place, "rung": rung}
                group.append(_one(find(**asked), ", ".join(f"{k}={v!r}" for k, v in asked.items())))
        groups.append(group)
    found = [record for group in groups for record in group]
    words = [under(record) if under else "" for record in found]
    below = dict(zip(map(id, found), words, strict=True))
    return Sweep(lambda: _draw_bars(groups, list(rungs), below, same_scale), found, [*words, str(same_scale)])


def _draw_bars(
    groups: Sequence[Sequence[Record]], rungs: Sequence[str], under: dict[int, str], same_scale: bool
) -> Figure:
    count = sum(len(group) for group in groups)
    figure, every = plt.subplots(1, len(groups), figsize=(max(6.4, 1.05 * count + 1.2), 3.8), squeeze=False)
    figure.subplots_adjust(left=0.09, right=0.985, top=0.80, wspace=0.28)
    rows = sorted({record["shape"]["nt"] for group in groups for record in group})
    for axes, group in zip(every[0], groups, strict=True):
        for x, record in enumerate(group):
            time = record["time_ns"]
            colour = COLOURS[rungs.index(record["rung"]) % len(COLOURS)]
            valid = record.get("valid", True)
            axes.bar(
                x,
                _micros(record),
                width=0.72,
                facecolor=colour if valid else "white",
                edgecolor=colour,
                label=record["rung"],
            )
            spread = [[(time["median"] - time["q1"]) / 1e3], [(time["q3"] - time["median"]) / 1e3]]
            axes.errorbar(x, _micros(record), yerr=spread, color="#222222", linewidth=0.9, capsize=2)
            axes.annotate(
                f"{_micros(record):#.3g}" if _micros(record) < 99.95 else f"{_micros(record):.0f}",
                (x, time["q3"] / 1e3),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=8.5,
            )
        axes.set_xticks(range(len(group)), [under[id(record)] for record in group], fontsize=7.5)
        of_rows = f", nt {group[0]['shape']['nt']}" if len(rows) > 1 else ""
        axes.set_title(layer_name(group[0]) + of_rows, fontsize=9.5)
        axes.set_xlim(-0.6, len(group) - 0.4)
        compared = [record for each in groups for record in each] if same_scale else group
        axes.set_ylim(0, 1.12 * max(record["time_ns"]["q3"] for record in compared) / 1e3)
        axes.grid(axis="x", visible=False)
    every[0][0].set_ylabel("time, µs")
    handles = {name: part for axes in every[0] for part, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="upper left", ncols=min(4, len(handles)), fontsize=8.5)
    modes = sorted({record["mode"] for group in groups for record in group})
    _caption(
        figure,
        [record for group in groups for record in group],
        [f"nt {', '.join(map(str, rows))}, {' and '.join(modes)} operands, medians; whiskers are quartiles."],
    )
    return figure


# --- one rung's time by another's -----------------------------------------------------------------------------------


def ratio(find: Find, pairs: Sequence[tuple[str, str]], od: int, **common: Any) -> Sweep:
    """time(a) / time(b) against id for each pair (a, b), at a fixed od: below 1, a is the faster one.  Where a curve
    meets 1 is marked."""
    curves: list[tuple[str, list[tuple[Record, Record]]]] = []
    for a, b in pairs:
        # A shape may be recorded as several layers, or without a name: the newest record stands for it.
        of = {
            rung: {r["shape"]["id"]: r for r in sorted(find(rung=rung, od=od, **common), key=lambda r: r["date"])}
            for rung in (a, b)
        }
        both = sorted(of[a].keys() & of[b].keys())
        if len(both) < 2:
            raise UserError(f"sweep: {a} and {b} have {len(both)} id in common at od {od}; a curve needs two")
        curves.append((f"{a} / {b}", [(of[a][id_], of[b][id_]) for id_ in both]))
    found = [record for _, points in curves for point in points for record in point]
    return Sweep(lambda: _draw_ratio(curves, od), found, [name for name, _ in curves])


def crossings(points: Sequence[tuple[float, float]]) -> list[float]:
    """Where a curve of (id, ratio) meets 1, straight lines between the points on logarithmic axes."""
    found = []
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if (y0 - 1) * (y1 - 1) < 0:
            part = math.log(y0) / (math.log(y0) - math.log(y1))
            found.append(x0 * (x1 / x0) ** part)
    return found + [x for x, y in points if y == 1]


def _draw_ratio(curves: Sequence[tuple[str, list[tuple[Record, Record]]]], od: int) -> Figure:
    figure, axes = plt.subplots(figsize=(9.6, 4.8))
    figure.subplots_adjust(left=0.08, right=1 - 2.6 / figure.get_figwidth(), top=0.93)
    ids: set[int] = set()
    notes = []
    for k, (name, pairs) in enumerate(curves):
        points = [(a["shape"]["id"], a["time_ns"]["median"] / b["time_ns"]["median"]) for a, b in pairs]
        ids |= {x for x, _ in points}
        colour = COLOURS[k % len(COLOURS)]
        marker, label = MARKERS[k % len(MARKERS)], name.replace(" / ", "\n/ ")
        axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=5, linewidth=1.4, label=label)
        meets = crossings(points)
        for x in meets:
            axes.plot([x], [1], marker="|", markersize=16, markeredgewidth=2, color=colour)
            at = {"xytext": (4, 8 + 10 * k), "textcoords": "offset points"}
            axes.annotate(f"{x:.0f}", (x, 1), fontsize=8, color=colour, **at)
        if not meets:
            word = "faster" if points[0][1] < 1 else "slower"
            notes.append(f"{name.partition(' / ')[0]} is {word} at every id here.")
    axes.axhline(1, color="#333333", linewidth=1.2)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(sorted(ids))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    low, high = axes.get_ylim()
    axes.set_yticks([tick for tick in _RATIOS if low <= tick <= high])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel("id, length of a row")
    axes.set_ylabel("time / time of the other")
    axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), fontsize=8.5)
    found = [record for _, pairs in curves for pair in pairs for record in pair]
    nts = sorted({record["shape"]["nt"] for record in found})
    figure.suptitle(f"Ratio of times against id: od {od}, nt {', '.join(map(str, nts))}", x=0.02, ha="left")
    marks = "Ticks on the line are where a curve meets 1, read off straight lines between neighbouring points."
    _caption(figure, found, [marks, *notes])
    return figure


# --- hot and cold ---------------------------------------------------------------------------------------------------


def hot_cold(find: Find, rungs: Sequence[str], layer: Sequence[str], nt: int = 1, **common: Any) -> Sweep:
    """Bytes per second of cold and hot operands under the memory roof that was measured with them."""
    groups: list[list[tuple[Record, Record]]] = []
    for name in layer:
        group = []
        for rung in rungs:
            asked = {**common, "layer": name, "rung": rung, "nt": nt}
            text = ", ".join(f"{k}={v!r}" for k, v in asked.items())
            both = [_one(find(**asked, mode=mode), f"{text}, mode={mode!r}") for mode in ("cold", "hot")]
            group.append((both[0], both[1]))
        groups.append(group)
    found = [record for group in groups for pair in group for record in pair]
    return Sweep(lambda: _draw_hot_cold(groups, nt), found, [])


def _draw_hot_cold(groups: Sequence[Sequence[tuple[Record, Record]]], nt: int) -> Figure:
    figure, axes = plt.subplots(figsize=(9.6, 4.6))
    figure.subplots_adjust(left=0.09, right=0.77, top=0.93)
    labels: list[str] = []
    highest = max(pair[0]["roof"]["bandwidth_gbps"] for group in groups for pair in group)
    for group in groups:
        first = len(labels)
        for cold, hot in group:
            x = len(labels)
            labels.append(cold["rung"])
            axes.plot([x, x], [cold["gbps"], hot["gbps"]], color="#999999", linewidth=1.0, zorder=1)
            for record, colour, marker in ((cold, COLOURS[0], "o"), (hot, COLOURS[1], "s")):
                valid = record.get("valid", True)
                axes.plot(
                    [x],
                    [record["gbps"]],
                    linestyle="none",
                    marker=marker,
                    markersize=8,
                    markeredgecolor=colour,
                    markerfacecolor=colour if valid else "white",
                )
        roof = group[0][0]["roof"]["bandwidth_gbps"]
        axes.plot([first - 0.4, len(labels) - 0.6], [roof, roof], color="#333333", linewidth=1.5)
        size = group[0][0]["bytes"]["total"] / 1e6
        axes.annotate(
            f"{layer_name(group[0][0])}, {size:.3g} MB",
            ((first + len(labels) - 1) / 2, 1.0),
            xycoords=("data", "axes fraction"),
            ha="center",
            va="bottom",
            fontsize=9,
        )
    _hot_cold_key(axes)
    top = max(max(p[1]["gbps"], p[0]["gbps"]) for group in groups for p in group)
    axes.set_ylim(0, 1.1 * max(top, highest))
    axes.set_xlim(-0.6, len(labels) - 0.4)
    axes.set_xticks(range(len(labels)), labels, fontsize=7.5, rotation=20, ha="right")
    axes.set_ylabel("compulsory bytes per time, GB/s")
    figure.subplots_adjust(top=0.92)
    found = [record for group in groups for pair in group for record in pair]
    line = "The line is the read roof that was measured with the cold run of each layer's first rung."
    _caption(figure, found, [f"nt {nt}, medians. {line}"])
    figure.subplots_adjust(bottom=figure.subplotpars.bottom + 0.3 / figure.get_figheight())
    return figure


def _hot_cold_key(axes: Axes) -> None:
    for marker, colour, label in (
        ("o", COLOURS[0], "cold: copies that\nfill the cache four times"),
        ("s", COLOURS[1], "hot: the same operands\nagain and again"),
    ):
        axes.plot([], [], linestyle="none", marker=marker, color=colour, label=label)
    axes.plot([], [], color="#333333", linewidth=1.5, label="memory roof")
    axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), fontsize=8.5)


KINDS: dict[str, Callable[..., Sweep]] = {"bars": bars, "ratio": ratio, "hot_cold": hot_cold}


def draw(sweep: Sweep) -> Figure:
    with matplotlib.rc_context(STYLE):
        return sweep.draw()
