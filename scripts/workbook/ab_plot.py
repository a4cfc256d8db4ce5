"""The plot of an A/B run: speeds of both sides, and the launches of a pass, kernel by kernel."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import ab, plots

MOST = len(plots.COLOURS) - 1  # kernels with a colour of their own; the last colour is of all others
SIDES = ("without", "with")


def save(figure: Figure, path: Path) -> None:
    plots.save(figure, path)
    plt.close(figure)


def draw(title: str, rates: Sequence[ab.Rates], passes: Mapping[str, Sequence[ab.Pass]], timed: bool) -> Figure:
    """@param timed passes are drawn as times, else as numbers of launches, and there are no speeds"""
    tests = list(rates[0]) if timed else []
    panels = len(tests) + len(passes)
    with matplotlib.rc_context(plots.STYLE):
        figure, all_axes = plt.subplots(
            1, panels, squeeze=False, figsize=(1.0 + 1.8 * len(tests) + 4.4 * len(passes), 4.4),
            width_ratios=[1.2] * len(tests) + [3.0] * len(passes), layout="constrained",
        )  # fmt: skip
        figure.suptitle(title, fontsize=11)
        for axes, test in zip(all_axes[0], tests, strict=False):
            _speed(axes, test, [side[test] for side in rates])
        for axes, (name, sides) in zip(all_axes[0][len(tests) :], passes.items(), strict=True):
            _pass(axes, name, sides, timed)
    return figure


def _speed(axes: Axes, test: str, sides: Sequence[Sequence[float]]) -> None:
    medians = [statistics.median(samples) for samples in sides]
    axes.bar(SIDES[: len(sides)], medians, color=plots.COLOURS[: len(sides)], width=0.6)
    for i, samples in enumerate(sides):
        axes.plot([i] * len(samples), samples, "k.", markersize=4)
        axes.annotate(f"{medians[i]:,.0f}", (i, 0), ha="center", va="bottom", fontsize=8, color="white")
    ratio = f", x {medians[1] / medians[0]:.3f}" if len(sides) > 1 else ""
    axes.set_title(f"{test}{ratio}", fontsize=9.5)
    axes.set_ylabel("tokens/s")
    axes.grid(visible=False, axis="x")


def _pass(axes: Axes, name: str, sides: Sequence[ab.Pass], timed: bool) -> None:
    """A bar for each side, divided by kernels, the largest first."""
    sums: list[dict[str, float]] = []
    for side in sides:
        by_kernel: dict[str, float] = {}
        for (kernel, _, _), launched in side.items():
            by_kernel[kernel] = by_kernel.get(kernel, 0.0) + (launched.us if timed else launched.count)
        sums.append(by_kernel)
    everything = {kernel: sum(s.get(kernel, 0.0) for s in sums) for s in sums for kernel in s}
    largest = sorted(everything, key=lambda kernel: (-everything[kernel], kernel))
    drawn, rest = (largest, []) if len(largest) <= MOST + 1 else (largest[:MOST], largest[MOST:])
    bottoms = [0.0] * len(sums)
    for colour, kernels in zip(plots.COLOURS, [*([k] for k in drawn), *([rest] if rest else [])], strict=False):
        values = [sum(s.get(kernel, 0.0) for kernel in kernels) for s in sums]
        label = kernels[0] if len(kernels) == 1 else f"{len(kernels)} others"
        axes.bar(SIDES[: len(sums)], values, bottom=bottoms, color=colour, width=0.6, label=label)
        bottoms = [b + v for b, v in zip(bottoms, values, strict=True)]
    for i, total in enumerate(bottoms):
        axes.annotate(f"{total:,.0f}", (i, total), ha="center", va="bottom", fontsize=8)
    axes.set_title(f"{name}, kernel by kernel", fontsize=9.5)
    axes.set_ylabel("time of its kernels, µs" if timed else "launches")
    axes.grid(visible=False, axis="x")
    axes.legend(fontsize=7.5, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
