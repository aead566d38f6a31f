"""Pure. The exact mapping between a Hugging Face state dict and Megatron-Core's, for dense decoders.

Invariant: a permutation of rows, never arithmetic, so a round trip is bit-exact in both directions.
Direction: tensors of either side -> views or stacks of the other.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from gyre.workers.policy_shape import PolicyShape, check_axes, tensor_shapes


def _layer_names(shape: PolicyShape, i: int) -> dict[str, str]:
    """Megatron name -> Hugging Face name, of the tensors of layer `i` that are the same on both sides."""
    a, b = f"decoder.layers.{i}.", f"model.layers.{i}."
    same = {
        f"{a}self_attention.linear_proj.weight": f"{b}self_attn.o_proj.weight",
        f"{a}mlp.linear_fc2.weight": f"{b}mlp.down_proj.weight",
        f"{a}input_layernorm.weight": f"{b}input_layernorm.weight",
        f"{a}pre_mlp_layernorm.weight": f"{b}post_attention_layernorm.weight",
    }
    if shape.qk_norm:
        same[f"{a}self_attention.q_layernorm.weight"] = f"{b}self_attn.q_norm.weight"
        same[f"{a}self_attention.k_layernorm.weight"] = f"{b}self_attn.k_norm.weight"
    return same


def _outer_names(shape: PolicyShape) -> dict[str, str]:
    outer = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
    }
    return outer if shape.tied else outer | {"output_layer.weight": "lm_head.weight"}


def to_megatron(shape: PolicyShape, tensors: Mapping[str, Tensor], source: str = "checkpoint") -> dict[str, Tensor]:
    """Hugging Face tensors -> Megatron tensors, checked first.

    Megatron keeps q, k and v in one matrix, by group of heads that share a k and a v: `[q..., k, v]` for
    group 0, then for group 1, ...; and gate above up in `linear_fc1`.
    """
    check_axes(shape, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, source)
    groups, d = shape.num_kv_heads, shape.head_size
    out = {ours: tensors[theirs] for ours, theirs in _outer_names(shape).items()}
    for i in range(shape.num_layers):
        a, b = f"decoder.layers.{i}.", f"model.layers.{i}."
        out |= {ours: tensors[theirs] for ours, theirs in _layer_names(shape, i).items()}
        for kind in ("weight", "bias") if shape.qkv_bias else ("weight",):
            q, k, v = (tensors[f"{b}self_attn.{name}_proj.{kind}"] for name in "qkv")
            rest = q.shape[1:]
            stacked = [x.reshape(groups, -1, d, *rest) for x in (q, k, v)]
            out[f"{a}self_attention.linear_qkv.{kind}"] = torch.cat(stacked, 1).reshape(-1, *rest)
        gate_up = (tensors[f"{b}mlp.gate_proj.weight"], tensors[f"{b}mlp.up_proj.weight"])
        out[f"{a}mlp.linear_fc1.weight"] = torch.cat(gate_up, 0)
    return out


def from_megatron(shape: PolicyShape, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Megatron tensors -> Hugging Face tensors in the order of `tensor_shapes`; q, k, v may be strided copies."""
    groups, d = shape.num_kv_heads, shape.head_size
    out = {theirs: tensors[ours] for ours, theirs in _outer_names(shape).items()}
    for i in range(shape.num_layers):
        a, b = f"decoder.layers.{i}.", f"model.layers.{i}."
        out |= {theirs: tensors[ours] for ours, theirs in _layer_names(shape, i).items()}
        for kind in ("weight", "bias") if shape.qkv_bias else ("weight",):
            fused = tensors[f"{a}self_attention.linear_qkv.{kind}"]
            rest = fused.shape[1:]
            by_group = fused.view(groups, -1, d, *rest)
            for name, part in (("q", by_group[:, :-2]), ("k", by_group[:, -2]), ("v", by_group[:, -1])):
                out[f"{b}self_attn.{name}_proj.{kind}"] = part.reshape(-1, *rest)
        gate, up = tensors[f"{a}mlp.linear_fc1.weight"].chunk(2, 0)
        out[f"{b}mlp.gate_proj.weight"], out[f"{b}mlp.up_proj.weight"] = gate, up
    return {name: out[name] for name in tensor_shapes(shape)}
