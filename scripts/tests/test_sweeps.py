"""Pictures of experiments from made-up records, and of blocks from structs."""

from __future__ import annotations

import tempfile
import textwrap
import unittest
from pathlib import Path

from tests.support import ROOT, ProjectCase, committed, has_package, made_record, needs_venv
from workbook.common import UserError


def timed(rung: str, median: float, id_: int, mode: str = "cold", layer: str = "", **more) -> dict:
    record = committed(made_record(rung, 1, 64, id_, mode=mode), "a" * 64)
    record["time_ns"] = {**record["time_ns"], "median": median, "q1": median * 0.98, "q3": median * 1.03}
    record["gbps"] = record["bytes"]["total"] / median
    record["layer"] = layer
    return {**{k: v for k, v in record.items() if k != "layer" or v}, **more}


class Finder:
    """Stands in for the weaver: records that fit conditions, as a list."""

    def __init__(self, found: list[dict]) -> None:
        from workbook import records

        self.found, self.records = found, records

    def __call__(self, **wanted) -> list[dict]:
        return [record for record in self.found if self.records.matches(record, **wanted)]


@unittest.skipUnless(has_package("matplotlib"), "needs Matplotlib; run it with scripts/ladder test")
class Sweeps(unittest.TestCase):
    def setUp(self):
        from workbook import plots, sweeps

        self.plots, self.sweeps = plots, sweeps

    def words(self, sweep) -> str:
        figure = self.sweeps.draw(sweep)
        self.addCleanup(self.plots.plt.close, figure)
        figure.canvas.draw()
        return " ".join(text.get_text() for text in figure.findobj(self.plots.matplotlib.text.Text))

    def test_crossings_lie_on_the_line(self):
        self.assertEqual(self.sweeps.crossings([(256, 2.0), (1024, 0.5)]), [512.0])
        self.assertEqual(self.sweeps.crossings([(256, 2.0), (1024, 1.5)]), [])
        self.assertEqual(self.sweeps.crossings([(256, 0.5), (512, 1.0), (1024, 0.5)]), [512])
        self.assertEqual(len(self.sweeps.crossings([(1, 2.0), (2, 0.5), (4, 2.0)])), 2)

    def test_a_ratio_marks_where_it_meets_one(self):
        rows = (256, 1024, 4096)
        find = Finder(
            [timed("a", 2000.0 if i == 256 else 500.0, i) for i in rows]
            + [timed("b", 1000.0, i) for i in rows]
            + [timed("c", 3000.0, i) for i in rows]
        )
        words = self.words(self.sweeps.ratio(find, [("a", "b"), ("c", "b")], od=64, mode="cold"))
        for expected in ("512", "4096", "a\n/ b", "c is slower at every id", "od 64", "2026-01-02"):
            self.assertIn(expected, words)
        with self.assertRaisesRegex(UserError, "a and d have 0 id in common"):
            self.sweeps.ratio(find, [("a", "d")], od=64)

    def test_bars_need_every_record_that_is_not_skipped(self):
        find = Finder([timed("a", 1000.0, 256), timed("b", 2000.0, 256), timed("b", 4000.0, 257)])
        at = [{"od": 64, "id": 256}, {"od": 64, "id": 257}]
        with self.assertRaisesRegex(UserError, "no record with .*id=257"):
            self.sweeps.bars(find, ["a", "b"], at)
        sweep = self.sweeps.bars(find, ["a", "b"], at, under=lambda r: f"{r['shape']['id']}!", skip=[("a", at[1])])
        words = self.words(sweep)
        for expected in ("64x256", "64x257", "1.00", "4.00", "257!", "nt 1, cold operands"):
            self.assertIn(expected, words)

    def test_groups_may_have_one_scale(self):
        find = Finder([timed("a", 1000.0, 256), timed("a", 9000.0, 512)])
        at = [{"od": 64, "id": 256}, {"od": 64, "id": 512}]
        tops = {}
        for same in (False, True):
            figure = self.sweeps.draw(self.sweeps.bars(find, ["a"], at, same_scale=same))
            tops[same] = [axes.get_ylim()[1] for axes in figure.axes]
            self.plots.plt.close(figure)
        self.assertGreater(tops[False][1], 5 * tops[False][0])
        self.assertEqual(tops[True][0], tops[True][1])

    def test_hot_points_that_are_not_valid_say_why(self):
        both = [timed("a", 4e6, 18944, layer="x"), timed("a", 1e6, 18944, "hot", "x", valid=False, why_not="in cache")]
        words = self.words(self.sweeps.hot_cold(Finder(both), ["a"], ["x"]))
        self.assertIn("Hollow: not valid under the memory roof: in cache.", words)
        self.assertIn("x, 4.93 MB", words)
        with self.assertRaisesRegex(UserError, "mode='hot'"):
            self.sweeps.hot_cold(Finder(both[:1]), ["a"], ["x"])

    def test_the_fingerprint_follows_records_and_labels(self):
        at = [{"od": 64, "id": 256}]

        def mark(median: float, label: str) -> str:
            find = Finder([timed("a", median, 256)])
            return self.sweeps.fingerprint(self.sweeps.bars(find, ["a"], at, under=lambda _: label))

        self.assertEqual(mark(1.0, "x"), mark(1.0, "x"))
        self.assertNotEqual(mark(1.0, "x"), mark(2.0, "x"))
        self.assertNotEqual(mark(1.0, "x"), mark(1.0, "y"))


@unittest.skipUnless(has_package("matplotlib"), "needs Matplotlib; run it with scripts/ladder test")
class Blocks(unittest.TestCase):
    def setUp(self):
        from workbook import layouts

        self.layouts = layouts

    def read(self, text: str, struct: str = "BlockX"):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "blocks.hpp"
            path.write_text(textwrap.dedent(text), encoding="utf-8")
            return self.layouts.layout_of(path, struct)

    def test_every_block_of_the_project_is_as_long_as_its_table_says(self):
        table = (ROOT / "harness" / "experiment" / "weight_types.hpp").read_text(encoding="utf-8")
        for name, elements, size in (("Q4_0", 32, 18), ("Q5_1", 32, 24), ("Q6_K", 256, 210), ("IQ4_XS", 256, 136)):
            layout = self.layouts.layout_of(ROOT / "kernels" / "quant" / "blocks.hpp", f"Block{name}")
            self.assertEqual((layout.elements, layout.bytes), (elements, size))
            self.assertRegex(table, rf'"{name.lower()}".*\b{elements}, {size}\b')
        pad40 = self.layouts.layout_of(ROOT / "kernels" / "quant" / "q8_acts.hpp", "BlockQ8Pad40")
        self.assertEqual([(f.name, f.offset) for f in pad40.fields], [("d", 0), ("pad", 2), ("q", 4), ("sum", 36)])
        self.assertEqual((pad40.elements, pad40.bytes), (32, 40))

    def test_fields_lie_at_multiples_of_their_size(self):
        layout = self.read("struct BlockX {\n  std::uint8_t a;\n  float b[2];  // two\n  std::int8_t q[32];\n};\n")
        self.assertEqual(
            [(f.name, f.offset, f.note) for f in layout.fields], [("a", 0, ""), ("b", 4, "two"), ("q", 12, "")]
        )
        self.assertEqual(layout.bytes, 44)

    def test_what_is_not_understood_is_an_error(self):
        for text, words in (
            ("struct BlockY {\n};\n", "no struct BlockX"),
            ("struct BlockX {\n  Strange a;\n};\n", 'cannot read the member "Strange a;"'),
            (
                "struct BlockX {\n  float a;\n};\nstatic_assert(sizeof(BlockX) == 8);\n",
                "8 bytes long, its fields take 4",
            ),
        ):
            with self.assertRaisesRegex(UserError, words):
                self.read(text)


@needs_venv
class Woven(ProjectCase):
    def test_a_sweep_and_a_picture_of_blocks(self):
        from workbook.sources import source_hash

        sha = source_hash("fake_fast", "cpu", "chapters/42-fake/fake.cu", self.root)
        self.write_runs(*(committed(made_record("fake_fast", mode=mode), sha) for mode in ("cold", "hot")))
        (self.root / "blocks.hpp").write_text(
            "struct BlockX {\n  float d;\n  std::int8_t q[32];\n};\n", encoding="utf-8"
        )
        page = self.page(
            """\
            <!-- [[[cog sweep("hot_cold", "two", rungs=["fake_fast"], layer=["7b.ffn_down"]) ]]] -->
            <!-- [[[end]]] -->
            <!-- [[[cog block_picture([("blocks.hpp", "BlockX")], "blocks") ]]] -->
            <!-- [[[end]]] -->
            """
        )
        done = self.ladder("weave")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("](plots/two.svg)", page.read_text(encoding="utf-8"))
        self.assertIn("](plots/blocks.svg)", page.read_text(encoding="utf-8"))
        self.assertEqual(self.ladder("weave", "--check").returncode, 0)
        (self.root / "blocks.hpp").write_text(
            "struct BlockX {\n  float d;\n  std::int8_t q[64];\n};\n", encoding="utf-8"
        )
        done = self.ladder("weave", "--check")
        self.assertEqual(done.returncode, 1)
        self.assertIn("blocks.svg is not up to date", done.stdout)

    def test_an_unknown_kind(self):
        self.page('<!-- [[[cog sweep("bras", "x") ]]] -->\n<!-- [[[end]]] -->\n')
        done = self.ladder("weave")
        self.assertEqual(done.returncode, 1)
        self.assertIn("bars", done.stdout)


if __name__ == "__main__":
    unittest.main()
