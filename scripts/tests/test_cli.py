"""The command line as a user meets it, with a stand-in for a chapter binary."""

from __future__ import annotations

import json
import sys
import unittest
from pathlib import Path

from tests.support import DEVICE, ProjectCase, made_record
from workbook.sources import hash_of


class Errors(ProjectCase):
    def test_command_line_mistakes_are_one_line(self):
        for args, word in (
            ((), "COMMAND"),
            (("frob",), "frob"),
            (("run",), "ID|CHAPTER"),
            (("run", "fake_fast", "--nt", "0"), "--nt"),
            (("run", "fake_fast", "--nt", "1,x"), "--nt"),
            (("run", "fake_fast", "--mode", "warm"), "warm"),
            (("run", "fake_fast", "--on", "tpu"), "tpu"),
            (("run", "fake_fast", "--od", "3"), "--od and --id"),
            (("run", "fake_fast", "--od", "3", "--id", "4", "--layer", "7b.ffn_down"), "not both"),
            (("run", ","), "name a rung"),
            (("counters",), "ID|CHAPTER"),
            (("counters", "fake_fast", "--nt", "0"), "--nt"),
            (("counters", "fake_fast", "--mode", "hot"), "--mode"),
            (("plot",), "roofline"),
            (("plot", "pie"), "pie"),
            (("compare", "fake_fast"), "B"),
            (("compare", "fake_fast", "fake_fast"), "different"),
        ):
            self.assert_usage_error(self.ladder(*args), word)

    def test_wrong_names_say_what_there_is(self):
        self.build()
        run = ("--no-build",)
        self.assert_usage_error(self.ladder("run", "fake_fats", *run), "did you mean fake_fast?", "fake_slow")
        self.assert_usage_error(self.ladder("run", "43", *run), '"43"', "42-fake")
        self.assert_usage_error(self.ladder("compare", "fake_fast", "nothing", *run), '"nothing"')
        self.assert_usage_error(self.ladder("run", "fake_fast", "--layer", "8b.attn", *run), "8b.attn")
        self.assert_usage_error(self.ladder("run", "fake_fast", "--on", "gpu", *run), "does not run on gpu")
        self.assert_usage_error(self.ladder("run", "42", "--on", "gpu", *run), "--on gpu", "CUDA")

    def test_wrong_files(self):
        self.build()
        self.assert_usage_error(self.ladder("run", "fake_fast", "--no-build", "--json", "no/such/file"), "no/such/file")
        self.assert_usage_error(self.ladder("run", "fake_fast", "--no-build", "--json", "build"), "folder")
        self.assert_usage_error(self.ladder("run", "fake_fast", "--build-dir", "nowhere"), "nowhere")

    def test_nothing_built(self):
        (self.root / "build").mkdir()
        self.assert_usage_error(self.ladder("run", "fake_fast", "--no-build"), "not built", "42-fake")
        self.assert_usage_error(self.ladder("run", "42", "--no-build"), "not built")

    def test_a_broken_binary_is_one_line(self):
        binary = self.build()
        binary.write_text("#!/bin/sh\nkill -SEGV $$\n")
        done = self.ladder("run", "42", "--no-build")
        self.assertEqual(done.returncode, 1)
        self.assertNotIn("Traceback", done.stderr)

    def test_help_everywhere(self):
        commands = ["demo", "test", "doctor", "list", "run", "counters", "plot", "compare", "record", "engine", "weave"]
        for command in ([], *([name] for name in commands)):
            done = self.ladder(*command, "--help")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("usage: scripts/ladder", done.stdout)


class Run(ProjectCase):
    def records(self, text: str) -> list[dict]:
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def test_records_are_annotated(self):
        self.build()
        done = self.ladder("run", "fake_fast", "--no-build", "--layer", "7b.ffn_down", "--json", "-")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("fake_fast ok", done.stdout)
        (record,) = self.records(done.stdout)
        body = "void fake_fast(const float* w, float* out) {\n  out[0] = w[0];\n}\n"
        self.assertEqual(record["source_sha256"], hash_of(body))
        self.assertEqual(record["command"], "scripts/ladder run fake_fast --layer 7b.ffn_down")
        self.assertRegex(record["date"], r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")
        self.assertEqual(record["gbps"], made_record()["gbps"])

    def test_only_the_standard_library_is_needed(self):
        self.build()
        done = self.ladder("run", "42", "--no-build", "--json", "-", python=("-S", "-E"))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual([r["rung"] for r in self.records(done.stdout)], ["fake_slow", "fake_fast"])

    def test_a_chapter_has_several_names(self):
        self.build()
        for name in ("42", "42-fake", "fake"):
            self.assertEqual(self.ladder("run", name, "--no-build").returncode, 0, name)

    def test_a_file_is_appended_to(self):
        self.build()
        for _ in range(2):
            done = self.ladder("run", "fake_fast,fake_slow", "--no-build", "--json", "out.jsonl")
            self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(len(self.records((self.root / "out.jsonl").read_text())), 4)

    def test_the_binarys_exit_status_is_kept(self):
        self.build()
        self.assertEqual(self.ladder("run", "fake_fast", "--no-build", "--threads", "99").returncode, 1)

    def test_record_adds_to_the_devices_file(self):
        self.build()
        done = self.ladder("record", "fake_fast", "--no-build")
        self.assertEqual(done.returncode, 0, done.stderr)
        path = self.root / "data" / "runs" / DEVICE / "42-fake.jsonl"
        first = path.read_text()
        (record,) = self.records(first)
        self.assertEqual(record["command"], "scripts/ladder record fake_fast")
        self.assertEqual(self.ladder("record", "--no-build").returncode, 0)
        self.assertTrue(path.read_text().startswith(first))
        self.assertEqual(len(self.records(path.read_text())), 3)

    def test_an_unsound_record_is_refused(self):
        binary = self.build()
        binary.write_text(binary.read_text().replace('"gbps": ', '"speed": '))
        done = self.ladder("record", "fake_fast", "--no-build")
        self.assertEqual(done.returncode, 2)
        self.assertIn("speed is not a field", done.stderr)
        self.assertFalse((self.root / "data" / "runs").exists())

    def test_compare_runs_the_pair(self):
        self.build()
        done = self.ladder("compare", "fake_fast", "fake_slow", "--no-build", "--json", "-")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual([r["rung"] for r in self.records(done.stdout)], ["fake_fast", "fake_slow"])

    def test_a_missing_anchor_is_one_line(self):
        self.build()
        source = self.root / "chapters" / "42-fake" / "fake.cu"
        source.write_text(source.read_text().replace("fake_fast\n", "renamed\n"))
        self.assert_usage_error(self.ladder("run", "fake_fast", "--no-build", "--json", "-"), 'no anchor "fake_fast"')


QWEN = '''\
#!{python}
"""Stands in for the final program: notes its arguments, and answers `synthetic` and `bench`."""
import json, sys
from pathlib import Path

me, args = Path(sys.argv[0]), sys.argv[1:]
with open(me.parent / "calls", "a") as out:
    out.write(" ".join([me.name, args[0]]) + "\\n")
if args[0] == "synthetic":
    Path(args[-1]).write_bytes(b"GGUF")
if args[0] == "explain":
    print(json.dumps({{"size_label": "0.5B", "file_type": "Q4_0", "bytes_per_token": 346206720}}))
if args[0] == "run":
    timings = {{"load_bytes": 4, "load_seconds": 0.5}}
    print(json.dumps({{"device": "NVIDIA H200", "timings": timings}}))
if args[0] == "bench":
    record = {{"schema": 1, "rung": "engine", "executor": args[args.index("--on") + 1], "device": "{device}",
              "model": {{"size": "0.5B", "file_type": "Q4_0", "bytes_per_token": 346206720}}, "test": "tg8",
              "params": {{"threads": 2}}, "tokens_per_s": {{"mean": 10.0, "stddev": 0.5, "samples": [9.5, 10.5]}}}}
    print(json.dumps(record))
'''


class Engine(ProjectCase):
    def build_qwen(self, *names: str) -> Path:
        """Put stand-ins where Meson would put the final program; returns the file in which they note their calls."""
        folder = self.root / "build" / "chapters" / "09-qwen"
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).write_text(QWEN.format(python=sys.executable, device=DEVICE), encoding="utf-8")
            (folder / name).chmod(0o755)
        return folder / "calls"

    def engine(self, *args: str):
        return self.ladder("engine", "0.5b:Q4_0", "--no-build", "-p", "0", "-n", "8", *args)

    def test_the_cuda_program_alone_does_for_the_gpu(self):
        calls = self.build_qwen("qwen_cuda")
        done = self.engine("--on", "gpu", "--runs", "data/runs")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(calls.read_text().splitlines(), ["qwen_cuda synthetic", "qwen_cuda bench"])
        (record,) = map(json.loads, (self.root / "data" / "runs" / DEVICE / "09-qwen.jsonl").read_text().splitlines())
        self.assertEqual(record["executor"], "gpu")
        self.assertEqual(record["command"], "scripts/ladder engine 0.5b:Q4_0 --on gpu -p 0 -n 8 -d 0 -r 5")

    def test_loading(self):
        calls = self.build_qwen("qwen_cuda")
        done = self.engine("--on", "gpu", "--load", "-r", "2", "--runs", "data/runs")
        if "does not leave the page cache" in done.stderr:
            self.skipTest("temporary files are in memory")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(calls.read_text().splitlines()[1:], ["qwen_cuda explain", *["qwen_cuda run"] * 5])
        lines = (self.root / "data" / "runs" / "nvidia-h200" / "09-qwen.jsonl").read_text().splitlines()
        cached, cold = map(json.loads, lines)
        self.assertEqual((cached["test"], cached["load"]), ("load cached", {"bytes": 4, "seconds": 0.5}))
        self.assertEqual((cold["test"], cold["load"]["seconds"]), ("load cold", 0.5))
        self.assertGreater(cold["load"]["read_seconds"], 0)
        self.assertEqual(cold["command"], "scripts/ladder engine 0.5b:Q4_0 --on gpu --load -r 2")
        self.assertIn("0.00 GB in 0.50 s, reading alone 0.00 s", done.stdout)
        self.assert_usage_error(self.engine("--load"), "--load", "--on gpu")

    def test_the_host_program_comes_first(self):
        calls = self.build_qwen("qwen", "qwen_cuda")
        for on in ("gpu", "cpu"):
            self.assertEqual(self.engine("--on", on).returncode, 0)
        self.assertEqual(calls.read_text().splitlines(), ["qwen synthetic", "qwen bench", "qwen bench"])

    def test_what_is_not_built_is_named(self):
        self.build_qwen("qwen_cuda")
        self.assert_usage_error(self.engine("--on", "cpu"), "09-qwen/qwen,", "--on cpu", "qwen_cuda is there")
        self.assert_usage_error(self.engine(), "09-qwen/qwen,", "without --on", "--on gpu")
        (self.root / "build" / "chapters" / "09-qwen" / "qwen_cuda").unlink()
        self.assert_usage_error(self.engine("--on", "gpu"), "09-qwen/qwen and no qwen_cuda", "scripts/ladder test")


class Listing(ProjectCase):
    def test_without_a_build_the_sources_are_read(self):
        done = self.ladder("list")
        self.assertEqual(done.returncode, 0, done.stderr)
        for words in ("fake_fast", "the quick one", "not built: 42-fake"):
            self.assertIn(words, done.stdout)

    def test_with_a_build_everything_is_known(self):
        self.build()
        done = self.ladder("list")
        for words in ("fake_slow", "cpu emulator", "ffn_down 3584x18944", "executors that work here: cpu, emulator"):
            self.assertIn(words, done.stdout)
        self.assertNotIn("not built", done.stdout)
        lines = [json.loads(line) for line in self.ladder("list", "--json").stdout.splitlines()]
        self.assertEqual(
            [line.get("rung", line.get("layer")) for line in lines], ["fake_slow", "fake_fast", "7b.ffn_down"]
        )

    def test_doctor_always_answers(self):
        done = self.ladder("doctor")
        self.assertEqual(done.returncode, 0, done.stderr)
        for words in ("C++20 compiler", "CUDA compiler", "GPU", "what will run here"):
            self.assertIn(words, done.stdout)


if __name__ == "__main__":
    unittest.main()
