"""Packed weights against an implementation of other hands: the package `gguf` (NumPy), bit for bit.

Decoding is compared for every type.  Quantizing is compared where the package can do it, which is F16, BF16, Q4_0,
Q4_1, Q5_0, Q5_1 and Q8_0; for the others kernels/quant/test_quant.cpp has reference bytes of ggml.
"""

from __future__ import annotations

import subprocess
import unittest

from .support import ROOT, has_package

TOOL = ROOT / "build" / "kernels" / "quant" / "quant_tool"
QUANTIZED = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
DECODED = ["F32", *QUANTIZED, "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]  # all of the workbook's
BLOCKS = 2000


def tool(what: str, name: str, data: bytes) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([str(TOOL), what, name.lower()], input=data, capture_output=True, check=False, timeout=60)


@unittest.skipUnless(has_package("gguf"), "needs the packages of .venv; run it with scripts/ladder test")
@unittest.skipUnless(TOOL.exists(), "needs a build; run it with scripts/ladder test")
class AgreementWithGguf(unittest.TestCase):
    def run_tool(self, what: str, name: str, data: bytes) -> bytes:
        result = tool(what, name, data)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        return result.stdout

    def test_sizes_of_blocks(self):
        import gguf

        for name in DECODED:
            with self.subTest(name):
                elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
                decoded = self.run_tool("dequantize", name, bytes(3 * size))
                self.assertEqual(len(decoded), 3 * elements * 4)
                self.assertEqual(len(self.run_tool("quantize", name, decoded)), 3 * size)

    def test_decoding_random_bytes(self):
        import gguf
        import numpy as np

        rng = np.random.default_rng(1)
        for name in DECODED:
            with self.subTest(name):
                kind = gguf.GGMLQuantizationType[name]
                _, size = gguf.GGML_QUANT_SIZES[kind]
                packed = rng.integers(0, 256, BLOCKS * size, dtype=np.uint8)
                ours = np.frombuffer(self.run_tool("dequantize", name, packed.tobytes()), dtype=np.uint32)
                with np.errstate(all="ignore"):  # random scales: some are infinite, some are no numbers
                    theirs = gguf.quants.dequantize(packed.reshape(1, -1), kind).reshape(-1).astype(np.float32)
                no_number = np.isnan(theirs)
                self.assertTrue(np.array_equal(no_number, np.isnan(ours.view(np.float32))))
                self.assertLess(np.count_nonzero(no_number), theirs.size // 4)
                differ = np.flatnonzero((ours != theirs.view(np.uint32)) & ~no_number)
                self.assertEqual(differ.size, 0, f"first at element {differ[:1]}")

    def test_quantizing(self):
        import gguf
        import numpy as np

        rng = np.random.default_rng(2)
        count = 32 * BLOCKS
        inputs = {
            "like weights": rng.standard_normal(count) * 0.02,
            "uniform": rng.uniform(-1, 1, count),
            "positive": rng.uniform(0.1, 1, count),
            "whole numbers": rng.integers(-8, 8, count),
            # No negative zeros: of a block of nothing else the package stores another sign of the scale than ggml.
            "mostly zero": np.where(rng.random(count) < 0.05, rng.standard_normal(count), 0.0),
            "small": rng.standard_normal(count) * 1e-6,
            "large": rng.standard_normal(count) * 1e4,
            "zero": np.zeros(count),
        }
        for label, values in inputs.items():
            x = values.astype(np.float32)
            for name in QUANTIZED:
                with self.subTest(input=label, type=name):
                    theirs = gguf.quants.quantize(x.reshape(-1, 32), gguf.GGMLQuantizationType[name])
                    ours = self.run_tool("quantize", name, x.tobytes())
                    self.assertEqual(ours, theirs.tobytes())

    def test_errors_are_told(self):
        for what, name, data, part in (
            ("quantize", "q9_9", b"", "unknown type 'q9_9'; known are f32, f16,"),
            ("quantize", "q4_0", bytes(4), "must be a multiple of 32, not 1"),
            ("quantize", "q4_0", bytes(3), "not whole f32 numbers"),
            ("dequantize", "q4_k", bytes(143), "not whole blocks of 144 bytes"),
            ("quantize", "q8_0", b"\0\0\xc0\x7f" * 32, "element 0 is nan"),
            ("weigh", "q8_0", b"", "usage: quant_tool"),
        ):
            with self.subTest(what=what, type=name):
                result = tool(what, name, data)
                self.assertEqual(result.returncode, 2)
                self.assertEqual(result.stdout, b"")
                self.assertIn(part, result.stderr.decode())


if __name__ == "__main__":
    unittest.main()
