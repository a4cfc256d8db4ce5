"""data/devices: spec ceilings of known devices, each figure with its source."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from .common import ROOT, UserError, capture, one_of, read_text, shown

DEVICES = ROOT / "data" / "devices"
Device = dict[str, Any]

# name -> type; every field is required unless it stands in OPTIONAL.
FIELDS: dict[str, type | tuple[type, ...]] = {
    "name": str,
    "slug": str,
    "match": str,
    "vendor": str,
    "architecture": str,
    "compute_capability": str,
    "sms": int,
    "boost_mhz": int,
    "memory": str,
    "memory_bytes": int,
    "bandwidth_gbps": (int, float),
    "l2_bytes": int,
    "shared_bytes_per_block_optin": int,
    "shared_bytes_per_sm": int,
    "l1_and_shared_bytes_per_sm": int,
    "max_threads_per_sm": int,
    "max_blocks_per_sm": int,
    "registers_per_sm": int,
    "warp_size": int,
    "shared_banks": int,
    "peaks": dict,
    "sources": list,
}
OPTIONAL = {"tensor_boost_mhz": int, "notes": list}
PEAKS = {
    "fma_f32": "flop",
    "dp4a": "int8_op",
    "mma_f16": "flop",
    "mma_s8": "int8_op",
}
PEAK_TITLES = {
    "fma_f32": "f32 FMA",
    "dp4a": "dp4a",
    "mma_f16": "f16 tensor",
    "mma_s8": "int8 tensor",
}
# The chapter-00 probe that measures each peak.
PEAK_RUNGS = {
    "roof_fma_f32": "fma_f32",
    "roof_dp4a": "dp4a",
    "roof_mma_f16": "mma_f16",
    "roof_mma_s8": "mma_s8",
    "roof_wgmma_f16": "mma_f16",
    "roof_int8_dot": "dp4a",
}
# Probes whose measured ceiling is not called what the datasheet's is.
PROBE_TITLES = {
    "roof_mma_f16": "f16 mma.sync",
    "roof_mma_s8": "int8 mma.sync",
    "roof_wgmma_f16": "f16 wgmma",
    "roof_int8_dot": "int8 dot",
}


def problems(device: Device) -> list[str]:
    """What is wrong with a device file's content; empty if it is sound."""
    found = []
    for name, kind in FIELDS.items():
        if name not in device:
            found.append(f"lacks {name}")
        elif not isinstance(device[name], kind) or isinstance(device[name], bool):
            found.append(f"{name} has the wrong type")
        elif isinstance(device[name], int | float) and device[name] <= 0:
            found.append(f"{name} must be above 0")
    for name in device:
        if name not in FIELDS and name not in OPTIONAL:
            found.append(f"has an unknown field {name}")
    if found:
        return found
    try:
        if not re.fullmatch(device["match"], device["name"]):
            found.append("match does not accept the device's own name")
    except re.error as error:
        found.append(f"match is not a regular expression: {error}")
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", device["slug"]):
        found.append("slug must be lower-case letters, digits and dashes")
    if not re.fullmatch(r"\d+\.\d", device["compute_capability"]):
        found.append("compute_capability must look like 9.0")
    for name in PEAKS:
        if name not in device["peaks"]:
            found.append(f"peaks lacks {name}")
    for name, peak in device["peaks"].items():
        if name not in PEAKS:
            found.append(f"peaks has an unknown entry {name}")
            continue
        if not isinstance(peak, dict) or not {"gops", "unit", "source"} <= set(peak):
            found.append(f"peaks.{name} needs gops, unit and source")
            continue
        if set(peak) - {"gops", "unit", "source", "derived"}:
            found.append(f"peaks.{name} has an unknown field")
        if not isinstance(peak["gops"], int | float) or peak["gops"] <= 0:
            found.append(f"peaks.{name}.gops must be a number above 0")
        if peak["unit"] != PEAKS[name]:
            found.append(f"peaks.{name}.unit must be {PEAKS[name]}")
        if not isinstance(peak["source"], int) or not 0 <= peak["source"] < len(device["sources"]):
            found.append(f"peaks.{name}.source must be an index into sources")
    for number, source in enumerate(device["sources"]):
        ok = isinstance(source, dict) and {"title", "url"} <= set(source) and set(source) <= {"title", "url", "for"}
        if not ok or not str(source["url"]).startswith("https://"):
            found.append(f"sources[{number}] needs title and an https url")
    return found


@cache
def all_devices(folder: Path = DEVICES) -> dict[str, Device]:
    """Every device file, by slug."""
    found: dict[str, Device] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            device = json.loads(read_text(path))
        except json.JSONDecodeError as error:
            raise UserError(f"{shown(path)}:{error.lineno}: not JSON: {error.msg}") from None
        wrong = problems(device)
        if wrong:
            raise UserError(f"{shown(path)}: {wrong[0]}")
        if path.stem != device["slug"]:
            raise UserError(f"{shown(path)}: the file's name must be its slug, {device['slug']}")
        found[device["slug"]] = device
    return found


def spec_for(slug_or_name: str, folder: Path = DEVICES) -> Device | None:
    """The spec of a device given by slug or by the name that CUDA reports; None if it is not known."""
    known = all_devices(folder)
    if slug_or_name in known:
        return known[slug_or_name]
    for device in known.values():
        if re.fullmatch(device["match"], slug_or_name):
            return device
    for device in known.values():  # a slug made from another of the names that match accepts
        if slug_or_name == slugify(device["name"]):
            return device
    return None


def require(slug: str, known: list[str]) -> str:
    """The slug, if it is one of those known."""
    if slug not in known:
        raise one_of("device", slug, known)
    return slug


def slugify(name: str) -> str:
    """The folder name of a device, as the harness makes it: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def nvidia_smi() -> list[dict[str, str]]:
    """GPUs as the driver's own tool lists them; empty without a driver."""
    columns = ["name", "driver_version", "compute_cap", "memory.total"]
    status, text, _ = capture(["nvidia-smi", f"--query-gpu={','.join(columns)}", "--format=csv,noheader"], timeout=30)
    if status:
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    return [dict(zip(columns, row, strict=True)) for row in rows if len(row) == len(columns)]
