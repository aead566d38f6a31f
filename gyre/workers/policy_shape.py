"""Pure. What a policy in Hugging Face format is made of, without its tensors: `config.json` -> shape -> names, axes.

Supported: Llama, Qwen2 (bias on q, k, v) and Qwen3 (a norm on each head of q and k), tied or not. Invariant: what is
let through is computed exactly; all else is refused.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from gyre.errors import PolicyError

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
DTYPES = ("float32", "bfloat16", "float16")
# The one rope scaling that Megatron-Core has: Llama 3's, with these constants built in.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class PolicyShape(msgspec.Struct, frozen=True, kw_only=True):
    """What the trainer needs of `config.json`. `rope_scaling_factor` 0 means no scaling."""

    family: str
    num_layers: int
    hidden: int
    ffn: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab: int
    context: int
    rope_theta: float
    rope_scaling_factor: float
    norm_epsilon: float
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    dtype: str


def read_shape(config: Mapping[str, Any], source: str = "config.json") -> PolicyShape:
    """The shape that a Hugging Face config describes. Raises PolicyError for what would not be computed exactly."""

    def refuse(key: str, found: object, expected: str) -> PolicyError:
        return PolicyError(f"{source}: {key} is {found!r}, expected {expected}")

    family = config.get("model_type")
    if family not in ARCHITECTURES:
        raise refuse("model_type", family, f"one of {', '.join(ARCHITECTURES)}")
    for key, value in (("hidden_act", "silu"), ("mlp_bias", False), ("use_sliding_window", False)):
        if config.get(key, value) != value:
            raise refuse(key, config[key], repr(value))
    if family != "qwen2" and config.get("attention_bias"):
        raise refuse("attention_bias", True, "False")
    rope: dict[str, Any] = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "llama3" and {k: rope.get(k) for k in _LLAMA3_ROPE} != _LLAMA3_ROPE:
        raise refuse("rope_parameters", rope, f"Llama 3's {_LLAMA3_ROPE}")
    if kind not in ("default", "llama3") or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise refuse("rope_parameters", rope, "rope_type default or llama3 on the whole head")
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    if dtype not in DTYPES:
        raise refuse("dtype", dtype, f"one of {', '.join(DTYPES)}")
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        return PolicyShape(
            family=family,
            num_layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            ffn=int(config["intermediate_size"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            # Qwen3's own default is 128, whatever hidden and heads are.
            head_size=int(config.get("head_dim") or (128 if family == "qwen3" else hidden // heads)),
            vocab=int(config["vocab_size"]),
            context=int(config.get("max_position_embeddings") or 2048),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            rope_scaling_factor=float(rope["factor"]) if kind == "llama3" else 0.0,
            norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            dtype=dtype,
        )
    except KeyError as error:
        raise PolicyError(f"{source}: {error.args[0]} is missing; it is not a full Hugging Face config") from None


def tensor_shapes(shape: PolicyShape) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> axes, in the order of the layers. A tied head is not a tensor of its own."""
    q, kv = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab, shape.hidden)}
    for i in range(shape.num_layers):
        at = f"model.layers.{i}."
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            out[f"{at}self_attn.{name}_proj.weight"] = (rows, shape.hidden)
            if shape.qkv_bias:
                out[f"{at}self_attn.{name}_proj.bias"] = (rows,)
        out[f"{at}self_attn.o_proj.weight"] = (shape.hidden, q)
        if shape.qk_norm:
            out[f"{at}self_attn.q_norm.weight"] = (shape.head_size,)
            out[f"{at}self_attn.k_norm.weight"] = (shape.head_size,)
        out[f"{at}mlp.gate_proj.weight"] = (shape.ffn, shape.hidden)
        out[f"{at}mlp.up_proj.weight"] = (shape.ffn, shape.hidden)
        out[f"{at}mlp.down_proj.weight"] = (shape.hidden, shape.ffn)
        out[f"{at}input_layernorm.weight"] = (shape.hidden,)
        out[f"{at}post_attention_layernorm.weight"] = (shape.hidden,)
    out["model.norm.weight"] = (shape.hidden,)
    if not shape.tied:
        out["lm_head.weight"] = (shape.vocab, shape.hidden)
    return out


def check_axes(shape: PolicyShape, axes_of: Mapping[str, tuple[int, ...]], source: str = "checkpoint") -> None:
    """Raises PolicyError for the first tensor that is missing, misshapen or unknown."""
    expected = tensor_shapes(shape)
    for name, axes in expected.items():
        if name not in axes_of:
            raise PolicyError(f"{source}: {name} is missing, expected shape {axes}")
        if axes_of[name] != axes:
            raise PolicyError(f"{source}: {name} has shape {axes_of[name]}, expected {axes}")
    for name in axes_of:
        if name not in expected:
            raise PolicyError(f"{source}: {name} has shape {axes_of[name]}, expected no such tensor")
