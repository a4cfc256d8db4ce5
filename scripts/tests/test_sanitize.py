"""scripts/sanitize_gpu.sh with a stand-in for compute-sanitizer."""

from __future__ import annotations

import os
import subprocess
import unittest

from tests.support import ProjectCase

SANITIZER = """\
#!/bin/sh
# $2 is the tool. The broken kernels have a race; the rest is as FAKE says.
case "$*" in
  *--test-case=*) echo "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"; exit 1 ;;
esac
if [ "$FAKE" = mute ]; then exit 0; fi
if [ "$FAKE" = "$2" ]; then
  echo "========= Invalid __global__ read of size 4 bytes"; echo "========= ERROR SUMMARY: 3 errors"; exit 1
fi
echo "========= ERROR SUMMARY: 0 errors"
"""


class Sanitize(ProjectCase):
    def setUp(self):
        super().setUp()
        self.test = self.root / "build" / "chapters" / "test_vector_gemv_cuda"
        self.tool = self.root / "bin" / "compute-sanitizer"
        for path, text in ((self.test, "#!/bin/sh\nexit 0\n"), (self.tool, SANITIZER)):
            path.parent.mkdir(parents=True)
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

    def test_one_line_for_each_tool_and_test(self):
        done = self.run_it()
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        lines = done.stdout.splitlines()
        self.assertEqual(
            [line.split()[0] for line in lines[:-1]], ["memcheck", "racecheck", "initcheck", "synccheck", "racecheck"]
        )
        self.assertEqual(lines[-1], "5 passed, 0 failed")

    def test_an_error_fails(self):
        done = self.run_it("initcheck")
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stdout, r"initcheck +test_vector_gemv_cuda +FAILED \(exit status 1,")
        self.assertIn("Invalid __global__ read", done.stdout)
        self.assertEqual(done.stdout.splitlines()[-1], "4 passed, 1 failed")

    def test_a_tool_that_says_nothing_fails(self):
        done = self.run_it("mute")
        self.assertEqual(done.stdout.splitlines()[-1], "1 passed, 4 failed")

    def test_an_unseen_race_fails(self):
        self.tool.write_text(
            SANITIZER.replace("1 hazard displayed", "0 hazards displayed").replace("exit 1 ;;", "exit 0 ;;")
        )
        done = self.run_it()
        self.assertEqual((done.returncode, done.stdout.splitlines()[-1]), (1, "4 passed, 1 failed"))

    def test_what_stops_it_is_one_line(self):
        self.assert_usage_error(self.run_it("", "a", "b"), "at most one")
        self.assert_usage_error(self.run_it("", "nowhere"), "no test_*_cuda in nowhere")
        self.test.write_text("#!/bin/sh\nexit 77\n")
        self.assert_usage_error(self.run_it(), "no CUDA device")


if __name__ == "__main__":
    unittest.main()
