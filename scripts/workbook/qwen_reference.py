"""Qwen2 and Qwen2.5 in NumPy, written to be read: the independent reference of the C++ engines.

It reads any GGUF file, dequantizes every tensor with the package gguf, and computes in float64.  It shares no code with
the engines.  On request it makes the two kinds of error that an engine makes, so that a test knows how large they are:

  int8   activations are rounded to int8 before they meet a quantized matrix, 32 elements to a scale, as engines do
  noise  every result is moved at random by about as much as float32 arithmetic may move it

Shapes: n new tokens, T tokens in all, d = embedding length, h query heads, kv key and value heads, hd = d / h.
Formulas: https://arxiv.org/abs/2407.10671 (Qwen2), https://arxiv.org/abs/2309.00071 (YaRN).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
F32_UNIT = 2.0**-24  # largest relative error of one rounding to float32
INT8_BLOCK = 32
PLAIN_TYPES = ("F32", "F16", "BF16")  # met by float32 activations, whatever the engine does with the others


@dataclass(frozen=True)
class Yarn:
    factor: float
    original_context: int


class Qwen2:
    """The weights of one file, dequantized; a matrix is [out, in].

    @param dtype of weights and of everything computed with them: float64, or float32 to see what that costs
    Raises ValueError for a file of another architecture, KeyError for a tensor or key that is missing.
    """

    def __init__(self, path: Path, dtype: type[np.floating[Any]] = np.float64) -> None:
        from gguf import GGUFReader, quants

        reader = GGUFReader(path)

        def value(key: str, default: Any = None) -> Any:
            field = reader.get_field(key)
            if field is None and default is None:
                raise KeyError(f"{path}: no key {key}")
            return default if field is None else field.contents()

        if value("general.architecture") != "qwen2":
            raise ValueError(f"{path}: the architecture is {value('general.architecture')}, not qwen2")
        self.dtype = dtype
        self.layers = int(value("qwen2.block_count"))
        self.heads = int(value("qwen2.attention.head_count"))
        self.kv_heads = int(value("qwen2.attention.head_count_kv", self.heads))
        self.head_dim = int(value("qwen2.embedding_length")) // self.heads
        self.epsilon = float(value("qwen2.attention.layer_norm_rms_epsilon"))
        self.base = float(value("qwen2.rope.freq_base", 10000.0))
        self.yarn: Yarn | None = None
        if value("qwen2.rope.scaling.type", "none") == "yarn":
            original = int(value("qwen2.rope.scaling.original_context_length"))
            self.yarn = Yarn(float(value("qwen2.rope.scaling.factor")), original)
        self.types = {t.name: t.tensor_type.name for t in reader.tensors}
        self.weights: dict[str, Array] = {
            t.name: quants.dequantize(t.data, t.tensor_type).astype(dtype) for t in reader.tensors
        }
        self.output = "output.weight" if "output.weight" in self.weights else "token_embd.weight"
        self.norms: dict[str, Array] = {}  # Euclidean norms of a matrix's rows, for noise; made when asked for

    @property
    def vocabulary(self) -> int:
        return len(self.weights["token_embd.weight"])

    def row_norms(self, name: str) -> Array:
        if name not in self.norms:
            self.norms[name] = np.sqrt(np.square(self.weights[name]).sum(axis=1))
        return self.norms[name]

    def rotations(self, positions: Array) -> tuple[Array, Array]:
        """cos and sin of the angles by which pairs (i, i + hd/2) turn, [n, hd/2] each."""
        i = np.arange(self.head_dim // 2)
        angle = positions[:, None] * self.base ** (-2.0 * i / self.head_dim)
        magnitude = 1.0
        if self.yarn:

            def pair_that_turns(times: float) -> float:
                """The number of the pair that turns this often within the original context."""
                assert self.yarn
                turns = self.yarn.original_context / (2 * math.pi * times)
                return self.head_dim * math.log(turns) / (2 * math.log(self.base))

            low = max(0, math.floor(pair_that_turns(32)))
            high = min(self.head_dim - 1, math.ceil(pair_that_turns(1)))
            kept = 1 - np.clip((i - low) / max(0.001, high - low), 0, 1)
            angle = angle / self.yarn.factor * (1 - kept) + angle * kept
            magnitude = 1 + 0.1 * math.log(self.yarn.factor)
        return (np.cos(angle) * magnitude).astype(self.dtype), (np.sin(angle) * magnitude).astype(self.dtype)


def round_to_int8(x: Array) -> Array:
    """x [n, id] as blocks of 32 int8 with a float32 scale would hold it: scale = amax / 127, ties to even."""
    blocks = x.reshape(*x.shape[:-1], -1, INT8_BLOCK)
    scale = (np.abs(blocks).max(axis=-1, keepdims=True) / 127).astype(np.float32).astype(x.dtype)
    codes = np.rint(np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale != 0))
    return (np.clip(codes, -127, 127) * scale).reshape(x.shape)


class Run:
    """A sequence being evaluated: the keys and values of its tokens.

    @param int8 round activations to int8 where a matrix is quantized
    @param half_cache round keys and values to float16, as an engine with an f16 cache does
    @param noise move results at random, by what float32 does to them.  A sum of n products is moved by up to
      u * |a| * |b|, u = 2^-24, the norms of its two vectors.  Why: products of random signs, added one by one, have
      partial sums of about sqrt(k) * |a| * |b| / n after k of them; each is rounded by u times itself at most, and n
      such errors of random sign come to u * |a| * |b| / sqrt(6) in the root mean square, against 1 / sqrt(3) for the
      noise.  Sums that are split over lanes round less.  What is computed elementwise is moved by up to four roundings.
    """

    def __init__(
        self, model: Qwen2, int8: bool = False, half_cache: bool = False, noise: np.random.Generator | None = None
    ) -> None:
        self.model, self.int8, self.half_cache, self.noise = model, int8, half_cache, noise
        empty = np.zeros((0, model.kv_heads, model.head_dim), model.dtype)
        self.keys = [empty] * model.layers
        self.values = [empty] * model.layers

    @property
    def position(self) -> int:
        return len(self.keys[0])

    def evaluate(self, tokens: Sequence[int], rows: Sequence[int] = (-1,)) -> Array:
        """Appends tokens to the sequence.  Returns the logits [len(rows), V] of these of them (last: -1)."""
        model = self.model
        positions = np.arange(self.position, self.position + len(tokens))
        cos, sin = model.rotations(positions)
        h = model.weights["token_embd.weight"][np.asarray(tokens, dtype=np.int64)]  # [n, d]
        for layer in range(model.layers):
            name = f"blk.{layer}."
            a = self._norm(name + "attn_norm.weight", h)
            q = self._rotate(self._heads(name + "attn_q", a, model.heads), cos, sin)
            k = self._rotate(self._heads(name + "attn_k", a, model.kv_heads), cos, sin)
            v = self._heads(name + "attn_v", a, model.kv_heads)
            if self.half_cache:
                k, v = (x.astype(np.float16).astype(model.dtype) for x in (k, v))
            self.keys[layer] = np.concatenate((self.keys[layer], k))
            self.values[layer] = np.concatenate((self.values[layer], v))
            h = h + self._multiply(name + "attn_output.weight", self._attend(layer, q, positions))
            f = self._norm(name + "ffn_norm.weight", h)
            gate, up = (self._multiply(name + f"ffn_{part}.weight", f) for part in ("gate", "up"))
            gated = self._moved(gate / (1 + np.exp(-gate)) * up)
            h = h + self._multiply(name + "ffn_down.weight", gated)
        return self._multiply(model.output, self._norm("output_norm.weight", h[list(rows)]))

    def _multiply(self, name: str, x: Array) -> Array:
        """[n, in] -> [n, out]"""
        w = self.model.weights[name]
        if self.int8 and self.model.types[name] not in PLAIN_TYPES:
            x = round_to_int8(x)
        y = x @ w.T
        if self.noise is None:
            return y
        size = F32_UNIT * np.linalg.norm(x, axis=1)[:, None] * self.model.row_norms(name)
        return y + self.noise.uniform(-1, 1, y.shape) * size

    def _moved(self, x: Array, by: float | Array = 4 * F32_UNIT) -> Array:
        """x, moved by up to `by` relative to each element."""
        return x if self.noise is None else x * (1 + self.noise.uniform(-1, 1, x.shape) * by)

    def _norm(self, name: str, x: Array) -> Array:
        mean = np.square(x).mean(axis=-1, keepdims=True)
        return self._moved(x / np.sqrt(mean + self.model.dtype(self.model.epsilon)) * self.model.weights[name])

    def _heads(self, name: str, x: Array, heads: int) -> Array:
        """[n, d] -> [n, heads, hd]"""
        y = self._multiply(name + ".weight", x) + self.model.weights[name + ".bias"]
        return y.reshape(len(x), heads, self.model.head_dim)

    def _rotate(self, x: Array, cos: Array, sin: Array) -> Array:
        a, b = np.split(x, 2, axis=-1)
        cos, sin = cos[:, None], sin[:, None]
        return self._moved(np.concatenate((a * cos - b * sin, a * sin + b * cos), axis=-1))

    def _attend(self, layer: int, q: Array, positions: Array) -> Array:
        """[n, h, hd] -> [n, d]: query heads share a key and value head in groups of h / kv."""
        model = self.model
        n, group = len(q), model.heads // model.kv_heads
        k, v = self.keys[layer].transpose(1, 0, 2), self.values[layer].transpose(1, 0, 2)  # [kv, T, hd]
        q = q.reshape(n, model.kv_heads, group, model.head_dim).transpose(1, 2, 0, 3)  # [kv, group, n, hd]
        scores = q @ k[:, None].swapaxes(-1, -2) / model.dtype(math.sqrt(model.head_dim))  # [kv, group, n, T]
        if self.noise is not None:
            lengths = np.linalg.norm(q, axis=-1)[..., None] * np.linalg.norm(k, axis=-1)[:, None, None, :]
            scores = scores + self.noise.uniform(-1, 1, scores.shape) * F32_UNIT * lengths
        later = np.arange(k.shape[1]) > positions[:, None]  # [n, T]
        scores = np.where(later, model.dtype(-np.inf), scores)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        p = self._moved(p)
        mixed = (p / p.sum(axis=-1, keepdims=True)) @ v[:, None]  # [kv, group, n, hd]
        return mixed.transpose(2, 0, 1, 3).reshape(n, -1)


@dataclass(frozen=True)
class Greedy:
    """The most probable token, again and again."""

    tokens: list[int]
    gaps: list[float]  # of the largest two logits, at each step


def greedy(run: Run, prompt: Sequence[int], count: int) -> Greedy:
    """`count` tokens after the prompt, of all the vocabulary: none ends it.  The lowest id wins a tie."""
    found = Greedy([], [])
    logits = run.evaluate(prompt)[0]
    for step in range(count):
        second, first = np.partition(logits, -2)[-2:]
        found.tokens.append(int(np.argmax(logits)))
        found.gaps.append(float(first - second))
        if step + 1 < count:
            logits = run.evaluate(found.tokens[-1:])[0]
    return found


@dataclass(frozen=True)
class Perplexity:
    window: int
    windows: int
    counted: int  # tokens whose prediction counts
    mean_nll: float
    standard_error: float  # of the perplexity

    @property
    def perplexity(self) -> float:
        return math.exp(self.mean_nll)


def negative_log_likelihoods(logits: Array, tokens: Array) -> Array:
    """-log softmax(logits[i])[tokens[i]], [n]."""
    largest = logits.max(axis=1)
    log_sum = np.log(np.exp(logits - largest[:, None]).sum(axis=1)) + largest
    return log_sum - logits[np.arange(len(tokens)), tokens]


def perplexity(model: Qwen2, tokens: Sequence[int], window: int = 512, windows: int = -1) -> Perplexity:
    """By the method of `qwen perplexity`: windows that do not overlap, each from an empty cache; of each, the tokens
    from number window/2 + 1 on are counted, so that every one has at least window/2 tokens before it.  What does not
    fill a window is dropped.

    @param windows at most this many; negative: all.  Raises ValueError if the text is shorter than one window
    """
    total = len(tokens) // window
    if total == 0:
        raise ValueError(f"{len(tokens)} tokens are fewer than one window of {window}")
    total = total if windows < 0 else min(total, windows)
    first, found = window // 2, []
    for w in range(total):
        part = np.asarray(tokens[w * window : (w + 1) * window])
        logits = Run(model).evaluate(part[:-1], range(first, window - 1))
        found.append(negative_log_likelihoods(logits, part[first + 1 :]))
    nll = np.concatenate(found)
    mean = float(nll.mean())
    spread = float(nll.std(ddof=1) / math.sqrt(len(nll))) if len(nll) > 1 else 0.0
    return Perplexity(window, total, len(nll), mean, math.exp(mean) * spread)


@dataclass(frozen=True)
class Tolerance:
    """How far an engine's logits may be from the reference."""

    limit: float  # of |difference|, any logit
    moved: float  # what noise did in the trials


def tolerance(
    model: Qwen2, tokens: Sequence[int], rows: Sequence[int], reference: Array, int8: bool, trials: int = 4
) -> Tolerance:
    """What float32 arithmetic may do to the logits, from trials: the largest change of any logit by noise, times 8, or
    times 3 with int8.

    No proof: a worst case over five layers, where all roundings conspire, is thousands of times larger and would find
    no mistake.  The trials move every intermediate result by about as much as float32 does (see Run), and at random, as
    rounding does.  With int8, noise also makes codes flip where an activation is near the middle between two; each flip
    moves everything behind it by a part of a code's width and so makes others flip, and what comes out is a sample of
    the error of int8 itself rather than of float32's.  Where no code flipped in the trials, one may in an engine: so
    what int8 did to the logits counts as a trial.  Samples of that error differ by less than those of float32's, whose
    size depends on how an engine adds: hence the smaller factor.

    @param reference [rows, V] without noise, computed with the same int8
    """
    runs = [Run(model, int8, noise=np.random.default_rng(seed)) for seed in range(trials)]
    if int8:
        runs.append(Run(model))
    moved = max(float(np.abs(run.evaluate(tokens, rows) - reference).max()) for run in runs)
    return Tolerance((3 if int8 else 8) * moved, moved)
