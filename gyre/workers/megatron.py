"""Shell. Megatron-Core's process groups and model, as a trainer uses them.

Invariant: the model computes what the Hugging Face checkpoint describes, in float32, with no dropout.
Direction: shape and tensors -> `GPTModel`; ids [B, T] -> hidden [T, B, H] -> logits.

Attention is torch's own, put in by Megatron's layer spec. Rows are padded on the right, so no token sees a pad: they
go through the causal kernel and no mask is built. A forest comes with a `TreeMask` (`tree_attention.py`) in the place
of a mask, and with the position of each token in its branch. All else is the same for both, on CPU and on GPU.
"""

import logging
import os
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from gyre.errors import PolicyError
from gyre.workers.megatron_cpu import quick_import, without_cuda
from gyre.workers.policy_shape import PolicyShape
from gyre.workers.tree_attention import TreeMask, attend

with quick_import(), warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Apex and Transformer Engine are not needed
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

logging.getLogger("megatron.core").setLevel(logging.ERROR)


def device() -> torch.device:
    """Where this process trains."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def start_process_group(seed: int, num_threads: int, tensor_parallel: int = 1) -> None:
    """Deterministic arithmetic, and Megatron's process groups; ranks that hold one model together are neighbours.

    torchrun's environment is honoured; without it this is a world of one that opens no port. Safe to call again.
    Raises PolicyError when there are not enough ranks for a whole number of models.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(num_threads)
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory would only hide a read of it, and costs a pass over every buffer.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    join_ranks()
    if dist.get_world_size() % tensor_parallel:
        raise PolicyError(
            f"trainer.tensor_parallel is {tensor_parallel}, but the cell has {dist.get_world_size()} ranks; "
            "start it with torchrun and a multiple of it"
        )
    with without_cuda():
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(tensor_parallel, create_gloo_process_groups=backend_needs_gloo())
        model_parallel_cuda_manual_seed(seed, inference_rng_tracker=True, force_reset_rng=True)


def join_ranks() -> None:
    """torch's own group of all ranks. Safe to call again."""
    if dist.is_initialized():
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


def backend_needs_gloo() -> bool:
    """Megatron adds gloo groups beside nccl's for checkpoints; where all is gloo there is nothing to add."""
    return torch.cuda.is_available()


class CoreAttention(torch.nn.Module):
    """Megatron's core attention: [T, B, heads, D] -> [T, B, heads * D]. Causal without a mask; B is 1 with one."""

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **_: Any) -> None:
        super().__init__()
        self.share = config.num_attention_heads // config.num_query_groups

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: TreeMask | None, **_: Any) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if attention_mask is not None:
            mixed = attend(q, k, v, attention_mask)
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.share > 1)
        return mixed.permute(2, 0, 1, 3).flatten(2)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}


def build_model(shape: PolicyShape) -> Any:
    """A `GPTModel` with unset weights on `device()`; fill it with `copy_weights`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a default of Megatron's own that it deprecates
        config = _transformer_config(shape)
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=shape.qk_norm)
    layer.submodules.self_attention.submodules.core_attention = CoreAttention
    with without_cuda():
        model = GPTModel(
            config,
            TransformerBlockSubmodules(layer_specs=[layer] * shape.num_layers, layer_norm=WrappedTorchNorm),
            vocab_size=shape.vocab,
            max_sequence_length=shape.context,
            parallel_output=False,
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="rope",
            rotary_base=shape.rope_theta,
            rope_scaling=shape.rope_scaling_factor > 0,
            rope_scaling_factor=shape.rope_scaling_factor or 8.0,
        )
    return model.to(device())


def _transformer_config(shape: PolicyShape) -> Any:
    num_ranks = parallel_state.get_tensor_model_parallel_world_size()
    if shape.num_kv_heads % num_ranks or shape.vocab % num_ranks:
        raise PolicyError(
            f"trainer.tensor_parallel is {num_ranks}: {shape.num_kv_heads} KV heads and {shape.vocab} tokens of the "
            "policy must be multiples of it"
        )
    return TransformerConfig(
        tensor_model_parallel_size=num_ranks,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_size,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_epsilon,
        activation_func=functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        perform_initialization=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )


def copy_weights(model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Copy whole Megatron tensors into the parameters, each rank its part. Raises PolicyError when names or shapes
    differ."""
    assign(model, own_parts(tensors))


def assign(model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Copy what this rank holds into its parameters. Raises PolicyError when names or shapes differ."""
    parameters = dict(model.named_parameters())
    if parameters.keys() != tensors.keys():
        raise PolicyError(f"megatron: parameters differ: {', '.join(sorted(parameters.keys() ^ tensors.keys()))}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            if parameter.shape != tensors[name].shape:
                found = tuple(tensors[name].shape)
                raise PolicyError(f"megatron: {name} has shape {found}, expected {tuple(parameter.shape)}")
            parameter.copy_(tensors[name])


def whole_weights(model: Any) -> dict[str, Tensor]:
    """Whole Megatron tensors on every rank; with one rank a model they are the parameters, not copies."""
    return whole_tensors({name: parameter.detach() for name, parameter in model.named_parameters()})


def whole_tensors(own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of what each rank of a model holds, by the names of its parameters."""
    return {name: _whole(name, tensor) for name, tensor in own.items()}


def own_parts(whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse: what this rank holds of whole tensors."""
    return {name: _part(name, tensor) for name, tensor in whole.items()}


_PARTED = {"word_embeddings": 0, "output_layer": 0, "linear_qkv": 0, "linear_fc1": 0, "linear_proj": 1, "linear_fc2": 1}
"""Layers that the ranks of a model share out, and along which axis of their tensors. Norms are on every rank."""


def _axis(name: str) -> int | None:
    if not is_parted():
        return None
    return _PARTED.get(name.split(".")[-2])


def _part(name: str, whole: Tensor) -> Tensor:
    """Of a tensor, what this rank of the model holds. Gate and up stand one above the other on each rank."""
    axis = _axis(name)
    if axis is None:
        return whole
    num, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    pieces = whole.chunk(2, 0) if name.endswith("linear_fc1.weight") else (whole,)
    return torch.cat([piece.chunk(num, axis)[rank] for piece in pieces])


def _whole(name: str, own: Tensor) -> Tensor:
    axis = _axis(name)
    if axis is None:
        return own
    parts = [torch.empty_like(own) for _ in range(parallel_state.get_tensor_model_parallel_world_size())]
    dist.all_gather(parts, own.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    halves = [part.chunk(2, 0) for part in parts] if name.endswith("linear_fc1.weight") else [(part,) for part in parts]
    return torch.cat([torch.cat(pieces, axis) for pieces in zip(*halves, strict=True)])


def hidden_states(model: Any, ids_BT: Tensor, position_T: Tensor | None = None, mask: TreeMask | None = None) -> Tensor:
    """[B, T] -> [T, B, H] after the last norm. Without positions they are 0, 1, 2, ..."""
    embedded = model.embedding(input_ids=ids_BT, position_ids=None)
    length = ids_BT.shape[1] if position_T is None else int(position_T.max()) + 1
    with without_cuda():  # the first call for a length looks for a GPU; the result is cached
        rope = model.rotary_pos_emb(length)
    if position_T is not None:
        rope = rope.index_select(0, position_T)
    hidden: Tensor = model.decoder(hidden_states=embedded, attention_mask=mask, rotary_pos_emb=rope)
    return hidden


def logits_at(model: Any, hidden_NH: Tensor) -> Tensor:
    """[N, H] -> [N, V]: the head is computed only where something is predicted."""
    weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
    with (
        without_cuda() if is_parted() else nullcontext()
    ):  # ranks gather the parts on what Megatron takes for the device
        logits: Tensor = model.output_layer(hidden_NH.unsqueeze(1), weight=weight)[0]
    return logits.squeeze(1)


def sum_over_models(*tensors: Tensor, largest: Tensor) -> None:
    """Sum tensors in place over the models of this cell, and take the maximum of `largest`."""
    group = parallel_state.get_data_parallel_group()
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)


def norm(gradient: Tensor, model: Any) -> float:
    """Euclidean norm over all parameters of a model, whose gradients lie in `gradient` one after another."""
    if not is_parted():
        return float(torch.linalg.vector_norm(gradient))
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    pieces = zip(sizes, torch.split(gradient, list(sizes.values())), strict=True)
    first = parallel_state.get_tensor_model_parallel_rank() == 0
    squares = [piece.double().square().sum() for name, piece in pieces if first or _axis(name) is not None]
    total = torch.stack(squares).sum()
    dist.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
    return float(total.sqrt())


def on_every_rank(is_so: bool) -> bool:
    """Whether it is so on each rank of this model: what one refuses, all refuse."""
    if not is_parted():
        return is_so
    flag = torch.tensor(int(is_so), device=device())
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=parallel_state.get_tensor_model_parallel_group())
    return bool(flag)


def place_among_models() -> tuple[int, int]:
    """Of the one that this rank holds, or a part of: its number, and how many the cell has."""
    return parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()


def is_parted() -> bool:
    """Whether this rank holds a part of a model."""
    return bool(parallel_state.get_tensor_model_parallel_world_size() > 1)


def is_first_rank() -> bool:
    return dist.get_rank() == 0


def from_first_rank(text: str) -> str:
    """What the first rank gave, on every rank; also a barrier."""
    box = [text]
    dist.broadcast_object_list(box)
    return box[0]
