"""scripts/sanitize_gpu.sh with a stand-in for compute-sanitizer."""

from __future__ import annotations

import json
import os
import subprocess
import unittest

from tests.support import ProjectCase
from workbook import records, sanitizer

SANITIZER = """\
#!/bin/sh
if [ "$1" = --version ]; then echo "NVIDIA (R) Compute Sanitizer"; echo "Version 2025.3.0.0 (build 1)"; exit 0; fi
# $2 is the tool. The broken kernels have a race; the rest is as FAKE says: a tool finds something in the last case.
case "$*" in
  *--test-case=*) echo "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"; exit 1 ;;
esac
if [ "$FAKE" = mute ]; then exit 0; fi
if [ "$FAKE" = slow ]; then exec sleep 30; fi
if [ "$FAKE" = env ]; then echo "ERROR told: '$LADDER_SANITIZER'"; exit 1; fi
case "$*" in *--last=2*) last=yes ;; esac
if [ "$FAKE" = "$2" ] && [ "$last" = yes ]; then
  echo "========= Invalid __global__ read of size 4 bytes"; echo "========= ERROR SUMMARY: 3 errors"; exit 1
fi
echo "========= ERROR SUMMARY: 0 errors"
"""


TEST = """\
#!/bin/sh
if [ "$1" = --list-test-cases ]; then
  printf '%s\\n' "[doctest] listing all test case names" ===== "one: a shape" "two, and more" ===== "[doctest] cases: 2"
fi
"""
SMI = """\
#!/bin/sh
echo "NVIDIA H200, 580.1, 9.0, 143771 MiB"
"""
TOOLS = ["memcheck", "racecheck", "synccheck", "initcheck"]


class Sanitize(ProjectCase):
    def setUp(self):
        super().setUp()
        self.test = self.root / "build" / "chapters" / "test_vector_gemv_cuda"
        self.tool = self.root / "bin" / "compute-sanitizer"
        self.smi = self.tool.with_name("nvidia-smi")
        for path, text in ((self.test, TEST), (self.tool, SANITIZER), (self.smi, SMI)):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)

    def run_it(self, fake: str = "", *args: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [self.root / "scripts" / "sanitize_gpu.sh", *args],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "FAKE": fake, "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}"},
        )

    def lines(self, done: subprocess.CompletedProcess) -> tuple[list[str], list[str]]:
        """Verdicts as they came, and the report."""
        verdicts, report = done.stdout.split("\n\n")
        return verdicts.splitlines(), report.splitlines()

    def test_one_line_for_each_tool_and_test(self):
        done = self.run_it()
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        verdicts, report = self.lines(done)
        self.assertEqual(len(verdicts), 9)
        self.assertIn("memcheck test_vector_gemv_cuda 2: passed (0 s)", verdicts)
        self.assertEqual([line.split()[0] for line in report[:-2]], [*TOOLS, "racecheck"])
        self.assertRegex(report[0], r"^memcheck +test_vector_gemv_cuda +passed \(2 cases, ")
        self.assertIn("--whole", report[-2])
        self.assertRegex(report[-1], r"^5 passed, 0 failed, \d+ s$")

    def test_an_error_fails(self):
        done = self.run_it("initcheck")
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stdout, r"initcheck +test_vector_gemv_cuda +FAILED \(1 of 2 cases passed")
        self.assertIn("case 2: exit status 1, ERROR SUMMARY: 3 errors", done.stdout)
        self.assertIn("Invalid __global__ read", done.stdout)
        self.assertRegex(done.stdout.splitlines()[-1], "^4 passed, 1 failed")

    def test_a_tool_that_says_nothing_fails(self):
        done = self.run_it("mute")
        self.assertRegex(done.stdout.splitlines()[-1], "^1 passed, 4 failed")

    def test_a_part(self):
        done = self.run_it("initcheck", "--tool", "memcheck,synccheck", "--test", "gemv", "--jobs", "1")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual([line.split()[0] for line in self.lines(done)[1][:-2]], ["memcheck", "synccheck"])
        other = self.test.with_name("test_argmax_cuda")
        other.write_bytes(self.test.read_bytes())
        other.chmod(0o755)
        done = self.run_it("", "--tool", "synccheck,memcheck", "--test", "vector,argmax", "--jobs", "1")
        order = [line.split()[:2] for line in self.lines(done)[1][:-2]]
        names = ("test_vector_gemv_cuda", "test_argmax_cuda")
        self.assertEqual(order, [[tool, name] for tool in ("synccheck", "memcheck") for name in names])
        self.assert_usage_error(self.run_it("", "--test", "attention"), "no test_*_cuda of attention in build")
        self.assert_usage_error(self.run_it("", "--tool", "leakcheck"), "no tool 'leakcheck'; there are memcheck")

    def test_what_takes_too_long_is_cut_off(self):
        done = self.run_it("slow", "--tool", "memcheck", "--limit", "1")
        self.assertEqual(done.returncode, 1)
        self.assertIn("case 1: cut off after 1 s", done.stdout)

    def test_time_that_is_over(self):
        done = self.run_it("slow", "--tool", "memcheck,racecheck", "--jobs", "1", "--within", "5")
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stdout, r"memcheck test_vector_gemv_cuda 1: cut off after \d s")
        self.assertIn("case 2: not run: there was no time left", done.stdout)
        self.assertRegex(done.stdout, r"racecheck +test_vector_gemv_cuda +FAILED \(0 of 2 cases passed")

    def test_cases_together(self):
        done = self.run_it("", "--tool", "memcheck,racecheck", "--cases", "3")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        verdicts, report = self.lines(done)
        self.assertEqual(len(verdicts), 4)  # racecheck's cases stay apart
        self.assertIn("memcheck test_vector_gemv_cuda 1 to 2: passed (0 s)", verdicts)
        self.assertRegex(report[0], r"^memcheck +test_vector_gemv_cuda +passed \(2 cases, ")
        # Something is found in the second: which case it is comes out, and the first one passes.
        done = self.run_it("memcheck", "--tool", "memcheck", "--cases", "2")
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stdout, r"memcheck +test_vector_gemv_cuda +FAILED \(1 of 2 cases passed")
        self.assertIn("case 2: exit status 1, ERROR SUMMARY: 3 errors", done.stdout)
        self.assertNotIn("case 1:", done.stdout)

    def test_records(self):
        done = self.run_it("initcheck", "--runs", "data/runs", "--limit", "9")
        self.assertEqual(done.returncode, 1)
        lines = (self.root / "data/runs/nvidia-h200/sanitizer.jsonl").read_text().splitlines()
        found = {(r["params"]["tool"], r["test"]): r for r in map(json.loads, lines)}
        self.assertEqual(len(found), 5)
        for record in found.values():
            self.assertEqual(records.problems({**record, "git": "x"}, committed=True), [])
            self.assertEqual(record["command"], "scripts/sanitize_gpu.sh --limit 9")
            self.assertIs(record["params"]["whole"], False)
            self.assertTrue(record["toolchain"].endswith("compute-sanitizer 2025.3.0.0"))
        good, bad = ({"name": "one: a shape", "result": "passed"}, {"name": "two, and more", "result": "failed"})
        self.assertEqual(found["memcheck", "test_vector_gemv_cuda"]["cases"], [good, {**good, "name": bad["name"]}])
        said = "exit status 1, ERROR SUMMARY: 3 errors"
        self.assertEqual(found["initcheck", "test_vector_gemv_cuda"]["cases"], [good, {**bad, "said": said}])
        self.assertEqual(found["racecheck", "planted race"]["cases"], [{"name": "is found", "result": "passed"}])
        rows = sanitizer.table(list(found.values())).splitlines()
        cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
        self.assertEqual(cells[0], ["test", *TOOLS])
        self.assertEqual(cells[2], ["planted race", "", "1", "", ""])
        self.assertEqual(cells[3], ["vector_gemv", "2", "2", "2", "1 of 2: 1 failed"])
        self.assertEqual(
            sanitizer.left_over(list(found.values())), [f"* initcheck, vector_gemv: “two, and more”: {said}"]
        )
        # What did not finish is not something that was found.
        done = self.run_it("slow", "--tool", "memcheck", "--within", "5", "--jobs", "1", "--runs", "data/runs")
        last = json.loads((self.root / "data/runs/nvidia-h200/sanitizer.jsonl").read_text().splitlines()[-1])
        self.assertEqual([case["result"] for case in last["cases"]], ["cut off", "not run"])
        self.assertEqual(sanitizer.left_over([last]), [])
        # A GPU without a name has no folder.
        self.smi.write_text("#!/bin/sh\nexit 1\n")
        self.assert_usage_error(self.run_it("", "--runs", "data/runs"), "nvidia-smi does not say which GPU")

    def test_the_program_with_the_bundled_model(self):
        program = self.root / "build" / "chapters" / "09-qwen" / "qwen_cuda"
        program.parent.mkdir()
        program.write_text('#!/bin/sh\nif [ "$1" = quantize ]; then echo "$4" > "$3"; fi\n')
        program.chmod(0o755)
        self.tool.write_text(
            SANITIZER + 'for word; do case "$word" in *.gguf) cat "$word" >> $(dirname $0)/log ;; esac; done\n'
        )
        done = self.run_it("", "--tool", "memcheck,racecheck", "--cases", "9", "--jobs", "1", "--runs", "data/runs")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual((self.tool.parent / "log").read_text(), "Q4_0\nQ4_K_M\n" * 2)
        self.assertIn("memcheck qwen_cuda 2: passed (0 s)", done.stdout)
        found = map(json.loads, (self.root / "data/runs/nvidia-h200/sanitizer.jsonl").read_text().splitlines())
        names = [c["name"] for r in found if r["test"] == "qwen_cuda" for c in r["cases"]]
        self.assertEqual(len(names), 4)
        self.assertEqual(names[0], "the bundled model in Q4_0: a prompt, and eight tokens")
        self.assertEqual(len(self.lines(self.run_it("", "--test", "gemv", "--tool", "memcheck"))[0]), 2)

    def test_tests_are_told(self):
        for words, value in (((), "1"), (("--whole",), "")):
            done = self.run_it("env", "--tool", "memcheck", *words)
            self.assertEqual(done.returncode, 1)
            self.assertIn(f"ERROR told: '{value}'", done.stdout)
            self.assertEqual("largest shapes" in done.stdout, value == "1")

    def test_an_unseen_race_fails(self):
        self.tool.write_text(
            SANITIZER.replace("1 hazard displayed", "0 hazards displayed").replace("exit 1 ;;", "exit 0 ;;")
        )
        done = self.run_it()
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stdout.splitlines()[-1], "^4 passed, 1 failed")

    def test_what_stops_it_is_one_line(self):
        self.assert_usage_error(self.run_it("", "a", "b"), "one build folder")
        self.assert_usage_error(self.run_it("", "--limit", "x"), "--limit: 'x' is not")
        self.assert_usage_error(self.run_it("", "--frob"), "no option '--frob'")
        self.assert_usage_error(self.run_it("", "nowhere"), "no test_*_cuda in nowhere")
        self.test.write_text("#!/bin/sh\nexit 77\n")
        self.assert_usage_error(self.run_it(), "no CUDA device")


if __name__ == "__main__":
    unittest.main()
