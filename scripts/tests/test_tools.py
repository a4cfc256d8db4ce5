"""Counting test results, the set-up stamp, and the parts of building that need no compiler."""

from __future__ import annotations

import re
import unittest
from pathlib import Path
from unittest import mock

from tests.support import ROOT
from workbook import build, run, setup, testing


class Counting(unittest.TestCase):
    def cpp(self, **test: object) -> testing.Tally:
        tally = testing.Tally()
        testing.add_cpp_result(tally, test)
        return tally

    def test_doctest_cases_are_counted(self):
        text = "[doctest] test cases:  7 |  6 passed | 1 failed | 2 skipped\n"
        self.assertEqual(build.doctest_counts(text), (6, 1, 2))
        self.assertIsNone(build.doctest_counts("nothing"))
        tally = self.cpp(name="a", result="FAIL", stdout=text, returncode=1)
        self.assertEqual((tally.passed, tally.failed, len(tally.skipped)), (6, 1, 2))

    def test_a_test_without_counts_is_one(self):
        self.assertEqual(
            self.cpp(name="a", result="OK", stdout="", returncode=0).closing(), "1 passed, 0 failed, 0 skipped"
        )
        self.assertEqual(self.cpp(name="a", result="TIMEOUT", stdout="").closing(), "0 passed, 1 failed, 0 skipped")

    def test_a_crash_after_passing_cases_fails(self):
        text = "[doctest] test cases: 3 | 3 passed | 0 failed | 0 skipped\n"
        self.assertEqual(self.cpp(name="a", result="FAIL", stdout=text, returncode=-11).failed, 1)

    def test_a_skip_keeps_its_reason(self):
        tally = self.cpp(name="matmul-ladder:gpu", result="SKIP", stdout="skipped: no CUDA device\n", returncode=77)
        self.assertEqual((tally.passed, tally.skipped), (0, ["gpu: no CUDA device"]))

    def test_unittest_output_is_counted(self):
        text = (
            "test_a (x.A.test_a) ... ok\n"
            "test_b (x.A.test_b) ... skipped 'no Matplotlib'\n"
            "test_c (x.A.test_c) ... FAIL\n"
            "FAIL: test_c (x.A.test_c)\n"
            "Ran 3 tests in 0.1s\n"
        )
        tally = testing.Tally()
        testing.add_python_result(tally, text, 1)
        self.assertEqual(tally.closing(), "1 passed, 1 failed, 1 skipped")
        self.assertEqual(tally.skipped, ["python: test_b: no Matplotlib"])

    def test_a_suite_that_cannot_start_fails(self):
        tally = testing.Tally()
        testing.add_python_result(tally, "No module named unittest", 1)
        self.assertEqual(tally.failed, 1)


class Setup(unittest.TestCase):
    def test_pins_are_exact(self):
        names = set()
        for line in (ROOT / "scripts" / "requirements.txt").read_text().splitlines():
            text = line.partition("#")[0].strip()
            if text:
                pin = re.fullmatch(r'([a-z-]+)==\d[\w.]*(\s*;\s*python_version\s*[<>]=?\s*"3\.\d+")?', text)
                self.assertTrue(pin, line)
                names.add(pin[1])
        self.assertEqual(names, {"meson", "ninja", "numpy", "matplotlib", "cogapp", "ruff", "gguf", "tokenizers"})

    def test_a_changed_pin_makes_the_stamp_stale(self):
        with mock.patch.object(setup, "read_text", return_value="meson==1\n"):
            one = setup._stamp()
        with mock.patch.object(setup, "read_text", return_value="meson==2\n"):
            self.assertNotEqual(one, setup._stamp())

    def test_options_for_meson(self):
        self.assertEqual(setup.Libraries(None, True).meson_options(), ["-Dboost_prefix=", "-Dtests=enabled"])
        self.assertEqual(setup.Libraries(Path("/p"), False).meson_options(), ["-Dboost_prefix=/p", "-Dtests=disabled"])

    def test_without_root_nothing_is_installed_unasked(self):
        with (
            mock.patch.object(setup, "is_root", return_value=False),
            mock.patch.object(setup, "is_terminal", return_value=False),
            mock.patch.object(setup, "is_debian", return_value=True),
            mock.patch.object(setup.subprocess, "run") as ran,
        ):
            self.assertFalse(setup.try_install(["g++"], "needed"))
            with self.assertRaisesRegex(setup.UserError, "run: sudo apt-get install python3-venv"):
                setup.install_packages(["python3-venv"], "needed")
        ran.assert_not_called()

    def test_a_library_that_cannot_be_had_is_named(self):
        for library in setup.WRAPPED:
            wrap = ROOT / "harness" / "subprojects" / f"{library.name}.wrap"
            self.assertRegex(wrap.read_text(), r"source_hash = [0-9a-f]{64}\n")
            with (
                mock.patch.object(setup.Wrapped, "on_system", return_value=False),
                mock.patch.object(setup.Wrapped, "is_fetched", return_value=False),
                mock.patch.object(setup, "is_debian", return_value=True),
                mock.patch.object(setup, "say"),
                mock.patch.object(setup, "capture", return_value=(1, "", "")) as ran,
                self.assertRaisesRegex(setup.UserError, f"{library.name}.wrap.*sudo apt-get install {library.package}"),
            ):
                setup.fetch(library)
            ran.assert_called_once()

    def test_nothing_is_fetched_that_is_there(self):
        for there in ("on_system", "is_fetched"):
            with (
                mock.patch.object(setup.Wrapped, "on_system", return_value=there == "on_system"),
                mock.patch.object(setup.Wrapped, "is_fetched", return_value=there == "is_fetched"),
                mock.patch.object(setup, "capture") as ran,
            ):
                setup.fetch(setup.UTF8PROC)
            ran.assert_not_called()


class Clocks(unittest.TestCase):
    def test_busy_samples_and_reasons(self):
        text = "1980, 3201, 0x0, 0\n1965, 3201, 0x0000000000000004, 99\n1980, 3201, 0x0000000000000000, 98\n"
        found = run._clock_summary(text)
        self.assertEqual((found["sm_mhz_min"], found["sm_mhz_max"], found["memory_mhz"]), (1965, 1980, 3201))
        self.assertEqual((found["throttled"], found["throttle_reasons"]), (True, "power"))

    def test_nothing_seen_says_nothing(self):
        self.assertEqual(run._clock_summary("N/A, N/A, N/A, N/A\n"), {})


if __name__ == "__main__":
    unittest.main()
