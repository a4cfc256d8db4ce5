"""The emulator's part of `run`, its device models, and readers' own files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from tests.support import ROOT, ProjectCase, made_record
from workbook import devices, emulate

EXAMPLES = ROOT / "harness" / "emulator" / "example"


def ladder(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "ladder"), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, **variables},
    )


class Registers(unittest.TestCase):
    def test_resource_usage(self):
        text = """\
Resource usage:
 Common:
  GLOBAL:0
 Function _ZN6ladder8gemv_vecILi1ELi4EEEvPKfS2_Pfiii:
  REG:40 STACK:0 SHARED:64 LOCAL:0 CONSTANT[0]:388 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function _Z9transposePKfPfi:
  REG:12 STACK:0 SHARED:4096 LOCAL:0 CONSTANT[0]:372 TEXTURE:0 SURFACE:0 SAMPLER:0
Resource usage:
 Function _Z9transposePKfPfi:
  REG:14 STACK:0 SHARED:4096 LOCAL:0 CONSTANT[0]:548 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
        found = emulate.parse_resource_usage(text)
        self.assertEqual(found, {"_ZN6ladder8gemv_vecILi1ELi4EEEvPKfS2_Pfiii": 40, "_Z9transposePKfPfi": 14})
        self.assertEqual(emulate.parse_resource_usage("no kernels here\n"), {})

    def test_names_are_those_of_the_emulator(self):
        for demangled, name in (
            ("void ladder::gemv_vec<1, 4>(float const*, float const*, float*, int)", "ladder::gemv_vec<1, 4>"),
            ("transpose(float const*, float*, int)", "transpose"),
            ("ladder::(anonymous namespace)::probe(int)", "ladder::(anonymous namespace)::probe"),
            ("void (anonymous namespace)::probe<float>(float*)", "probe<float>"),
        ):
            self.assertEqual(emulate.plain_name(demangled), name)


COUNTERS = {"sectors": 1000, "unique_bytes": 16000, "past_l1_bytes": 24000}


class Bytes(unittest.TestCase):
    def emulated(self, **more: object) -> dict:
        return {**made_record(od=10, id_=100), "executor": "emulator", "counters": COUNTERS, **more}

    def test_declared_counted_measured(self):
        record = self.emulated(bytes={"total": 8000})
        gpu = {**record, "executor": "gpu", "device": "nvidia-h200"}
        gpu["counters"] = {"sectors": 1000, "dram_read_bytes": 8800, "past_l1_bytes": 24000}
        text = emulate.bytes_report([record], [gpu])
        self.assertRegex(text, r"declared.* 0\.008\n")
        self.assertRegex(text, r"counted.* 0\.016 \(2\.00x\) +0\.024 \(3\.00x\) +0\.032 \(4\.00x\)")
        self.assertRegex(text, r"measured on nvidia-h200.* 0\.009 \(1\.10x\) +0\.024 \(3\.00x\) +0\.032 \(4\.00x\)")
        self.assertLessEqual(max(map(len, text.splitlines())), 100)

    def test_only_a_record_of_the_same_point_counts(self):
        record = self.emulated()
        other = {**record, "executor": "gpu", "device": "nvidia-h200", "shape": {"nt": 2, "od": 10, "id": 100}}
        self.assertIn("no record of a GPU's counters", emulate.bytes_report([record], [other]))
        self.assertEqual(emulate.bytes_report([made_record()], []), "")
        stale = {**record, "executor": "gpu", "device": "nvidia-h200", "source_sha256": "0" * 64}
        self.assertIn("another version of this kernel", emulate.bytes_report([record], [stale]))


class Options(ProjectCase):
    def test_only_for_the_emulator(self):
        for option in (
            ["--annotate"],
            ["--brief"],
            ["--pictures", "x"],
            ["--registers", "32"],
            ["--device-model", "x"],
        ):
            self.assert_usage_error(self.ladder("run", "fake_fast", "--on", "cpu", *option), option[0], "emulator")
        emulator = ("run", "fake_fast", "--on", "emulator")
        self.assert_usage_error(self.ladder(*emulator, "--brief", "--report"), "not both")
        self.assert_usage_error(self.ladder(*emulator, "--registers", "0"), "255")
        self.assert_usage_error(self.ladder(*emulator, "--check-only", "--annotate"), "--check-only")

    def test_files_that_are_no_source(self):
        self.assert_usage_error(self.ladder("emulate", "nothing.cu"), "no file nothing.cu")
        self.assert_usage_error(self.ladder("emulate", "chapters"), "no file")
        (self.root / "notes.md").write_text("# notes\n", encoding="utf-8")
        self.assert_usage_error(self.ladder("emulate", str(self.root / "notes.md")), ".cu")


class DeviceTable(unittest.TestCase):
    def test_every_device_is_a_model(self):
        meson = (ROOT / "harness" / "emulator" / "meson.build").read_text(encoding="utf-8")
        self.assertEqual(sorted(re.findall(r"devices/([\w-]+)\.json", meson)), sorted(devices.all_devices()))

    def test_a_device_that_the_emulator_cannot_be(self):
        with tempfile.TemporaryDirectory() as folder:
            text = (ROOT / "data" / "devices" / "nvidia-h200.json").read_text(encoding="utf-8")
            odd = Path(folder) / "odd.json"
            odd.write_text(text.replace('"warp_size": 32', '"warp_size": 64'), encoding="utf-8")
            script = [sys.executable, str(ROOT / "scripts" / "device_table.py")]
            done = subprocess.run([*script, f"{folder}/out.cpp", str(odd)], capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 2)
            self.assertIn("warp_size", done.stderr)
            self.assertFalse(Path(folder, "out.cpp").exists())


@unittest.skipUnless(
    (ROOT / "build" / "chapters" / "01-scalar-gemv" / "scalar_gemv").exists(), "nothing is built (scripts/ladder test)"
)
class ReadersFile(unittest.TestCase):
    """Real compilations, with the flags of the build that is there."""

    def test_the_example_counts_its_bank_conflicts(self):
        with tempfile.TemporaryDirectory() as folder:
            done = ladder("emulate", "--no-build", str(EXAMPLES / "first_kernel.cu"), "--pictures", folder)
            self.assertEqual(done.returncode, 0, done.stderr)
            # Reading a column of a 32x32 tile: 32 lanes, 32 words, all in one bank; 128 warps do it.
            self.assertRegex(done.stdout, r"first_kernel\.cu:\d+ +load +128 +32\.00 +1\.00 +3,968 ")
            self.assertIn("checks: nothing found", done.stdout)
            self.assertLessEqual(max(map(len, done.stdout.splitlines())), 100)
            self.assertEqual(len(list(Path(folder).glob("transpose-line*.svg"))), 4)

    def test_the_models_and_registers_reach_the_report(self):
        example = str(EXAMPLES / "first_kernel.cu")
        done = ladder("emulate", "--no-build", example, "--device-model", "nvidia-gb10", "--registers", "64")
        # 1024 threads of 64 registers take all 65536 of an SM; a GB10 has no room for a second block anyway.
        self.assertIn("at most 1 blocks, 32 of 48 warps", done.stdout)
        self.assertIn("64 registers a thread", done.stdout)
        done = ladder("emulate", "--no-build", example, "--device-model", "h300")
        self.assertEqual((done.returncode, len(done.stderr.splitlines())), (2, 1), done.stderr)
        self.assertIn("nvidia-geforce-rtx-4090", done.stderr)
        done = ladder("emulate", "--no-build", example, LADDER_EMULATOR_REGISTERS="many")
        self.assertEqual((done.returncode, len(done.stderr.splitlines())), (2, 1), done.stderr)

    def test_every_mistake_is_found(self):
        done = ladder("emulate", "--no-build", str(EXAMPLES / "mistakes.cu"))
        self.assertEqual(done.returncode, 0, done.stderr)
        for check in (
            "out of bounds",
            "unwritten memory",
            "misaligned access",
            "race in shared memory",
            "race between blocks",
            "dynamic shared memory overrun",
            "barrier",
            "warp collective",
        ):
            self.assertRegex(done.stdout, rf"(?m)^  {check}( \(\d+ times\))?: ")

    def test_a_program_of_ones_own(self):
        with tempfile.TemporaryDirectory() as folder:
            mine = Path(folder) / "mine.cu"
            mine.write_text("#include <cstdio>\nint main(int c, char** v) { std::puts(v[c - 1]); return c; }\n")
            done = ladder("emulate", "--no-build", str(mine), "--", "--brief", "last")
            self.assertEqual((done.returncode, done.stdout), (3, "last\n"), done.stderr)
            mine.write_text("int main() { return nothing; }\n")
            done = ladder("emulate", "--no-build", str(mine))
            self.assertEqual(done.returncode, 1)
            self.assertIn("mine.cu:1:", done.stderr)
            self.assertIn("does not compile", done.stderr)


if __name__ == "__main__":
    unittest.main()
