"""Qwen2 in PyTorch, as small as it can be written; parameter names are those of Hugging Face's state dict.

Shapes: [B, T] tokens, [B, T, d] activations; weights are [out, in], as torch.nn.Linear keeps them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .shape import Shape


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in f32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)


def rotation(shape: Shape, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of position * base^(-2i/head_dim), [T, head_dim/2] each."""
    half = shape.head_dim // 2
    frequency = shape.rope_theta ** (-torch.arange(half, device=device, dtype=torch.float64) / half)
    angle = torch.arange(length, device=device, dtype=torch.float64)[:, None] * frequency
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of [B, heads, T, head_dim]: element i of a head turns with element i + head_dim/2 ("NEOX" order)."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal attention; heads share keys and values in groups (4 heads, 2 of keys and values)."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        d, kv = shape.hidden_size, self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(d, d, bias=True)
        self.k_proj = nn.Linear(d, kv, bias=True)
        self.v_proj = nn.Linear(d, kv, bias=True)
        self.o_proj = nn.Linear(d, d, bias=False)
        self.dropout = dropout

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, d = x.shape

        def split(y: Tensor, heads: int) -> Tensor:
            return y.view(rows, length, heads, self.head_dim).transpose(1, 2)  # [B, heads, T, head_dim]

        q = rotate(split(self.q_proj(x), self.heads), cos, sin)
        k = rotate(split(self.k_proj(x), self.kv_heads), cos, sin)
        v = split(self.v_proj(x), self.kv_heads)
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, length, d))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate x) * up x)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d, ff = shape.hidden_size, shape.intermediate_size
        self.gate_proj = nn.Linear(d, ff, bias=False)
        self.up_proj = nn.Linear(d, ff, bias=False)
        self.down_proj = nn.Linear(ff, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape, dropout)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)
        self.dropout = dropout

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = h + F.dropout(self.self_attn(self.input_layernorm(h), cos, sin), self.dropout, self.training)
        return h + F.dropout(self.mlp(self.post_attention_layernorm(h)), self.dropout, self.training)


class Body(nn.Module):
    """Everything but the output head."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape, dropout) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.dropout = dropout

    def forward(self, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = F.dropout(self.embed_tokens(tokens), self.dropout, self.training)
        for layer in self.layers:
            h = layer(h, cos, sin)
        return self.norm(h)


class Qwen2(nn.Module):
    """tokens [B, T] -> logits [B, T, V]; the embedding is the output matrix too."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape, dropout)
        deep = (2 * shape.num_hidden_layers) ** -0.5  # each layer adds to the residual stream twice
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                scale = 0.02 if "embed" in name else 0.04
                nn.init.normal_(parameter, std=scale * (deep if "o_proj" in name or "down_proj" in name else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        cos, sin = rotation(self.shape, tokens.shape[1], tokens.device)
        return F.linear(self.model(tokens, cos, sin), self.model.embed_tokens.weight)
