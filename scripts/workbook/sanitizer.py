"""What scripts/sanitize_gpu.sh found, as records and as a table: one for each tool and test, with all its cases."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from . import build, devices, records, run
from .common import UserError, markdown_table, say, shown
from .records import Record

RUNG = "sanitizer"
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")


def outcome(said: str) -> str:
    """The kind of a verdict such as "cut off after 60 s"."""
    known = [kind for kind in records.OUTCOMES if said.startswith(kind)]
    return known[0] if known else "failed"


def records_of(lines: TextIO, device: str, command: str) -> list[Record]:
    """From lines of tool, test, name of the case and verdict, with tabs between."""
    found: dict[tuple[str, str], Record] = {}
    for number, line in enumerate(lines, 1):
        parts = line.rstrip("\n").split("\t")
        if len(parts) != 4 or parts[0] not in TOOLS:
            raise UserError(f"sanitizer: line {number} is not a tool, a test, a case and a verdict")
        tool, test, name, said = parts
        record = found.setdefault(
            (tool, test),
            {
                "schema": 1,
                "rung": RUNG,
                "executor": "gpu",
                "device": device,
                "test": test,
                "params": {"tool": tool, "whole": "--whole" in command.split()},
                "cases": [],
            },
        )
        result = outcome(said)
        record["cases"].append({"name": name, "result": result, **({} if result == "passed" else {"said": said})})
    return list(found.values())


def table(found: Sequence[Record]) -> str:
    """A row for each test, a column for each tool: how many cases passed, and what became of the others."""
    tools = [tool for tool in TOOLS if any(r["params"]["tool"] == tool for r in found)]
    by_test: dict[str, dict[str, Record]] = {}
    for record in found:
        by_test.setdefault(record["test"], {})[record["params"]["tool"]] = record
    rows = []
    for test, of in sorted(by_test.items()):
        name = test.removeprefix("test_").removesuffix("_cuda")
        rows.append([name, *(_cell(of[tool]) if tool in of else "" for tool in tools)])
    return markdown_table(["test", *tools], rows, range(1, len(tools) + 1))


def _cell(record: Record) -> str:
    counts = {kind: sum(case["result"] == kind for case in record["cases"]) for kind in records.OUTCOMES}
    passed, total = counts.pop("passed"), len(record["cases"])
    others = ", ".join(f"{n} {kind}" for kind, n in counts.items() if n)
    return f"{passed} of {total}: {others}" if others else str(passed)


def left_over(found: Sequence[Record]) -> list[str]:
    """A line of Markdown for each case in which something was found, with what the tool said."""
    return [
        f"* {record['params']['tool']}, {record['test'].removeprefix('test_').removesuffix('_cuda')}: "
        f"“{case['name']}”: {case['said']}"
        for record in found
        for case in record["cases"]
        if case["result"] == "failed"
    ]


def main(words: Sequence[str]) -> int:
    """RUNS BUILD VERSION COMMAND: adds the records of the lines on stdin."""
    runs, folder, version, command = words
    gpus = devices.nvidia_smi()
    if not gpus:
        raise UserError("--runs: nvidia-smi does not say which GPU this is")
    spec = devices.spec_for(gpus[0]["name"])
    device = spec["slug"] if spec else devices.slugify(gpus[0]["name"])
    tools = ", ".join(
        part for part in (build.toolchain("gpu", Path(folder)), f"compute-sanitizer {version}".strip()) if part
    )
    made = records.annotate(records_of(sys.stdin, device, command), {}, command, tools)
    for record in made:
        wrong = records.problems(record, committed=True)
        if wrong:
            raise UserError(f"{record['test']} cannot be recorded: it {wrong[0]}")
    path = Path(runs) / device / f"{RUNG}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    run.emit(made, str(path))
    say(f"{len(made)} records added to {shown(path)}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"scripts/sanitize_gpu.sh: {error}", file=sys.stderr)
        sys.exit(2)
