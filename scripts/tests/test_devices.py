"""data/devices: complete, consistent, and found by the names that drivers report."""

from __future__ import annotations

import copy
import unittest

from workbook import devices

LANES = {"8.0": 64}  # f32 lanes an SM; 128 on every other architecture here


class DeviceFiles(unittest.TestCase):
    def test_every_file_is_sound(self):
        known = devices.all_devices()
        self.assertGreaterEqual(len(known), 9)
        for slug, device in known.items():
            self.assertEqual(devices.problems(device), [], slug)
            self.assertEqual(slug, devices.slugify(device["name"]))

    def test_f32_peaks_follow_from_lanes_and_clock(self):
        for slug, device in devices.all_devices().items():
            lanes = LANES.get(device["compute_capability"], 128)
            expected = device["sms"] * lanes * 2 * device["boost_mhz"] / 1e3
            self.assertAlmostEqual(device["peaks"]["fma_f32"]["gops"] / expected, 1, delta=0.01, msg=slug)

    def test_tensor_peaks_are_dense_and_f32_accumulated(self):
        """Operations a clock and SM: sparse figures, or f16 accumulation on GeForce, would be twice as high."""
        f16 = {"8.0": 2048, "8.6": 512, "8.9": 512, "9.0": 4096, "12.0": 512, "12.1": 1024}
        s8 = {"8.0": 4096, "8.6": 2048, "8.9": 2048, "9.0": 8192, "12.0": 2048, "12.1": 2048}
        for slug, device in devices.all_devices().items():
            capability = device["compute_capability"]
            clock = device.get("tensor_boost_mhz", device["boost_mhz"]) * device["sms"] / 1e3
            half_rate = 2 if slug == "nvidia-l4" else 1  # a data-centre part: full rate on the same architecture
            for name, rate in (("mma_f16", f16[capability] * half_rate), ("mma_s8", s8[capability])):
                self.assertAlmostEqual(
                    device["peaks"][name]["gops"] / (rate * clock), 1, delta=0.03, msg=f"{slug} {name}"
                )

    def test_shared_memory_limits_fit_the_architecture(self):
        limits = {  # KiB of one block, of an SM, of an SM with its L1; blocks of an SM
            "8.0": (163, 164, 192, 32),
            "8.6": (99, 100, 128, 16),
            "8.9": (99, 100, 128, 24),
            "9.0": (227, 228, 256, 32),
            "12.0": (99, 100, 128, 24),
            "12.1": (99, 100, 128, 24),
        }
        for slug, device in devices.all_devices().items():
            block, sm, l1, blocks = limits[device["compute_capability"]]
            self.assertEqual(device["shared_bytes_per_block_optin"], block * 1024, slug)
            self.assertEqual(device["shared_bytes_per_sm"], sm * 1024, slug)
            self.assertEqual(device["l1_and_shared_bytes_per_sm"], l1 * 1024, slug)
            self.assertEqual(device["max_blocks_per_sm"], blocks, slug)

    def test_names_that_drivers_report(self):
        for name, slug in (
            ("NVIDIA H200", "nvidia-h200"),
            ("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3"),
            ("NVIDIA H100 PCIe", "nvidia-h100-pcie"),
            ("NVIDIA A100-SXM4-80GB", "nvidia-a100-sxm4-80gb"),
            ("NVIDIA GeForce RTX 4090", "nvidia-geforce-rtx-4090"),
            ("NVIDIA L4", "nvidia-l4"),
            ("NVIDIA GB10", "nvidia-gb10"),
            ("nvidia-gb10", "nvidia-gb10"),
        ):
            found = devices.spec_for(name)
            self.assertEqual(found and found["slug"], slug, name)
        for stranger in ("NVIDIA L40", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H200 NVL", "made-up-cpu-2c"):
            self.assertIsNone(devices.spec_for(stranger), stranger)

    def test_mistakes_are_found(self):
        good = devices.all_devices()["nvidia-h200"]
        for change in (
            {"sms": 0},
            {"sms": "132"},
            {"match": "NVIDIA H300"},
            {"match": "("},
            {"slug": "NVIDIA H200"},
            {"compute_capability": "9"},
            {"bandwith_gbps": 4800},
            {"peaks": {}},
            {"sources": [{"title": "a page"}]},
        ):
            self.assertTrue(devices.problems({**good, **change}), change)
        peak = copy.deepcopy(good)
        peak["peaks"]["dp4a"]["unit"] = "flop"
        self.assertTrue(devices.problems(peak))
        source = copy.deepcopy(good)
        source["peaks"]["dp4a"]["source"] = 99
        self.assertTrue(devices.problems(source))
        lacking = dict(good)
        del lacking["l2_bytes"]
        self.assertEqual(devices.problems(lacking), ["lacks l2_bytes"])


if __name__ == "__main__":
    unittest.main()
