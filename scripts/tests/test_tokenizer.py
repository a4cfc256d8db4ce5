"""The tokenizer gives the ids that Hugging Face's `tokenizers` gives, on random text of many kinds.

The vocabulary is the bundled model's.  Where the environment variable LADDER_TOKENIZER_JSON names Qwen2.5's own
tokenizer.json, the same is done with that, and known ids are checked.  LADDER_TOKENIZER_STRINGS sets how many texts
there are, LADDER_TOKENIZER_SEED which.
"""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import tempfile
import unicodedata
import unittest
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

from .support import ROOT, has_package

TOOL = ROOT / "build" / "chapters" / "09-qwen" / "tokenize_tool"
MODEL = ROOT / "data" / "models" / "tales-f16.gguf"
FULL = os.environ.get("LADDER_TOKENIZER_JSON", "")
STRINGS = int(os.environ.get("LADDER_TOKENIZER_STRINGS", "10000"))
SEED = int(os.environ.get("LADDER_TOKENIZER_SEED", "1"))

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5

# Ids that Qwen2.5's tokenizer is known to give, special tokens recognised.
KNOWN = {
    "Hello, world!": "9707 11 1879 0",
    " Hello  world": "21927 220 1879",
    "a   b": "64 256 293",
    "\n\n  foo\n": "271 220 15229 198",
    "I'm you'RE it's I'LL": "40 2776 498 94153 432 594 358 6 4086",
    "1234567": "16 17 18 19 20 21 22",
    "x=1+22": "87 28 16 10 17 17",
    "def f():\n    return  x\n": "750 282 3932 262 470 220 856 198",
    "\t\tif (a->b) {\r\n": "197 743 320 64 405 65 8 972",
    "(x):\n": "2075 982",
    "->": "405",
    "...!!!": "1112 12069",
    "你好，世界": "108386 3837 99489",
    "日本語テスト": "101059 102819 140592",
    "😀👨‍👩‍👧": "141334 145367 378 235 145233 378 235 145665",
    "caf\u00e9": "924 58858",
    "cafe\u0301": "924 58858",
    "  ": "256",
    "   \n  x": "5872 220 856",
    "<|im_start|>user\nhi<|im_end|>\n": "151644 872 198 6023 151645 198",
    "a<|endoftext|>b": "64 151643 65",
    "<tool_call>": "151657",
    "#include <cuda.h>\n": "1067 366 33926 860 397",
    "foo_bar.baz()": "7975 14388 948 1370 368",
    "３４５": "33517 45602 43497",
    "a\u00a0b": "64 4102 65",
    "x\u2028y": "87 378 101 88",
    "नमस्ते": "60096 87244 78368 30484 97 34370",
    "The quick brown fox jumps over the lazy dog.": "785 3974 13876 38835 34208 916 279 15678 5562 13",
    (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    ): (
        "151644 8948 198 2610 525 1207 16948 11 3465 553 54364 14817 13 1446 525 264 10950 17847 13 151645 198 "
        "151644 872 198 9707 151645 198 151644 77091 198"
    ),
}


# --- the oracle -------------------------------------------------------------------------------------------------


def read_vocabulary(path: Path) -> tuple[list[str], list[int], list[str]]:
    """Tokens, types and merges of a GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""
    sizes = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

    def number(file: BinaryIO, code: str) -> int:
        return struct.unpack("<" + code, file.read(struct.calcsize("<" + code)))[0]

    def value(file: BinaryIO, kind: int) -> object:
        if kind == 8:
            return file.read(number(file, "Q")).decode()
        if kind == 9:
            element, count = number(file, "I"), number(file, "Q")
            return [value(file, element) for _ in range(count)]
        return number(file, sizes[kind])

    with path.open("rb") as file:
        assert file.read(4) == b"GGUF"
        number(file, "I"), number(file, "Q")
        found = {}
        for _ in range(number(file, "Q")):
            key = value(file, 8)
            found[key] = value(file, number(file, "I"))
    return tuple(found[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type", "merges"))


def write_vocabulary(path: Path, tokens: list[str], types: list[int], merges: list[str], eos: int) -> None:
    """A GGUF file with a vocabulary and no tensors."""

    def text(of: str) -> bytes:
        return struct.pack("<Q", len(of.encode())) + of.encode()

    def texts(of: list[str]) -> bytes:
        return struct.pack("<IIQ", 9, 8, len(of)) + b"".join(map(text, of))

    values = {
        "general.architecture": struct.pack("<I", 8) + text("qwen2"),
        "tokenizer.ggml.model": struct.pack("<I", 8) + text("gpt2"),
        "tokenizer.ggml.pre": struct.pack("<I", 8) + text("qwen2"),
        "tokenizer.ggml.tokens": texts(tokens),
        "tokenizer.ggml.token_type": struct.pack(f"<IIQ{len(types)}i", 9, 5, len(types), *types),
        "tokenizer.ggml.merges": texts(merges),
        "tokenizer.ggml.eos_token_id": struct.pack("<II", 4, eos),
    }
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, len(values)))
        for key, packed in values.items():
            file.write(text(key) + packed)


def oracle_of(tokens: list[str], types: list[int], merges: list[str]):
    """The same vocabulary in `tokenizers`, put together as Qwen2.5's tokenizer.json does."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate(tokens) if types[i] != UNUSED}
    oracle = Tokenizer(models.BPE(vocab=vocabulary, merges=[tuple(merge.split(" ")) for merge in merges]))
    oracle.normalizer = normalizers.NFC()
    oracle.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    oracle.decoder = decoders.ByteLevel()
    added = [
        AddedToken(t, normalized=False, special=True) for t, kind in zip(tokens, types, strict=True) if kind == CONTROL
    ]
    oracle.add_special_tokens(added)
    added = [AddedToken(t, normalized=False) for t, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED]
    oracle.add_tokens(added)
    return oracle


# --- this project's tokenizer -----------------------------------------------------------------------------------


def through_tool(model: Path, texts: Iterable[str], *options: str) -> list[list[int]]:
    packed = b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in texts)
    done = subprocess.run([TOOL, model, *options], input=packed, capture_output=True, check=False, timeout=600)
    if done.returncode:
        raise AssertionError(done.stderr.decode())
    return [[int(word) for word in line.split()] for line in done.stdout.decode().split("\n")[:-1]]


def decoded_by_tool(model: Path, ids: Iterable[list[int]]) -> list[bytes]:
    lines = "".join(" ".join(map(str, line)) + "\n" for line in ids)
    done = subprocess.run(
        [TOOL, model, "--decode"], input=lines.encode(), capture_output=True, check=False, timeout=600
    )
    if done.returncode:
        raise AssertionError(done.stderr.decode())
    texts, at = [], 0
    while at < len(done.stdout):
        (length,) = struct.unpack_from("<I", done.stdout, at)
        texts.append(done.stdout[at + 4 : at + 4 + length])
        at += 4 + length
    return texts


# --- random text ------------------------------------------------------------------------------------------------


def _spread(*ranges: tuple[int, int]) -> list[str]:
    """Characters that Unicode 3.2 had already: the libraries may know different versions of Unicode."""
    old = unicodedata.ucd_3_2_0
    return [
        chr(c)
        for first, last in ranges
        for c in range(first, last + 1)
        if not 0xD800 <= c < 0xE000 and old.category(chr(c)) not in ("Cn", "Co")
    ]


ANY = _spread((0, 0xFFFF), (0x10300, 0x1D7FF), (0x20000, 0x20100), (0x2F800, 0x2FA1D))
MARKS = [c for c in ANY if unicodedata.category(c) in ("Mn", "Mc", "Me")]
DIGITS = [c for c in ANY if unicodedata.category(c) in ("Nd", "Nl", "No")]
SPACES = [" "] * 8 + list("\t\n\r\v\f\x85\u00a0\u1680\u2000\u2001\u2003\u2009\u200a\u2028\u2029\u202f\u205f\u3000")
NOT_QUITE_SPACES = list("\u180e\u200b\u200c\u200d\u2060\ufeff\x1c\x1d\x1e\x1f\x00\x08\x7f")
CASED = list("sStTmMdDrReEvVlL\u017f'’ʼ")
COMPOSABLE = [c for c in ANY if unicodedata.decomposition(c) and not unicodedata.decomposition(c).startswith("<")]
EMOJI = ["😀", "👨‍👩‍👧", "👍🏽", "🏳️‍🌈", "🇩🇪", "❤️", "1️⃣", "🧑‍🚀", "✔", "🫠"]
SCRIPTS = [
    _spread(r)
    for r in (
        (0x41, 0x7A),
        (0xC0, 0x24F),
        (0x370, 0x3FF),
        (0x400, 0x4FF),
        (0x590, 0x5F4),
        (0x600, 0x6FF),
        (0x900, 0x97F),
        (0xE00, 0xE5B),
        (0x1100, 0x11F9),
        (0x3040, 0x30FF),
        (0x4E00, 0x9FA5),
        (0xAC00, 0xD7A3),
        (0xFF00, 0xFFEF),
    )
]
CODE = """\
def f(x: int) -> list[str]:\n    return  [str(i) for i in range(x)]  # it's\n\n
#include <cuda_runtime.h>\r\n__global__ void k(float* a){a[threadIdx.x]*=2.0f;}\r\n
SELECT * FROM t WHERE a != 'don''t' AND b >= 1e-6;\n\t\tif (a->b && !c) { i++; }\n
{"key": [1, 2.5, null], "I'LL": "\\u00e9"}\n<div class="x">&nbsp;</div>\n   \n  \n
"""
PROSE = (
    "It was the best of times, it was the worst of times; they'd said \"we've 1,234 reasons\" -- and I'm sure you'RE "
    "not. Naïve café, Übergröße, 你好，世界。日本語のテスト、Привет мир! नमस्ते दुनिया 12½ ٣٤٥"
)


def _cut(rng: random.Random, text: str) -> str:
    at = rng.randrange(len(text))
    return text[at : at + rng.randrange(1, 40)]


def random_text(rng: random.Random, added: list[str]) -> str:
    """Stretches of different kinds, one after another."""

    def some(characters: list[str], most: int) -> str:
        return "".join(rng.choices(characters, k=rng.randrange(1, most)))

    kinds: list[tuple[int, Callable[[], str]]] = [
        (6, lambda: _cut(rng, PROSE)),
        (6, lambda: _cut(rng, CODE)),
        (4, lambda: some(rng.choice(SCRIPTS), 12)),
        (4, lambda: some(SPACES, 6)),
        (2, lambda: some([" ", "\n", "\r", "a"], 10)),
        (3, lambda: some(CASED, 8)),
        (2, lambda: some(DIGITS, 4) + some(list("0123456789"), 5)),
        (2, lambda: some(COMPOSABLE, 6)),
        (2, lambda: unicodedata.normalize(rng.choice(["NFC", "NFD"]), some(COMPOSABLE, 6))),
        (2, lambda: some(rng.choice(SCRIPTS), 4) + some(MARKS, 4)),
        (1, lambda: some(rng.choice(SCRIPTS), 2) + some(MARKS, 150)),
        (2, lambda: some(EMOJI, 3)),
        (2, lambda: some(NOT_QUITE_SPACES, 4)),
        (2, lambda: some(list("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"), 10)),
        (2, lambda: some(ANY, 6)),
        (1, lambda: rng.choice(["a", " ", "\n", "ab", "=", "-", "0", "你"]) * rng.randrange(1, 200)),
    ]
    if added:
        kinds.append((1, lambda: rng.choice(added)))
        kinds.append((1, lambda: _cut(rng, rng.choice(added))))
    weights = [weight for weight, _ in kinds]
    return "".join(make() for _, make in rng.choices(kinds, weights, k=rng.randrange(1, 7)))


def random_texts(count: int, seed: int, added: list[str]) -> list[str]:
    rng = random.Random(seed)
    return ["", *(random_text(rng, added) for _ in range(count - 1))]


@unittest.skipUnless(has_package("tokenizers"), "needs the packages of .venv; run it with scripts/ladder test")
@unittest.skipUnless(TOOL.exists(), "needs a build; run it with scripts/ladder test")
class Agreement(unittest.TestCase):
    def compare(self, model: Path, oracle, texts: list[str], special: bool, options: tuple[str, ...] = ()) -> None:
        oracle.encode_special_tokens = not special
        expected = [found.ids for found in oracle.encode_batch(texts, add_special_tokens=False)]
        got = through_tool(model, texts, *(["--special"] if special else []), *options)
        self.assertEqual(len(got), len(texts))
        wrong = [i for i in range(len(texts)) if got[i] != expected[i]]
        shown = "".join(f"\n  {texts[i]!r}\n    expected {expected[i]}\n    got      {got[i]}" for i in wrong[:3])
        self.assertFalse(wrong, f"{len(wrong)} of {len(texts)} texts differ:{shown}")

    def agree(self, model: Path, oracle, added: list[str]) -> None:
        texts = random_texts(STRINGS, SEED, added)
        half = len(texts) // 2
        with self.subTest("special tokens are text"):
            self.compare(model, oracle, texts[:half], special=False)
        with self.subTest("special tokens are recognised"):
            self.compare(model, oracle, texts[half:], special=True)
        with self.subTest("without NFC"):
            normalizer, oracle.normalizer = oracle.normalizer, None
            self.addCleanup(setattr, oracle, "normalizer", normalizer)
            self.compare(model, oracle, texts[: half // 2], special=True, options=("--no-nfc",))
        with self.subTest("decoding is the way back"):
            ids = through_tool(model, texts, "--special", "--no-nfc")
            self.assertEqual(decoded_by_tool(model, ids), [text.encode() for text in texts])

    @unittest.skipUnless(MODEL.exists(), "the bundled model is not there")
    def test_vocabulary_of_the_bundled_model(self):
        tokens, types, merges = read_vocabulary(MODEL)
        added = [t for t, kind in zip(tokens, types, strict=True) if kind in (CONTROL, USER_DEFINED)]
        self.assertTrue(added)
        self.agree(MODEL, oracle_of(tokens, types, merges), added)

    @unittest.skipUnless(FULL, "LADDER_TOKENIZER_JSON does not name Qwen2.5's tokenizer.json")
    def test_full_vocabulary(self):
        from tokenizers import Tokenizer

        described = json.loads(Path(FULL).read_text(encoding="utf-8"))
        ids = dict(described["model"]["vocab"])
        special = {entry["content"]: entry["special"] for entry in described["added_tokens"]}
        ids |= {entry["content"]: entry["id"] for entry in described["added_tokens"]}
        size = 151936
        tokens, types = [f"[PAD{i}]" for i in range(size)], [UNUSED] * size
        for token, i in ids.items():
            tokens[i] = token
            types[i] = NORMAL if token not in special else CONTROL if special[token] else USER_DEFINED
        merges = [m if isinstance(m, str) else " ".join(m) for m in described["model"]["merges"]]
        with tempfile.TemporaryDirectory(prefix="ladder-test-") as folder:
            model = Path(folder) / "vocabulary.gguf"
            write_vocabulary(model, tokens, types, merges, eos=ids["<|im_end|>"])
            with self.subTest("known ids"):
                got = through_tool(model, KNOWN, "--special")
                for text, found in zip(KNOWN, got, strict=True):
                    with self.subTest(text):
                        self.assertEqual(" ".join(map(str, found)), KNOWN[text])
            self.agree(model, Tokenizer.from_file(FULL), list(special))


if __name__ == "__main__":
    unittest.main()
