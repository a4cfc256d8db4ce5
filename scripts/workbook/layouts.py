"""Pictures of blocks: which byte holds what, drawn from the structs in the sources.

One cell a byte, two half cells where a byte holds two codes.  A field is what the struct declares; its place follows
from the rules of C++ (each field at a multiple of its own size), and the whole must be as long as a static_assert in
the same file says, if there is one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from .common import ROOT, UserError, read_text
from .plots import COLOURS, STYLE

_SIZES = {"F16Bits": 2, "BF16Bits": 2, "float": 4}
_SIZES |= {f"std::{sign}int{bits}_t": bits // 8 for sign in ("", "u") for bits in (8, 16, 32)}
_FIELD = re.compile(r"^\s*([A-Za-z_][\w:]*)\s+(\w+)(?:\[(\d+)\])?;\s*(?://\s*(.*))?$")
_PER_LINE = 48  # bytes; a longer block goes on in the next line
_WORD = 4


@dataclass(frozen=True)
class Field:
    name: str
    offset: int
    size: int  # of one element
    count: int
    note: str  # the comment beside it

    @property
    def end(self) -> int:
        return self.offset + self.size * self.count


@dataclass(frozen=True)
class Layout:
    struct: str
    meaning: str  # the comment above it
    elements: int
    fields: tuple[Field, ...]
    bytes: int


def layout_of(path: Path, struct: str) -> Layout:
    """The fields of a struct with plain members.  A member that is not understood is an error, not a gap."""
    text = read_text(path)
    found = re.search(
        r"^(?:///(?P<meaning>[^\n]*)\n)?struct (?:alignas\((?P<align>\d+)\) )?"
        rf"{re.escape(struct)} \{{\n(?P<body>.*?)^\}};",
        text,
        re.MULTILINE | re.DOTALL,
    )
    if not found:
        raise UserError(f"{path.name} has no struct {struct}")
    elements = int((re.search(r"kElems = (\d+)", found["body"]) or [0, 0])[1])
    fields: list[Field] = []
    offset, alignment = 0, int(found["align"] or 1)
    for line in re.sub(r"\n\s+(?=\w+\[\d+\];)", " ", found["body"]).splitlines():
        if not line.strip() or line.strip().startswith(("static constexpr", "//")):
            continue
        member = _FIELD.match(line)
        if not member or member[1] not in _SIZES:
            raise UserError(f'{path.name}, {struct}: cannot read the member "{line.strip()}"')
        size = _SIZES[member[1]]
        alignment = max(alignment, size)
        offset = -(-offset // size) * size
        fields.append(Field(member[2], offset, size, int(member[3] or 1), (member[4] or "").strip()))
        offset = fields[-1].end
    total = -(-offset // alignment) * alignment
    # Blocks of activations say how long they are, in the file; those of weights in the table of storage types.
    said = re.search(rf"sizeof\({re.escape(struct)}\) == (\d+)", text)
    if said and int(said[1]) != total:
        raise UserError(f"{path.name}: {struct} is {said[1]} bytes long, its fields take {total}")
    if not elements:  # activations: as many as there are codes
        elements = max((field.count for field in fields if field.size == 1), default=1)
    return Layout(struct, (found["meaning"] or "").strip(), elements, tuple(fields), total)


def fingerprint(layouts: Sequence[Layout]) -> str:
    code = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    return hashlib.sha256(json.dumps([code, repr(list(layouts))]).encode()).hexdigest()


def _role(layout: Layout, field: Field) -> tuple[str, bool]:
    """Colour, and whether a byte holds two codes."""
    codes = field.name in ("q", "qs", "ql", "qh", "hmask")
    halves = codes and field.count * 2 == layout.elements
    if field.name == "pad":
        return "#EEEEEE", False
    if codes:
        return COLOURS[5], halves
    return (COLOURS[2] if field.name in ("sum", "s", "bsums") else COLOURS[4]), False


def draw(layouts: Sequence[Layout]) -> Figure:
    rows = sum(-(-layout.bytes // _PER_LINE) for layout in layouts)
    height = 0.62 * rows + 0.42 * len(layouts) + 0.45
    with rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(9.6, height))
        figure.subplots_adjust(left=0.01, right=0.99, top=1 - 0.05 / height, bottom=0.45 / height)
        axes.set_axis_off()
        y = 0.0
        for layout in layouts:
            bits = 8 * layout.bytes / layout.elements
            axes.text(
                0,
                y - 0.12,
                f"{layout.struct.removeprefix('Block')}: {layout.bytes} bytes for {layout.elements} values, "
                f"{bits:g} bits each",
                va="top",
                weight="bold",
                fontsize=9.5,
            )
            y -= 0.68
            for start in range(0, layout.bytes, _PER_LINE):
                _line(axes, layout, start, y)
                y -= 1.0
        axes.set_xlim(-0.3, _PER_LINE + 0.3)
        axes.set_ylim(y + 0.3, 0.0)
        figure.text(
            0.01,
            0.02,
            "A cell is a byte, two half cells two codes. Orange: scales and minima; blue: codes; green: their sum; "
            "grey: nothing.\nNumbers: bytes from the beginning of the block. Heavy marks: boundaries of 4-byte words.",
            fontsize=8,
            color="#444444",
            va="bottom",
        )
    return figure


def _line(axes: Axes, layout: Layout, start: int, y: float) -> None:
    """Bytes start..start+_PER_LINE-1 of a block, their top at y."""
    high = 0.46
    end = min(start + _PER_LINE, layout.bytes)
    for field in layout.fields:
        first, last = max(field.offset, start), min(field.end, end)
        if first >= last:
            continue
        colour, halves = _role(layout, field)
        left, right = first - start, last - start
        axes.add_patch(Rectangle((left, y - high), right - left, high, facecolor=colour, edgecolor="none"))
        axes.vlines(range(left, right + 1), y - high, y, color="white", linewidth=0.7)
        if halves:
            axes.hlines(y - high / 2, left, right, color="white", linewidth=0.7)
        label = f"{field.name}[{field.count}]" if field.count > 1 else field.name
        if last - first > 1:
            axes.text(
                (first + last) / 2 - start,
                y - high / 2,
                label,
                ha="center",
                va="center",
                fontsize=8.5,
                bbox={"boxstyle": "square,pad=0.12", "fc": colour, "ec": "none"},
            )
    marks = {start, end} | {field.offset for field in layout.fields if start <= field.offset < end}
    for byte in sorted(marks):
        axes.text(byte - start, y - high - 0.09, str(byte), ha="center", va="top", fontsize=7.5, color="#333333")
    words = range(-(-start // _WORD) * _WORD - start, end + 1 - start, _WORD)
    axes.vlines(words, y - high - 0.07, y + 0.05, color="#222222", linewidth=1.1)


def named(structs: Sequence[tuple[str, str]]) -> list[Layout]:
    return [layout_of(ROOT / file, struct) for file, struct in structs]
