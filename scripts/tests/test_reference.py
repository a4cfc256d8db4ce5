"""The NumPy reference against what is committed, and the engine against the NumPy reference, for every weight type.

LADDER_QWEN names another binary than build/chapters/09-qwen/qwen.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import tempfile
import unittest
from functools import cache
from pathlib import Path

from tests.support import ROOT, has_package

MODELS = ROOT / "data" / "models"
MODEL, REFERENCE = MODELS / "tales-f16.gguf", MODELS / "tales-reference.gguf"
QWEN = Path(os.environ.get("LADDER_QWEN", ROOT / "build" / "chapters" / "09-qwen" / "qwen"))

# Mixtures that together hold every type of tensor; a second or two for each.
SIMPLE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "IQ4_XS")
MIXTURES = (*SIMPLE, "Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M")
ALL_TYPES = {*SIMPLE, "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}
PROMPT = "prompt1"


def missing(*needed: Path) -> str | None:
    if not (has_package("numpy") and has_package("gguf")):
        return "needs the packages numpy and gguf; run it with scripts/ladder test"
    absent = [path for path in needed if not path.exists()]
    return f"{absent[0].name} is not there" if absent else None


if not missing():
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the products are small: threads cost more than they gain
    import numpy as np

    from workbook.qwen_reference import Qwen2, Run, greedy, perplexity, round_to_int8, tolerance
    from workbook.tales.reference import YARN, read_cases, sha256


@cache
def cases() -> dict[str, object]:
    return {case.name: case for case in read_cases(REFERENCE)}


@cache
def tales() -> Qwen2:
    return Qwen2(MODEL)


class Near(unittest.TestCase):
    def assert_near(self, found: np.ndarray, expected: np.ndarray, limit: float, what: str = ""):
        """Finite and no farther than the limit, every element."""
        self.assertEqual(found.shape, expected.shape)
        self.assertTrue(np.isfinite(found).all(), f"{what}: not finite")
        farthest = float(np.abs(found.astype(np.float64) - expected).max())
        self.assertLessEqual(farthest, limit, what)


@unittest.skipIf(missing(MODEL, REFERENCE), missing(MODEL, REFERENCE) or "")
class Reference(Near):
    def test_belongs_to_the_model(self):
        from gguf import GGUFReader

        stored = GGUFReader(REFERENCE).get_field("reference.sha256").contents()
        self.assertEqual(stored, sha256(MODEL), "make it again: scripts/tales.py reference")

    def test_logits(self):
        for name in ("prompt0", "prompt1", "prompt2", "yarn0"):
            case, model = cases()[name], tales()
            model.yarn = YARN if name.startswith("yarn") else None
            self.addCleanup(setattr, model, "yarn", None)
            wanted = case.logits["logits"]
            rounding = 2.0**-24 * float(np.abs(wanted).max()) + 1e-9
            self.assert_near(Run(model).evaluate(case.tokens, case.rows), wanted, rounding, name)
            model.yarn = None

    def test_one_token_at_a_time_is_the_same(self):
        tokens = cases()["prompt2"].tokens
        whole = Run(tales()).evaluate(tokens, range(len(tokens)))
        run = Run(tales())
        pieces = [run.evaluate(tokens[:5], range(5)), *(run.evaluate([token]) for token in tokens[5:])]
        self.assertEqual(run.position, len(tokens))
        self.assert_near(np.concatenate(pieces), whole, 1e-10)

    def test_what_is_stored_is_what_it_says(self):
        for name, case in cases().items():
            self.assertEqual(case.logits["logits"].shape, (len(case.rows), 4096), name)
            self.assertEqual(case.rows[-1], len(case.tokens) - 1, name)
            self.assertLess(max(case.lists["transformers"]), case.numbers["limit"], name)
            self.assertLess(case.numbers["limit"], 1e-3, name)
            if name in ("prompt0", "prompt1", "prompt2"):
                self.assertEqual(len(case.lists["greedy"]), 128)
                self.assertEqual(min(case.lists["gaps"]), case.numbers["smallest_gap"])
                self.assertGreater(case.numbers["smallest_gap"], 10 * case.numbers["limit"], name)
                self.assertEqual(case.lists["greedy"][0], int(case.logits["logits"][-1].argmax()))

    def test_greedy(self):
        case = cases()["prompt0"]
        found = greedy(Run(tales()), case.tokens, 24)
        self.assertEqual(found.tokens, case.lists["greedy"][:24])
        for gap, stored in zip(found.gaps, case.lists["gaps"], strict=False):
            self.assertAlmostEqual(gap, stored, places=5)

    def test_yarn_matters(self):
        plain, yarn = cases()["prompt1"].logits["logits"], cases()["yarn0"].logits["logits"]
        self.assertEqual(cases()["prompt1"].tokens, cases()["yarn0"].tokens)
        self.assertGreater(float(np.abs(plain - yarn).max()), 100 * cases()["prompt1"].numbers["limit"])

    def test_float32_stays_within_the_limit(self):
        case = cases()[PROMPT]
        found = Run(Qwen2(MODEL, np.float32)).evaluate(case.tokens, case.rows)
        self.assertEqual(found.dtype, np.float32)
        self.assert_near(found, case.logits["logits"], case.numbers["limit"])

    def test_mistakes_exceed_the_limit(self):
        """Mistakes that an engine might make are larger than what it may be off by."""
        case = cases()[PROMPT]
        for attribute, value in (("epsilon", 1e-5), ("base", 1e4), ("kv_heads", None)):
            wrong = Qwen2(MODEL)
            if value is None:  # a bias left out
                wrong.weights["blk.4.attn_v.bias"][:] = 0
            else:
                setattr(wrong, attribute, value)
            off = np.abs(Run(wrong).evaluate(case.tokens, case.rows) - case.logits["logits"]).max()
            self.assertGreater(off, 2 * case.numbers["limit"], attribute)

    def test_perplexity(self):
        tokens = cases()["prompt3"].tokens
        found = perplexity(tales(), tokens, window=64, windows=2)
        self.assertEqual((found.windows, found.counted), (2, 62))
        nll = []
        for first in (0, 64):
            logits = Run(tales()).evaluate(tokens[first : first + 64], range(64))
            for i in range(33, 64):
                p = np.exp(logits[i - 1] - logits[i - 1].max())
                nll.append(-math.log(p[tokens[first + i]] / p.sum()))
        self.assertAlmostEqual(found.mean_nll, sum(nll) / len(nll), places=10)
        with self.assertRaises(ValueError):
            perplexity(tales(), tokens[:50], window=64)

    def test_int8_blocks(self):
        x = np.zeros((1, 64))
        x[0, :4] = [127, -3.5, 2.5, 0.49]  # scale 1: ties to even
        x[0, 32:34] = [-254, 3]  # scale 2, and 1.5 codes are 2
        expected = np.zeros((1, 64))
        expected[0, :4] = [127, -4, 2, 0]
        expected[0, 32:34] = [-254, 4]
        self.assertEqual(round_to_int8(x).tolist(), expected.tolist())


@unittest.skipIf(missing(MODEL, REFERENCE, QWEN), missing(MODEL, REFERENCE, QWEN) or "")
class Engine(Near):
    """The CPU engine, keys and values in f32, against the reference for the weights of the very same file."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="qwen-reference-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def qwen(self, *args: object, stdin: bytes = b"") -> bytes:
        command = [str(QWEN), *map(str, args)]
        done = subprocess.run(command, input=stdin, capture_output=True, check=False, timeout=120)
        self.assertEqual(done.returncode, 0, f"{args}: {done.stderr.decode(errors='replace')}")
        return done.stdout

    def logits(self, model: Path, tokens: list[int], rows: list[int], *options: str) -> np.ndarray:
        ids, places = (",".join(map(str, numbers)) for numbers in (tokens, rows))
        where = ("--on", "cpu", "-t", 1, "-ctk", "f32", "-o", "bin")
        out = self.qwen("logits", model, "--tokens", ids, "--rows", places, *where, *options)
        return np.frombuffer(out, dtype="<f4").reshape(len(rows), -1)

    def test_every_weight_type(self):
        """With f32 activations, and with int8 ones where those are the engine's way: both within their tolerance, and
        the error of int8 as a whole no more than a half larger than the reference finds."""
        case, types = cases()[PROMPT], set()
        for mixture in MIXTURES:
            with self.subTest(mixture):
                file = self.folder / f"{mixture}.gguf"
                self.qwen("quantize", MODEL, file, mixture, "-t", 1)
                model = Qwen2(file)
                file_types = set(model.types.values())
                types |= file_types
                exact = Run(model).evaluate(case.tokens, case.rows)
                limit = tolerance(model, case.tokens, case.rows, exact, int8=False).limit
                self.assertLess(limit, 2e-3, "too wide to find a mistake")
                found = self.logits(file, case.tokens, case.rows, "--exact")
                self.assert_near(found, exact, limit, mixture + " --exact")
                found = self.logits(file, case.tokens, case.rows)
                if file_types <= {"F32", "F16", "BF16"}:
                    self.assert_near(found, exact, limit, mixture)
                else:
                    rounded = Run(model, int8=True).evaluate(case.tokens, case.rows)
                    limit = tolerance(model, case.tokens, case.rows, rounded, int8=True).limit
                    self.assertLess(limit, 0.15 * rounded.std(), "too wide to find a mistake")
                    self.assert_near(found, rounded, limit, mixture + " int8")
                    error, expected = (np.sqrt(np.mean((x - exact) ** 2)) for x in (found, rounded))
                    self.assertLess(error, 1.5 * expected, mixture + " int8, root mean square")
                file.unlink()
        self.assertEqual(types, ALL_TYPES)

    def test_greedy(self):
        from workbook.tales.reference import reader_of

        reader = reader_of(MODEL)
        names = reader.get_field("tokenizer.ggml.tokens").contents()
        case = cases()["prompt1"]
        text = self.qwen("tokenize", MODEL, "--decode", *case.tokens).decode()
        asked = ("-n", 128, "--ignore-eos", "--temp", 0, "--repeat-penalty", 1, "--on", "cpu", "--json")
        report = json.loads(self.qwen("run", MODEL, text, *asked))
        self.assertEqual(report["prompt_tokens"], case.tokens)
        self.assertEqual(report["tokens"], case.lists["greedy"], [names[t] for t in report["tokens"]])

    def test_perplexity(self):
        from workbook.tales.reference import reader_of

        stored = {
            key: reader_of(REFERENCE).get_field("perplexity." + key).contents()
            for key in ("value", "mean_nll", "standard_error", "window", "windows", "counted", "text_tokens", "text")
        }
        self.assertGreater(stored["counted"], 10_000)
        where = ("--on", "cpu", "-ctk", "f32", "--json")
        found = json.loads(self.qwen("perplexity", MODEL, MODELS / stored["text"], *where))
        counts = [found[key] for key in ("window", "windows", "counted_tokens", "text_tokens")]
        self.assertEqual(counts, [stored[key] for key in ("window", "windows", "counted", "text_tokens")])
        self.assertAlmostEqual(found["mean_nll"], stored["mean_nll"], delta=1e-5)
        self.assertAlmostEqual(found["perplexity"], stored["value"], delta=1e-3)
        self.assertAlmostEqual(found["standard_error"], stored["standard_error"], delta=1e-4)

    def test_yarn(self):
        """A copy of the file that asks for YaRN."""
        file = self.folder / "yarn.gguf"
        with_yarn(MODEL, file)
        for name in ("yarn0", "yarn1"):
            case = cases()[name]
            found = self.logits(file, case.tokens, case.rows, "--exact")
            self.assert_near(found, case.logits["logits"], case.numbers["limit"], name)


def with_yarn(file: Path, to: Path) -> None:
    """A copy of a GGUF file with the keys of YaRN."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter

    reader = GGUFReader(file)
    writer = GGUFWriter(to, "qwen2")
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        writer.add_key_value(key, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
    writer.add_key_value("qwen2.rope.scaling.type", "yarn", GGUFValueType.STRING)
    writer.add_key_value("qwen2.rope.scaling.factor", YARN.factor, GGUFValueType.FLOAT32)
    writer.add_key_value("qwen2.rope.scaling.original_context_length", YARN.original_context, GGUFValueType.UINT32)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    unittest.main()
