"""Shell. Megatron-Core on a machine without a GPU: every way round, in one place.

Invariant: where CUDA is there, nothing here has an effect; where it is not, what is changed in torch is put back
on leaving the context. Direction: none; these are contexts around Megatron's own code.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@contextmanager
def quick_import() -> Iterator[None]:
    """Around Megatron's import: its decorators must not load the compiler, which takes longer than all the rest.

    `torch.compile` is the identity meanwhile. Nothing that gyre runs is compiled by Megatron on a CPU.
    """
    if torch.cuda.is_available():
        yield
        return
    compile_ = torch.compile
    torch.compile = _identity
    try:
        yield
    finally:
        torch.compile = compile_


@contextmanager
def without_cuda() -> Iterator[None]:
    """Around construction, seeding and checkpointing: devices that Megatron spells `cuda` become `cpu`."""
    if torch.cuda.is_available():
        yield
        return
    current_device, synchronize = torch.cuda.current_device, torch.cuda.synchronize
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda device=None: None
    try:
        with _CpuDevices():
            yield
    finally:
        torch.cuda.current_device, torch.cuda.synchronize = current_device, synchronize


class _CpuDevices(TorchFunctionMode):
    """Rewrites `device="cuda"` and `.cuda()` in every torch call made inside."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        named = dict(kwargs or {})
        if "device" in named and _is_cuda(named["device"]):
            named["device"] = torch.device("cpu")
        if func is torch.Tensor.to:
            args = [torch.device("cpu") if _is_cuda(a) else a for a in args]
        return func(*args, **named)


def _is_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


def _identity(model: Any = None, **options: Any) -> Any:
    return (lambda function: function) if model is None else model
