"""Weights and tokenizer -> a GGUF file, under llama.cpp's names: F16 matrices, F32 norms and biases."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np

from ..common import StepFailed, UserError, read_text, say, shown
from .chat import DEFAULT_SYSTEM
from .corpus import CONTROL
from .shape import Shape

LARGEST_FILE = 20_000_000
LICENSE = "mit"  # of the weights, as of the whole project; the books are in the public domain

# ChatML as Qwen2.5 writes it, without its tool calls: a system message is put first if the caller gave none.
CHAT_TEMPLATE = (
    "{%- if messages[0]['role'] != 'system' %}"
    "{{- '<|im_start|>system\\n" + DEFAULT_SYSTEM + "<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- endif %}"
)

IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight"""
    outside = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in outside:
        return outside[name]
    parts = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    if not parts or parts[2] not in IN_LAYER:
        raise UserError(f"the weights hold {name}, which no Qwen2 has")
    return f"blk.{parts[1]}.{IN_LAYER[parts[2]]}.{parts[3]}"


def random_weights(shape: Shape, seed: int) -> dict[str, np.ndarray]:
    """Weights of the size that training gives, so that logits differ and nothing overflows; for tests of an engine."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, size in shape.tensors().items():
        values = rng.standard_normal(size, dtype=np.float32)
        if name.endswith("norm.weight"):
            weights[name] = 1 + 0.1 * values
        elif name.endswith("bias"):
            weights[name] = 0.5 * values
        else:
            weights[name] = values * (0.05 if "embed" in name else size[1] ** -0.5)
    return weights


def read_weights(files: list[Path], shape: Shape) -> dict[str, np.ndarray]:
    """The arrays of all files, checked against the shape."""
    weights: dict[str, np.ndarray] = {}
    for file in files:
        try:
            with np.load(file) as arrays:
                weights |= {name: arrays[name] for name in arrays.files}
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read {shown(file)}: {error}") from None
    expected = shape.tensors()
    missing = sorted(expected.keys() - weights.keys())
    if missing:
        raise UserError(f"{len(missing)} of {len(expected)} tensors are missing, the first is {missing[0]}")
    for name, size in expected.items():
        if weights[name].shape != size:
            raise UserError(f"{name} is {weights[name].shape}, expected {size}")
        if not np.isfinite(weights[name]).all():
            raise UserError(f"{name} holds a value that is not finite")
    return weights


def export(tokenizer: Path, files: list[Path], to: Path, random_seed: int | None) -> None:
    """Writes the model.  Fails if the file is larger than the repository allows."""
    try:
        from gguf import GGUFWriter
    except ImportError:
        raise UserError("needs the package gguf: pip install -r scripts/requirements-train.txt") from None
    shape = Shape()
    if random_seed is None and not files:
        raise UserError("no weights: run train first, or give --weights, or --random for a file to test with")
    weights = random_weights(shape, random_seed) if random_seed is not None else read_weights(files, shape)

    to.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(to, "qwen2")
    writer.add_name("tales" if random_seed is None else "tales-random")
    writer.add_type("model")
    writer.add_size_label("10M")
    writer.add_license(LICENSE)
    writer.add_description(
        "Story prose, learned from 29 books in the public domain"
        if random_seed is None
        else "Random weights in the shape of tales, to test an engine with"
    )
    writer.add_file_type(1)  # F16
    writer.add_quantization_version(2)
    writer.add_block_count(shape.num_hidden_layers)
    writer.add_context_length(shape.max_position_embeddings)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_attention_heads)
    writer.add_head_count_kv(shape.num_key_value_heads)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)

    tokens, merges = read_tokenizer(tokenizer, shape.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in CONTROL else 1 for token in tokens])  # control, normal
    writer.add_token_merges(merges)
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_pad_token_id(tokens.index("<|endoftext|>"))
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)

    for name in shape.tensors():
        kind = np.float16 if weights[name].ndim == 2 else np.float32
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(weights[name].astype(kind)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    size = to.stat().st_size
    if size > LARGEST_FILE:
        raise StepFailed(f"{shown(to)} is {size:,} bytes, more than {LARGEST_FILE:,}")
    say(f"{shown(to)}: {size:,} bytes, {sum(w.size for w in weights.values()):,} parameters")


def read_tokenizer(file: Path, size: int) -> tuple[list[str], list[str]]:
    """(tokens by id, merges "a b" by rank) of a tokenizer.json."""
    data = json.loads(read_text(file))
    ids = dict(data["model"]["vocab"]) | {added["content"]: added["id"] for added in data["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    if [ids[token] for token in tokens] != list(range(size)):
        raise UserError(f"{shown(file)} has {len(tokens)} tokens, expected ids 0 to {size - 1}")
    merges = data["model"]["merges"]
    return tokens, [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
