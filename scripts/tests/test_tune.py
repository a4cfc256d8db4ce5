"""Gates from times: where one kernel overtakes another, what goes into the file, and that the program reads it."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import os
import re
import stat
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from tests.support import ROOT, has_package
from tests.test_qwen import MODEL, QWEN, missing
from workbook import ab, cli, records, tune
from workbook.common import UserError


def record(rung: str, type_: str, od: int, id_: int, nt: int, ns: float, **more: object) -> dict:
    return {
        "schema": 1,
        "rung": rung,
        "executor": "gpu",
        "device": "nvidia-test",
        "type": type_,
        "shape": {"nt": nt, "od": od, "id": id_},
        "mode": "cold",
        "time_ns": {"median": ns, "q1": ns, "q3": ns, "n": 9},
        "check": {"max_error_over_bound": 0.1},
        "date": "2026-01-02T03:04:05Z",
        "toolchain": "none",
        "command": "made up",
        "source_sha256": "0" * 64,
        **more,
    }


def model_times(type_: str = "q4_0", shapes: tuple[tuple[int, int], ...] = ((4096, 4096), (896, 4864))) -> list[dict]:
    """mmvq: 10 us for each group of eight.  mmq: 16 us and a little a row.  wgmma: 30 us, and less a row: they meet
    at nt = 141."""
    found = []
    for od, id_ in shapes:
        for nt in (1, 2, 4, 8):
            found.append(record(f"{type_}_q8_mmvq_tiles", type_, od, id_, nt, 10_000))
        for nt in (8, 16, 32, 64, 128, 256, 512):
            found.append(record(f"{type_}_q8_mmq", type_, od, id_, nt, 16_000 + 130 * nt))
            found.append(record(f"{type_}_f16_wgmma", type_, od, id_, nt, 30_000 + 30 * nt))
        found.append(record(f"{type_}_f32_matmul", type_, od, id_, 1, 9_000 if id_ < 1024 else 20_000))
    return found


class Curves(unittest.TestCase):
    def test_spans_are_where_the_times_meet(self) -> None:
        curves = tune.curves_of(model_times(), ["q4_0"])
        found = tune.spans(curves["q4_0"])
        self.assertEqual([s.kernel for s in found], ["mmvq_tiles", "mmq_tiles", "gemm_tiles_wgmma"])
        self.assertEqual(found[0].least, 1)
        # Two groups of eight take 20 us, mmq at 17 rows 18.2; the third group decides.
        self.assertEqual(found[1].least, 9)
        # 16 + 0.13 nt = 30 + 0.03 nt; between measured points the curves are straight on logarithmic axes only.
        self.assertAlmostEqual(found[2].least, 140, delta=8)
        self.assertIsNone(found[2].most)
        self.assertEqual(found[1].most, found[2].least - 1)

    def test_a_slower_prefill_kernel_moves_the_first_bound(self) -> None:
        times = [r for r in model_times() if "wgmma" not in r["rung"]]
        for r in times:
            if r["rung"].endswith("_mmq"):
                r["time_ns"]["median"] *= 1.5  # 24 us and more: three groups of eight take 30
        found = tune.spans(tune.curves_of(times, ["q4_0"])["q4_0"])
        self.assertEqual([s.kernel for s in found], ["mmvq_tiles", "mmq_tiles"])
        self.assertEqual(found[1].least, 17)

    def test_rows_that_nobody_measured_move_no_bound(self) -> None:
        times = [r for r in model_times() if r["shape"]["nt"] <= 8 or r["shape"]["nt"] >= 64]
        times = [r for r in times if not (r["shape"]["nt"] == 8 and "mmvq" not in r["rung"])]
        found = tune.spans(tune.curves_of(times, ["q4_0"])["q4_0"])
        self.assertEqual([s.kernel for s in found], ["mmvq_tiles", "mmq_tiles", "gemm_tiles_wgmma"])
        self.assertEqual(found[1].least, 9)

    def test_measured_groups(self) -> None:
        """Sixteen rows took less than twice eight, which also made the activations' form."""
        curve = tune.Curves("q4_0")
        curve.times[(8, 4)]["mmvq_tiles"] = {1: 6.0, 8: 10.0, 16: 16.0, 32: 28.0}
        times = [curve.time((8, 4), "mmvq_tiles", nt) for nt in (8, 9, 16, 20, 24, 32, 40)]
        self.assertEqual(times, [10.0, 16.0, 16.0, 22.0, 22.0, 28.0, 34.0])

    def test_rows_below_all_times_are_decodings(self) -> None:
        times = [r for r in model_times() if r["shape"]["nt"] >= 16]
        times += [record("q4_0_q8_mmvq_tiles", "q4_0", 4096, 4096, 8, 40_000)]
        found = tune.spans(tune.curves_of(times, ["q4_0"])["q4_0"].only([(4096, 4096)]))
        self.assertEqual(found, [])  # one time is no curve
        times += [record("q4_0_q8_mmvq_tiles", "q4_0", 4096, 4096, 16, 80_000)]
        found = tune.spans(tune.curves_of(times, ["q4_0"])["q4_0"].only([(4096, 4096)]))
        self.assertEqual((found[0].kernel, found[0].least), ("mmvq_tiles", 8))
        self.assertEqual((found[1].kernel, found[1].least), ("mmq_tiles", 9))
        self.assertEqual(tune.chosen(found, 1), "mmvq_tiles")

    def test_groups_of_eight(self) -> None:
        curve = tune.curves_of(model_times(), ["q4_0"])["q4_0"]
        shape = (4096, 4096)
        self.assertEqual(curve.time(shape, "mmvq_tiles", 8), 10_000)
        self.assertEqual(curve.time(shape, "mmvq_tiles", 9), 20_000)
        self.assertEqual(curve.time(shape, "mmvq_tiles", 64), 80_000)
        self.assertIsNone(curve.time(shape, "mmq_tiles", 7))
        self.assertIsNone(curve.time(shape, "mmq_tiles", 513))
        self.assertGreater(curve.time(shape, "mmq_tiles", 24), curve.time(shape, "mmq_tiles", 16))

    def test_newest_cold_times_of_the_gpu_count(self) -> None:
        old = model_times()
        new = record("q4_0_q8_mmvq_tiles", "q4_0", 4096, 4096, 1, 5_000, date="2026-02-01T00:00:00Z")
        ignored = [
            record("q4_0_q8_mmvq_tiles", "q4_0", 4096, 4096, 1, 1, mode="hot", date="2027-01-01T00:00:00Z"),
            record("q4_0_q8_mmvq_tiles", "q4_0", 4096, 4096, 1, 2, executor="cpu", date="2027-01-01T00:00:00Z"),
            record("q4_0_q8_mmvq_tiles_d1", "q4_0", 4096, 4096, 1, 3, date="2027-01-01T00:00:00Z"),
        ]
        curve = tune.curves_of([new, *ignored, *old], ["q4_0"])["q4_0"]
        self.assertEqual(curve.times[(4096, 4096)]["mmvq_tiles"][1], 5_000)

    def test_a_shape_weighs_as_much_as_its_time(self) -> None:
        """Of a large model's products two small ones gain a half, and the large one loses a fifth, which is more time.
        A small model, of which all products gain a little, counts as much as the large one."""
        curve = tune.Curves("q4_0")
        large = {(64, 64): (10.0, 5.0), (64, 128): (10.0, 5.0), (4096, 64): (100.0, 120.0)}
        for shape, (mmvq, wgmma) in large.items():
            curve.times[shape] = {"mmvq_tiles": {1: mmvq, 8: mmvq}, "gemm_tiles_wgmma": {1: wgmma, 8: wgmma}}
        self.assertEqual(tune.models(curve.times), [sorted(large)])
        costs = {k: tune.cost(curve, k, 4, list(large)) for k in ("mmvq_tiles", "gemm_tiles_wgmma")}
        self.assertAlmostEqual(costs["mmvq_tiles"], math.log(120 / 110))
        self.assertAlmostEqual(costs["gemm_tiles_wgmma"], math.log(130 / 110))
        self.assertEqual([s.kernel for s in tune.spans(curve)], ["mmvq_tiles"])
        for shape in ((16, 16), (16, 32)):
            curve.times[shape] = {"mmvq_tiles": {1: 1.3, 8: 1.3}, "gemm_tiles_wgmma": {1: 1.0, 8: 1.0}}
        self.assertEqual(tune.models(curve.times), [[(16, 16), (16, 32)], sorted(large)])
        self.assertEqual([s.kernel for s in tune.spans(curve)], ["gemm_tiles_wgmma"])
        # Two classes are better still: the large matrix has its own.
        small, rest = tune.classes(curve)
        self.assertEqual([small.spans[0].kernel, rest.spans[0].kernel], ["gemm_tiles_wgmma", "mmvq_tiles"])
        self.assertEqual((small.axis, small.most, rest.least), ("weights", 4096 * 64 - 1, 4096 * 64))

    def test_gates_of_devices_fit_their_evidence(self) -> None:
        """With the gates of a committed table no model's products take much longer, at any number of rows, than each
        with its best kernel.  The times of a prompt's kernels were measured at all shapes."""
        paths = sorted(tune.GATES.glob("*.json"))
        self.assertTrue(paths)
        checked = 0
        for path in paths:
            gates = json.loads(path.read_text())
            for type_, evidence in gates["evidence"].items():
                curve = tune.Curves(type_)
                for name, kernels in evidence.items():
                    od, id_ = map(int, name.split("x"))
                    for kernel, times in kernels.items():
                        curve.times[od, id_][kernel] = {int(nt): us for nt, us in times.items()}
                shapes = [s for s in curve.times if len(curve.times[s].get("gemm_tiles_wgmma", ())) > 1]
                for model, nt in itertools.product(tune.models(shapes), tune.LOOKED_AT):
                    at = [curve.at(shape, nt) for shape in model]
                    chosen = [tune.kernel_at(gates, type_, nt, shape) for shape in model]
                    took = sum(times[kernel] for times, kernel in zip(at, chosen, strict=True))
                    best = sum(min(ns for kernel, ns in times.items() if kernel != "f32_matmul") for times in at)
                    self.assertLess(took / best, 1.06, (path.name, type_, model, nt))
                    checked += 1
        self.assertGreater(checked, 100)

    def test_short_rows(self) -> None:
        self.assertIsNone(tune.short_rows(tune.curves_of(model_times(), ["q4_0"])["q4_0"]))
        times = model_times(shapes=((896, 896), (4096, 4096), (4096, 512)))
        self.assertEqual(tune.short_rows(tune.curves_of(times, ["q4_0"])["q4_0"]), 4096)


class Files(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="tune-test-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.records = self.folder / "records.jsonl"
        times = [*model_times("q4_0"), *model_times("q4_k", ((4096, 4096), (4096, 512), (896, 768)))]
        self.records.write_text("".join(json.dumps(r) + "\n" for r in times))

    def ladder(self, *words: object, status: int = 0) -> tuple[str, str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            self.assertEqual(cli.main([str(w) for w in words]), status, err.getvalue())
        return out.getvalue(), err.getvalue()

    def written(self) -> Path:
        path = self.folder / "nvidia-test.json"
        out, _ = self.ladder("tune", "--records", self.records, "-o", path)
        self.assertIn("gemm_tiles_wgmma", out)
        return path

    def test_the_file(self) -> None:
        gates = json.loads(self.written().read_text())
        names = [g["name"] for g in gates["gates"]]
        self.assertEqual(len(set(names)), len(names))
        self.assertEqual(names[-1], "float")
        tuned = [g for g in gates["gates"] if "evidence" in g]
        self.assertEqual(tuned[0]["types"], ["q4_0", "q4_k"])
        self.assertEqual(tuned[0]["nt"][0], 9)
        short = [g for g in gates["gates"] if g["name"] == "float.short_rows.q4_k"]
        self.assertEqual(short[0]["id"], [1, 4095])
        self.assertEqual(gates["evidence"]["q4_0"]["4096x4096"]["mmvq_tiles"]["8"], 10.0)
        # Types without times keep the default's gates.
        rest = next(g for g in gates["gates"] if g["name"] == "prefill.mmq.unmeasured")
        self.assertIn("q8_0", rest["types"])
        self.assertNotIn("q4_0", rest["types"])

    @unittest.skipIf(missing(), missing() or "")
    def test_the_program_reads_it(self) -> None:
        path = self.written()
        out = self.folder / "q4_0.gguf"
        subprocess.run([str(QWEN), "quantize", str(MODEL), str(out), "q4_0"], check=True, capture_output=True)
        done = subprocess.run(
            [
                str(QWEN),
                "explain",
                str(out),
                "--gates",
                str(path),
                "--device",
                "nvidia-h200",
                "--json",
                "--nt",
                "8,9,300",
            ],
            check=True,
            capture_output=True,
        )
        report = json.loads(done.stdout)
        self.assertEqual(report["gates"], str(path))
        at = {a["nt"]: a for a in report["dispatch"][0]["at"]}
        self.assertEqual(at[8]["kernel"], "q4_0_mmvq_tiles")
        self.assertEqual(at[9]["kernel"], "q4_0_mmq_tiles")
        self.assertEqual(at[300]["kernel"], "q4_0_gemm_tiles_wgmma")
        self.assertAlmostEqual(at[8]["margin"], 9 / 8, places=6)
        broken = self.folder / "broken.json"
        broken.write_text(path.read_text().replace('"mmq_tiles"', '"mmq"', 1))
        failed = subprocess.run(
            [str(QWEN), "explain", str(out), "--gates", str(broken)], check=False, capture_output=True, text=True
        )
        self.assertEqual(failed.returncode, 2)
        self.assertEqual(len(failed.stderr.strip().splitlines()), 1)
        self.assertIn("no kernel 'mmq'; there are mmvq_tiles, ", failed.stderr)

    def test_traces_of_the_program(self) -> None:
        events = [{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "a GPU"}}]
        kernels = {"mmvq_tiles": lambda nt: 10, "gemm_tiles_wgmma": lambda nt: 15 + nt / 100}
        for kernel, us in kernels.items():
            for nt in (1, 2, 4, 8, 16, 64, 512):
                if kernel == "mmvq_tiles" and nt > 8:
                    continue
                for extra in (500, 0, 0, 0, 0):  # the first launch loads the kernel
                    args = {"type": "q4_k", "nt": nt, "od": 4096, "id": 4096}
                    event = {
                        "name": f"q4_k_{kernel}",
                        "cat": "multiply",
                        "ph": "X",
                        "dur": us(nt) + extra,
                        "args": args,
                    }
                    events += [event, {"name": "rope_store", "cat": "other", "ph": "X", "dur": 9, "args": {}}]
        events.append({"name": "rms_norm", "cat": "other", "ph": "X", "dur": 1, "args": {"nt": 1}})
        trace = self.folder / "trace.json"
        trace.write_text(json.dumps(events))
        out = self.folder / "gates.json"
        _, err = self.ladder("tune", "--traces", trace, "-o", out, status=2)
        self.assertIn("of which device?", err)
        self.ladder("tune", "--traces", trace, "--device", "nvidia-h200", "-o", out)
        gates = json.loads(out.read_text())
        self.assertEqual(gates["device"], "NVIDIA H200")
        tuned = next(g for g in gates["gates"] if g["kernel"] == "gemm_tiles_wgmma" and "evidence" in g)
        self.assertEqual((tuned["types"], tuned["nt"]), (["q4_k"], [9, None]))
        self.assertEqual(gates["evidence"]["q4_k"]["4096x4096"]["mmvq_tiles"]["8"], 10.0)
        trace.write_text("[\n{")
        _, err = self.ladder("tune", "--traces", trace, "--device", "x", status=2)
        self.assertIn("trace.json:2: not JSON", err)

    def test_tables_go_into_the_program(self) -> None:
        source, depends = self.folder / "gates.cpp", self.folder / "gates.d"
        folder = self.folder / "gates of devices"
        script = [sys.executable, ROOT / "scripts" / "gates_table.py", source, folder, depends]
        subprocess.run(script, check=True)
        self.assertIn("return {};", source.read_text())
        self.assertEqual(depends.read_text(), f"{source}: {self.folder}\n")  # where the folder will appear
        folder.mkdir()
        self.written().rename(folder / "nvidia-test.json")
        subprocess.run(script, check=True)
        self.assertIn('{"nvidia-test",', source.read_text())
        self.assertNotIn("4096x4096", source.read_text())  # evidence is for people
        name = str(folder).replace(" ", "\\ ")
        self.assertEqual(depends.read_text(), f"{source}: {name} {name}/nvidia-test.json\n")
        (folder / "broken.json").write_text("{")
        failed = subprocess.run(script, check=False, capture_output=True, text=True)
        self.assertEqual(failed.returncode, 2)
        self.assertRegex(failed.stderr, r"^gates_table.py: .*broken.json: .*\n$")

    def test_nothing_to_tune(self) -> None:
        self.records.write_text(json.dumps(model_times()[0]) + "\n")
        _, err = self.ladder("tune", "--records", self.records, status=2)
        self.assertIn("--measure", err)
        _, err = self.ladder("tune", "q9", "--records", self.records, status=2)
        self.assertIn('no type "q9"', err)

    def test_the_map(self) -> None:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            self.skipTest("matplotlib is not here")
        from workbook import dispatch_plot

        gates = dispatch_plot.read(self.written())
        self.assertEqual(dispatch_plot.kernel_at(gates, "q4_0", 8), "mmvq_tiles")
        self.assertEqual(dispatch_plot.kernel_at(gates, "q4_0", 9), "mmq_tiles")
        self.assertEqual(dispatch_plot.kernel_at(gates, "q4_k", 1, (4096, 512)), "f32_matmul")
        self.assertEqual(dispatch_plot.kernel_at(gates, "q8_0", 9), "gemm_tiles_wgmma")
        figure = dispatch_plot.draw(gates, "q4_0")
        self.assertEqual(len(figure.axes), 4)
        with self.assertRaises(UserError):
            dispatch_plot.draw(gates, "q8_0")


PROGRAM = '''\
#!/usr/bin/env python3
"""Stands in for the program: small matrices take 9 us a group of eight, large ones 40; wgmma takes 20 and 22."""
import json, os, sys

words = sys.argv[1:]
if words[0] == "synthetic":
    assert words[words.index("--layer-types") + 1] == "f16,q4_0,q4_k", words
    open(words[3], "w").close()
elif words[0] == "explain":
    ods = {"blk.0.attn_q.weight": 896, "blk.0.attn_k.weight": 128, "blk.1.ffn_down.weight": 18944}
    print(json.dumps({"dispatch": [{"tensor": name, "od": od} for name, od in ods.items()]}))
elif words[0] == "bench":
    gates = json.load(open(os.environ["LADDER_GATES"]))["gates"]
    kernel = gates[0]["kernel"]
    events = []
    for nt in map(int, words[words.index("-p") + 1].split(",")):
        for names, ods, id_, us in (
            (["blk.0.attn_q.weight", "blk.0.attn_k.weight"], [896, 128], 896, 9),
            (["blk.1.ffn_down.weight"], [18944], 3584, 40),
        ):
            # In one launch, but for mmq, which has one for each matrix; mmvq has one for each group of eight.
            launches = [(" + ".join(names), sum(ods))] if kernel != "mmq_tiles" else list(zip(names, ods))
            groups = [8] * (nt // 8) + [nt % 8] * (nt % 8 > 0) if kernel == "mmvq_tiles" else [nt]
            time = {"mmvq_tiles": us, "f32_matmul": 3 * us, "mmq_tiles": 30 * us}.get(kernel, 20 if us < 40 else 22)
            for _ in range(5):
                if kernel == "gemm_tiles_wgmma":
                    events.append({"name": "acts_f16", "cat": "other", "ph": "X", "dur": 1, "args": {}})
                for name, od in launches:
                    for some in groups:
                        args = {"weights": name, "type": "q4_0", "nt": some, "od": od, "id": id_}
                        event = {"name": "q4_0_" + kernel, "cat": "multiply", "ph": "X", "dur": time, "args": args}
                        events.append(event)
                events.append({"name": "rope_store", "cat": "other", "ph": "X", "dur": 100, "args": {}})
    json.dump(events, open(os.environ["LADDER_TRACE"], "w"))
    print(json.dumps({"device": "nvidia-h200"}))
'''


AB_PROGRAM = """\
#!/usr/bin/env python3
import json, os, sys

words, switched = sys.argv[1:], os.environ.get("LADDER_MMQ") == "0"
value = lambda name: words[words.index(name) + 1]
if words[0] == "explain":
    print(json.dumps({"dispatch": []}))
elif words[0] == "bench":
    for test in ("pp512", "tg64"):
        record = {"schema": 1, "rung": "engine", "executor": "gpu", "device": "nvidia-test", "test": test}
        record["model"] = {"size": "1B", "file_type": "Q4_0", "bytes_per_token": 1000}
        record["tokens_per_s"] = {"mean": 200.0 if switched else 100.0, "stddev": 0, "samples": [1.0]}
        print(json.dumps(record))
elif words[0] == "logits":
    nt = int(value("-b"))
    args = {"weights": "blk.0.attn_q.weight", "nt": nt, "od": 8, "id": 4}
    name, us = ("fast", 10) if switched else ("slow", 40)
    events = [{"name": name, "cat": "multiply", "ph": "X", "dur": us, "args": args}]
    json.dump(events * (1 + value("--rows").count(",")), open(os.environ["LADDER_TRACE"], "w"))
"""


class Measured(unittest.TestCase):
    def test_small_and_large_matrices_have_borders_of_their_own(self) -> None:
        with tempfile.TemporaryDirectory(prefix="tune-test-") as name:
            folder = Path(name)
            program = folder / "qwen"
            program.write_text(PROGRAM)
            program.chmod(0o755)
            out = folder / "gates.json"
            with (
                mock.patch.object(tune.build, "built_qwen", return_value=program),
                mock.patch.object(tune.build, "BUILD", folder),
                mock.patch.object(tune.run, "prepare", return_value=folder),
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()) as err,
            ):
                words = ["tune", "q4_0", "q4_k", "--measure", "--no-build", "--sizes", "7b", "-o", str(out)]
                self.assertEqual(cli.main(words), 0, err.getvalue())
            gates = json.loads(out.read_text())
        self.assertEqual(gates["device"], "NVIDIA H200")
        # What brings activations to their form is the product's own: 20 + 1 us.  Groups: 9, 18, 27 us; 40, 80 us.
        times = gates["evidence"]["q4_0"]["1024x896"]
        self.assertEqual((times["gemm_tiles_wgmma"]["9"], times["mmvq_tiles"]["8"]), (21.0, 9.0))
        # Two launches of mmq are one product; so are the groups of 64 rows.
        self.assertEqual((times["mmq_tiles"]["9"], times["mmvq_tiles"]["64"]), (540.0, 72.0))
        self.assertEqual(set(gates["evidence"]["q4_0"]), {"1024x896", "18944x3584"})
        borders = {(g["nt"][0], tuple(g.get("id", ()))) for g in gates["gates"] if g.get("evidence")}
        self.assertEqual(borders, {(17, (1, 3583)), (1, (3584, None))})
        from_one = next(g for g in gates["gates"] if g["name"] == "prefill.tiles_wgmma.large")
        other = gates["gates"][gates["gates"].index(from_one) + 1]
        self.assertEqual((other["kernel"], other["id"]), ("mmq_tiles", [3584, None]))

    def test_bounds_keep_what_is_launched_together(self) -> None:
        curve = tune.Curves("q4_0", parts={(1024, 896): (128 * 896, 896 * 896)})
        self.assertEqual(curve.extent((1024, 896), "weights"), (128 * 896, 896 * 896))
        self.assertEqual(curve.extent((896, 896), "weights"), (896 * 896, 896 * 896))
        self.assertEqual(curve.extent((1024, 896), "id"), (896, 896))


DISPATCH = QWEN.parent.parent / "07-dispatch" / "dispatch"


@unittest.skipUnless(os.access(DISPATCH, os.X_OK), "dispatch is not built")
class Dispatch(unittest.TestCase):
    def test_tables_side_by_side(self) -> None:
        words = ["--size", "0.5b,7b", "--layer", "attn_q", "--type", "q4_0,q5_k", "--borders", "default,seed"]
        done = subprocess.run([DISPATCH, *words], check=True, capture_output=True, text=True)
        lines = [re.split(r" {2,}", line) for line in done.stdout.splitlines()]
        self.assertEqual(lines[0][-2:], ["gates default, NVIDIA H200", "gates seed, NVIDIA GB10"])
        tiles = "mmvq_tiles 1-8, gemm_tiles_wgmma from 9"
        self.assertEqual(lines[1][-2:], [tiles, "f32_matmul 1, mmvq_tiles 2-8, mmq_tiles from 9"])
        self.assertEqual(lines[2][-2:], [tiles, "mmvq_tiles 1-8, mmq_tiles from 9"])
        # 896 is no whole number of q5_k's blocks: of 0.5b nothing is said.
        self.assertEqual([line[0] for line in lines[3:]], ["7b.attn_q"])


class Experiments(unittest.TestCase):
    def test_every_switch_of_the_program_is_known_to_it(self) -> None:
        names = {name for e in ab.EXPERIMENTS.values() for name in e.variables}
        switches = (ROOT / "kernels" / "dispatch" / "switches.hpp").read_text()
        for name in names:
            self.assertIn(f'"{name}"', switches)

    def test_ratios(self) -> None:
        text = ab.ratios({"pp512": [1.0, 3.0, 2.0], "tg64": [10.0]}, {"pp512": [4.0], "tg64": [5.0]}, ("a", "b"))
        self.assertIn("| 2.000 |", text)
        self.assertIn("| 0.500 |", text)

    @unittest.skipIf(missing(), missing() or "")
    def test_changed_kernels(self) -> None:
        changed = ab.changed_kernels(QWEN, MODEL, {"LADDER_NO_PREFILL_GEMM": "1"})
        self.assertTrue(changed)
        self.assertTrue(all(line[2] == "512" for line in changed))
        self.assertEqual(ab.changed_kernels(QWEN, MODEL, {"LADDER_NO_Q40_MMVQ": "1"}), [])

    def test_what_moved(self) -> None:
        def event(name: str, us: float, **more: object) -> dict:
            return {"name": name, "cat": "multiply" if "od" in more else "other", "ph": "X", "dur": us, "args": more}

        product = {"weights": "blk.0.attn_q.weight + blk.0.attn_k.weight", "nt": 1, "od": 8, "id": 4}
        events = [event("m", us, **product) for us in (500, 10, 12, 11)]  # the first one loads the kernel
        events += [event("quantize", 3, nt=1, width=4), {"name": "process_name", "ph": "M", "args": {}}]
        a = ab.pass_of(events, 2)
        self.assertEqual(
            a,
            {
                ("m", "attn_q + attn_k [8, 4]", 1): ab.Launched(2, 22),
                ("quantize", "rows of 4", 1): ab.Launched(0.5, 1.5),
            },
        )
        b = {
            ("m", "attn_q + attn_k [8, 4]", 1): ab.Launched(2, 23),
            ("f", "attn_q + attn_k [8, 4]", 1): ab.Launched(1, 5),
        }
        self.assertEqual([kernel for kernel, *_ in ab.moved(a, b, timed=True)], ["quantize", "f"])
        b[("m", "attn_q + attn_k [8, 4]", 1)] = ab.Launched(2, 30)
        self.assertEqual([kernel for kernel, *_ in ab.moved(a, b, timed=True)], ["m", "quantize", "f"])
        self.assertEqual([kernel for kernel, *_ in ab.moved(a, b, timed=False)], ["quantize", "f"])
        text = ab.trace_table("a token", a, b, timed=True)
        self.assertRegex(text, r"\| m +\| attn_q \+ attn_k \[8, 4\] \| +1 \| +2 \| +2 \| +22.0 \| +30.0 \|")
        self.assertRegex(text, r"all launches .* 2.5 \| +3 \| +23.5 \| +35.0 \|$")

    @unittest.skipIf(missing(), missing() or "")
    def test_the_emulators_traces(self) -> None:
        with tempfile.TemporaryDirectory(prefix="ab-test-") as folder:
            file = Path(folder) / "q4_0.gguf"
            subprocess.run([str(QWEN), "quantize", str(MODEL), str(file), "q4_0"], check=True, capture_output=True)
            sides = [ab.traced(QWEN, file, "emulator", 1, 1, v) for v in ({}, {"LADDER_NO_Q40_MMVQ": "1"})]
        # Five layers, whose q, k and v are one launch without the switch and three with it; the head is Q6_K.
        kernels = [
            {kernel: sum(side[k].count for k in side if k[0] == kernel) for kernel, *_ in side} for side in sides
        ]
        self.assertEqual((kernels[0]["q4_0_mmvq_tiles"], kernels[0]["q6_k_mmvq_tiles"]), (20, 1))
        self.assertEqual((kernels[1]["q4_0_f32_matmul"], kernels[1]["q6_k_mmvq_tiles"]), (35, 1))
        self.assertNotIn("q4_0_mmvq_tiles", kernels[1])
        moved = {kernel for kernel, *_ in ab.moved(*sides, timed=False)}
        self.assertTrue({"q4_0_mmvq_tiles", "q4_0_f32_matmul"} <= moved)
        self.assertNotIn("attention_decode", moved)

    def ladder_ab(self, *words: str, status: int = 0) -> str:
        """A run with a stand-in whose switch doubles the speed and changes a kernel."""
        out, err = io.StringIO(), io.StringIO()
        with (
            mock.patch.object(ab.build, "built_qwen", return_value=self.program),
            mock.patch.object(ab.run, "prepare", return_value=self.program.parent),
            mock.patch.object(ab.engine, "resolve", side_effect=lambda _, model: Path(model.replace(":", "-"))),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            self.assertEqual(cli.main(["ab", *words, "--no-build"]), status, err.getvalue())
        return out.getvalue() + err.getvalue()

    @unittest.skipUnless(has_package("matplotlib"), "matplotlib is not here")
    def test_a_run(self) -> None:
        with tempfile.TemporaryDirectory(prefix="ab-test-") as name:
            self.program = Path(name) / "qwen"
            self.program.write_text(AB_PROGRAM)
            self.program.chmod(0o755)
            plot = Path(name) / "plot.svg"
            text = self.ladder_ab("mmq_off", "--on", "gpu", "-r", "2", "-o", str(plot), "--runs", name)
            self.assertRegex(text, r"\| pp512 \| +100.0 \| +200.0 \| +2.000 \|")
            self.assertRegex(text, r"\| slow +\| attn_q \[8, 4\] \| +512 \| +1 \| +0 \| +40.0 \| +0.0 \|")
            self.assertRegex(text, r"\| fast +\| attn_q \[8, 4\] \| +512 \| +0 \| +1 \|")
            self.assertIn("</svg>", plot.read_text())
            lines = [line.record for line in records.read_file(Path(name) / "nvidia-test" / "09-qwen.jsonl")]
            self.assertEqual([r["params"]["switch"] for r in lines], ["none", "none", "LADDER_MMQ=0", "LADDER_MMQ=0"])
            self.assertEqual(lines[2]["tokens_per_s"]["samples"], [200.0, 200.0])
            self.assertEqual({r["rung"] for r in lines}, {"engine_ab"})
            row = ["mmq_off", "LADDER_MMQ=0", "1B Q4_0", "pp512", "100", "200", "2.000"]
            self.assertEqual(ab.rows_of(lines, ["mmq_off"])[0], row)
            self.assertEqual(ab.rows_of(lines, ["baseline"]), [])
            plot.unlink()
            text = self.ladder_ab("mmq_off", "--on", "emulator", "-o", str(plot))
            self.assertIn("no clock", text)
            self.assertRegex(text, r"\| slow +\| attn_q \[8, 4\] \| +12 \| +1 \| +0 \|\n")
            self.assertTrue(plot.exists())
            text = self.ladder_ab("baseline", "--on", "gpu", "-o", str(plot))
            self.assertRegex(text, r"\| slow +\| attn_q \[8, 4\] \| +1 \| +1 \| +40.0 \|")
            self.assertIn("must end in .svg or .png", self.ladder_ab("mmq_off", "-o", "plot.jpg", status=2))
            self.assertIn("did you mean mmq_off?", self.ladder_ab("mmq_of", status=2))

    def compare_llama(self, path: str, status: int) -> tuple[str, str]:
        out, err = io.StringIO(), io.StringIO()
        words = ["compare-llama", str(MODEL), "--no-build", "--on", "cpu", "-p", "8", "-n", "2", "-r", "1"]
        with (
            mock.patch.object(ab.build, "built_qwen", return_value=QWEN),
            mock.patch.object(ab.run, "prepare", return_value=QWEN.parent),
            mock.patch.dict(os.environ, {"PATH": path}),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            self.assertEqual(cli.main(words), status, err.getvalue())
        return out.getvalue(), err.getvalue()

    @unittest.skipIf(missing(), missing() or "")
    def test_llama_bench_beside_ours(self) -> None:
        with tempfile.TemporaryDirectory(prefix="ab-test-") as folder:
            _, err = self.compare_llama(folder, 2)
            self.assertIn("there is no llama-bench on PATH", err)
            fake = Path(folder) / "llama-bench"
            fake.write_text(
                "#!/bin/sh\n"
                'echo \'{"n_prompt": 8, "n_gen": 0, "avg_ts": 100.0}\'\n'
                'echo \'{"n_prompt": 0, "n_gen": 2, "avg_ts": 50.0}\'\n'
            )
            fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
            out, _ = self.compare_llama(f"{folder}:{os.environ['PATH']}", 0)
            self.assertRegex(out, r"\| pp8 +\| +100\.0 \|")
            self.assertRegex(out, r"\| tg2 +\| +50\.0 \|")


if __name__ == "__main__":
    unittest.main()
