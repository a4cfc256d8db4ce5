"""Generated regions of the text: code by anchor, numbers and tables from records, plots, command outputs.

A region in Markdown looks like this, on lines of its own:

    <!-- [[[cog code("chapters/02-vector-gemv/vector_gemv.cu", "gemv_vec_chunk") ]]] -->
    ...generated...
    <!-- [[[end]]] -->

cogapp runs what stands in the brackets; the functions below are what it may call.  A region fails, with file and line,
on an unknown anchor, on a record that is missing, and on a record whose kernel is not today's.  An anchor that no text
quotes and that is no rung fails too: it would be a mark that nobody needs.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shlex
import subprocess
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cogapp import Cog
from cogapp.cogapp import CogError

from . import ab, devices, engine, listing, records, sanitizer, tune
from .build import CHAPTERS
from .common import ROOT, UserError, markdown_table, one_of, say, shown
from .records import Line, Record
from .sources import all_anchors, find_anchor, source_hash

_SECTOR_BYTES = 32
_SKIP = {".git", ".venv", "build", "site", "subprojects", "node_modules", "shared"}
_LANGUAGE = {
    ".cu": "cuda",
    ".cuh": "cuda",
    ".cpp": "cpp",
    ".hpp": "cpp",
    ".h": "cpp",
    ".py": "python",
    ".build": "meson",
}


class Failure(Exception):
    """What is wrong with one region; the caller adds file and line."""


class Weaver:
    """State of one run: the records, what has been quoted, and what went wrong."""

    def __init__(self, check: bool) -> None:
        self.check = check
        self.page = ROOT
        self.emit: Callable[[str], None] = print
        self.quoted: set[tuple[Path, str]] = set()
        self._lines: list[Line] | None = None
        self._fresh: dict[tuple[str, str, str | None], str | None] = {}

    # --- records --------------------------------------------------------------------------------------------------

    @property
    def lines(self) -> list[Line]:
        if self._lines is None:
            self._lines = records.latest(records.load_committed())
        return self._lines

    def find(self, counted: bool = False, **wanted: Any) -> list[Line]:
        """One record a point, newest first come; never one half of a comparison unless that is asked for.

        A GPU's times and its hardware counters are records apart: counted=True asks for counts.
        """
        found = [line for line in self.lines if records.matches(line.record, **wanted)]
        if counted:
            found = [line for line in found if records.only_counts(line.record)]
        else:
            found = [line for line in found if line.record["executor"] != "gpu" or not records.only_counts(line.record)]
        if "compared_with" not in wanted:
            found = [line for line in found if "compared_with" not in line.record.get("params", {})]
        return found

    def fresh(self, lines: Iterable[Line]) -> list[Line]:
        """The same lines, if each was made from today's source; the first that was not is a failure."""
        kept = list(lines)
        for line in kept:
            record = line.record
            if not records.needs_source(record):
                continue
            name = (record["rung"], record["executor"], record.get("sources"))
            if name not in self._fresh:
                self._fresh[name] = source_hash(*name)
            if record["source_sha256"] != self._fresh[name]:
                raise Failure(
                    f"{line.where}: {record['rung']} has changed since this was measured; record it again "
                    f"({record['command']})"
                )
        return kept

    def one(self, **wanted: Any) -> Record:
        """Exactly one record, measured from today's source."""
        found = records.one_per_point(self.find(**wanted))
        asked = ", ".join(f"{name}={value!r}" for name, value in wanted.items())
        if len(found) > 1:  # of a probe's points, the one that it calls the ceiling
            found = [line for line in found if line.record.get("params", {}).get("best") is True] or found
        if not found:
            raise Failure(f"no record with {asked}{self._nearest(wanted)}")
        if len(found) > 1:
            differ = [
                n
                for n in ("device", "executor", "type", "layer", "mode")
                if len({str(line.record.get(n)) for line in found}) > 1
            ]
            axes = [a for a in ("nt", "od", "id") if len({line.record.get("shape", {}).get(a) for line in found}) > 1]
            more = ", ".join(differ + axes) or "params"
            raise Failure(f"{len(found)} records fit {asked}; say which: {more}")
        return self.fresh(found)[0].record

    def _nearest(self, wanted: dict[str, Any]) -> str:
        """Which of the conditions leaves nothing, and what there is instead."""
        given: dict[str, Any] = {}
        for name, value in wanted.items():
            before = self.find(**given)
            given[name] = value
            if not self.find(**given) and before:
                have = sorted({str(_value(line.record, name)) for line in before} - {"None"})
                return f" ({name} is {', '.join(have[:12]) or 'in none of them'})"
        return ""

    # --- what text may call ---------------------------------------------------------------------------------------

    def code(self, file: str, anchor: str) -> None:
        """The lines between the anchor's marks, as a fenced block."""
        found = find_anchor(ROOT / file, anchor)
        self.quoted.add((found.path, anchor))
        self._fence(textwrap.dedent(found.text).strip("\n"), _LANGUAGE.get(found.path.suffix, ""))

    def value(self, template: str, **which: Any) -> None:
        """A sentence with numbers.  The template names fields of one record, `{gbps:.0f}`, `{time_us:.1f}`:

            value("gemv_vec reads {gbps:.0f} GB/s.", rung="gemv_vec", device="nvidia-h200", layer="7b.ffn_down", nt=1)

        or of several, each given as a dict, and functions of them:

            value("{ratio:.1f} times", a=dict(rung=..), b=dict(rung=..), ratio=lambda a, b: b.time_us / a.time_us)
        """
        several = {name: spec for name, spec in which.items() if isinstance(spec, dict)}
        functions = {name: spec for name, spec in which.items() if callable(spec)}
        common = {name: spec for name, spec in which.items() if name not in several and name not in functions}
        if several:
            named = {name: _fields(self.one(**{**common, **spec})) for name, spec in several.items()}
        else:
            named = vars(_fields(self.one(**common)))
        try:
            for name, function in functions.items():
                taken = function.__code__.co_varnames[: function.__code__.co_argcount]
                named[name] = function(*(named[arg] for arg in taken))
            self.emit(
                "\n".join(textwrap.wrap(template.format(**named), 118, break_long_words=False, break_on_hyphens=False))
            )
        except (KeyError, AttributeError) as error:
            raise Failure(f"value: the record has no field {error}") from None

    def table(
        self,
        columns: Sequence[str] | None = None,
        pivot: str | None = None,
        value: str = "gbps",
        note: bool = True,
        **wanted: Any,
    ) -> None:
        """Records as a Markdown table.

        Conditions: device, executor, rung, layer, nt, mode, type (one value or a list each), chapter, and counted=True
        for records of counters (their names are columns).  `columns`
        names what to show (default: what differs, then time, GB/s, percent of roof).  `pivot="nt"` spreads one axis
        over the columns and shows `value` in the cells.  The caption says what all rows share.
        """
        wanted = self._with_chapter(wanted)
        found = records.one_per_point(self.find(**wanted))
        asked = ", ".join(f"{name}={item!r}" for name, item in wanted.items() if item is not None)
        if not found:
            raise Failure(f"no records with {asked}{self._nearest(wanted)}")
        for name, item in wanted.items():
            for each in item if isinstance(item, list | tuple) else []:
                if not any(_value(line.record, name) == each for line in found):
                    raise Failure(f"no record with {name}={each!r} among those with {asked}")
        rows = [
            line.record for line in self.fresh(sorted(found, key=lambda line: _order(line.record, wanted, columns)))
        ]
        text = _pivot(rows, pivot, value) if pivot else _flat(rows, columns)
        self.emit(text)
        if note:
            self.emit("\n" + _caption(rows, marked="†" in text))

    def engine_table(self, device: str, test: Sequence[str], name: str | None = None) -> None:
        """Records of whole models on one device: a row for each model and test, in the order of bytes per token.

        @param name only models of that name (general.name); those of random weights have none
        """
        newest: dict[tuple[str, ...], Record] = {}
        for line in sorted(self.lines, key=lambda line: str(line.record.get("date", ""))):
            record = line.record
            model = record.get("model", {})
            if record["rung"] != "engine" or record["device"] != device or model.get("name") != name:
                continue
            if record.get("test") in test:
                newest[model["size"], model["file_type"], record["test"]] = record
        if not newest:
            raise Failure(f"no record of a whole model on {device} with test {', '.join(test)} and name {name}")
        missing = [t for t in test if all(t != key[2] for key in newest)]
        if missing:
            raise Failure(f"no record of a whole model on {device} with test {missing[0]}")
        rows = sorted(newest.values(), key=lambda r: (-r["model"]["bytes_per_token"], list(test).index(r["test"])))
        self.emit(engine.as_table(rows))
        dates = sorted({record["date"][:10] for record in rows})
        self.emit(
            f"\n*{device}, {dates[0]}{f' to {dates[-1]}' if len(dates) > 1 else ''}; the commands are in the records.*"
        )

    def ladder_table(
        self,
        layer: str = "7b.ffn_down",
        nt: int = 1,
        mode: str = "cold",
        devices: Sequence[str] | None = None,
        also: dict[str, dict[str, str]] | None = None,
        without: Sequence[str] = (),
    ) -> None:
        """Every rung of the ladder with its best-known speed on each device that has records.

        `also`: chapter -> rung -> what it is, for rungs whose ids are made when the chapter's binary runs.
        `without`: chapters whose rungs are for other shapes.
        """
        rungs = [
            rung
            for rung in listing.rungs_from_sources()
            if not rung.rung.startswith(("roof_", "latency_")) and rung.chapter not in without
        ]
        for chapter, more in (also or {}).items():
            rungs += [listing.RungText(rung, chapter, title, "") for rung, title in more.items()]
        shown_devices = (
            list(devices)
            if devices is not None
            else sorted(
                {line.record["device"] for line in self.find(layer=layer, nt=nt, mode=mode, executor=["gpu", "cpu"])},
                key=lambda name: (not name.startswith("nvidia"), name),
            )
        )
        if not shown_devices:
            raise Failure(f"no record with layer={layer!r}, nt={nt}, mode={mode!r}")
        rows = []
        for rung in rungs:
            cells = []
            for device in shown_devices:
                found = records.one_per_point(
                    self.find(rung=rung.rung, device=device, layer=layer, nt=nt, mode=mode, executor=["gpu", "cpu"])
                )
                record = self.fresh(found)[0].record if found else None
                cells.append(_speed(record) if record else "")
            if not any(cells):
                raise Failure(
                    f"no record of {rung.rung} with layer={layer!r}, nt={nt}, mode={mode!r} on any of "
                    f"{', '.join(shown_devices)}"
                )
            rows.append([self._chapter_link(rung.chapter), f"`{rung.rung}`", rung.title, *cells])
        header = ["chapter", "rung", "what it is", *(_device_name(device) for device in shown_devices)]
        self.emit(markdown_table(header, rows))
        self.emit(
            f"\n<sub>{layer}, nt = {nt}, {mode} operands: GB/s of compulsory traffic, and percent of the roof "
            "measured in the same run. Empty: not measured on that device, or no twin.</sub>"
        )

    def bytes_table(
        self,
        rungs: Sequence[str],
        layer: str | None = None,
        nt: int = 1,
        device: str | None = None,
        allow_missing: bool = False,
        **shape: int,
    ) -> None:
        """The bytes of each rung three times: declared by the model, counted by the emulator, measured by the hardware.

        At a layer, or at od= and id=.  `device` is the GPU; the emulator's records are those of its model of that GPU.
        A half that is missing is a failure, or says so in its cells if `allow_missing`.
        """
        if set(shape) not in (set(), {"od", "id"}) or bool(layer) == bool(shape):
            raise Failure("bytes_table: give either layer=, or od= and id=")
        point = {**({"layer": layer} if layer else shape), "nt": nt}
        device = device or self._counted_device(rungs, point)
        found: list[Record] = []
        rows = []
        for rung in rungs:
            wanted = {"rung": rung, **point}
            halves = []
            for executor, slug in (("emulator", f"emulator-{device}"), ("gpu", device)):
                record = self._newest(counted=True, executor=executor, device=slug, **wanted)
                if record is None and not allow_missing:
                    asked = ", ".join(f"{name}={value!r}" for name, value in wanted.items())
                    how = "record --on emulator" if executor == "emulator" else "counters"
                    raise Failure(f"no counts of the {executor} ({slug}) with {asked}; scripts/ladder {how} makes them")
                halves.append(record)
            known = [record for record in halves if record] or [self._newest(**wanted)]
            totals = {record["bytes"]["total"] for record in known if record and "bytes" in record}
            if len(totals) > 1:
                raise Failure(f"bytes_table: the records of {rung} declare different bytes ({sorted(totals)})")
            declared = totals.pop() if totals else None
            found += [record for record in halves if record]
            cells = [_megabytes(declared), *_requests(halves[0], declared), *_requests(halves[1], declared)]
            cells.append(_with_ratio(_counter(halves[1], "dram_read_bytes"), declared))
            if _MISSING in cells and not allow_missing:
                raise Failure(f"bytes_table: the records of {rung} lack bytes, requests, sectors or dram_read_bytes")
            rows.append([f"`{rung}`", *cells])
        each = ["requests", "sectors each", "sectors, MB"]
        header = ["rung", "declared, MB", *(f"{who} {what}" for who in ("counted", "measured") for what in each)]
        self.emit(markdown_table([*header, "DRAM read, MB"], rows, range(1, len(header) + 1)))
        at = layer or f"{shape['od']}x{shape['id']}"
        days = sorted({record["date"][:10] for record in found})
        when = f" Recorded {days[0]}{f' to {days[-1]}' if len(days) > 1 else ''}." if days else ""
        self.emit(
            f"\n<sub>{at}, nt = {nt}. Declared: every operand once. Counted by the emulator, measured by the counters "
            f"of {_device_name(device)}: requests of warps to global memory, and the 32-byte sectors that they touch. "
            f"DRAM read: after the caches were emptied. In brackets: multiples of the declared bytes.{when}</sub>"
        )

    def _newest(self, **wanted: Any) -> Record | None:
        """The newest record of a point, made from today's source; None if there is none."""
        found = max(self.find(**wanted), key=lambda line: line.record["date"], default=None)
        return self.fresh([found])[0].record if found else None

    def _counted_device(self, rungs: Sequence[str], point: dict[str, Any]) -> str:
        """The one GPU that has counters of these rungs, or that the emulator has counted for."""
        counts = [line.record for line in self.find(counted=True, rung=list(rungs), **point)]
        slugs = sorted({record["device"] for record in counts if record["executor"] == "gpu"})
        slugs = slugs or sorted({record["device"].removeprefix("emulator-") for record in counts})
        if len(slugs) != 1:
            asked = ", ".join(f"{name}={value!r}" for name, value in point.items())
            what = f"several GPUs have counts ({', '.join(slugs)}); say device=" if slugs else "no record has counters"
            raise Failure(f"bytes_table: {what} (rung in {', '.join(rungs)}, {asked})")
        return slugs[0]

    def plot(
        self,
        kind: str,
        device: str,
        file: str | None = None,
        layer: str | None = None,
        mode: str = "cold",
        nt: Sequence[int] | None = None,
        rungs: Sequence[str] | None = None,
    ) -> None:
        """An SVG beside the page (plots/<kind>-<device>.svg, or `file` from the project root), and the image line."""
        from . import plots

        choice = plots.choose(self.lines, kind, device, layer, mode, nt, rungs)
        if kind == "ladder" and nt is None:
            choice = plots.choose(self.lines, kind, device, choice.layer, mode, [plots.smallest_nt(choice)], rungs)
        self.fresh(choice.drawn())
        if file is None and self.page.parent == ROOT:
            raise Failure("plot: a page in the project root must say file=")
        path = ROOT / file if file else self.page.parent / "plots" / f"{kind}-{device}-{choice.layer}.svg"
        title = f"{kind} of {_device_name(device)}, {choice.layer}"
        self._picture(path, plots.fingerprint(choice), lambda: plots.draw(choice), title)

    def dispatch_map(self, device: str, type: str) -> None:
        """An SVG plots/dispatch-<device>.svg beside the page: what the device's gates choose, and times of one type."""
        from . import dispatch_plot

        gates = dispatch_plot.read(tune.GATES / f"{device}.json")
        path = self.page.parent / "plots" / f"dispatch-{device}.svg"
        title = f"dispatch on {_device_name(device)}"
        self._picture(path, dispatch_plot.fingerprint(gates, type), lambda: dispatch_plot.draw(gates, type), title)

    def ab_table(self, device: str, names: Sequence[str] | None = None) -> None:
        """The records of scripts/ladder ab on one device: speeds without and with each experiment's switch."""
        found = [line.record for line in self.lines]
        rows = ab.rows_of([r for r in found if r["rung"] == ab.RUNG and r["device"] == device], names)
        if not rows:
            raise Failure(f"no records of scripts/ladder ab on {device}")
        head = ["experiment", "switch", "model", "test", "without, tokens/s", "with", "ratio"]
        self.emit(markdown_table(head, rows, (4, 5, 6)))

    def sanitizer_table(self, device: str) -> None:
        """The records of scripts/sanitize_gpu.sh on one device, and the cases in which something was found."""
        found = [line.record for line in self.lines if line.record["rung"] == sanitizer.RUNG]
        found = [record for record in found if record["device"] == device]
        if not found:
            raise Failure(f"no records of scripts/sanitize_gpu.sh on {device}")
        self.emit(sanitizer.table(found))
        shapes = "" if all(r["params"]["whole"] for r in found) else "; without the largest shapes and most repetitions"
        days = sorted({record["date"][:10] for record in found})
        self.emit(
            f"\n<sub>{_device_name(device)}, {days[0]}{f' to {days[-1]}' if len(days) > 1 else ''}: test cases in "
            f"which the tool found nothing{shapes}.</sub>"
        )
        if left := sanitizer.left_over(found):
            self.emit("\n" + "\n".join(left))

    def block_picture(self, structs: Sequence[tuple[str, str]], name: str) -> None:
        """Which byte of a block holds what: plots/<name>.svg beside the page, drawn from structs (file, name)."""
        from . import layouts

        found = layouts.named(structs)
        shape = ", ".join(layout.struct.removeprefix("Block") for layout in found)
        path = self.page.parent / "plots" / f"{name}.svg"
        self._picture(path, layouts.fingerprint(found), lambda: layouts.draw(found), f"bytes of the blocks {shape}")

    def sweep(self, kind: str, name: str, **options: Any) -> None:
        """An SVG plots/<name>.svg beside the page of an experiment that varies one thing (sweeps.py: bars, ratio,
        hot_cold).  Conditions are those of a table."""
        from . import sweeps

        if kind not in sweeps.KINDS:
            raise one_of("kind of sweep", kind, list(sweeps.KINDS))
        made = sweeps.KINDS[kind](lambda **wanted: self._timed(**wanted), **options)
        path = self.page.parent / "plots" / f"{name}.svg"
        who = ", ".join(sorted({_device_name(record["device"]) for record in made.records}))
        self._picture(path, sweeps.fingerprint(made), lambda: sweeps.draw(made), f"{name}, {who}")

    def _timed(self, **wanted: Any) -> list[Record]:
        """Times that fit, one a point, each made from today's source."""
        timed = [line for line in records.one_per_point(self.find(**wanted)) if "time_ns" in line.record]
        return [line.record for line in self.fresh(timed)]

    def _picture(self, path: Path, mark: str, draw: Callable[[], Any], title: str) -> None:
        """Draw an SVG unless the one that is there has the mark, and emit the image line."""
        from . import plots

        there = path.read_text(encoding="utf-8") if path.exists() else ""
        if mark not in there:
            if self.check:
                raise Failure(f"{shown(path)} is {'not up to date' if there else 'missing'}; run scripts/ladder weave")
            plots.save(draw(), path, mark)
            say(f"drew {shown(path)}")
        link = Path(os.path.relpath(path, self.page.parent)).as_posix()
        self.emit(f"![{title}]({link})")

    def output(self, command: str) -> None:
        """A command and what it prints, run from the project root.  For outputs that are the same everywhere."""
        words = shlex.split(command)
        if not words or not (words[0].startswith(("scripts/", "build/"))):
            raise Failure(f'output: "{command}" must begin with scripts/ or build/')
        if not (ROOT / words[0]).exists():
            raise Failure(f"output: {words[0]} is not there; build first (scripts/ladder test)")
        done = subprocess.run(
            words,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            env={**os.environ, "COLUMNS": "100"},
        )
        if done.returncode:
            raise Failure(f"output: {command} ended with status {done.returncode}: {done.stderr.strip()[-200:]}")
        self._fence(f"$ {command}\n{done.stdout.rstrip()}", "console")

    # --- parts ----------------------------------------------------------------------------------------------------

    def _fence(self, text: str, language: str) -> None:
        ticks = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`{3,}", text)), default=2))
        self.emit(f"{ticks}{language}\n{text}\n{ticks}")

    def _with_chapter(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """chapter= becomes the list of that chapter's rungs."""
        chapter = wanted.pop("chapter", None)
        if chapter is None:
            return wanted
        known = {rung.chapter for rung in listing.rungs_from_sources()}
        if chapter not in known:
            raise Failure(str(one_of("chapter", chapter, sorted(known))))
        if "rung" not in wanted:
            mine = {line.record["rung"] for line in self.lines}
            # Lists are checked item by item; a chapter's rungs need not all have a record on every device.
            wanted["rung"] = {rung for rung in mine if listing.chapter_of(rung) == chapter}
        return wanted

    def _chapter_link(self, chapter: str) -> str:
        link = Path(os.path.relpath(CHAPTERS / chapter / "README.md", self.page.parent)).as_posix()
        return f"[{chapter.partition('-')[0]}]({link})"


def _value(record: Record, name: str) -> Any:
    if name in ("nt", "od", "id"):
        return record.get("shape", record.get("params", {})).get(name)
    return record.get(name, record.get("params", {}).get(name))


def _fields(record: Record) -> SimpleNamespace:
    """A record as attributes (time_ns.median), its parameters and shape at the top, and times in readable units."""

    def spread(value: Any) -> Any:
        return SimpleNamespace(**{k: spread(v) for k, v in value.items()}) if isinstance(value, dict) else value

    flat = {**record.get("params", {}), **record.get("shape", {}), **record}
    if "time_ns" in record:
        median = record["time_ns"]["median"]
        flat |= {"time_us": median / 1e3, "time_ms": median / 1e6}
    if "gbps" in record:
        flat["tbps"] = record["gbps"] / 1e3
    if "gops" in record:
        flat["tops"] = record["gops"] / 1e3
    return spread(flat)


def _order(record: Record, wanted: dict[str, Any], columns: Sequence[str] | None) -> tuple[Any, ...]:
    """Rungs in the order of the ladder, or of the condition; then layer, nt and mode; then parameters, as shown."""
    ladder = [rung.rung for rung in listing.rungs_from_sources()]
    asked = wanted.get("rung")
    order = list(asked) if isinstance(asked, list | tuple) else ladder
    rung = record["rung"]
    layers = wanted.get("layer")
    layer = layers.index(record.get("layer")) if isinstance(layers, list | tuple) else 0
    shape, params = record.get("shape", {}), record.get("params", {})
    return (
        order.index(rung) if rung in order else len(order),
        rung,
        layer,
        shape.get("od", 0) * shape.get("id", 0),
        record.get("layer", ""),
        shape.get("nt", 0),
        record.get("mode", ""),
        record["executor"],
        *(_param_order(params.get(name)) for name in columns or sorted(params)),
    )


def _param_order(value: Any) -> tuple[int, Any]:
    """Numbers, then words, then nothing; flags are outcomes and order nothing."""
    if value is None or isinstance(value, bool):
        return (2, 0)
    return (1, value) if isinstance(value, str) else (0, value)


def _time(record: Record) -> str:
    median = record["time_ns"]["median"]
    for limit, scale, unit in ((1e3, 1, "ns"), (1e6, 1e3, "µs"), (1e9, 1e6, "ms")):
        if median < limit:
            return f"{median / scale:#.3g} {unit}" if median / scale < 99.95 else f"{median / scale:.0f} {unit}"
    return f"{median / 1e9:#.3g} s"


def _number(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _percent(record: Record) -> str:
    mark = "" if record.get("valid", True) else " †"
    return f"{record['percent_of_roof']:.1f} %{mark}"


COLUMNS: dict[str, tuple[str, Callable[[Record], str]]] = {
    "rung": ("rung", lambda r: f"`{r['rung']}`"),
    "executor": ("on", lambda r: r["executor"]),
    "device": ("device", lambda r: _device_name(r["device"])),
    "type": ("type", lambda r: r["type"]),
    "layer": ("layer", lambda r: r["layer"]),
    "shape": ("od x id", lambda r: f"{r['shape']['od']} x {r['shape']['id']}"),
    "nt": ("nt", lambda r: str(r.get("shape", r.get("params", {}))["nt"])),
    "mode": ("mode", lambda r: r["mode"]),
    "bytes": ("MB", lambda r: f"{r['bytes']['total'] / 1e6:.1f}"),
    "time": ("time", _time),
    "spread": (
        "quartiles",
        lambda r: f"{100 * (r['time_ns']['q3'] - r['time_ns']['q1']) / r['time_ns']['median']:.1f} %",
    ),
    "gbps": ("GB/s", lambda r: _number(r["gbps"])),
    "gops": ("Gop/s", lambda r: _number(r["gops"])),
    "intensity": ("op/B", lambda r: f"{r['intensity']:.2f}"),
    "percent": ("% of roof", _percent),
    "bound": ("bound", lambda r: r["bound"]),
    "error": ("error / bound", lambda r: f"{r['check']['max_error_over_bound']:.3f}"),
    "why_not": ("not valid because", lambda r: r["why_not"]),
}
_WORDS = {"rung", "executor", "device", "type", "layer", "shape", "mode", "bound", "why_not"}
_NAMES = ("rung", "executor", "device", "type", "layer", "nt", "mode")


def _cell(record: Record, column: str) -> str:
    try:
        if column in COLUMNS:
            return COLUMNS[column][1](record)
        value = _value(record, column)
    except KeyError:
        return ""
    if value is None:
        counters = record.get("counters", {})
        value = counters.get(column)
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _flat(rows: Sequence[Record], columns: Sequence[str] | None) -> str:
    if columns is None:
        names = [name for name in _NAMES if len({_cell(row, name) for row in rows}) > 1] or ["rung"]
        if any("shape" not in row for row in rows):
            names += sorted({key for row in rows for key in row.get("params", {})})
        rates = [name for name in ("time", "gbps", "gops", "percent", "bound") if any(_cell(row, name) for row in rows)]
        columns = [*names, *rates]
    for column in columns:
        if not any(_cell(row, column) for row in rows):
            raise Failure(
                f'table: no record here has "{column}" (columns: {", ".join(COLUMNS)}, or a parameter or counter)'
            )
    header = [COLUMNS[column][0] if column in COLUMNS else column for column in columns]
    words = {c for c in columns if c in _WORDS or any(isinstance(_value(row, c), str) for row in rows)}
    right = [i for i, column in enumerate(columns) if column not in words]
    return markdown_table(header, [[_cell(row, column) for column in columns] for row in rows], right)


def _pivot(rows: Sequence[Record], pivot: str, value: str) -> str:
    """One axis over the columns."""
    across = list(dict.fromkeys(_value(row, pivot) for row in rows))
    if None in across:
        raise Failure(f'table: not every record here has "{pivot}"')
    if pivot in ("nt", "od", "id") or all(isinstance(item, int) for item in across):
        across.sort()
    names = [name for name in _NAMES if name != pivot and len({_cell(row, name) for row in rows}) > 1]
    names = names or [name for name in ("rung", "layer") if name != pivot][:1]
    body: dict[tuple[str, ...], dict[Any, str]] = {}
    for row in rows:
        line = body.setdefault(tuple(_cell(row, name) for name in names), {})
        where = _value(row, pivot)
        if where in line:
            raise Failure(f"table: two records for {pivot} {where} in one row; narrow the conditions")
        line[where] = _cell(row, value)
    if not any(cell for line in body.values() for cell in line.values()):
        raise Failure(f'table: no record here has "{value}"')
    title = COLUMNS[value][0] if value in COLUMNS else value
    header = [
        *(COLUMNS[name][0] for name in names),
        *(f"{pivot} {item}" if i == 0 else str(item) for i, item in enumerate(across)),
    ]
    table = markdown_table(
        header,
        [[*keys, *(line.get(item, "") for item in across)] for keys, line in body.items()],
        range(len(names), len(header)),
    )
    return f"{table}\n\n<sub>In the cells: {title}.</sub>"


def _caption(rows: Sequence[Record], marked: bool) -> str:
    """What all rows share, when they were measured, and why marked points are not valid."""
    shared = []
    for name in ("device", "executor", "layer", "nt", "mode", "type"):
        cells = {_cell(row, name) for row in rows}
        if len(cells) == 1 and (cell := cells.pop()):
            shared.append({"nt": f"nt = {cell}", "mode": f"{cell} operands"}.get(name, cell))
    days = sorted({row["date"][:10] for row in rows})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    reasons = sorted({row["why_not"] for row in rows if row.get("valid") is False})
    marks = f" † not valid: {'; '.join(reasons)}." if marked and reasons else ""
    return f"<sub>{', '.join(shared)}{'; ' if shared else ''}measured {when}.{marks}</sub>"


_MISSING = "not recorded"


def _counter(record: Record | None, name: str) -> int | float | None:
    return record["counters"].get(name) if record else None


def _megabytes(count: float | None) -> str:
    """Bytes in MB (1e6), with three digits or more."""
    if count is None:
        return _MISSING
    size = count / 1e6
    return f"{size:,.1f}" if size >= 99.95 else f"{size:.3g}" if size < 0.1 else f"{size:.{1 if size >= 9.995 else 2}f}"


def _with_ratio(count: float | None, declared: float | None) -> str:
    if count is None or declared is None:
        return _megabytes(count)
    return f"{_megabytes(count)} ({count / declared:.2f}×)"


def _requests(record: Record | None, declared: float | None) -> list[str]:
    """Requests, sectors for each, and the sectors' bytes, of global memory."""
    requests, sectors = _counter(record, "requests"), _counter(record, "sectors")
    if not requests or sectors is None:
        return [_MISSING] * 3
    return [f"{requests:,}", f"{sectors / requests:.2f}", _with_ratio(sectors * _SECTOR_BYTES, declared)]


def _speed(record: Record) -> str:
    return f"{_number(record['gbps'])} ({_percent(record)})" if "percent_of_roof" in record else _number(record["gbps"])


def _device_name(slug: str) -> str:
    spec = devices.spec_for(slug)
    return spec["name"].removeprefix("NVIDIA ") if spec else slug


# --- running over all text -------------------------------------------------------------------------------------------


_CALLABLE = (
    "code",
    "table",
    "engine_table",
    "dispatch_map",
    "ab_table",
    "sanitizer_table",
    "ladder_table",
    "bytes_table",
    "value",
    "plot",
    "sweep",
    "block_picture",
    "output",
)


def pages() -> list[Path]:
    """Every Markdown file of the project."""
    return [path for path in sorted(ROOT.rglob("*.md")) if not _SKIP & set(path.relative_to(ROOT).parts)]


def weave_page(weaver: Weaver, path: Path) -> tuple[str, str, list[str]]:
    """(text as it is, text as it should be, failures) of one page."""
    text = path.read_text(encoding="utf-8")
    failures: list[str] = []
    if "[[[cog" not in text:
        return text, text, failures
    cog = Cog()
    weaver.page = path
    weaver.emit = lambda piece: cog.cogmodule.outl(piece)
    cog.options.defines = {name: _guarded(getattr(weaver, name), weaver, failures, cog) for name in _CALLABLE}
    try:
        new = cog.process_string(text, fname=str(path))
    except CogError as error:
        return text, text, [*failures, _located(path, str(error))]
    return text, new, failures


def _guarded(function: Callable[..., None], weaver: Weaver, failures: list[str], cog: Cog) -> Callable[..., None]:
    """Turn what a function raises into a failure with file and line, and leave the region's old text in place."""

    def call(*args: Any, **kwargs: Any) -> None:
        pieces: list[str] = []
        emit, weaver.emit = weaver.emit, pieces.append
        where = f"{shown(weaver.page)}:{cog.cogmodule.firstLineNum}"
        try:
            function(*args, **kwargs)
            made = "\n".join(pieces)
            for mark in ("[[[cog", "]]]", "[[[end]]]"):
                if mark in made:
                    raise Failure(f"the generated text contains {mark}, which marks regions")
        except (Failure, UserError, TypeError) as error:
            failures.append(f"{where}: {error}")
            cog.cogmodule.out(cog.cogmodule.previous)
            return
        finally:
            weaver.emit = emit
        # Blank lines on both sides: some Markdown readers need them next to a comment.
        cog.cogmodule.outl(f"\n{made}\n")

    return call


def _located(path: Path, message: str) -> str:
    """One line for an error that cogapp itself reports: a mark out of place, or Python that does not run."""
    lines = [line for line in message.splitlines() if line.strip()]
    number = re.search(r"<cog [^>]*:(\d+)>", message) or re.search(r"\((\d+)\): ", message)
    last = re.sub(r"^.*?\(\d+\): ", "", lines[-1]) if lines else message
    return f"{shown(path)}{f':{number[1]}' if number else ''}: {last}"


def unused_anchors(weaver: Weaver) -> list[str]:
    """Anchors that no text quotes, that name no rung (or the CPU twin of one), and that no record was made from.

    Without sound records that cannot be said; the first unsound one is the answer then.
    """
    registered = _registered_names()
    try:
        measured = {part for line in weaver.lines for part in line.record.get("sources", "").split(",")}
    except UserError as error:
        return [] if weaver.check else [str(error)]  # check_data() says it too
    found = []
    for anchor in all_anchors():
        rung = anchor.name.removeprefix("cpu_")
        if f"{shown(anchor.path)}#{anchor.name}" in measured:
            continue
        if (anchor.path, anchor.name) not in weaver.quoted and rung not in registered:
            found.append(f"{anchor.where}: anchor {anchor.name} is quoted by no text and names no rung")
    return found


def _registered_names() -> set[str]:
    """Words that chapter sources and the kernels beside them spell as strings: rung ids are among them."""
    names: set[str] = set()
    for path in CHAPTERS.glob("*/*.cu"):
        names |= set(re.findall(r'"([a-z][a-z0-9_]*)"', path.read_text(encoding="utf-8")))
    return names


def quoted_without_running(paths: Iterable[Path]) -> set[tuple[Path, str]]:
    """Anchors that pages quote, read from the marks alone (for pages that are not woven in this run)."""
    found = set()
    for path in paths:
        for call in re.findall(r"\bcode\(([^)]*)\)", path.read_text(encoding="utf-8")):
            try:
                file, anchor = ast.literal_eval(f"({call})")
            except (ValueError, SyntaxError, TypeError):
                continue
            found.add((ROOT / file, anchor))
    return found


def command_weave(args: argparse.Namespace) -> int:
    chosen = []
    for path in args.file:
        if not path.is_file():
            raise UserError(f"no file {path}")
        chosen.append(path.resolve())
    weaver = Weaver(args.check)
    everything = pages()
    failures, changed, regions = [], [], 0
    for path in chosen or everything:
        old, new, wrong = weave_page(weaver, path)
        failures += wrong
        regions += old.count("[[[cog")
        if new != old:
            changed.append(path)
            if args.check:
                failures += _drift(path, old, new)
            else:
                path.write_text(new, encoding="utf-8")
    weaver.quoted |= quoted_without_running(path for path in everything if chosen and path not in chosen)
    failures += unused_anchors(weaver)
    if args.check:
        failures += check_data()
    for failure in failures:
        print(failure)
    what = f"{regions} generated regions in {len(chosen or everything)} pages"
    if failures:
        print(f"weave: {len(failures)} failures, {what}")
        return 1
    rewritten = "" if args.check else f", {len(changed)} pages rewritten"
    print(f"weave: {what}{rewritten}; all up to date")
    return 0


def _drift(path: Path, old: str, new: str) -> list[str]:
    """The first line that differs, as a failure."""
    for number, (was, now) in enumerate(zip(old.splitlines(), new.splitlines(), strict=False), 1):
        if was != now:
            return [f'{shown(path)}:{number}: out of date from "{was[:80]}"; run scripts/ladder weave']
    return [f"{shown(path)}: out of date; run scripts/ladder weave"]


def check_data() -> list[str]:
    """Every committed record and device file must be sound."""
    found = []
    for check in (devices.all_devices, records.load_committed):
        try:
            check()
        except UserError as error:
            found.append(str(error))
    return found
