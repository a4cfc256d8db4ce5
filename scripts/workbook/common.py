"""Names and small helpers that every command shares."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
USAGE_ERROR = 2


class UserError(Exception):
    """Something the user can put right.  Printed as one line, exit status 2."""


class StepFailed(Exception):
    """A step that was asked for ran and failed (build, check, test).  One line, exit status 1."""


def say(message: str) -> None:
    """Tell the user what is being done; stdout stays free for results."""
    print(f"ladder: {message}", file=sys.stderr, flush=True)


def shown(path: Path) -> str:
    """The path as a reader of the project would write it."""
    try:
        return str(path.resolve().relative_to(ROOT))
    except ValueError:
        return str(path)


def one_of(what: str, given: str, allowed: Iterable[str]) -> UserError:
    """The error for a name that is not in a list: what was wrong, the nearest, and what is allowed."""
    names = list(allowed)
    near = difflib.get_close_matches(given, names, 1)
    hint = f", did you mean {near[0]}?" if near else ""
    return UserError(f'no {what} "{given}"{hint} (there are: {", ".join(names) or "none"})')


def capture(
    command: Sequence[str | Path],
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> tuple[int, str, str]:
    """Run a command and return (status, stdout, stderr); status 127 if it is not there."""
    try:
        done = subprocess.run(
            [str(part) for part in command],
            cwd=cwd or ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
        return 127, "", str(error)
    except subprocess.TimeoutExpired:
        return 124, "", f"{command[0]} took longer than {timeout} s"
    return done.returncode, done.stdout, done.stderr


def stream(
    command: Sequence[str | Path],
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    to_stderr: bool = True,
) -> int:
    """Run a command with its output passed through (to stderr unless it is a result)."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        return subprocess.run(
            [str(part) for part in command],
            cwd=cwd or ROOT,
            env=env,
            check=False,
            stdout=sys.stderr if to_stderr else None,
        ).returncode
    except FileNotFoundError:
        return 127


def json_lines(text: str, where: str) -> list[dict[str, Any]]:
    """Parse JSON objects, one a line.  `where` names the source in errors."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{where}:{number}: not JSON: {error.msg}") from None
        if not isinstance(value, dict):
            raise UserError(f"{where}:{number}: expected one JSON object a line")
        found.append(value)
    return found


def read_text(path: Path) -> str:
    """A text file, or one clear line."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"no file {shown(path)}") from None
    except IsADirectoryError:
        raise UserError(f"{shown(path)} is a folder, expected a file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {shown(path)}: {error}") from None


def write_text(path: Path, text: str) -> None:
    """Write a text file, or one clear line."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {shown(path)}: {error.strerror or error}") from None


def is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> str:
    """A Markdown table with padded columns, readable in a terminal too.  `right`: columns set flush right."""
    flush_right = set(right)
    cells = [list(header), *[list(row) for row in rows]]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        set_cells = [
            c.rjust(w) if i in flush_right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        return "| " + " | ".join(set_cells) + " |"

    rule = "|" + "|".join("-" * (w + 1) + (":" if i in flush_right else "-") for i, w in enumerate(widths)) + "|"
    return "\n".join([line(cells[0]), rule, *(line(row) for row in cells[1:])])
