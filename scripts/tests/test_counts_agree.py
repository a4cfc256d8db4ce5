"""Where both were recorded, the emulator's requests and sectors are the hardware's, to the last one.

Two exceptions, both in chapter 04, and both bounded here.
"""

from __future__ import annotations

import json
import unittest

from workbook.common import ROOT

EXACT = ("requests", "sectors", "load_requests", "load_sectors", "store_requests", "store_sectors", "shared_requests")

# nvcc joins a thread's neighbouring reads of shared memory (eight partial sums: two requests, not eight). The emulator
# runs the source as it stands, so it may count more of them, never fewer. (In the last two rungs there are copies into
# shared memory as well; what share of the difference is theirs was not traced.)
JOINED = ("_q8_mmvq", "_q8_mmvq_pf", "_q8_mmvq_tiles")
# Copies into shared memory: the hardware counts a few percent more sectors, for a reason that is not known. Not so
# those of mmvq_tiles, whose ring begins at a line of the 32 banks.
COPIES_AT_MOST = {"_q8_mmvq_pf": 1.06}


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
                        ours, theirs = emulator[pair][name], hardware[pair][name]
                        if name == "shared_requests" and pair[0].endswith(JOINED):
                            self.assertLessEqual(theirs, ours)
                        elif name in ("sectors", "load_sectors") and pair[0].endswith(tuple(COPIES_AT_MOST)):
                            most = next(m for step, m in COPIES_AT_MOST.items() if pair[0].endswith(step))
                            self.assertLessEqual(ours, theirs)
                            self.assertLessEqual(theirs, ours * most)
                        else:
                            self.assertEqual(ours, theirs)


if __name__ == "__main__":
    unittest.main()
