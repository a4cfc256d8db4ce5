"""Pictures of made-up records."""

from __future__ import annotations

import json
import unittest
from pathlib import Path

from tests.support import DEVICE, ProjectCase, committed, has_package, made_record, needs_venv
from workbook.common import UserError
from workbook.records import Line


def sample() -> list[dict]:
    found = [made_record(rung, nt) for rung in ("fake_slow", "fake_fast") for nt in (1, 4, 64)]
    found.append(
        {**found[-1], "shape": {**found[-1]["shape"], "nt": 512}, "valid": False, "why_not": "operands stay in L2"}
    )
    for rung, unit, gops in (("roof_fma_f32", "flop", 95.0), ("roof_int8_dot", "int8_op", 300.0)):
        found.append(
            {
                "schema": 1,
                "rung": rung,
                "executor": "cpu",
                "device": DEVICE,
                "params": {"threads": 2},
                "work": {"count": 10**9, "unit": unit},
                "time_ns": {"median": 1e7, "q1": 9e6, "q3": 1.1e7, "n": 9},
                "gops": gops,
            }
        )
    read = {
        "schema": 1,
        "rung": "roof_read",
        "executor": "cpu",
        "device": DEVICE,
        "bytes": {"total": 10**9},
        "time_ns": {"median": 5e7, "q1": 5e7, "q3": 5e7, "n": 9},
    }
    found += [{**read, "params": {"threads": threads}, "gbps": gbps} for threads, gbps in ((1, 9.0), (2, 18.5))]
    return [committed(record, "a" * 64) for record in found]


@unittest.skipUnless(has_package("matplotlib"), "needs Matplotlib; run it with scripts/ladder test")
class Drawing(unittest.TestCase):
    def setUp(self):
        from workbook import plots

        self.plots = plots
        self.lines = [Line(record, Path("x.jsonl"), number) for number, record in enumerate(sample(), 1)]

    def test_roofs_are_the_best_probes(self):
        roofs = self.plots.roofs_of(DEVICE, self.lines)
        self.assertEqual(roofs.measured_gbps, 18.5)
        self.assertEqual({(c.title, c.gops) for c in roofs.peaks}, {("f32 FMA", 95.0), ("int8 dot", 300.0)})

    def test_intensity_draws_curves_of_one_storage_type(self):
        single = committed(made_record("fake_packed", 1, type="q4_0"), "a" * 64)
        lines = [*self.lines, Line(single, Path("x.jsonl"), 99)]
        drawn = self.plots.choose(lines, "intensity", DEVICE)
        self.assertEqual({line.record["rung"] for line in drawn.points}, {"fake_slow", "fake_fast"})
        everything = self.plots.choose(lines, "roofline", DEVICE)
        self.assertIn("fake_packed", {line.record["rung"] for line in everything.points})
        asked = self.plots.choose(lines, "intensity", DEVICE, rungs=["fake_packed"])
        self.assertEqual({line.record["rung"] for line in asked.points}, {"fake_packed"})

    def test_roofs_without_probes_come_from_the_records(self):
        points = [line for line in self.lines if "shape" in line.record]
        roofs = self.plots.roofs_of(DEVICE, points)
        self.assertEqual((roofs.measured_gbps, [c.gops for c in roofs.peaks]), (20.0, [100.0]))

    def test_spec_roofs_of_a_known_device(self):
        roofs = self.plots.roofs_of("nvidia-h200", [])
        self.assertEqual((roofs.measured_gbps, roofs.spec_gbps), (None, 4800.0))
        self.assertEqual(len(roofs.peaks), 4)

    def test_crossovers_are_where_the_fastest_changes(self):
        def record(rung, nt, time):
            return {"rung": rung, "shape": {"nt": nt}, "time_ns": {"median": time}, "executor": "gpu"}

        few, many = ("a", (1.0, 2.0, 9.0, 80.0)), ("b", (5.0, 5.0, 5.0, 6.0))
        records = [
            record(name, nt, t) for name, times in (few, many) for nt, t in zip((1, 8, 64, 512), times, strict=True)
        ]
        (change,) = self.plots.crossovers(records)
        self.assertEqual(change[2:], (8, 64))
        self.assertIn("a", change[0])
        self.assertIn("b", change[1])
        self.assertEqual(self.plots.crossovers(records[:4]), [])

    def test_nothing_to_draw_says_what_there_is(self):
        for change, words in (
            ({"device": "other"}, "no timed records"),
            ({"layer": "9b.x"}, "7b.ffn_down"),
            ({"mode": "hot"}, "cold"),
            ({"nt": [3]}, "1, 4, 64"),
            ({"rungs": ["fake_fats"]}, "did you mean fake_fast"),
        ):
            with self.assertRaisesRegex(UserError, words):
                self.plots.choose(self.lines, "roofline", **{"device": DEVICE, **change})

    def test_every_kind_shows_every_rung(self):
        for kind in self.plots.KINDS:
            choice = self.plots.choose(self.lines, kind, DEVICE)
            figure = self.plots.draw(choice)
            words = " ".join(text.get_text() for text in figure.findobj(self.plots.matplotlib.text.Text))
            for expected in ("fake_fast", "fake_slow", DEVICE, "2026-01-02", "7b.ffn_down", "operands stay in L2"):
                self.assertIn(expected, words, kind)
            self.plots.plt.close(figure)

    def test_the_fingerprint_follows_the_records(self):
        choice = self.plots.choose(self.lines, "roofline", DEVICE)
        same = self.plots.choose(list(self.lines), "roofline", DEVICE)
        self.assertEqual(self.plots.fingerprint(choice), self.plots.fingerprint(same))
        changed = [Line({**line.record, "date": "2026-03-01T00:00:00Z"}, line.path, line.number) for line in self.lines]
        other = self.plots.choose(changed, "roofline", DEVICE)
        self.assertNotEqual(self.plots.fingerprint(choice), self.plots.fingerprint(other))


@needs_venv
class Command(ProjectCase):
    def write(self) -> str:
        path = self.root / "made.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in sample()), encoding="utf-8")
        return str(path)

    def test_files_are_the_same_every_time(self):
        made = self.write()
        for kind in ("roofline", "intensity", "ladder"):
            for suffix, magic in ((".svg", b"<?xml"), (".png", b"\x89PNG")):
                drawn = []
                for turn in "ab":
                    out = self.root / f"{turn}-{kind}{suffix}"
                    done = self.ladder("plot", kind, "--records", made, "-o", str(out))
                    self.assertEqual(done.returncode, 0, done.stderr)
                    drawn.append(out.read_bytes())
                self.assertTrue(drawn[0].startswith(magic))
                self.assertEqual(drawn[0], drawn[1], f"{kind}{suffix}")

    def test_both_formats_by_default(self):
        done = self.ladder("plot", "ladder", "--records", self.write())
        self.assertEqual(done.stdout.split(), [f"build/plots/ladder-{DEVICE}.svg", f"build/plots/ladder-{DEVICE}.png"])
        for name in done.stdout.split():
            self.assertTrue((self.root / name).exists(), name)

    def test_mistakes_are_one_line(self):
        made = self.write()
        self.assert_usage_error(self.ladder("plot", "roofline"), "record")
        self.assert_usage_error(self.ladder("plot", "roofline", "--device", "nvidia-h100"), "nvidia-h100")
        self.assert_usage_error(self.ladder("plot", "roofline", "--records", "no.jsonl"), "no.jsonl")
        self.assert_usage_error(self.ladder("plot", "roofline", "--records", made, "-o", "x.pdf"), ".svg or .png")
        self.assert_usage_error(self.ladder("plot", "roofline", "--records", made, "--device", "x"), '"x"', DEVICE)
        self.assert_usage_error(self.ladder("plot", "roofline", "--records", made, "--layer", "x"), "7b.ffn_down")


if __name__ == "__main__":
    unittest.main()
