"""Records: the schema, reading, choosing the latest, and adding what the chapter binary cannot know.

A record is one JSON object a line (schema 1).  Fields that do not apply are absent, never zero.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .common import ROOT, UserError, capture, json_lines, read_text, shown
from .sources import source_hash

Record = dict[str, Any]
RUNS = ROOT / "data" / "runs"
EXECUTORS = ("gpu", "emulator", "cpu")
_SLUG = re.compile(r"[a-z0-9][a-z0-9.-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")


# --- the schema -------------------------------------------------------------------------------------------------

Check = Callable[[Any], "str | None"]  # what is wrong with the value, or None


def _text(value: Any) -> str | None:
    return None if isinstance(value, str) and value else "must be a non-empty string"


def _matches(pattern: re.Pattern[str], what: str) -> Check:
    return lambda value: None if isinstance(value, str) and pattern.fullmatch(value) else f"must be {what}"


def _choice(*allowed: str) -> Check:
    return lambda value: None if value in allowed else f"must be one of {', '.join(allowed)}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _positive(value: Any) -> str | None:
    return None if _is_number(value) and value > 0 else "must be a number above 0 (leave it out if it does not apply)"


def _not_negative(value: Any) -> str | None:
    return None if _is_number(value) and value >= 0 else "must be a number, at least 0"


def _count(value: Any) -> str | None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return None if whole and value > 0 else "must be a whole number above 0"


def _flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else "must be true or false"


def _date(value: Any) -> str | None:
    try:
        datetime.datetime.fromisoformat(str(value).replace("Z", "+00:00"))
    except ValueError:
        return "must be an ISO 8601 date"
    return None if isinstance(value, str) else "must be an ISO 8601 date"


def _flat(value: Any) -> str | None:
    if not isinstance(value, dict) or not value:
        return "must be an object with at least one entry"
    for key, item in value.items():
        if not (isinstance(item, str | bool) or _is_number(item)):
            return f"{key} must be a number, a string or a flag"
    return None


def _object(required: dict[str, Check], optional: dict[str, Check] | None = None) -> Check:
    optional = optional or {}

    def check(value: Any) -> str | None:
        if not isinstance(value, dict):
            return "must be an object"
        for name in required:
            if name not in value:
                return f"lacks {name}"
        for name, item in value.items():
            test = required.get(name) or optional.get(name)
            if test is None:
                return f"has an unknown field {name}"
            wrong = test(item)
            if wrong:
                return f"{name} {wrong}"
        return None

    return check


def _samples(value: Any) -> str | None:
    return (
        None
        if isinstance(value, list) and value and all(_is_number(v) and v > 0 for v in value)
        else "must be a list of numbers above 0"
    )


def _cases(value: Any) -> str | None:
    """Test cases under compute-sanitizer, each with its name and what came of it."""
    if not isinstance(value, list) or not value:
        return "must be a list with at least one case"
    case = _object({"name": _text, "result": _choice(*OUTCOMES)}, {"said": _text})
    return next((wrong for wrong in map(case, value) if wrong), None)


# Of a test case under compute-sanitizer: nothing found; the tool or the test found something; the time was over.
OUTCOMES = ("passed", "failed", "cut off", "not run")
FIELDS: dict[str, Check] = {
    "schema": lambda value: None if value == 1 and not isinstance(value, bool) else "must be 1",
    "rung": _text,
    "executor": _choice(*EXECUTORS),
    "device": _matches(_SLUG, "a slug (lower-case letters, digits, dashes)"),
    "type": _text,
    "shape": _object({"nt": _count, "od": _count, "id": _count}),
    "layer": _text,
    "mode": _choice("cold", "hot"),
    "bytes": _object({"total": _positive}, {"weights": _positive, "acts": _positive, "out": _positive}),
    "work": _object({"count": _positive, "unit": _choice("flop", "int8_op")}),
    "time_ns": _object(
        {"median": _positive, "q1": _positive, "q3": _positive, "n": _count},
        {"stop": _choice("iqr", "time_limit")},
    ),
    "sm_mhz": _positive,  # what the GPU's multiprocessors counted while it was measured
    "gbps": _positive,
    "gops": _positive,
    "intensity": _positive,
    "roof": _object(
        {"source": _choice("measured", "spec")},
        {"bandwidth_gbps": _positive, "peak_gops": _positive, "unit": _choice("flop", "int8_op")},
    ),
    "percent_of_roof": _positive,
    "bound": _choice("memory", "compute", "latency"),
    "valid": _flag,
    "why_not": _text,
    "check": _object({}, {"max_error_over_bound": _not_negative, "exact_case": _flag}),
    "counters": _flat,
    "params": _flat,
    "clocks": _flat,
    "peer": _object({"name": _text}, {"version": _text}),
    # Whole-model records (rung "engine").
    "model": _object({"size": _text, "file_type": _text, "bytes_per_token": _positive}, {"name": _text}),
    "test": _text,
    "tokens_per_s": _object({"mean": _positive, "stddev": _not_negative}, {"samples": _samples}),
    "kernels_per_token": _positive,
    "perplexity": _object({"value": _positive, "standard_error": _not_negative}),
    "cases": _cases,  # rung "sanitizer"
    "load": _object({"bytes": _count, "seconds": _positive}, {"read_seconds": _positive}),
    # Added by scripts/ladder.
    "sources": _text,  # where the hashed code stands, if not in an anchor of the rung's own name
    "source_sha256": _matches(_SHA256, "64 hexadecimal digits"),
    "git": _text,
    "date": _date,
    "toolchain": _text,
    "command": _text,
}
REQUIRED = ("schema", "rung", "executor", "device")
MEASURED = ("time_ns", "check", "counters", "tokens_per_s", "perplexity", "load", "cases")
REQUIRED_WHEN_COMMITTED = ("date", "toolchain", "command")


def problems(record: Record, committed: bool = False) -> list[str]:
    """What is wrong with one record; empty if it is sound.  `committed` asks for what `ladder record` adds."""
    found = [f"lacks {name}" for name in REQUIRED if name not in record]
    for name, value in record.items():
        test = FIELDS.get(name)
        wrong = "is not a field of schema 1" if test is None else test(value)
        if wrong:
            found.append(f"{name} {wrong}")
    if found:
        return found
    if not any(name in record for name in MEASURED):
        found.append(f"says nothing: it has none of {', '.join(MEASURED)}")
    time = record.get("time_ns")
    if time and not time["q1"] <= time["median"] <= time["q3"]:
        found.append("time_ns must have q1 <= median <= q3")
    if record.get("valid") is False and "why_not" not in record:
        found.append("valid is false but why_not is absent")
    if record.get("valid") is True and "why_not" in record:
        found.append("valid is true but why_not is given")
    sizes = record.get("bytes", {})
    parts = [sizes[part] for part in ("weights", "acts", "out") if part in sizes]
    if parts and sum(parts) != sizes["total"]:
        found.append("bytes.total is not the sum of weights, acts and out")
    if committed:
        found += [f"lacks {name}" for name in REQUIRED_WHEN_COMMITTED if name not in record]
        if needs_source(record) and "source_sha256" not in record:
            found.append("lacks source_sha256")
    return found


def needs_source(record: Record) -> bool:
    """Peers, whole-model runs and tests are not one anchored kernel; everything else must carry its source's hash."""
    return "peer" not in record and record.get("rung") not in ("engine", "engine_ab", "sanitizer")


# --- reading ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A record and where it stands."""

    record: Record
    path: Path
    number: int

    @property
    def where(self) -> str:
        return f"{shown(self.path)}:{self.number}"


def read_file(path: Path, committed: bool = False) -> list[Line]:
    """Every record of a file, validated.  The first unsound one is an error that names file and line."""
    lines = []
    for number, text in enumerate(read_text(path).splitlines(), 1):
        if not text.strip():
            continue
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"{shown(path)}:{number}: not JSON: {error.msg}") from None
        if not isinstance(record, dict):
            raise UserError(f"{shown(path)}:{number}: expected one JSON object a line")
        wrong = problems(record, committed)
        if wrong:
            raise UserError(f"{shown(path)}:{number}: {wrong[0]}")
        lines.append(Line(record, path, number))
    return lines


def devices_with_records(runs: Path = RUNS) -> list[str]:
    return sorted({path.parent.name for path in runs.glob("*/*.jsonl")})


def load_committed(device: str | None = None, runs: Path = RUNS) -> list[Line]:
    """Records under data/runs, all devices or one."""
    lines = []
    for path in sorted(runs.glob(f"{device or '*'}/*.jsonl")):
        for line in read_file(path, committed=True):
            if line.record["device"] != path.parent.name:
                raise UserError(f"{line.where}: device {line.record['device']} in the folder of {path.parent.name}")
            lines.append(line)
    return lines


def key(record: Record) -> tuple[Any, ...]:
    """What a newer record replaces: the same rung, executor, device, type, shape, layer, mode and parameters.

    Parameters count where they were chosen (whole numbers, words), not where they came out (fractions, flags).  A
    whole-model run is told apart by its model and test, a peer by its name.  Counts do not replace a bare check, nor
    the other way round.
    """
    shape = record.get("shape", {})
    chosen = {name: value for name, value in record.get("params", {}).items() if not isinstance(value, float | bool)}
    model = record.get("model", {})
    return (
        record["rung"],
        record["executor"],
        record["device"],
        record.get("type"),
        *(shape.get(axis) for axis in ("nt", "od", "id")),
        record.get("layer"),
        record.get("mode"),
        json.dumps(chosen, sort_keys=True),
        record.get("peer", {}).get("name"),
        model.get("size"),
        model.get("file_type"),
        record.get("test"),
        only_counts(record),
    )


def only_counts(record: Record) -> bool:
    """The emulator's counts, or those of a profiler: no clock was running."""
    return "counters" in record and "time_ns" not in record


def latest(lines: Iterable[Line]) -> list[Line]:
    """The newest record of each key (by date, then by order in the file), in order of first appearance."""
    best: dict[tuple[Any, ...], Line] = {}
    for line in lines:
        name = key(line.record)
        if name not in best or line.record.get("date", "") >= best[name].record.get("date", ""):
            best[name] = line
    return list(best.values())


def matches(record: Record, **wanted: Any) -> bool:
    """Does a record have these values?  A list allows any of them; nt, od and id look into the shape, and where there
    is none into the parameters, as other names that are no field of their own."""
    for name, value in wanted.items():
        if value is None:
            continue
        if name in ("nt", "od", "id"):
            have = record.get("shape", record.get("params", {})).get(name)
        elif name in FIELDS:
            have = record.get(name)
        else:
            have = record.get("params", {}).get(name)
        allowed = value if isinstance(value, list | tuple | set) else [value]
        if have not in allowed:
            return False
    return True


def one_per_point(lines: Iterable[Line]) -> list[Line]:
    """One record for each rung, executor, device, shape and mode, where parameters left several: the plain measurement
    before one half of a comparison, then the most threads, then the newest.  Probes have no shape; their parameters are
    the points, and all stay."""
    best: dict[tuple[Any, ...], tuple[tuple[Any, ...], Line]] = {}
    for line in lines:
        record, params = line.record, line.record.get("params", {})
        name = key({k: v for k, v in record.items() if k != "params"} if "shape" in record else record)
        rank = ("compared_with" not in params, params.get("threads", 0), record.get("date", ""))
        if name not in best or rank >= best[name][0]:
            best[name] = (rank, line)
    return [line for _, line in best.values()]


# --- adding what the binary cannot know -----------------------------------------------------------------------------


def git_revision(root: Path = ROOT) -> str | None:
    """Short commit id, "-dirty" if code differs from it (records themselves do not count); None outside git.

    LADDER_REVISION says it for a copy of the tree that carries no history.
    """
    if os.environ.get("LADDER_REVISION"):
        return os.environ["LADDER_REVISION"]
    status, commit, _ = capture(["git", "rev-parse", "--short=12", "HEAD"], cwd=root)
    if status:
        return None
    _, changes, _ = capture(["git", "status", "--porcelain", "--", ".", ":!data/runs"], cwd=root)
    return commit.strip() + ("-dirty" if changes.strip() else "")


def sources_of(rungs: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The code behind each rung of a binary's --list, and behind "<rung>@cpu" where the twin names its own."""
    found = {rung["rung"]: rung["source"] for rung in rungs if "source" in rung}
    found |= {f"{rung['rung']}@cpu": rung["cpu_source"] for rung in rungs if "cpu_source" in rung}
    return found


def annotate(
    raw: Sequence[Record],
    sources: dict[str, str],
    command: str,
    toolchain: str | None,
    clocks: Record | None = None,
) -> list[Record]:
    """Add source_sha256, git, date, toolchain, command.  `sources` is what sources_of(the binary's rungs) returns."""
    date = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0).isoformat().replace("+00:00", "Z")
    revision = git_revision()
    done = []
    for record in raw:
        record = dict(record)
        source = sources.get(f"{record['rung']}@{record['executor']}") or sources.get(record["rung"])
        if needs_source(record) and source:
            if "#" in source:
                record["sources"] = source
            record["source_sha256"] = source_hash(record["rung"], record["executor"], source)
        if revision:
            record["git"] = revision
        record["date"] = date
        if toolchain:
            record.setdefault("toolchain", toolchain)
        if clocks:
            record.setdefault("clocks", clocks)
        record["command"] = command
        done.append(record)
    return done


def to_line(record: Record) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def parse(text: str, where: str) -> list[Record]:
    """Records from a binary's output; an unsound one is an error."""
    found = json_lines(text, where)
    for number, record in enumerate(found, 1):
        wrong = problems(record)
        if wrong:
            raise UserError(f"{where}: record {number} is unsound: {wrong[0]}")
    return found
