"""Hardware counters: the profiler's table, its refusals, and the command with a stand-in for the profiler."""

from __future__ import annotations

import argparse
import io
import json
import sys
import unittest
from contextlib import redirect_stderr
from unittest import mock

from tests.support import ProjectCase, made_record
from workbook import counters, records, setup
from workbook.common import StepFailed, UserError

GPU = "made-up-gpu"
COLUMNS = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size"]
COLUMNS += ["Grid Size", "Device", "CC"]
METRICS = {
    "dram__bytes_read.sum": ("byte", "3,219,712"),
    "dram__bytes_write.sum": ("byte", "0"),
    "gpu__time_duration.sum": ("ns", "5,472"),
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum": ("", "3"),
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum": ("", "4"),
    "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum": ("", "3,587"),
    "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum": ("", "3,588"),
    "l1tex__t_requests_pipe_lsu_mem_global_op_atom.sum": ("request", "0"),
    "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum": ("request", "12,544"),
    "l1tex__t_requests_pipe_lsu_mem_global_op_red.sum": ("request", "0"),
    "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum": ("request", "896"),
    "l1tex__t_sectors_pipe_lsu_mem_global_op_atom.sum": ("sector", "0"),
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum": ("sector", "200,704"),
    "l1tex__data_pipe_lsu_wavefronts.sum": ("", "827,973"),
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld_lookup_hit.sum": ("sector", "50,176"),
    "l1tex__t_sectors_pipe_lsu_mem_global_op_red.sum": ("sector", "0"),
    "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum": ("sector", "896"),
    "launch__occupancy_limit_blocks": ("block", "32"),
    "launch__occupancy_limit_registers": ("block", "8"),
    "launch__occupancy_limit_shared_mem": ("block", "100"),
    "launch__occupancy_limit_warps": ("block", "8"),
    "launch__registers_per_thread": ("register/thread", "32"),
    "lts__t_sectors.sum": ("sector", "253,104"),
    "lts__t_sectors_srcunit_tex.sum": ("sector", "151,424"),
    "memory_l1_wavefronts_shared": ("", "7,168"),
    "memory_l1_wavefronts_shared_ideal": ("", "7,168"),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("%", "37.42"),
    "smsp__sass_inst_executed_op_shared_ld.sum": ("inst", "3,584"),
    "smsp__sass_inst_executed_op_shared_st.sum": ("inst", "3,584"),
    "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum": ("inst", "802,816"),
}


def table(metrics: dict[str, tuple[str, str]], kernel: str = "gemv_vec<1, 4>", launches: int = 1) -> str:
    """What ncu writes to its log for one launch, or several."""
    row = (
        f'"4711","vector_gemv_cuda","127.0.0.1","void ladder::{kernel}(const float *, const float *, float *, int)",'
        '"1","13","(256, 1, 1)","(448, 1, 1)","0","9.0"'
    )
    values = "".join(f',"{value}"' for _, value in metrics.values())
    return "\n".join(
        [
            "==PROF== Connected to process 4711 (vector_gemv_cuda)",
            f'==PROF== Profiling "{kernel}" - 0: 0%....50%....100% - 11 passes',
            "==PROF== Disconnected from process 4711",
            ",".join(f'"{name}"' for name in (*COLUMNS, *metrics)),
            ",".join(['""'] * len(COLUMNS)) + "".join(f',"{unit}"' for unit, _ in metrics.values()),
            *(f'"{i}",{row}{values}' for i in range(launches)),
            "",
        ]
    )


def profiler() -> counters.Profiler:
    return counters.Profiler(setup.Tool("ncu", "ncu 2025.3.1"))


class Table(unittest.TestCase):
    def made(self, **changed: tuple[str, str]) -> tuple[dict, str]:
        """The counters of the table above, with some cells changed, and what was said about them."""
        (launch,) = counters.parse_raw(table({**METRICS, **changed}))
        said = io.StringIO()
        with redirect_stderr(said):
            made = profiler().counters(launch)
        return made, said.getvalue()

    def test_every_metric_asked_for_is_in_the_sample(self):
        self.assertEqual(sorted(profiler().asked()), sorted(METRICS))

    def test_names_and_sums(self):
        made, said = self.made()
        self.assertEqual(said, "")
        self.assertEqual(
            made,
            {
                "requests": 12544 + 896,
                "sectors": 200704 + 896,
                "sectors_per_request": 15,
                "past_l1_bytes": 151424 * 32,
                "load_requests": 12544,
                "load_sectors": 200704,
                "store_requests": 896,
                "store_sectors": 896,
                "shared_requests": 7168,
                "bank_passes": 7175,
                "bank_conflicts": 7,
                "fma_f32": 802816,
                "shared_wavefronts_by_address": 7168,
                "shared_wavefronts_ideal": 7168,
                "l1_data_passes": 827973,
                "load_l1_hit_sectors": 50176,
                "l2_sectors": 253104,
                "dram_read_bytes": 3219712,
                "dram_write_bytes": 0,
                "registers_per_thread": 32,
                "occupancy_limit_blocks": 32,
                "occupancy_limit_registers": 8,
                "occupancy_limit_shared_mem": 100,
                "occupancy_limit_warps": 8,
                "occupancy_percent": 37.42,
                "profiled_time_ns": 5472,
            },
        )

    def test_the_record_is_sound_without_a_time(self):
        record = made_record(executor="gpu", device=GPU, counters=self.made()[0])
        for name in ("time_ns", "mode", "gbps", "gops", "percent_of_roof", "bound", "valid", "roof", "params"):
            del record[name]
        self.assertEqual(records.problems(record), [])
        self.assertTrue(records.only_counts(record))

    def test_a_kernel_without_shared_memory_has_no_such_entries(self):
        none = {name: ("", "0") for name in METRICS if "shared" in name and not name.startswith("launch")}
        made, _ = self.made(**none)
        self.assertFalse([name for name in made if "bank" in name or name.startswith("shared")])
        self.assertIn("occupancy_limit_shared_mem", made)
        self.assertIn("dram_write_bytes", made, "a zero that was measured stays")

    def test_units_are_converted_or_refused(self):
        cells = {"dram__bytes_read.sum": ("Mbyte", "3.219712"), "gpu__time_duration.sum": ("us", "5.472")}
        made, _ = self.made(**cells)
        self.assertEqual((made["dram_read_bytes"], made["profiled_time_ns"]), (3219712, 5472))
        for name, unit in (("dram__bytes_read.sum", "sector"), ("lts__t_sectors.sum", "Ksector")):
            with self.assertRaisesRegex(StepFailed, f"{name} in {unit}"):
                self.made(**{name: (unit, "1")})

    def test_a_value_that_is_not_there_leaves_its_counter_out(self):
        for cell in ("n/a", "nan", ""):
            made, said = self.made(**{"l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum": ("sector", cell)})
            self.assertEqual({"sectors", "sectors_per_request", "store_sectors"} & set(made), set())
            self.assertIn("load_sectors", made)
            self.assertIn("store_sectors is left out", said)

    def test_what_is_no_table(self):
        self.assertEqual(counters.parse_raw("==ERROR== nothing\n"), [])
        self.assertEqual(counters.parse_raw(""), [])
        self.assertEqual(len(counters.parse_raw(table(METRICS, launches=2))), 2)
        lines = table(METRICS).splitlines()
        without_units = "\n".join(line for line in lines if not line.startswith('"",'))
        with self.assertRaisesRegex(StepFailed, "no line of units"):
            counters.parse_raw(without_units + "\n" + lines[-1])
        with self.assertRaisesRegex(StepFailed, "cells"):
            counters.parse_raw(table(METRICS).rstrip() + ',"1"\n')


class Refusals(unittest.TestCase):
    def test_unknown_metrics_are_found_by_name_or_pattern(self):
        for line in (
            "==ERROR== Failed to find metric lts__t_sectors.sum",
            "==ERROR== Failed to find metric regex:^lts__t_sectors\\.(sum|min|max|avg|pct|ratio|max_rate)$",
            "==ERROR== Failed to access the following 1 metrics: lts__t_sectors.sum",
        ):
            self.assertEqual(profiler()._unknown(line), {"lts__t_sectors.sum"}, line)
        self.assertEqual(profiler()._unknown("==PROF== lts__t_sectors.sum\n==ERROR== no metric of that kind"), set())

    def test_a_second_spelling_is_tried(self):
        mine = profiler()
        mine.refused.add("dram__bytes_read.sum")
        self.assertIn("dram__bytes_op_read.sum", mine.asked())
        (launch,) = counters.parse_raw(table({**METRICS, "dram__bytes_op_read.sum": ("byte", "5")}))
        self.assertEqual(mine.counters(launch)["dram_read_bytes"], 5)

    def test_reasons_are_one_line(self):
        for messages, kind, words in (
            ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n", UserError, "run as root"),
            (
                "==ERROR== An error was reported by the counter measurement library:\n"
                "==ERROR== Failed to initialize the profiler: LibraryNotLoaded.\n"
                "==ERROR== The application returned an error code (9).\n",
                UserError,
                "LibraryNotLoaded",
            ),
            (
                "7 check(s) failed\n==ERROR== The application returned an error code (1).\n",
                StepFailed,
                r"7 check\(s\) failed",
            ),
            ("==WARNING== No kernels were profiled.\n", StepFailed, "no second launch of a kernel named gemv_vec"),
        ):
            with self.assertRaisesRegex(kind, words) as caught:
                raise counters._explained(messages, "gemv_vec", 0, 0)
            self.assertNotIn("\n", str(caught.exception))


NCU = '''\
#!{python}
"""Stands in for ncu: runs the program, then writes a table with what was asked for."""
import json, os, re, subprocess, sys

args = sys.argv[1:]
if args == ["--version"]:
    print("NVIDIA (R) Nsight Compute Command Line Profiler\\nVersion 2025.3.1.0 (build 36398880) (public-release)")
    sys.exit(0)
options = {{}}
while args and args[0].startswith("-"):
    name = args.pop(0)
    options[name] = args.pop(0) if name != "--csv" else ""
log = open(options["--log-file"], "w")
mode = os.environ.get("FAKE_NCU", "")
if mode == "permission":
    log.write("==PROF== Connected to process 1\\n==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\\n")
    sys.exit(1)
asked = options["--metrics"].split(",")
if mode in asked:
    log.write("==ERROR== Failed to find metric " + mode + "\\n")
    sys.exit(1)
done = subprocess.run(args)
if done.returncode:
    log.write("==ERROR== The application returned an error code (%d).\\n" % done.returncode)
    sys.exit(done.returncode)
known = json.load(open({sample!r}))
with open({calls!r}, "a") as calls:
    calls.write(json.dumps([options, args]) + "\\n")
pattern = options["--kernel-name"].partition(":")[2]
if not re.search(pattern, "fake_fast") and not re.search(pattern, "fake_slow"):
    log.write("==WARNING== No kernels were profiled.\\n")
    sys.exit(0)
log.write('"ID","Kernel Name"' + "".join(',"%s"' % name for name in asked) + "\\n")
log.write('"",""' + "".join(',"%s"' % known[name][0] for name in asked) + "\\n")
log.write('"0","void fake(float const*)"' + "".join(',"%s"' % known[name][1] for name in asked) + "\\n")
'''


class Command(ProjectCase):
    def setUp(self):
        super().setUp()
        host = self.build()
        # The CUDA binary: another device, no times, and a variant without code of its own.
        text = host.read_text(encoding="utf-8")
        text = text.replace('["emulator", "cpu"]', '["gpu"]').replace('"--on", "cpu"', '"--on", "gpu"')
        text = text.replace("made-up-cpu-2c", GPU).replace(
            '["fake_slow", "fake_fast"]', '["fake_slow", "fake_fast_x4"]'
        )
        timed = '("time_ns", "mode", "gbps", "gops", "percent_of_roof", "bound", "valid", "roof", "params")'
        text = text.replace(
            "        out.write(",
            f"        record = {{k: v for k, v in record.items() if k not in {timed}}}\n        out.write(",
        )
        self.cuda = host.with_name("fake_cuda")
        self.cuda.write_text(text, encoding="utf-8")
        self.cuda.chmod(0o755)
        self.calls = self.root / "calls.jsonl"
        tool = self.root / "bin" / "ncu"
        tool.parent.mkdir()
        sample = self.root / "sample.json"
        sample.write_text(json.dumps(METRICS), encoding="utf-8")
        tool.write_text(NCU.format(python=sys.executable, sample=str(sample), calls=str(self.calls)), encoding="utf-8")
        tool.chmod(0o755)

    def count(self, *args: str, fake: str = "", python: tuple[str, ...] = ()):
        path = f"{self.root / 'bin'}:/usr/bin:/bin"
        return self.ladder("counters", *args, "--no-build", python=python, PATH=path, FAKE_NCU=fake)

    def recorded(self) -> list[dict]:
        path = self.root / "data" / "runs" / GPU / "42-fake.jsonl"
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []

    def test_each_rung_and_shape_is_a_record(self):
        done = self.count("42", "--layer", "7b.ffn_down", "--nt", "1,8", python=("-S", "-E"))
        self.assertEqual(done.returncode, 0, done.stderr)
        found = self.recorded()
        self.assertEqual(
            [(r["rung"], r["shape"]["nt"]) for r in found],
            [("fake_slow", 1), ("fake_slow", 8), ("fake_fast_x4", 1), ("fake_fast_x4", 8)],
        )
        for record in found:
            self.assertEqual(records.problems(record, committed=True), [])
            self.assertFalse({"time_ns", "mode"} & set(record))
            self.assertEqual(record["counters"]["load_requests"], 12544)
            self.assertIn("ncu 2025.3.1", record["toolchain"])
            self.assertEqual(record["command"], "scripts/ladder counters 42 --layer 7b.ffn_down --nt 1,8")
        self.assertIn("4 records added to data/runs/made-up-gpu/42-fake.jsonl", done.stderr)
        self.assertEqual(done.stdout.count("15.00 sectors each"), 4)

    def test_only_the_rungs_second_launch_is_profiled(self):
        self.assertEqual(self.count("fake_fast_x4", "--nt", "8").returncode, 0)
        ((options, call),) = [json.loads(line) for line in self.calls.read_text().splitlines()]
        self.assertEqual(options["--kernel-name"], "regex:^fake_fast$")
        self.assertEqual((options["--launch-skip"], options["--launch-count"]), ("1", "1"))
        self.assertEqual((options["--clock-control"], options["--cache-control"]), ("none", "all"))
        self.assertEqual(call[1:], ["--rung", "fake_fast_x4", "--layer", "7b.ffn_down", "--nt", "8", "--check-only"])

    def test_a_metric_that_ncu_does_not_know_is_left_out(self):
        done = self.count("fake_slow", "--nt", "1,8", fake="lts__t_sectors.sum")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stderr.count("l2_sectors is left out: this ncu does not know lts__t_sectors.sum"), 1)
        for record in self.recorded():
            self.assertNotIn("l2_sectors", record["counters"])
            self.assertIn("past_l1_bytes", record["counters"])

    def test_mistakes_and_refusals_are_one_line(self):
        self.assert_usage_error(self.count("fake_slow", fake="permission"), "ERR_NVGPUCTRPERM", "root")
        self.assert_usage_error(self.count("fake_slow", "--layer", "8b.attn"), "8b.attn")
        self.assert_usage_error(self.count("fake_fast"), "fake_fast_x4")
        self.assert_usage_error(self.count("nothing"), '"nothing"')
        self.assert_usage_error(self.count("fake_slow", "--od", "3"), "--od and --id")
        self.cuda.unlink()
        self.assert_usage_error(self.count("42"), "need a GPU")
        self.assertEqual(self.recorded(), [])

    def test_without_the_profiler(self):
        args = argparse.Namespace(target=["42"], layer=None, od=None, id=None)
        with (
            mock.patch.object(setup, "ncu", return_value=None),
            self.assertRaisesRegex(UserError, r"no Nsight Compute \(ncu\)"),
        ):
            counters.command_counters(args)

    def test_a_failed_check_is_not_counted(self):
        self.cuda.write_text(
            self.cuda.read_text().replace('sys.exit(int(value("--threads", "0")) == 99)', "sys.exit(1)")
        )
        done = self.count("fake_slow")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertEqual(len(done.stderr.strip().splitlines()), 2, done.stderr)
        self.assertIn("was not counted", done.stderr)
        self.assertEqual(self.recorded(), [])


if __name__ == "__main__":
    unittest.main()
