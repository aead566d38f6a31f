"""Shell. SGLang's out-of-tree platform plugin for machines without a GPU.

Invariant: on a machine with a GPU it does nothing. Importing it needs neither SGLang nor torch: the
platform class is built when SGLang asks for it by name.

Direction: SGLang discovers `activate` by its entry point -> the platform class -> `init_backend`
replaces the two attention functions of the torch_native backend in each worker.

The stock functions pad the queries of an extend to the whole sequence and run a decode one sequence
at a time. Here an extend attends from its new tokens only, and a decode is one padded attention.
"""

import contextlib
import importlib.util
import os
from pathlib import Path
from typing import Any

_KEEP: list[Any] = []
"""torch forgets an operator when its library object is collected."""


def activate() -> str | None:
    """The entry point: the name of the platform class, or None where CUDA is there."""
    import torch

    if torch.cuda.is_available():
        return None
    define_torchvision_ops()
    return "gyre.workers.sglang_cpu:GyreCpuPlatform"


def define_torchvision_ops() -> None:
    """Declare the two operators that torchvision's Python code expects of its CUDA library.

    Needed once in each process, before anything imports torchvision (every transformers model does).
    A torchvision whose library can be loaded brings them itself.
    """
    import torch

    spec = importlib.util.find_spec("torchvision")
    if _KEEP or spec is None or spec.origin is None:
        return
    for path in Path(spec.origin).parent.glob("_C*.so"):
        with contextlib.suppress(OSError):
            torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
            return
    library: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _KEEP.append(library)


def __getattr__(name: str) -> Any:
    if name != "GyreCpuPlatform":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in globals():
        globals()[name] = _platform_class()
    return globals()[name]


def _platform_class() -> type:
    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

    class GyreCpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
        _enum = PlatformEnum.OOT
        device_name = device_type = "cpu"
        capabilities = PlatformCapabilities()

        def get_default_attention_backend(self) -> str:
            return "torch_native"

        def get_dispatch_key_name(self) -> str:
            return "native"

        def is_pin_memory_available(self, device: Any = None) -> bool:
            return False

        def init_backend(self) -> None:
            from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

            _replace_attention(TorchNativeAttnBackend)
            if "MOONCAKE_MASTER" in os.environ:  # it will keep its KV in a store as well
                from gyre.workers import hicache_cpu

                hicache_cpu.install()

    return GyreCpuPlatform


def _replace_attention(backend: Any) -> None:
    """Put ours in for causal self-attention; everything else keeps the stock functions."""
    stock_extend, stock_decode = backend._run_sdpa_forward_extend, backend._run_sdpa_forward_decode
    stock_metadata = backend.init_forward_metadata

    def init_forward_metadata(self: Any, forward_batch: Any) -> None:
        stock_metadata(self, forward_batch)
        self.forward_metadata = None  # the decode plan, which is the same in every layer

    def extend(
        self: Any, query: Any, output: Any, k_cache: Any, v_cache: Any, req_to_token: Any, req_pool_indices: Any,
        seq_lens: Any, prefix_lens: Any, extend_lens: Any, encoder_lens: Any = None, **options: Any,
    ) -> Any:  # fmt: skip
        plain = encoder_lens is None and options["causal"] and options["sliding_window_size"] is None
        if not plain or query.dtype != k_cache.dtype:
            return stock_extend(
                self, query, output, k_cache, v_cache, req_to_token, req_pool_indices,
                seq_lens, prefix_lens, extend_lens, encoder_lens, **options,
            )  # fmt: skip
        start = 0
        lengths = zip(req_pool_indices.tolist(), prefix_lens.tolist(), extend_lens.tolist(), strict=True)
        for row, prefix, num_new in lengths:
            end = start + num_new
            slots = req_to_token[row, : prefix + num_new]
            output[start:end] = attend_new(query[start:end], k_cache[slots], v_cache[slots], options["scaling"])
            start = end
        return output

    def decode(
        self: Any, query: Any, output: Any, k_cache: Any, v_cache: Any, req_to_token: Any, req_pool_indices: Any,
        seq_lens: Any, encoder_lens: Any = None, **options: Any,
    ) -> Any:  # fmt: skip
        plain = encoder_lens is None and not options["is_cross_attn"] and options["sliding_window_size"] is None
        if not plain or query.dtype != k_cache.dtype:
            return stock_decode(
                self, query, output, k_cache, v_cache, req_to_token, req_pool_indices,
                seq_lens, encoder_lens, **options,
            )  # fmt: skip
        if self.forward_metadata is None:
            self.forward_metadata = plan_decode(seq_lens, req_to_token, req_pool_indices)
        for rows, slots, mask in self.forward_metadata:
            found = attend_last(query[rows], k_cache[slots], v_cache[slots], mask, options["scaling"])
            output[rows] = found
        return output

    backend.init_forward_metadata = init_forward_metadata
    backend._run_sdpa_forward_extend = extend
    backend._run_sdpa_forward_decode = decode


def attend_new(query_THD: Any, key_SKD: Any, value_SKD: Any, scale: float | None) -> Any:
    """Attention of the last T tokens of a sequence of S over all of it: `[T, heads, size]`.

    T new tokens, S tokens in all, H heads, K key-value heads, D head size.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    num_new, num_all = query_THD.shape[0], key_SKD.shape[0]
    mask = None
    if 1 < num_new < num_all:
        position = torch.arange(num_all)
        mask = position[None, :] <= position[num_all - num_new :, None]
    found = scaled_dot_product_attention(
        query_THD.transpose(0, 1)[None],
        key_SKD.transpose(0, 1)[None],
        value_SKD.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=num_new == num_all,
        scale=scale,
        enable_gqa=query_THD.shape[1] != key_SKD.shape[1],
    )
    return found[0].transpose(0, 1)


def plan_decode(seq_lens: Any, req_to_token: Any, req_pool_indices: Any) -> list[tuple[Any, Any, Any]]:
    """Split a decode batch into padded parts `(rows, slots, mask)`.

    Sequences in one part differ by less than a factor of two in length, so that at most half of a
    part is padding however mixed the batch is.
    """
    import torch

    lengths = seq_lens.tolist()
    if max(lengths) <= 2 * min(lengths):
        parts = [list(range(len(lengths)))]
    else:
        parts = []
        for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
            if not parts or lengths[parts[-1][0]] > 2 * lengths[row]:
                parts.append([])
            parts[-1].append(row)
    plan = []
    for part in parts:
        rows: Any = slice(None) if len(parts) == 1 else torch.tensor(part)
        longest = max(lengths[row] for row in part)
        slots = req_to_token[req_pool_indices[rows], :longest].to(torch.int64)
        mask = None
        if min(lengths[row] for row in part) < longest:
            mask = (torch.arange(longest)[None, :] < seq_lens[rows][:, None])[:, None, None, :]
            slots = slots.masked_fill(~mask[:, 0, 0, :], 0)  # beyond its end a row holds leftovers
        plan.append((rows, slots, mask))
    return plan


def attend_last(query_BHD: Any, key_BSKD: Any, value_BSKD: Any, mask_B11S: Any, scale: float | None) -> Any:
    """Attention of one token of each of B sequences: `[B, heads, size]`.

    The heads that share a key-value head stand as its queries, so no key is repeated.
    """
    from torch.nn.functional import scaled_dot_product_attention

    size, num_heads, head_size = query_BHD.shape
    num_groups = key_BSKD.shape[2]
    found = scaled_dot_product_attention(
        query_BHD.view(size, num_groups, num_heads // num_groups, head_size),
        key_BSKD.transpose(1, 2),
        value_BSKD.transpose(1, 2),
        attn_mask=mask_B11S,
        scale=scale,
    )
    return found.reshape(size, num_heads, value_BSKD.shape[3])
