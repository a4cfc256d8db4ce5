"""Generated regions: what they show, and everything that must make them fail."""

from __future__ import annotations

import json
import unittest

from tests.support import DEVICE, KERNEL, ProjectCase, committed, made_record, needs_venv
from workbook.sources import hash_of

BODIES = {
    name: KERNEL.split(f"// ANCHOR: {name}\n")[1].split(f"// ANCHOR_END: {name}\n")[0]
    for name in ("fake_fast", "fake_slow")
}


def region(call: str, body: str = "") -> str:
    return f"# Page\n\nText.\n\n<!-- [[[cog {call} ]]] -->\n{body}<!-- [[[end]]] -->\n"


@needs_venv
class Weave(ProjectCase):
    def record_all(self, **more) -> None:
        self.write_runs(
            *(
                committed({**made_record(rung, nt), **more}, hash_of(BODIES[rung]))
                for rung in ("fake_slow", "fake_fast")
                for nt in (1, 4)
            )
        )

    def weave(self, *args: str) -> tuple[int, str]:
        done = self.ladder("weave", *args)
        self.assertNotIn("Traceback", done.stderr + done.stdout)
        return done.returncode, done.stdout + done.stderr

    def assert_woven(self, call: str, *words: str) -> str:
        """The region is filled, has these words, and then passes the check and stays as it is."""
        path = self.page(region(call))
        status, text = self.weave()
        self.assertEqual(status, 0, text)
        made = path.read_text(encoding="utf-8")
        for word in words:
            self.assertIn(word, made)
        status, text = self.weave("--check")
        self.assertEqual(status, 0, text)
        self.weave()
        self.assertEqual(path.read_text(encoding="utf-8"), made)
        return made

    def assert_fails(self, call: str, *words: str) -> None:
        """The region fails with page and line, and its old text is left alone."""
        path = self.page(region(call, "old text\n"))
        before = path.read_text(encoding="utf-8")
        for args in (("--check",), ()):
            status, text = self.weave(*args)
            self.assertEqual(status, 1, text)
            for word in ("chapters/42-fake/README.md:5", *words):
                self.assertIn(word, text)
            self.assertEqual(path.read_text(encoding="utf-8"), before)

    # --- what the functions show ----------------------------------------------------------------------------------

    def test_code(self):
        made = self.assert_woven(
            'code("chapters/42-fake/fake.cu", "fake_fast")', "```cuda\nvoid fake_fast(", "// copies\n}\n```"
        )
        self.assertNotIn("ANCHOR", made)

    def test_value_of_one_record(self):
        self.record_all()
        self.assert_woven(
            f'value("It reads {{gbps:.1f}} GB/s in {{time_ns.n}} samples, {{time_ms:.0f}} ms.", rung="fake_fast", '
            f'device="{DEVICE}", nt=1)',
            "It reads 18.0 GB/s in 20 samples, 15 ms.",
        )

    def test_value_of_several(self):
        self.record_all()
        self.assert_woven(
            'value("{ratio:.2f} times", a=dict(rung="fake_slow"), b=dict(rung="fake_fast"), nt=1, '
            "ratio=lambda a, b: a.time_us / b.time_us)",
            "\n3.00 times\n",
        )

    def test_table(self):
        self.record_all()
        made = self.assert_woven(
            'table(chapter="42-fake", nt=1)', "| rung", "`fake_slow`", "18.0", "90.0 %", "measured 2026-01-02"
        )
        self.assertLess(made.index("`fake_slow`"), made.index("`fake_fast`"), "rows are in the order of registration")

    def test_pivot(self):
        self.record_all()
        self.assert_woven('table(pivot="nt", value="percent")', "   nt 1 |", "In the cells: % of roof")

    def test_ladder_table(self):
        self.record_all()
        self.assert_woven("ladder_table()", "[42](README.md)", "the quick one", "18.0 (90.0 %)")

    def engine_record(self, file_type: str, **more) -> dict:
        model = {"size": "0.5B", "file_type": file_type, "bytes_per_token": 4e8 if file_type == "Q8_0" else 3e8}
        return {
            **{"schema": 1, "rung": "engine", "executor": "cpu", "device": DEVICE, "model": model, "test": "tg128"},
            **{"tokens_per_s": {"mean": 70.0, "stddev": 0.5}, "percent_of_roof": 80.0},
            **{
                "date": "2026-01-02T03:04:05Z",
                "toolchain": "gcc 12",
                "command": "scripts/ladder engine 0.5b:Q4_0",
                **more,
            },
        }

    def test_engine_table(self):
        older = self.engine_record("Q4_0", date="2026-01-01T00:00:00Z", tokens_per_s={"mean": 60.0, "stddev": 1.0})
        self.write_runs(older, self.engine_record("Q4_0"), self.engine_record("Q8_0"))
        made = self.assert_woven(f'engine_table("{DEVICE}", ["tg128"])', "70.0 ± 0.5 tok/s", "80.0", "2026-01-02")
        self.assertNotIn("60.0", made, "the newest record of a model counts")
        self.assertLess(made.index("Q8_0"), made.index("Q4_0"), "most bytes first")
        self.assert_fails(f'engine_table("{DEVICE}", ["tg128", "pp512"])', "pp512")
        self.assert_fails(f'engine_table("{DEVICE}", ["tg128"], name="tales")', "tales")

    def test_sanitizer_table(self):
        def record(tool: str, date: str, result: str, **more: str) -> dict:
            return {
                "schema": 1,
                "rung": "sanitizer",
                "executor": "gpu",
                "device": DEVICE,
                "test": "test_mmq_cuda",
                "params": {"tool": tool, "whole": False},
                "cases": [{"name": "ragged", "result": "passed"}, {"name": "long rows", "result": result, **more}],
                "date": date,
                "toolchain": "compute-sanitizer",
                "command": "scripts/sanitize_gpu.sh",
            }

        hazard = {"said": "exit status 1, RACECHECK SUMMARY: 1 hazard"}
        old = record("racecheck", "2026-01-01T00:00:00Z", "failed", **hazard)
        cut = record("racecheck", "2026-01-02T00:00:00Z", "cut off", said="cut off after 9 s")
        self.write_runs(old, cut, record("memcheck", "2026-01-02T00:00:00Z", "passed"))
        call = f'sanitizer_table("{DEVICE}")'
        made = self.assert_woven(call, "| mmq  |        2 | 1 of 2: 1 cut off |", "without the largest shapes")
        self.assertNotIn("hazard", made, "the newest record of a tool and test counts")
        self.write_runs(old)
        self.assert_woven(
            call, "1 of 2: 1 failed", "* racecheck, mmq: “long rows”: exit status 1, RACECHECK SUMMARY: 1"
        )
        self.assert_fails('sanitizer_table("nvidia-none")', "no records of scripts/sanitize_gpu.sh on nvidia-none")

    def test_invalid_points_are_marked_and_explained(self):
        self.record_all(valid=False, why_not="operands stay in L2")
        self.assert_woven("table(nt=1)", "90.0 % †", "† not valid: operands stay in L2.")

    def test_output(self):
        self.build()
        self.assert_woven('output("build/chapters/fake --layers")', "$ build/chapters/fake --layers", '"od": 3584')

    def test_plot(self):
        self.record_all()
        made = self.assert_woven(f'plot("ladder", "{DEVICE}")', f"![ladder of {DEVICE}, 7b.ffn_down](plots/ladder-")
        picture = self.root / "chapters" / "42-fake" / made.split("](")[1].split(")")[0]
        self.assertIn("<svg", picture.read_text(encoding="utf-8"))
        picture.write_text("<svg/>")
        status, text = self.weave("--check")
        self.assertEqual(status, 1)
        self.assertIn("not up to date", text)

    # --- counts ---------------------------------------------------------------------------------------------------

    def counted(self, rung: str, executor: str, date: str = "2026-01-02T03:04:05Z", **counters: int) -> dict:
        """A record of counts: of the made-up GPU, or of the emulator's model of it."""
        record = made_record(rung, executor=executor, device=DEVICE if executor == "gpu" else f"emulator-{DEVICE}")
        for name in ("time_ns", "mode", "gbps", "gops", "percent_of_roof", "bound", "valid", "roof", "params"):
            del record[name]
        return committed({**record, "counters": counters}, hash_of(BODIES[rung]), date)

    def write_counts(self, *found: dict) -> None:
        for device in {record["device"] for record in found}:
            path = self.root / "data" / "runs" / device / "42-fake.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            mine = [record for record in found if record["device"] == device]
            path.write_text("".join(json.dumps(record) + "\n" for record in mine), encoding="utf-8")

    TABLE = 'bytes_table(rungs=["fake_slow", "fake_fast"], layer="7b.ffn_down", nt=1)'

    def test_bytes_table(self):
        # Declared: 4 * (3584 * 18944 + 18944 + 3584) = 271,669,248 bytes; one sector is 32.
        self.write_counts(
            self.counted("fake_slow", "emulator", requests=8_000_000, sectors=67_917_312),
            self.counted("fake_fast", "emulator", requests=530_604, sectors=8_489_664),
            self.counted("fake_slow", "gpu", requests=1, sectors=1, dram_read_bytes=1),
            self.counted("fake_fast", "gpu", requests=530_605, sectors=8_489_665, dram_read_bytes=271_700_000),
            # The latest record wins.
            self.counted(
                "fake_slow", "gpu", "2026-01-03T00:00:00Z", requests=9, sectors=18, dram_read_bytes=543_338_496
            ),
        )
        made = self.assert_woven(self.TABLE, "measured by the counters of", "Recorded 2026-01-02 to 2026-01-03.")
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in made.splitlines() if "`fake_" in line]
        slow = ["271.7", "8,000,000", "8.49", "2,173.4 (8.00×)", "9", "2.00", "0.000576 (0.00×)", "543.3 (2.00×)"]
        fast = ["271.7", "530,604", "16.00", "271.7 (1.00×)", "530,605", "16.00", "271.7 (1.00×)", "271.7 (1.00×)"]
        self.assertEqual(rows, [["`fake_slow`", *slow], ["`fake_fast`", *fast]])

    def test_bytes_table_with_a_half_missing(self):
        slow = self.counted("fake_slow", "gpu", requests=8, sectors=64, dram_read_bytes=512)
        emulated = [self.counted(rung, "emulator", requests=8, sectors=64) for rung in ("fake_slow", "fake_fast")]
        self.write_counts(slow, *emulated)
        self.assert_fails(self.TABLE, "no counts of the gpu", "'fake_fast'", "scripts/ladder counters")
        made = self.assert_woven(self.TABLE[:-1] + ", allow_missing=True)")
        fast = next(line for line in made.splitlines() if "`fake_fast`" in line)
        self.assertEqual(fast.count("not recorded"), 4)
        self.write_counts(slow, emulated[1])
        self.assert_fails(self.TABLE, "no counts of the emulator", "record --on emulator")
        (self.root / "data" / "runs" / f"emulator-{DEVICE}" / "42-fake.jsonl").unlink()
        self.write_counts({**slow, "counters": {"requests": 8, "sectors": 64}}, *emulated)
        self.assert_fails('bytes_table(rungs=["fake_slow"], layer="7b.ffn_down")', "dram_read_bytes")
        self.assert_fails('bytes_table(rungs=["fake_slow"], layer="7b.ffn_up")', "no record has counters")
        self.assert_fails('bytes_table(rungs=["fake_slow"])', "either layer=, or od= and id=")

    def test_a_stale_count_fails(self):
        self.write_counts(
            *(
                self.counted(rung, executor, requests=8, sectors=64, dram_read_bytes=512)
                for rung in ("fake_slow", "fake_fast")
                for executor in ("emulator", "gpu")
            )
        )
        source = self.root / "chapters" / "42-fake" / "fake.cu"
        source.write_text(KERNEL.replace("out[0] = w[0];  // copies", "out[0] = w[1];"))
        self.assert_fails(self.TABLE, "fake_fast has changed since this was measured")

    def test_counts_are_shown_only_when_asked_for(self):
        timed = committed(made_record(executor="gpu"), hash_of(BODIES["fake_fast"]))
        self.write_counts(timed, self.counted("fake_fast", "gpu", requests=8, sectors=64))
        self.assert_woven('value("{gbps:.1f} GB/s", rung="fake_fast", nt=1)', "\n18.0 GB/s\n")
        self.assert_woven(
            'value("{counters.requests} requests", rung="fake_fast", nt=1, counted=True)', "\n8 requests\n"
        )
        made = self.assert_woven('table(counted=True, columns=["rung", "requests", "sectors"])', "64 |")
        self.assertEqual(made.count("`fake_fast`"), 1)

    # --- what must fail -------------------------------------------------------------------------------------------

    def test_unknown_anchor(self):
        self.assert_fails('code("chapters/42-fake/fake.cu", "fake_fats")', 'no anchor "fake_fats"', "fake_fast")

    def test_unknown_file(self):
        self.assert_fails('code("chapters/42-fake/none.cu", "fake_fast")', "none.cu")

    def test_unused_anchor(self):
        source = self.root / "chapters" / "42-fake" / "fake.cu"
        source.write_text(source.read_text() + "// ANCHOR: helper\nint x;\n// ANCHOR_END: helper\n")
        self.page("# Page\n")
        status, text = self.weave("--check")
        self.assertEqual(status, 1)
        self.assertRegex(text, r"chapters/42-fake/fake.cu:\d+: anchor helper is quoted by no text")
        self.assert_woven('code("chapters/42-fake/fake.cu", "helper")', "int x;")

    def test_missing_record(self):
        self.record_all()
        self.assert_fails('value("{gbps}", rung="fake_fast", nt=64)', "no record", "nt is 1, 4")
        self.assert_fails('table(rung="nothing")', "no records", "rung is fake_fast, fake_slow")
        self.assert_fails('table(rung=["fake_fast", "nothing"])', "nothing")
        self.assert_fails('ladder_table(layer="0.5b.output")', "0.5b.output")

    def test_a_vague_question(self):
        self.record_all()
        self.assert_fails('value("{gbps}", rung="fake_fast")', "2 records fit", "nt")

    def test_stale_record(self):
        self.record_all()
        source = self.root / "chapters" / "42-fake" / "fake.cu"
        for call in (
            'value("{gbps}", rung="fake_fast", nt=1)',
            "table()",
            "ladder_table()",
            f'plot("ladder", "{DEVICE}")',
        ):
            source.write_text(KERNEL.replace("out[0] = w[0];  // copies", "out[0] = w[1];"))
            self.assert_fails(call, "fake_fast has changed since this was measured", "scripts/ladder record fake_fast")
            source.write_text(KERNEL.replace("// copies", "// comments may change"))
            path = self.page(region(call))
            status, text = self.weave()
            self.assertEqual(status, 0, text)
            path.unlink()

    def test_unknown_field(self):
        self.record_all()
        self.assert_fails('value("{speed}", rung="fake_fast", nt=1)', "speed")
        self.assert_fails('table(columns=["rung", "speed"])', "speed")

    def test_drift(self):
        path = self.page(region('code("chapters/42-fake/fake.cu", "fake_fast")'))
        self.weave()
        path.write_text(path.read_text().replace("fake_fast(const", "fake_fast(volatile"))
        status, text = self.weave("--check")
        self.assertEqual(status, 1)
        self.assertRegex(text, r"chapters/42-fake/README.md:\d+: out of date")

    def test_marks_out_of_place(self):
        self.page("# Page\n\n<!-- [[[cog code('a', 'b') ]]] -->\n")
        status, text = self.weave("--check")
        self.assertEqual(status, 1)
        self.assertIn("chapters/42-fake/README.md", text)

    def test_python_that_does_not_run(self):
        self.page(region("codee('a', 'b')"))
        status, text = self.weave("--check")
        self.assertEqual(status, 1)
        self.assertIn("codee", text)

    def test_unsound_committed_record(self):
        self.record_all(gbps=-1)
        self.page("# Page\n")
        status, text = self.weave("--check")
        self.assertEqual(status, 1)
        self.assertRegex(text, r"42-fake.jsonl:1: gbps")

    def test_no_such_page(self):
        self.assert_usage_error(self.ladder("weave", "none.md"), "none.md")


if __name__ == "__main__":
    unittest.main()
