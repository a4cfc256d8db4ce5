"""Generated regions: what they show, and everything that must make them fail."""

from __future__ import annotations

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

    def test_invalid_points_are_marked_and_explained(self):
        self.record_all(valid=False, why_not="operands stay in L2")
        self.assert_woven("table(nt=1)", "90.0 % †", "† not valid: operands stay in L2.")

    def test_output(self):
        self.build()
        self.assert_woven(
            'output("build/chapters/42-fake/fake --layers")', "$ build/chapters/42-fake/fake --layers", '"od": 3584'
        )

    def test_plot(self):
        self.record_all()
        made = self.assert_woven(f'plot("ladder", "{DEVICE}")', f"![ladder of {DEVICE}, 7b.ffn_down](plots/ladder-")
        picture = self.root / "chapters" / "42-fake" / made.split("](")[1].split(")")[0]
        self.assertIn("<svg", picture.read_text(encoding="utf-8"))
        picture.write_text("<svg/>")
        status, text = self.weave("--check")
        self.assertEqual(status, 1)
        self.assertIn("not up to date", text)

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
