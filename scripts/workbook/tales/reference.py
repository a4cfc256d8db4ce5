"""tales-f16.gguf -> tales-reference.gguf: its logits, by two implementations that are not this project's engine.

NumPy in float64 (qwen_reference.py) computes what is stored; Hugging Face transformers, in float32, confirms it.

The file, general.architecture "reference", for the C++ tests and scripts/tests/test_reference.py.  For each SET of
prompt0 (one token), prompt1 (the opening of a story), prompt2 (a conversation), prompt3 (300 tokens of held-out text),
yarn0 and yarn1 (prompt1 and prompt3 with YaRN, whose parameters are yarn.factor and yarn.original_context):

  SET.about                  string
  SET.tokens                 i32 array, the prompt
  SET.rows                   u32 array, positions of the prompt whose logits are stored; the last is the prompt's end
  SET.logits                 tensor F32, ne = [V, rows], computed in float64, rounded once
  SET.transformers           f32 array, a row's largest |logit of transformers - logit|
  SET.limit                  f32, how far from SET.logits an engine may be that multiplies F16 weights with f32
                             activations and keeps keys and values in f32 (qwen_reference.tolerance)
  SET.greedy                 i32 array (prompt0 to prompt2): the most probable token, 128 times, of all the vocabulary;
                             the same with keys and values rounded to f16, and none of them a control token
  SET.gaps                   f32 array, how far the second largest logit is from the largest, at each of these steps
  SET.smallest_gap           f32

  reference.model            string, the model's file name;  reference.sha256 of its bytes
  perplexity.*               by the method of `qwen perplexity`: value, mean_nll, standard_error (f64); window, windows,
                             counted, text_tokens (u32); text (string, a file name)

`write_quantized` makes the same for any other file of the model, without greedy and transformers, and with
SET.logits_int8 and SET.limit_int8 besides: what an engine comes to that rounds activations to int8.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..common import StepFailed, UserError, read_text, say, shown
from ..qwen_reference import Array, Qwen2, Run, Yarn, greedy, perplexity, tolerance
from .chat import DEFAULT_SYSTEM
from .corpus import CONTROL, PIECES
from .export import gguf_name
from .shape import Shape

if TYPE_CHECKING:
    from gguf import GGUFReader, GGUFWriter
    from tokenizers import Tokenizer

STEPS = 128  # of greedy continuation
# A float32 engine moves logits by some 1e-4 at most (SET.limit says how much), so that no step can go another way.
# Keys and values rounded to float16 move them by some 1e-3, with which the same tokens must come out.
SMALLEST_GAP = 5e-3
LONG = 300  # tokens of held-out text
YARN = Yarn(factor=4.0, original_context=64)
LARGEST_FILE = 500_000
LARGEST_DIFFERENCE = 1e-3  # of transformers in float32; more than that is a mistake in one of the two

# The first of each kind is taken whose continuation never comes near a tie.
WORDS = ("Once", "The", " there", "There", "One", "In", "A", "When", "So", "It")
OPENINGS = (
    "Once upon a time there was a poor miller who had three sons and a daughter. One winter evening, when the snow lay "
    "deep in the forest, there came a knock at the door, and an old man",
    "There was once a king who had a garden, and in the garden grew a tree that bore golden apples. Every night one of "
    "them was stolen, and nobody could find out who the thief was. So the king",
    "A fox who was very hungry came one day to a vineyard where the grapes hung ripe and sweet upon the vines. He "
    "jumped as high as he could, but he could not reach them, and at last he said",
    "Long ago, in a little house by the sea, there lived a fisherman and his wife. Every morning he went down to the "
    "shore with his net, and every evening she waited for him at the door. One day",
    "The little girl put on her red cloak and took the basket which her mother had filled with bread and butter. She "
    "walked along the path through the dark wood until she met a wolf, who said to her",
)
QUESTIONS = (
    "Tell me a story about a fox.",
    "Tell me a story about a king and his daughter.",
    "Can you tell me a tale about a wolf?",
    "Hello!",
    "What happened to the prince?",
    "Tell me a story.",
    "A story about a bird.",
)


@dataclass
class Case:
    """A prompt and what is known about it."""

    name: str
    about: str
    tokens: list[int]
    rows: list[int]
    numbers: dict[str, float] = field(default_factory=dict)
    lists: dict[str, list[int] | list[float]] = field(default_factory=dict)
    logits: dict[str, Array] = field(default_factory=dict)


def some_rows(length: int) -> list[int]:
    """A third, two thirds, the end."""
    return sorted({length // 3, 2 * length // 3, length - 1})


def reader_of(file: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader

        return GGUFReader(file)
    except ImportError:
        raise UserError("needs the package gguf: pip install -r scripts/requirements.txt") from None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {shown(file)}: {error}") from None


def open_model(file: Path) -> Qwen2:
    try:
        return Qwen2(file)
    except ImportError:
        raise UserError("needs the package gguf: pip install -r scripts/requirements.txt") from None
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"cannot read {shown(file)}: {error}") from None


def tokenizer_of(file: Path) -> Tokenizer:
    """The tokenizer that a GGUF file holds, in Hugging Face's tokenizers."""
    try:
        from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
    except ImportError:
        raise UserError("needs the package tokenizers: pip install -r scripts/requirements.txt") from None
    reader = reader_of(file)
    tokens, merges = (reader.get_field(f"tokenizer.ggml.{key}").contents() for key in ("tokens", "merges"))
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [tuple(m.split(" ")) for m in merges]))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in CONTROL])
    return tokenizer


def with_greedy(model: Qwen2, tokenizer: Tokenizer, name: str, about: str, texts: tuple[str, ...]) -> Case:
    """A case from the first text whose greedy continuation keeps its distance from ties."""
    largest = 0.0
    for text in texts:
        tokens = tokenizer.encode(text).ids
        found = greedy(Run(model), tokens, STEPS)
        smallest = min(found.gaps)
        sure = smallest >= SMALLEST_GAP and max(found.tokens) < model.vocabulary - len(CONTROL)
        if sure and greedy(Run(model, half_cache=True), tokens, STEPS).tokens == found.tokens:
            case = Case(name, about, tokens, some_rows(len(tokens)))
            case.lists |= {"greedy": found.tokens, "gaps": found.gaps}
            case.numbers["smallest_gap"] = smallest
            return case
        largest = max(largest, smallest)
    raise StepFailed(
        f"{name}: none of {len(texts)} prompts will do, the best comes as near as {largest:.2g} to a tie; add others"
    )


def make_cases(model: Qwen2, tokenizer: Tokenizer, heldout: list[int]) -> list[Case]:
    chat = tuple(
        f"<|im_start|>system\n{DEFAULT_SYSTEM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        for question in QUESTIONS
    )
    words = tuple(word for word in WORDS if len(tokenizer.encode(word).ids) == 1)
    cases = [
        with_greedy(model, tokenizer, "prompt0", "one token", words),
        with_greedy(model, tokenizer, "prompt1", "the opening of a story", OPENINGS),
        with_greedy(model, tokenizer, "prompt2", "a question in ChatML", chat),
        Case("prompt3", f"the first {LONG} tokens of the held-out text", heldout[:LONG], some_rows(LONG)),
    ]
    return cases + [
        Case(name, f"{case.about}, with YaRN", case.tokens, case.rows)
        for name, case in (("yarn0", cases[1]), ("yarn1", cases[3]))
    ]


def set_yarn(model: Qwen2, case: Case) -> None:
    model.yarn = YARN if case.name.startswith("yarn") else None


def add_logits(model: Qwen2, case: Case, int8: bool) -> None:
    """The logits and how far an engine may be from them."""
    set_yarn(model, case)
    suffix = "_int8" if int8 else ""
    logits = Run(model, int8).evaluate(case.tokens, case.rows)
    case.logits["logits" + suffix] = logits
    case.numbers["limit" + suffix] = tolerance(model, case.tokens, case.rows, logits, int8).limit


def transformers_logits(model: Qwen2, case: Case) -> Array:
    """The same rows from Hugging Face transformers in float32, with the weights of the GGUF file."""
    try:
        import torch
        from transformers import Qwen2Config, Qwen2ForCausalLM
    except ImportError:
        raise UserError(
            "needs the packages torch and transformers: pip install -r scripts/requirements-train.txt"
        ) from None
    shape = Shape()
    settings = shape.as_dict()
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": settings.pop("rope_theta")}
    if model.yarn:
        rope |= {
            "rope_type": "yarn",
            "factor": model.yarn.factor,
            "original_max_position_embeddings": model.yarn.original_context,
        }
        # Has no part in the computation; transformers warns of one that is not the product.
        settings["max_position_embeddings"] = round(model.yarn.factor * model.yarn.original_context)
    config = Qwen2Config(**settings, rope_parameters=rope, tie_word_embeddings=True, attn_implementation="eager")
    other = Qwen2ForCausalLM(config).eval()
    weights = {name: torch.from_numpy(model.weights[gguf_name(name)].astype(np.float32)) for name in shape.tensors()}
    missing, unknown = other.load_state_dict(weights, strict=False)
    if unknown or [name for name in missing if name != "lm_head.weight"]:
        raise StepFailed(f"transformers knows other tensors: missing {missing}, unknown {unknown}")
    other.tie_weights()
    with torch.no_grad():
        return other(torch.tensor([case.tokens])).logits[0, case.rows].numpy()


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def write_file(to: Path, model: Path, cases: list[Case], perplexities: dict[str, int | float | str]) -> None:
    from gguf import GGUFValueType, GGUFWriter

    def add(key: str, value: Any) -> None:
        kinds = {str: GGUFValueType.STRING, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT64}
        writer.add_key_value(key, value, kinds[type(value)])

    to.parent.mkdir(parents=True, exist_ok=True)
    writer: GGUFWriter = GGUFWriter(to, "reference")
    add("reference.model", model.name)
    add("reference.sha256", sha256(model))
    writer.add_float32("yarn.factor", YARN.factor)
    add("yarn.original_context", YARN.original_context)
    for key, value in perplexities.items():
        add("perplexity." + key, value)
    for case in cases:
        add(case.name + ".about", case.about)
        writer.add_array(case.name + ".tokens", case.tokens)
        writer.add_key_value(case.name + ".rows", case.rows, GGUFValueType.ARRAY, GGUFValueType.UINT32)
        for key, numbers in case.lists.items():
            writer.add_array(f"{case.name}.{key}", numbers)
        for key, number in case.numbers.items():
            writer.add_float32(f"{case.name}.{key}", number)
        for key, logits in case.logits.items():
            writer.add_tensor(f"{case.name}.{key}", logits.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    say(f"{shown(to)}: {to.stat().st_size:,} bytes")


def read_cases(file: Path) -> list[Case]:
    """The prompts of a reference file, with the logits and everything else that is stored about them."""
    reader = reader_of(file)
    tensors = {t.name: np.array(t.data) for t in reader.tensors}
    cases: dict[str, Case] = {}
    for key in reader.fields:
        name, _, rest = key.partition(".")
        if not name.startswith(("prompt", "yarn")) or name == "yarn":
            continue
        case = cases.setdefault(name, Case(name, "", [], []))
        value = reader.fields[key].contents()
        if rest in ("about", "tokens", "rows"):
            setattr(case, rest, value)
        elif isinstance(value, list):
            case.lists[rest] = value
        else:
            case.numbers[rest] = value
    for name, case in cases.items():
        case.logits = {key.removeprefix(name + "."): t for key, t in tensors.items() if key.startswith(name + ".")}
    if not cases:
        raise UserError(f"{shown(file)} holds no prompts; make it with: scripts/tales.py reference")
    return list(cases.values())


def write(model_file: Path, heldout_file: Path, to: Path) -> None:
    """The reference of the F16 model."""
    began = time.monotonic()
    model = open_model(model_file)
    tokenizer = tokenizer_of(model_file)
    heldout = tokenizer.encode(read_text(heldout_file)).ids
    cases = make_cases(model, tokenizer, heldout)
    for case in cases:
        add_logits(model, case, int8=False)
        differences = np.abs(transformers_logits(model, case) - case.logits["logits"]).max(axis=1)
        case.lists["transformers"] = [float(x) for x in differences]
        gap = f", smallest gap {case.numbers['smallest_gap']:.4f}" if "smallest_gap" in case.numbers else ""
        say(f"{case.name} ({case.about}, {len(case.tokens)} tokens): transformers differs by at most "
            f"{differences.max():.2g}, limit {case.numbers['limit']:.2g}{gap}")  # fmt: skip
        if not differences.max() <= LARGEST_DIFFERENCE:  # also if it is not a number
            raise StepFailed(f"{case.name}: more than {LARGEST_DIFFERENCE} apart; nothing is written")
    model.yarn = None
    result = perplexity(model, heldout)
    say(f"perplexity {result.perplexity:.4f} +- {result.standard_error:.4f} on {shown(heldout_file)}: {result.windows} "
        f"windows of {result.window} tokens, {result.counted} tokens counted of {len(heldout)}")  # fmt: skip
    facts: dict[str, int | float | str] = {
        "value": result.perplexity,
        "mean_nll": result.mean_nll,
        "standard_error": result.standard_error,
        "window": result.window,
        "windows": result.windows,
        "counted": result.counted,
        "text_tokens": len(heldout),
        "text": heldout_file.name,
    }
    write_file(to, model_file, cases, facts)
    if to.stat().st_size > LARGEST_FILE:
        raise StepFailed(f"{shown(to)} is larger than {LARGEST_FILE:,} bytes")
    say(f"{time.monotonic() - began:.0f} s")


def quantized_cases(model: Qwen2, prompts: list[Case]) -> list[Case]:
    """The same prompts for the dequantized weights of another file, with and without activations rounded to int8."""
    cases = [replace(prompt, numbers={}, lists={}, logits={}) for prompt in prompts]
    for case in cases:
        add_logits(model, case, int8=False)
        add_logits(model, case, int8=True)
    return cases


def write_quantized(file: Path, reference: Path, to: Path | None) -> None:
    """Prints, and writes if `to` is given, the logits of another file of the model for the prompts of `reference`."""
    model, prompts = open_model(file), read_cases(reference)
    cases = quantized_cases(model, prompts)
    print("set      row  argmax    logit   int8 - f64: rms, largest   limit     limit_int8")
    for case in cases:
        exact, rounded = case.logits["logits"], case.logits["logits_int8"]
        for row, a, b in zip(case.rows, exact, rounded, strict=True):
            rms, largest = np.sqrt(np.mean((b - a) ** 2)), np.abs(b - a).max()
            limits = f"{case.numbers['limit']:.1e}   {case.numbers['limit_int8']:.1e}"
            print(f"{case.name:8} {row:3}  {a.argmax():6}  {a.max():7.3f}   {rms:9.4f} {largest:9.4f}         {limits}")
    if to is not None:
        write_file(to, file, cases, {})
