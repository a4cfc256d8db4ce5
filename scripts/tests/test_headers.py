"""Every kernel file opens with the fields that a reader is promised, in their order."""

from __future__ import annotations

import re
import unittest

from workbook.common import ROOT

FIELDS = ["RUNG", "PREV", "COMPUTES", "LAYOUT", "MAP", "NEEDS", "TRAFFIC", "WORK", "LOOK FOR", "EXPECT", "BUILD"]
NOT_KERNELS = {"device", "quant", "cpu"}  # building blocks; CPU twins describe themselves in their sources


def headers(text: str) -> list[str]:
    """The comment blocks of a file that describe a rung."""
    blocks = re.findall(r"(?:^//.*\n)+", text, re.MULTILINE)
    return [block for block in blocks if re.search(r"^// RUNG\b", block, re.MULTILINE)]


class KernelHeaders(unittest.TestCase):
    def test_fields_are_there_in_order(self) -> None:
        kernels = [p for p in ROOT.glob("kernels/*/*.cuh") if p.parent.name not in NOT_KERNELS]
        self.assertTrue(kernels)
        chapters = [p for p in ROOT.glob("chapters/*/*.cu") if "RUNG " in p.read_text(encoding="utf-8")]
        for path in kernels + chapters:
            text = path.read_text(encoding="utf-8")
            if path.suffix == ".cuh" and "__global__" not in text:
                continue  # shared by kernels, none itself
            with self.subTest(path=path.relative_to(ROOT).as_posix()):
                found = headers(text)
                self.assertTrue(found, "no header comment with RUNG")
                for header in found:
                    places = [header.find(field) for field in FIELDS]
                    self.assertNotIn(-1, places, [f for f, p in zip(FIELDS, places, strict=True) if p < 0])
                    self.assertEqual(places, sorted(places))

    def test_a_header_without_a_field_is_noticed(self) -> None:
        header = headers("// RUNG      x: y.  PREV z.\n// COMPUTES  a   LAYOUT b\n\nint f();\n")[0]
        self.assertEqual(next(f for f in FIELDS if f not in header), "MAP")


if __name__ == "__main__":
    unittest.main()
