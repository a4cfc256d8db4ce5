"""The dispatch map: which kernel a device's gates choose for each type and number of rows, and the times behind it."""

from __future__ import annotations

import argparse
import hashlib
import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator

from . import plots, tune
from .common import ROOT, UserError, one_of, read_text, shown
from .plots import COLOURS, MARKERS, STYLE, save
from .tune import kernel_at

Gates = Mapping[str, Any]
KERNELS = list(tune.RUNGS)
PANELS = 3
MAPS = ((18944, 3584), (3584, 18944))  # ffn_gate and ffn_down of 7b: od, id


def read(path: Path) -> Gates:
    try:
        gates = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise UserError(f"{shown(path)}:{error.lineno}: not JSON: {error.msg}") from None
    if not isinstance(gates, dict) or "gates" not in gates:
        raise UserError(f"{shown(path)}: it is no table of gates")
    return gates


def draw(gates: Gates, type_: str) -> Figure:
    evidence: Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]] = gates.get("evidence", {})
    if type_ not in evidence:
        raise one_of("type with evidence", type_, evidence)
    shapes = sorted(evidence[type_], key=lambda s: int(s.split("x")[0]) * int(s.split("x")[1]))
    if len(shapes) > PANELS:  # the smallest, the one of the longest rows, the largest
        longest = max(shapes[1:-1], key=lambda s: int(s.split("x")[1]))
        shapes = [shapes[0], longest, shapes[-1]]
    with matplotlib.rc_context(STYLE):
        figure = plt.figure(figsize=(4.2 * PANELS, 4.6 + 0.26 * len(evidence)))
        rows = figure.add_gridspec(2, 1, height_ratios=[3.2, 0.4 + 0.26 * len(evidence)], hspace=0.42)
        above = rows[0].subgridspec(1, len(shapes), wspace=0.28)
        for i, shape in enumerate(shapes):
            _times(figure.add_subplot(above[0, i]), gates, type_, shape, evidence[type_][shape])
        below = rows[1].subgridspec(1, len(MAPS), wspace=0.16)
        for i, shape in enumerate(MAPS):
            _map(figure.add_subplot(below[0, i]), gates, list(evidence), shape, legend=i == 0)
        where = f"{gates.get('device', 'unknown device')}, {gates.get('date', '')[:10]}"
        note = (
            f"{where}: cold medians of products, with the kernels that bring activations to their form; dotted lines "
            "where the gates change. Below, what the gates choose with no switch set."
        )
        figure.text(
            0.01, 0.01, "\n".join(textwrap.wrap(note, int(figure.get_figwidth() * 13))), fontsize=8, color="#444444"
        )
        figure.subplots_adjust(left=0.09, right=0.98, top=0.93, bottom=0.11)
    return figure


def fingerprint(gates: Gates, type_: str) -> str:
    """sha256 over everything that a picture depends on."""
    code = [hashlib.sha256(Path(module).read_bytes()).hexdigest() for module in (__file__, str(plots.__file__))]
    content = json.dumps([gates, type_, code, matplotlib.__version__], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _times(axes: Axes, gates: Gates, type_: str, shape: str, kernels: Mapping[str, Mapping[str, float]]) -> None:
    for kernel in KERNELS:
        points = sorted((int(nt), us) for nt, us in kernels.get(kernel, {}).items())
        if points:
            k = KERNELS.index(kernel)
            axes.plot(
                *zip(*points, strict=True),
                color=COLOURS[k],
                marker=MARKERS[k],
                markersize=4,
                linewidth=1.3,
                label=kernel,
            )
    od, id_ = map(int, shape.split("x"))
    before = kernel_at(gates, type_, 1, (od, id_))
    for nt in range(2, tune.FARTHEST + 1):
        now = kernel_at(gates, type_, nt, (od, id_))
        if now != before:
            axes.axvline(nt, color="#888888", linewidth=0.9, linestyle=":")
            axes.annotate(
                str(nt), (nt, 1.0), xycoords=("data", "axes fraction"), fontsize=7.5, ha="center", va="bottom"
            )
        before = now
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    plots._log_axis(axes.yaxis)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
    axes.set_xlabel("nt")
    axes.set_ylabel("time, µs")
    axes.set_title(f"{type_} [{shape.replace('x', ', ')}]", fontsize=9.5, pad=14)


def _map(axes: Axes, gates: Gates, types: Sequence[str], shape: tune.Shape, legend: bool) -> None:
    for row, type_ in enumerate(types):
        begin, kernel = 1, kernel_at(gates, type_, 1, shape)
        for nt in range(2, tune.FARTHEST + 2):
            now = kernel_at(gates, type_, nt, shape) if nt <= tune.FARTHEST else None
            if now != kernel:
                axes.barh(
                    row, nt - begin, left=begin, height=0.8, color=COLOURS[KERNELS.index(kernel)], edgecolor="white"
                )
                begin, kernel = nt, now or kernel
    axes.set_yticks(range(len(types)), types, fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log", base=2)
    axes.set_xlim(1, tune.FARTHEST)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
    axes.set_xlabel(f"nt, matrices of [{shape[0]}, {shape[1]}]")
    axes.grid(visible=False)
    if legend:
        axes.legend(
            handles=[Patch(color=COLOURS[KERNELS.index(k)], label=k) for k in KERNELS],
            loc="upper left",
            bbox_to_anchor=(0, 1.0 + 0.5 / max(1.0, 0.26 * len(types) + 0.4)),
            ncols=4,
            fontsize=8,
        )


def command_plot_dispatch(args: argparse.Namespace) -> int:
    out: Path | None = args.output
    if out is not None and out.suffix not in (".svg", ".png"):
        raise UserError(f"-o {out}: the name must end in .svg or .png")
    known = sorted(path.stem for path in tune.GATES.glob("*.json"))
    if args.records:
        path = args.records[0]
    else:
        device = args.device or (known[0] if len(known) == 1 else "")
        if device not in known:
            raise one_of("device with gates in data/gates", device, known)
        path = tune.GATES / f"{device}.json"
    gates = read(path)
    evidence = gates.get("evidence", {})
    type_ = args.type or ("q4_k" if "q4_k" in evidence else next(iter(evidence), ""))
    figure = draw(gates, type_)
    targets = (
        [out] if out else [ROOT / "build" / "plots" / f"dispatch-{path.stem}{suffix}" for suffix in (".svg", ".png")]
    )
    for target in targets:
        save(figure, target)
        print(shown(target))
    plt.close(figure)
    return 0
