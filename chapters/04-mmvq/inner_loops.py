#!/usr/bin/env python3
"""Counts the instructions of mmvq_tiles' inner loops in the machine code of a program of this chapter.

    chapters/04-mmvq/inner_loops.py [build/chapters/mmvq_cuda]

A line for every type and for 1 and 8 tokens: instructions of a warp for sixteen rows of 256 weights; how many of them
are integer ones of half the width (logic, shifts, byte permutations, comparisons, additions); the bytes of these
weights. Counted is the path that is taken most often: from the head of the innermost loop with a product in it, past
what a branch may leave out, unless that copies or multiplies.
"""

import collections
import re
import shutil
import subprocess
import sys
from pathlib import Path

BYTES = {  # of sixteen rows of 256 weights
    "Q8_0": 4352, "Q6_K": 3360, "Q5_1": 3072, "Q5_0": 2816, "Q5_K": 2816, "Q4_1": 2560, "Q4_0": 2304, "Q4_K": 2304,
    "IQ4_NL": 2304, "IQ4_XS": 2176, "Q3_K": 1760, "Q2_K": 1344,
}  # fmt: skip
INTEGER = {"LOP3", "SHF", "PRMT", "ISETP", "IADD3", "VIADD", "SEL", "VIMNMX", "VIADDMNMX", "LEA", "IABS"}
# mmvq_tiles<Format, NT, W, D, BLOCKS, SWIGLU = false, STAGED = true, RANKS = false>
NAME = re.compile(r"mmvq_tilesINS0_\d+Tile(\w+?)ELi(\d)ELi\d+ELi\d+ELi\d+ELb0ELb1ELb0E")
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);")
TARGET = re.compile(r"\bBRA\b.*?(0x[0-9a-f]+)")


def operation(text: str) -> str:
    """The name of an instruction without its predicate and its modifiers."""
    return re.sub(r"^@!?U?P\w+ ", "", text).split()[0].split(".")[0]


def multiplies(text: str) -> bool:
    return "IMMA" in text


def inner_loop(code: list[tuple[int, str]]) -> list[str]:
    """The path through the shortest loop that multiplies."""
    place = {address: i for i, (address, _) in enumerate(code)}

    def target(i: int) -> int | None:
        found = TARGET.search(code[i][1])
        return place[int(found.group(1), 16)] if found and "DIV" not in code[i][1] else None

    loops = [(to, i) for i in range(len(code)) if (to := target(i)) is not None and to < i]
    loops = [(a, b) for a, b in loops if any(multiplies(text) for _, text in code[a:b])]
    head, end = min(loops, key=lambda loop: loop[1] - loop[0])
    path, i = [], head
    while head <= i <= end:
        path.append(code[i][1])
        to = target(i)
        if to is not None and to <= i:
            break
        needed = to is not None and any(multiplies(t) or "LDGSTS" in t for _, t in code[i + 1 : to])
        i = to if to is not None and not (code[i][1].startswith("@") and needed) else i + 1
    return path


def main() -> int:
    program = Path(sys.argv[1] if len(sys.argv) > 1 else "build/chapters/mmvq_cuda")
    tool = shutil.which("cuobjdump") or shutil.which("/usr/local/cuda/bin/cuobjdump")
    if tool is None or not program.exists():
        print(f"inner_loops.py needs cuobjdump, of the CUDA toolkit, and {program}, which a GPU build makes")
        return 1
    sass = subprocess.run([tool, "--dump-sass", str(program)], capture_output=True, text=True, check=True).stdout
    lines = {}
    for function in sass.split("Function : ")[1:]:
        name = NAME.search(function.split("\n")[0])
        if name is None:
            continue
        kind, tokens = name.group(1), int(name.group(2))
        path = inner_loop([(int(a, 16), text.strip()) for a, text in INSTRUCTION.findall(function)])
        counts = collections.Counter(operation(text) for text in path)
        tiles = 2 if "K" not in kind and "XS" not in kind else 1  # of 128 weights, or of 256
        integer = sum(counts[op] for op in INTEGER)
        lines.setdefault((tokens, kind), []).append((tiles * len(path), tiles * integer))
    print("type   tokens instructions integer bytes")
    for tokens in (1, 8):
        for kind, size in BYTES.items():
            total, integer = min(lines[tokens, kind])  # of the plans for short and for long rows
            print(f"{kind:6} {tokens:6} {total:12} {integer:7} {size:5}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
