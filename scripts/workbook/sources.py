"""Anchors in source files, and the hash that ties a record to the code it measured."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .common import ROOT, UserError, read_text, shown

SOURCE_FOLDERS = ("chapters", "kernels", "harness", "scripts/workbook")
SOURCE_SUFFIXES = {".cu", ".cuh", ".cpp", ".hpp", ".h", ".c", ".py", ".build"}
_FOREIGN = {"__pycache__", "subprojects"}
_MARK = re.compile(r"^\s*(?://|#)\s*ANCHOR(?P<end>_END)?:\s*(?P<name>\S+)\s*$")


@dataclass(frozen=True)
class Anchor:
    """A named stretch of source: lines first..last (1-based) lie between the two marker lines."""

    name: str
    path: Path
    first: int
    last: int
    text: str

    @property
    def where(self) -> str:
        return f"{shown(self.path)}:{self.first - 1}"


def anchors_in(path: Path) -> list[Anchor]:
    """Every anchor of a file.  Anchors may nest; each must be closed, and a name stands once a file."""
    lines = read_text(path).splitlines()
    open_at: dict[str, int] = {}
    found: dict[str, Anchor] = {}
    for number, line in enumerate(lines, 1):
        mark = _MARK.match(line)
        if not mark:
            continue
        name = mark["name"]
        if not mark["end"]:
            if name in open_at or name in found:
                raise UserError(f"{shown(path)}:{number}: anchor {name} appears twice in this file")
            open_at[name] = number
            continue
        if name not in open_at:
            raise UserError(f"{shown(path)}:{number}: ANCHOR_END: {name} without its ANCHOR")
        start = open_at.pop(name)
        body = [text for text in lines[start : number - 1] if not _MARK.match(text)]
        found[name] = Anchor(name, path, start + 1, number - 1, "\n".join(body) + "\n")
    if open_at:
        name, number = next(iter(open_at.items()))
        raise UserError(f"{shown(path)}:{number}: anchor {name} is never closed (ANCHOR_END: {name})")
    return sorted(found.values(), key=lambda anchor: anchor.first)


def find_anchor(path: Path, name: str) -> Anchor:
    """The anchor of that name in that file; an error that lists the names there are."""
    anchors = anchors_in(path)
    for anchor in anchors:
        if anchor.name == name:
            return anchor
    names = ", ".join(anchor.name for anchor in anchors) or "none"
    raise UserError(f'{shown(path)} has no anchor "{name}" (there are: {names})')


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.suffix in SOURCE_SUFFIXES and path.is_file() and not _FOREIGN & set(path.parts):
            yield path


def source_files(root: Path = ROOT) -> Iterator[Path]:
    """Files that may hold anchors, in a fixed order."""
    for folder in SOURCE_FOLDERS:
        yield from _files(root / folder)


def all_anchors(root: Path = ROOT) -> list[Anchor]:
    return [anchor for path in source_files(root) for anchor in anchors_in(path)]


# One alternative each: raw string, string, character, line comment, block comment, whitespace, anything else.
# A character literal must not swallow C++14 digit separators (1'000), hence the look-behind.
_TOKEN = re.compile(
    r'(?P<keep>R"(?P<tag>[^()\\\s]{0,16})\(.*?\)(?P=tag)"|"(?:\\.|[^"\\\n])*"|(?<![0-9A-Fa-f])\'(?:\\.|[^\'\\\n])+\')'
    r"|(?P<space>//(?:\\\n|[^\n])*|/\*.*?\*/|\s+)"
    r"|(?P<other>.)",
    re.DOTALL,
)
_OPERATORS = set("+-*/%&|^<>=!:.#")


def normalised(code: str) -> str:
    """C++ source without comments, and with whitespace only where two tokens would otherwise run together.

    Text inside string and character literals is kept as it is.  Two sources that differ only in comments, line
    breaks or indentation come out equal; any change to a token does not.
    """
    out: list[str] = []
    gap = False
    for match in _TOKEN.finditer(code):
        if match["space"] is not None:
            gap = True
            continue
        piece = match["keep"] if match["keep"] is not None else match["other"]
        if gap and out:
            before, after = out[-1][-1], piece[0]
            both_words = (before.isalnum() or before == "_") and (after.isalnum() or after == "_")
            if both_words or (before in _OPERATORS and after in _OPERATORS):
                out.append(" ")
        gap = False
        out.append(piece)
    return "".join(out)


def hash_of(code: str) -> str:
    """sha256 (hex) of the normalised code."""
    return hashlib.sha256(normalised(code).encode("utf-8")).hexdigest()


def source_of(rung: str, executor: str | None = None, source: str | None = None, root: Path = ROOT) -> Anchor:
    """Where a rung's code stands.

    `source` is the file that the chapter binary names (its --list), or a list "file#anchor,file#anchor" of code that
    several rungs share, the kernel first; without it the files are searched.  The code behind
    an executor "cpu" record is the CPU twin: the anchor cpu_<rung> in kernels/cpu/, where there is one.  A variant that
    only sets a parameter of another rung's code has no anchor of its own; its id begins with that rung's
    (gemv_vec_w4: gemv_vec).
    """
    if source is not None and "#" in source:
        return anchors_of(source, root)[0]
    if executor == "cpu":
        folder = root / "kernels" / "cpu"
        for name in _names(rung):
            twins = _search(f"cpu_{name}", folder) or _search(name, folder)
            if twins:
                return _only(rung, twins)
    if source is not None:
        anchors = {anchor.name: anchor for anchor in anchors_in(root / source)}
        for name in _names(rung):
            if name in anchors:
                return anchors[name]
        return find_anchor(root / source, rung)
    for name in _names(rung):
        found = [anchor for folder in SOURCE_FOLDERS for anchor in _search(name, root / folder)]
        if found:
            return _only(rung, found)
    raise UserError(f'no source file has "// ANCHOR: {rung}"')


def anchors_of(source: str, root: Path = ROOT) -> list[Anchor]:
    """The anchors of a list "file#anchor,file#anchor"."""
    found = []
    for part in source.split(","):
        file, _, anchor = part.partition("#")
        found.append(find_anchor(root / file, anchor))
    return found


def _names(rung: str) -> list[str]:
    """The rung's id, then the ids that it may be a variant of: gemv_vec_w4, gemv_vec, gemv."""
    parts = rung.split("_")
    return ["_".join(parts[:count]) for count in range(len(parts), 0, -1)]


def _search(name: str, folder: Path) -> list[Anchor]:
    """Anchors of that name in a folder's files."""
    marker = f"ANCHOR: {name}"
    return [
        anchor
        for path in _files(folder)
        if marker in path.read_text(encoding="utf-8", errors="replace")
        for anchor in anchors_in(path)
        if anchor.name == name
    ]


def _only(name: str, found: list[Anchor]) -> Anchor:
    if len(found) > 1:
        places = " and ".join(anchor.where for anchor in found)
        raise UserError(f"anchor {name} is ambiguous: {places}")
    return found[0]


def source_hash(rung: str, executor: str | None = None, source: str | None = None, root: Path = ROOT) -> str:
    """The `source_sha256` that a record of this rung made from today's source would carry."""
    if source is not None and "#" in source:
        return hash_of("\n".join(anchor.text for anchor in anchors_of(source, root)))
    return hash_of(source_of(rung, executor, source, root).text)
