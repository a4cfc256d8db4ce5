"""A small project in a temporary folder: this project's scripts, and one chapter whose binary is a Python script."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEVICE = "made-up-cpu-2c"

KERNEL = """\
// RUNG      fake_fast: the quick one.  PREV fake_slow: waits.
// ANCHOR: fake_fast
void fake_fast(const float* w, float* out) {
  out[0] = w[0];  // copies
}
// ANCHOR_END: fake_fast
// RUNG      fake_slow: the slow one.
// ANCHOR: fake_slow
void fake_slow(const float* w, float* out) {
  for (int i = 0; i < 9; ++i) out[0] = w[0];
}
// ANCHOR_END: fake_slow
void register_all() { add("fake_slow", "slow"); add("fake_fast", "fast"); }
"""

BINARY = '''\
#!{python}
"""Stands in for a chapter binary: the same options, invented numbers."""
import json, sys

RUNGS = ["fake_slow", "fake_fast"]
args = sys.argv[1:]
value = lambda name, default: args[args.index(name) + 1] if name in args else default
if "--list" in args:
    for rung in RUNGS:
        print(json.dumps({{"rung": rung, "chapter": "42-fake", "title": "made up", "executors": ["emulator", "cpu"],
                          "source": "chapters/42-fake/fake.cu"}}))
    sys.exit(0)
if "--layers" in args:
    print(json.dumps({{"layer": "7b.ffn_down", "od": 3584, "id": 18944}}))
    sys.exit(0)
on = value("--on", "cpu")
if "--device" in args:
    print(json.dumps({{"executor": on, "device": "Made Up CPU", "slug": "{device}", "total_bytes": 1 << 40}}))
    sys.exit(0)
layer = value("--layer", "7b.ffn_down")
if layer != "7b.ffn_down":
    sys.stderr.write("fake: unknown layer '" + layer + "'\\n")
    sys.exit(2)
chosen = value("--rung", ",".join(RUNGS)).split(",")
if "--compare" in args:
    chosen = value("--compare", "").split(",")
out = open(value("--json", "/dev/null"), "a")
print("rung  time")
for rung in chosen:
    for nt in map(int, value("--nt", "1").split(",")):
        record = {record}
        out.write(json.dumps(record) + "\\n")
        print(rung, "ok")
sys.exit(int(value("--threads", "0")) == 99)
'''


def made_record(rung: str = "fake_fast", nt: int = 1, od: int = 3584, id_: int = 18944, **more) -> dict:
    """A sound record with invented times."""
    weights, acts, out = 4 * od * id_, 4 * nt * id_, 4 * nt * od
    total, work = weights + acts + out, 2 * nt * od * id_
    bandwidth, peak = 20.0, 100.0
    floor = max(total / bandwidth, work / peak)
    median = floor / (0.9 if rung.endswith("fast") else 0.3)
    record = {
        "schema": 1,
        "rung": rung,
        "executor": "cpu",
        "device": DEVICE,
        "type": "f32",
        "shape": {"nt": nt, "od": od, "id": id_},
        "layer": "7b.ffn_down",
        "mode": "cold",
        "params": {"threads": 2},
        "bytes": {"weights": weights, "acts": acts, "out": out, "total": total},
        "work": {"count": work, "unit": "flop"},
        "intensity": work / total,
        "time_ns": {"median": median, "q1": median * 0.99, "q3": median * 1.02, "n": 20, "stop": "iqr"},
        "gbps": total / median,
        "gops": work / median,
        "roof": {"bandwidth_gbps": bandwidth, "peak_gops": peak, "unit": "flop", "source": "measured"},
        "percent_of_roof": 100 * floor / median,
        "bound": "memory" if total / bandwidth > work / peak else "compute",
        "valid": True,
        "check": {"max_error_over_bound": 0.01, "exact_case": True},
    }
    return {**record, **more}


def committed(record: dict, sha256: str, date: str = "2026-01-02T03:04:05Z") -> dict:
    """The same with what `record` adds."""
    return {
        **record,
        "source_sha256": sha256,
        "date": date,
        "toolchain": "gcc 12.2.0",
        "command": f"scripts/ladder record {record['rung']}",
    }


def has_package(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def in_venv() -> bool:
    return Path(sys.prefix).resolve() == (ROOT / ".venv").resolve()


needs_venv = unittest.skipUnless(in_venv(), "needs the packages of .venv; run it with scripts/ladder test")


class ProjectCase(unittest.TestCase):
    """Every test gets a fresh little project."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="ladder-test-")
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name).resolve()
        ignore = shutil.ignore_patterns("__pycache__", "tests")
        shutil.copytree(ROOT / "scripts", self.root / "scripts", ignore=ignore)
        shutil.copytree(ROOT / "data" / "devices", self.root / "data" / "devices")
        chapter = self.root / "chapters" / "42-fake"
        chapter.mkdir(parents=True)
        (chapter / "fake.cu").write_text(KERNEL, encoding="utf-8")
        if in_venv():
            (self.root / ".venv").symlink_to(ROOT / ".venv")

    def build(self):
        """Put the stand-in where Meson would put the chapter's binary."""
        binary = self.root / "build" / "chapters" / "fake"
        binary.parent.mkdir(parents=True)
        sample = {**made_record(), "rung": "@rung", "shape": {"nt": "@nt", "od": 3584, "id": 18944}, "executor": "@on"}
        text = json.dumps(sample).replace('"@rung"', "rung").replace('"@nt"', "nt").replace('"@on"', "on")
        text = text.replace("true", "True")
        # The invented bytes are those of nt = 1; a stand-in need not be right for others.
        binary.write_text(BINARY.format(python=sys.executable, device=DEVICE, record=text), encoding="utf-8")
        binary.chmod(0o755)
        return binary

    def ladder(self, *args: str, python: tuple[str, ...] = (), **env: str) -> subprocess.CompletedProcess:
        """Run this project's scripts/ladder as a user would."""
        command = [sys.executable, *python, str(self.root / "scripts" / "ladder"), *args]
        return subprocess.run(
            command,
            cwd=self.root,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            env={**os.environ, "LADDER_NO_APT": "1", "PYTHONDONTWRITEBYTECODE": "1", **env},
        )

    def assert_usage_error(self, done: subprocess.CompletedProcess, *words: str):
        """Exit status 2 and one line that has these words."""
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertEqual(len(done.stderr.strip().splitlines()), 1, done.stderr)
        self.assertNotIn("Traceback", done.stderr)
        for word in words:
            self.assertIn(word, done.stderr)

    def write_runs(self, *found: dict) -> Path:
        """Committed records of the made-up device."""
        path = self.root / "data" / "runs" / DEVICE / "42-fake.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in found), encoding="utf-8")
        return path

    def page(self, text: str, name: str = "README.md") -> Path:
        path = self.root / "chapters" / "42-fake" / name
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path
