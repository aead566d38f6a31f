"""Shell. What SGLang's hierarchical KV cache needs without a GPU: three copies that are CUDA ops otherwise.

Invariant: a page that is copied to the host and back is the same bytes. Layouts: the device has one tensor a layer,
`[tokens, heads, size]`; the host has pages first, `[pages, layers, page, heads, size]`, so that one page is one range
of memory that Mooncake moves at once. Direction: device layers <-> host pages. `sglang_cpu.py` calls `install` in each
worker; without a KV store nothing of this is imported.
"""

from collections.abc import Sequence
from typing import Any


def install() -> None:
    """Put the copies in, and take out what asks for CUDA. To be called once in a process, before the pools are made."""
    import torch
    from sglang.srt.mem_cache.pool_host import base, common, mha, mla

    copies = {
        "transfer_kv_all_layer_direct_lf_pf": copy_to_pages,
        "transfer_kv_per_layer_direct_pf_lf": copy_from_pages,
        "transfer_kv_direct": copy_rows,
    }
    for module in (mha, mla):
        for name, copy in copies.items():
            setattr(module, name, copy)
    common._cuda_host_register = lambda *args, **options: None
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 1 << 30  # of 10 GiB: more than a small machine has to spare
    stream: Any = torch.cpu.Stream
    stream.synchronize = lambda self: None
    stock = base.HostKVCache.__init__

    def unpinned(self: Any, *args: Any, **options: Any) -> None:
        stock(self, *args, **options)
        self.pin_memory = False

    base.HostKVCache.__init__ = unpinned


def copy_to_pages(
    src_ptrs: Sequence[Any], dst_ptrs: Sequence[Any], src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """All layers of whole pages, device to host. `src_ptrs` has the layers of each destination, one after another."""
    num_layers = len(src_ptrs) // len(dst_ptrs)
    pages = dst_indices[::page_size] // page_size
    for which, host in enumerate(dst_ptrs):
        for layer in range(num_layers):
            rows = src_ptrs[which * num_layers + layer][src_indices]
            host[pages, layer] = rows.view(-1, page_size, *rows.shape[1:])


def copy_from_pages(
    src_ptrs: Sequence[Any], dst_ptrs: Sequence[Any], src_indices: Any, dst_indices: Any, layer_id: int, page_size: int
) -> None:
    """One layer of whole pages, host to device."""
    pages = src_indices[::page_size] // page_size
    for host, device in zip(src_ptrs, dst_ptrs, strict=True):
        device[dst_indices] = host[pages, layer_id].flatten(0, 1)


def copy_rows(
    src_layers: Sequence[Any], dst_layers: Sequence[Any], src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """Layer by layer, where both sides have the same layout."""
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices] = src[src_indices]
