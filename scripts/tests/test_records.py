"""The record schema, and which record counts."""

from __future__ import annotations

import json
import tempfile
import unittest
from pathlib import Path

from tests.support import committed, made_record
from workbook import records
from workbook.common import UserError


def without(record: dict, *names: str) -> dict:
    return {name: value for name, value in record.items() if name not in names}


class Schema(unittest.TestCase):
    def test_sound_records_pass(self):
        self.assertEqual(records.problems(made_record()), [])
        self.assertEqual(records.problems(committed(made_record(), "a" * 64), committed=True), [])
        probe = {
            "schema": 1,
            "rung": "latency_launch",
            "executor": "gpu",
            "device": "nvidia-h200",
            "time_ns": {"median": 2100.0, "q1": 2000.0, "q3": 2200.0, "n": 100},
        }
        self.assertEqual(records.problems(probe), [])
        engine = {
            "schema": 1,
            "rung": "engine",
            "executor": "gpu",
            "device": "nvidia-h200",
            "model": {"size": "7b", "file_type": "Q4_0", "bytes_per_token": 4119000000},
            "test": "tg128",
            "tokens_per_s": {"mean": 900.5, "stddev": 2.0, "samples": [899.0, 902.0]},
        }
        self.assertEqual(records.problems(engine), [])

    def test_each_mistake_is_found(self):
        good = made_record()
        time = good["time_ns"]
        for bad, words in (
            (without(good, "rung"), "lacks rung"),
            ({**good, "schema": 2}, "schema"),
            ({**good, "schema": True}, "schema"),
            ({**good, "executor": "tpu"}, "executor"),
            ({**good, "device": "NVIDIA H200"}, "device"),
            ({**good, "gbps": 0}, "gbps"),
            ({**good, "gbps": float("nan")}, "gbps"),
            ({**good, "gops": "12"}, "gops"),
            ({**good, "speed": 1}, "speed is not a field"),
            ({**good, "shape": {"nt": 1, "od": 0, "id": 2}}, "od"),
            ({**good, "shape": {"nt": 1, "od": 2}}, "lacks id"),
            ({**good, "mode": "warm"}, "mode"),
            ({**good, "work": {"count": 1, "unit": "int4_op"}}, "unit"),
            ({**good, "time_ns": {**time, "q1": time["median"] * 2}}, "q1 <= median"),
            ({**good, "valid": False}, "why_not is absent"),
            ({**good, "why_not": "because"}, "valid is true"),
            ({**good, "bytes": {**good["bytes"], "total": 5}}, "not the sum"),
            ({**good, "params": {}}, "params"),
            ({**good, "params": {"a": [1]}}, "params"),
            ({**good, "check": {"max_error_over_bound": -1}}, "check"),
            ({**good, "source_sha256": "abc"}, "source_sha256"),
            ({**good, "date": "yesterday"}, "date"),
            (without(good, "time_ns", "check"), "says nothing"),
        ):
            found = records.problems(bad)
            self.assertTrue(found and any(words in line for line in found), (words, found))

    def test_committed_records_say_where_they_come_from(self):
        good = committed(made_record(), "a" * 64)
        for name in ("source_sha256", "date", "toolchain", "command"):
            self.assertIn(f"lacks {name}", records.problems(without(good, name), committed=True))
        peer = {**without(good, "source_sha256"), "rung": "cublas_sgemv", "peer": {"name": "cuBLAS", "version": "13.0"}}
        self.assertEqual(records.problems(peer, committed=True), [])


class Files(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name) / "x.jsonl"

    def test_lines_are_counted_and_blank_ones_allowed(self):
        self.path.write_text(json.dumps(made_record()) + "\n\n" + json.dumps(made_record(nt=2)) + "\n")
        self.assertEqual([line.number for line in records.read_file(self.path)], [1, 3])

    def test_a_bad_line_is_named(self):
        for text, words in (
            ("{not json}\n", ":1: not JSON"),
            ("[1]\n", ":1: expected one JSON object"),
            (json.dumps(made_record()) + "\n" + json.dumps({**made_record(), "gbps": -1}) + "\n", ":2: gbps"),
        ):
            self.path.write_text(text)
            with self.assertRaisesRegex(UserError, words):
                records.read_file(self.path)

    def test_a_missing_file_is_one_line(self):
        with self.assertRaisesRegex(UserError, "no file"):
            records.read_file(self.path)

    def test_a_record_in_another_devices_folder_is_refused(self):
        runs = self.path.parent / "runs"
        (runs / "other").mkdir(parents=True)
        (runs / "other" / "x.jsonl").write_text(json.dumps(committed(made_record(), "a" * 64)) + "\n")
        with self.assertRaisesRegex(UserError, "in the folder of other"):
            records.load_committed(runs=runs)


class Latest(unittest.TestCase):
    def lines(self, *found: dict) -> list[records.Line]:
        return [records.Line(record, Path("x.jsonl"), number) for number, record in enumerate(found, 1)]

    def test_the_newest_of_each_key_wins(self):
        old = committed(made_record(), "a" * 64, "2026-01-01T00:00:00Z")
        new = committed(made_record(gbps=12.0), "b" * 64, "2026-02-01T00:00:00Z")
        other = committed(made_record(nt=8), "a" * 64, "2026-01-01T00:00:00Z")
        for order in ((old, new, other), (new, old, other)):
            found = [line.record for line in records.latest(self.lines(*order))]
            self.assertEqual(len(found), 2)
            self.assertIn(new, found)
            self.assertIn(other, found)

    def test_equal_dates_leave_the_later_line(self):
        a, b = made_record(gbps=1.0), made_record(gbps=2.0)
        self.assertEqual([line.record["gbps"] for line in records.latest(self.lines(a, b))], [2.0])

    def test_what_makes_records_different(self):
        base = made_record()
        for change in (
            {"rung": "fake_slow"},
            {"executor": "emulator"},
            {"device": "other"},
            {"type": "q4_0"},
            {"mode": "hot"},
            {"layer": "7b.ffn_up"},
            {"params": {"threads": 1}},
            {"peer": {"name": "x"}},
        ):
            self.assertNotEqual(records.key(base), records.key({**base, **change}), change)
        measured = {"params": {"threads": 2, "ratio_median": 1.5}}
        self.assertEqual(records.key(base), records.key({**base, **measured}))

    def test_one_per_point_prefers_plain_and_all_threads(self):
        one, two = made_record(params={"threads": 1}), made_record(params={"threads": 2})
        half = made_record(params={"threads": 4, "compared_with": "fake_slow"})
        found = records.one_per_point(self.lines(two, half, one))
        self.assertEqual([line.record for line in found], [two])

    def test_counts_and_checks_do_not_replace_each_other(self):
        bare = without(made_record(), "time_ns", "mode", "gbps", "gops", "percent_of_roof", "bound", "valid")
        counted = {**bare, "counters": {"requests": 4}}
        self.assertEqual(records.problems(counted), [])
        found = [line.record for line in records.latest(self.lines(made_record(), counted, bare, counted))]
        self.assertEqual(found, [made_record(), counted, bare])
        self.assertEqual([records.only_counts(record) for record in found], [False, True, False])

    def test_probes_keep_all_their_points(self):
        probe = {name: made_record()[name] for name in ("schema", "executor", "device", "time_ns", "gbps")}
        one, two = ({**probe, "rung": "roof_read", "params": {"threads": n, "best": n == 2}} for n in (1, 2))
        self.assertEqual([line.record for line in records.one_per_point(self.lines(one, two))], [one, two])
        again = {**two, "params": {"threads": 2, "best": False}}
        self.assertEqual([line.record for line in records.latest(self.lines(two, again))], [again])

    def test_matches(self):
        record = made_record(nt=4)
        self.assertTrue(records.matches(record, nt=[1, 4], rung="fake_fast", threads=2, layer=None))
        self.assertFalse(records.matches(record, nt=1))
        self.assertFalse(records.matches(record, threads=1))


if __name__ == "__main__":
    unittest.main()
