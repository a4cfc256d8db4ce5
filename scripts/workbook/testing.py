"""`test`: everything that this machine can run, and what it cannot and why."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field

from . import setup
from .build import BUILD, chapters, doctest_counts, ensure_build, meson_test_log
from .common import ROOT, StepFailed, say

MESON_SKIP = 77  # the exit status by which a test says that it does not apply here


@dataclass
class Tally:
    """Counts over all suites.  A skip always has its reason."""

    passed: int = 0
    failed: int = 0
    skipped: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def closing(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {len(self.skipped)} skipped"


def command_test(_: argparse.Namespace) -> int:
    tally = Tally()
    try:
        ensure_build(need_tests=True)
    except StepFailed as error:
        # Nothing can be tested that was not built; the rest still can.
        tally.failed += 1
        tally.failures.append(f"build: {error}")
    else:
        cpp_tests(tally)
    python_tests(tally)
    weave_check(tally)
    what_cannot_run(tally)
    sys.stderr.flush()
    for reason in tally.skipped:
        print(f"skipped: {reason}")
    for failure in tally.failures:
        print(f"failed: {failure}")
    print(tally.closing(), flush=True)
    return 1 if tally.failed else 0


def cpp_tests(tally: Tally) -> None:
    """Meson's tests; doctest's own count of cases is used where a test prints one."""
    say("C++ tests (meson test)")
    log = BUILD / "meson-logs" / "testlog.json"
    log.unlink(missing_ok=True)
    done = subprocess.run(
        [str(setup.venv_tool("meson")), "test", "-C", str(BUILD), "--no-rebuild", "--print-errorlogs"],
        cwd=ROOT,
        env=setup.tool_environment(),
        stdout=sys.stderr,
        check=False,
    )
    results = meson_test_log()
    for test in results:
        add_cpp_result(tally, test)
    if not results:
        tally.failed += 1
        tally.failures.append(f"meson test: ended with status {done.returncode} and ran nothing")
    elif done.returncode and not tally.failed:
        tally.failed += 1
        tally.failures.append(f"meson test: ended with status {done.returncode}")


def add_cpp_result(tally: Tally, test: dict[str, object]) -> None:
    """Count one entry of Meson's test log."""
    name = re.split(r" / |:", str(test.get("name", "?")))[-1]  # without the project's name
    text = str(test.get("stdout", ""))
    result = str(test.get("result", "")).upper()
    counts = doctest_counts(text)
    if result == "SKIP" or test.get("returncode") == MESON_SKIP:
        said = [line.strip().removeprefix("skipped: ") for line in text.splitlines() if line.strip()]
        tally.skipped.append(f"{name}: {said[-1] if said else 'it says that it does not apply here'}")
        return
    if counts:
        passed, failed, skipped = counts
        tally.passed += passed
        tally.failed += failed
        if skipped:
            tally.skipped += [f"{name}: a test case is marked as skipped"] * skipped
        if failed:
            tally.failures.append(f"{name}: {failed} test cases (output above)")
        if result == "OK" or failed:
            return
    if result in ("OK", "EXPECTEDFAIL"):
        tally.passed += 1
    else:
        tally.failed += 1
        tally.failures.append(f"{name}: {result.lower() or 'no result'} (output above)")


def python_tests(tally: Tally) -> None:
    """scripts/tests under .venv's Python, since plots and weave need its packages."""
    say("Python tests (unittest)")
    done = subprocess.run(
        [str(setup.venv_python()), "-m", "unittest", "discover", "-s", "scripts/tests", "-t", "scripts", "-v"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    add_python_result(tally, done.stderr, done.returncode)
    if done.returncode:
        _, rule, details = done.stderr.partition("=" * 70)
        sys.stderr.write(rule + details if rule else done.stderr)


def add_python_result(tally: Tally, text: str, status: int) -> None:
    """Count unittest's verbose output.  (Its "Ran N tests" means different things in different Python versions.)"""
    passed = len(re.findall(r"(?:^|\.\.\. )ok$", text, re.MULTILINE))
    bad = re.findall(r"^(?:FAIL|ERROR): (.+)$", text, re.MULTILINE)
    skipped = re.findall(r"^(.*)\.\.\. skipped '(.*)'$", text, re.MULTILINE)
    tally.passed += passed
    tally.skipped += [f"python: {name.split(' (')[0].strip()}: {reason}" for name, reason in skipped]
    tally.failures += [f"python: {name}" for name in bad]
    tally.failed += len(bad)
    if (status and not bad) or not (passed or bad or skipped):
        tally.failed += 1
        tally.failures.append(f"python: unittest ended with status {status} after {passed} tests")


def weave_check(tally: Tally) -> None:
    """Generated text must be what sources and records say."""
    say("generated text (weave --check)")
    done = subprocess.run(
        [str(setup.venv_python()), str(ROOT / "scripts" / "ladder"), "weave", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        tally.passed += 1
        return
    tally.failed += 1
    tally.failures.append("weave --check (lines above)")
    sys.stderr.write(done.stdout + done.stderr)


def what_cannot_run(tally: Tally) -> None:
    """Reasons that no single test can give, because it was not even built."""
    if setup.nvcc() is None:
        tally.skipped.append("GPU tests: not built, no nvcc (scripts/ladder doctor says how to get it)")
    elif not any(chapter.gpu_device for chapter in chapters()):
        already = any("cuda" in reason.lower() or "gpu" in reason.lower() for reason in tally.skipped)
        if not already:
            tally.skipped.append("GPU runs: the CUDA binaries are built, but there is no GPU that they can use")
