"""Anchors, and the hash that ties records to code."""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path

from workbook.common import UserError
from workbook.sources import anchors_in, find_anchor, hash_of, normalised, source_hash, source_of


class Normalised(unittest.TestCase):
    def assert_same(self, a: str, b: str):
        self.assertEqual(normalised(a), normalised(b))
        self.assertEqual(hash_of(a), hash_of(b))

    def assert_differ(self, a: str, b: str):
        self.assertNotEqual(hash_of(a), hash_of(b))

    def test_comments_and_layout_do_not_count(self):
        self.assert_same("int x = 1;  // one\nint y;\n", "int x=1; /* two\n lines */ int y;")
        self.assert_same("f( a,\n   b );", "f(a, b);")
        self.assert_same("  a\n", "a")

    def test_tokens_do_count(self):
        self.assert_differ("int x = 1;", "int x = 2;")
        self.assert_differ("unsigned int x;", "unsignedint x;")
        self.assert_differ("a = b + ++c;", "a = b ++ + c;")
        self.assert_differ("a - -b", "a--b")

    def test_text_in_literals_is_kept(self):
        self.assert_differ('say("a  b");', 'say("a b");')
        self.assert_differ('say("// no comment");', 'say("");')
        self.assert_differ("c = ' ';", "c = '';")
        self.assert_differ('asm(R"(a // b)");', 'asm(R"(a // c)");')

    def test_digit_separators_are_no_character_literals(self):
        self.assert_same("x = 1'000; // a\ny = 2'000;", "x = 1'000; y = 2'000;")

    def test_an_escaped_quote_does_not_end_a_string(self):
        self.assert_same('f("\\"// still text"); // gone', 'f("\\"// still text");')


class Anchors(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)

    def write(self, text: str, name: str = "kernels/k.cuh") -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def test_text_and_place(self):
        path = self.write("x\n// ANCHOR: a\none\n  // ANCHOR: b\ntwo\n  // ANCHOR_END: b\n// ANCHOR_END: a\n")
        a, b = anchors_in(path)
        self.assertEqual((a.name, a.text, a.first, a.last), ("a", "one\ntwo\n", 3, 6))
        self.assertEqual((b.name, b.text), ("b", "two\n"))

    def test_mistakes_name_file_and_line(self):
        for text, words in (
            ("// ANCHOR: a\nx\n", ":1: anchor a is never closed"),
            ("x\n// ANCHOR_END: a\n", ":2: ANCHOR_END: a without"),
            ("// ANCHOR: a\n// ANCHOR_END: a\n// ANCHOR: a\n", ":3: anchor a appears twice"),
        ):
            with self.assertRaisesRegex(UserError, words):
                anchors_in(self.write(text))

    def test_an_unknown_name_lists_the_known(self):
        path = self.write("// ANCHOR: a\nx\n// ANCHOR_END: a\n")
        with self.assertRaisesRegex(UserError, r'no anchor "b" \(there are: a\)'):
            find_anchor(path, "b")

    def test_a_cpu_record_belongs_to_the_twin(self):
        self.write("// ANCHOR: gemv\nkernel\n// ANCHOR_END: gemv\n")
        self.write("// ANCHOR: cpu_gemv\ntwin\n// ANCHOR_END: cpu_gemv\n", "kernels/cpu/gemv.cpp")
        self.assertEqual(source_of("gemv", "cpu", "kernels/k.cuh", self.root).text, "twin\n")
        self.assertEqual(source_of("gemv", "emulator", "kernels/k.cuh", self.root).text, "kernel\n")
        self.assertEqual(source_of("gemv", "gpu", None, self.root).text, "kernel\n")
        self.assertNotEqual(source_hash("gemv", "cpu", None, self.root), source_hash("gemv", "gpu", None, self.root))

    def test_a_variant_is_measured_on_the_code_that_it_parametrises(self):
        self.write("// ANCHOR: gemv_vec\nkernel\n// ANCHOR_END: gemv_vec\n")
        self.assertEqual(source_of("gemv_vec_w4", "gpu", "kernels/k.cuh", self.root).name, "gemv_vec")
        self.assertEqual(source_of("gemv_vec_w4", "gpu", None, self.root).name, "gemv_vec")

    def test_one_name_in_two_files_is_ambiguous(self):
        self.write("// ANCHOR: a\nx\n// ANCHOR_END: a\n")
        self.write("// ANCHOR: a\ny\n// ANCHOR_END: a\n", "kernels/other.cuh")
        with self.assertRaisesRegex(UserError, "ambiguous"):
            source_of("a", "gpu", None, self.root)
        self.assertEqual(source_of("a", "gpu", "kernels/other.cuh", self.root).text, "y\n")


if __name__ == "__main__":
    unittest.main()
