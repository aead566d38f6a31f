"""Shell. The ranks of one cell's trainer: what the first is asked for, every one does.

Invariant: orders reach all ranks in one order, each before the first rank begins on it, so their collectives meet; a
rank that is gone ends all of them, and the cell starts them again. Only the first rank knows log, run and clock.

Direction: a call of `Trainer` on the first rank -> order -> the same call on each other rank. torchrun starts them, at
the word of `cell.py` on the first host of a cell, and of `gyre cell ranks` on its others.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from gyre.errors import GyreError
from gyre.workers import megatron
from gyre.workers.step_metrics import MicrostepResult

P = ParamSpec("P")
T = TypeVar("T")
PATIENCE = timedelta(days=30)
"""A cell in rollout gives its ranks no orders; one that died breaks the connection at once."""
BUILD = "build"


class _Sent:
    """Stands for a tensor of an order, which follows it as it is: pickled, it would be copied again and again."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype


class Ranks:
    """All ranks of this cell, as each of them speaks and listens to the others. Every rank makes one."""

    def __init__(self) -> None:
        megatron.join_ranks()
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._is_told = False

    @contextmanager
    def told(self, name: str, args: Sequence[Any] = (), options: Mapping[str, Any] | None = None) -> Iterator[None]:
        """The first rank does this in the block, all others at the same time; what it does for it is not told."""
        if self._is_told:
            yield
            return
        self._is_told = True
        try:
            self._tell((name, args, options or {}))
            yield
        finally:
            self._is_told = False

    def end(self) -> None:
        """There is nothing more to do: all leave."""
        self._tell(None)
        dist.destroy_process_group()  # its threads may abort the end of an interpreter

    def _tell(self, order: Any) -> None:
        tensors: list[Tensor] = []
        dist.broadcast_object_list([_without(order, tensors)], group=self._group)
        for tensor in tensors:
            dist.broadcast(tensor.detach().cpu().contiguous(), 0, group=self._group)

    def hear(self) -> Any:
        """The next order of the first rank; None for its last."""
        box: list[Any] = [None]
        dist.broadcast_object_list(box, group=self._group)
        return _with(box[0], self._receive)

    def _receive(self, sent: _Sent) -> Tensor:
        tensor = torch.empty(sent.shape, dtype=sent.dtype)
        dist.broadcast(tensor, 0, group=self._group)
        return tensor.to(megatron.device())


def _without(value: Any, tensors: list[Tensor]) -> Any:
    """The value with a stand-in for each tensor of it, which is added to `tensors`."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Sent(value)
    if isinstance(value, tuple):
        return tuple(_without(item, tensors) for item in value)
    return {key: _without(item, tensors) for key, item in value.items()} if isinstance(value, Mapping) else value


def _with(value: Any, receive: Callable[[_Sent], Tensor]) -> Any:
    if isinstance(value, _Sent):
        return receive(value)
    if isinstance(value, tuple):
        return tuple(_with(item, receive) for item in value)
    return {key: _with(item, receive) for key, item in value.items()} if isinstance(value, dict) else value


class HasRanks(Protocol):
    ranks: Ranks | None


S = TypeVar("S", bound=HasRanks)


def on_all_ranks(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Of the first rank of several, the call goes to the others as well."""

    @wraps(method)
    def call(self: S, /, *args: P.args, **options: P.kwargs) -> T:
        if self.ranks is None:
            return method(self, *args, **options)
        with self.ranks.told(method.__name__, args, options):
            return method(self, *args, **options)

    return call


def share(rows: Sequence[T]) -> Sequence[T]:
    """Of this rank's model among those of the cell: a run of the rows, which share prefixes with their neighbours."""
    number, num_models = megatron.place_among_models()
    size = -(-len(rows) // num_models)
    return rows[number * size : (number + 1) * size]


def over_models(gradient: Tensor, result: MicrostepResult) -> MicrostepResult:
    """Sum the gradient in place, and the result, over the models of this cell (usually there is one)."""
    if megatron.place_among_models()[1] == 1:
        return result
    values = msgspec.structs.asdict(result)
    sums_K = torch.tensor(list(values.values()), dtype=torch.float64, device=gradient.device)
    largest_1 = torch.tensor([result.logprob_gap_max], dtype=torch.float64, device=gradient.device)
    megatron.sum_over_models(gradient, sums_K, largest=largest_1)
    summed = {name: type(values[name])(value) for name, value in zip(values, sums_K.tolist(), strict=True)}
    return MicrostepResult(**summed | {"logprob_gap_max": float(largest_1)})


@contextmanager
def leading() -> Iterator[Ranks | None]:
    """On the first rank of several: all of them, who leave at the end of a block that does not raise."""
    ranks = Ranks() if is_one_of_several() else None
    yield ranks
    if ranks is not None:
        ranks.end()


def is_one_of_several() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_follower() -> bool:
    """Whether torchrun started this process to do what the first rank says."""
    return is_one_of_several() and os.environ.get("RANK") != "0"


def follow(build: Callable[..., Any]) -> None:
    """Do what the first rank does with what `build` makes, until it has done all."""
    ranks, built = Ranks(), None
    while (order := ranks.hear()) is not None:
        name, args, options = order
        try:
            if name == BUILD:
                built = build(*args, **options)
            else:
                getattr(built, name)(*args, **options)
        except GyreError as error:  # so it was on the first rank, which knows what comes of it
            print(f"rank {dist.get_rank()}: {error}", file=sys.stderr, flush=True)
    dist.destroy_process_group()
