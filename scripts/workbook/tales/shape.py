"""The sizes of `tales`, in one place, under the names that Hugging Face's Qwen2 configuration uses."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Shape:
    """Like Qwen2.5-0.5B in miniature: grouped-query attention, biases on q, k and v, one matrix for both ends.

    Every row length is a multiple of 256, so that each K-quant fits; only ffn_down's (2048) is long, as in the 0.5B.
    """

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 5
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    intermediate_size: int = 2048
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name in Hugging Face's state dict -> shape [out, in] or [n], in the order of computation."""
        d, kv, ff = self.hidden_size, self.num_key_value_heads * self.head_dim, self.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, d)}
        for i in range(self.num_hidden_layers):
            layer = f"model.layers.{i}."
            shapes[layer + "input_layernorm.weight"] = (d,)
            for name, rows in (("q", d), ("k", kv), ("v", kv)):
                shapes[layer + f"self_attn.{name}_proj.weight"] = (rows, d)
                shapes[layer + f"self_attn.{name}_proj.bias"] = (rows,)
            shapes[layer + "self_attn.o_proj.weight"] = (d, d)
            shapes[layer + "post_attention_layernorm.weight"] = (d,)
            shapes[layer + "mlp.gate_proj.weight"] = (ff, d)
            shapes[layer + "mlp.up_proj.weight"] = (ff, d)
            shapes[layer + "mlp.down_proj.weight"] = (d, ff)
        shapes["model.norm.weight"] = (d,)
        return shapes

    def as_dict(self) -> dict[str, int | float]:
        return asdict(self)
