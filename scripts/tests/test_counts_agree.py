"""Where both were recorded, the emulator's requests and sectors are the hardware's, to the last one."""

from __future__ import annotations

import json
import unittest

from workbook.common import ROOT

EXACT = ("requests", "sectors", "load_requests", "load_sectors", "store_requests", "store_sectors", "shared_requests")


def counted(folder: str) -> dict[tuple, dict]:
    """Counters by rung and shape; the latest record wins."""
    found = {}
    for path in sorted((ROOT / "data" / "runs" / folder).glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if "counters" in record and "shape" in record:
                found[(record["rung"], *record["shape"].values())] = record["counters"]
    return found


class CountsAgree(unittest.TestCase):
    def test_emulator_and_hardware(self) -> None:
        emulator, hardware = counted("emulator-nvidia-h200"), counted("nvidia-h200")
        pairs = sorted(emulator.keys() & hardware.keys())
        self.assertGreaterEqual(len(pairs), 10, "too few pairs to say anything")
        for pair in pairs:
            for name in EXACT:
                if name in emulator[pair] and name in hardware[pair]:
                    with self.subTest(pair=pair, counter=name):
                        self.assertEqual(emulator[pair][name], hardware[pair][name])


if __name__ == "__main__":
    unittest.main()
