"""Shell. Megatron's sharded checkpoints of a trainer: parameters, moments and counters in one folder.

Invariant: a folder is a whole checkpoint or none, and what cannot be read whole changes nothing; what one sharding
wrote, any other reads, bit for bit. Every rank calls each of these. Direction: model and optimizer <-> folder.
"""

import queue
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from gyre.errors import MissingError, PolicyError
from gyre.workers import megatron
from gyre.workers.megatron_cpu import quick_import, without_cuda
from gyre.workers.policy_files import replace_folder

with quick_import(), warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Apex and Transformer Engine are not needed
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.optimizer import (
        get_param_id_to_sharded_param_map,
        optim_state_to_sharding_state,
    )
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy


def save_checkpoint(folder: Path, model: Any, optimizer: torch.optim.Optimizer, counters: Mapping[str, int]) -> None:
    """Write a torch_dist checkpoint in place of the folder. Raises PolicyError when it cannot."""
    first = megatron.is_first_rank()
    folder.parent.mkdir(parents=True, exist_ok=True)
    mine = tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent) if first else ""
    fresh = Path(megatron.from_first_rank(mine))
    updates = int(next(iter(optimizer.state.values()))["step"])
    try:
        _write(fresh, model, optimizer, {**counters, "updates": updates})
        if first:
            replace_folder(fresh, folder)
        megatron.from_first_rank("in place")
    finally:
        if first:
            shutil.rmtree(fresh, ignore_errors=True)


def load_checkpoint(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Read parameters and moments in place; returns the counters.

    Raises MissingError for an absent checkpoint, PolicyError for a torn one or one of another shape; parameters and
    moments are then as before.
    """
    if not (folder / "metadata.json").exists():
        raise MissingError(f"{folder}: no checkpoint of a trainer; start from a policy folder or give another path")
    held = [*model.parameters(), *(s[k] for s in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq"))]
    with without_cuda(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = [tensor.detach().clone() for tensor in held]
        try:
            loaded = dist_checkpointing.load(_sharded(model, optimizer), str(folder))
            megatron.assign(model, {name: loaded["model"][name] for name, _ in model.named_parameters()})
            for i, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
                for name, value in loaded["moments"][i].items():
                    optimizer.state[parameter][name].copy_(value)
            counters: dict[str, int] = loaded["counters"]
        except (Exception, CheckpointException) as error:
            for tensor, value in zip(held, before, strict=True):
                tensor.copy_(value)
            raise PolicyError(f"{folder}: torn checkpoint, or one of another policy: {_reason(error)}") from error
    for state in optimizer.state.values():
        state["step"].fill_(counters["updates"])
    return counters


def _write(folder: Path, model: Any, optimizer: torch.optim.Optimizer, counters: Mapping[str, int]) -> None:
    with without_cuda(), _write_here(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # parts of torch that Megatron uses and torch deprecates
        strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
        try:
            dist_checkpointing.save(_sharded(model, optimizer) | {"counters": dict(counters)}, str(folder), strategy)
        except (Exception, CheckpointException) as error:
            raise PolicyError(f"{folder}: cannot write the checkpoint: {_reason(error)}") from error


def _sharded(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a checkpoint holds, by Megatron's sharding: the parameters and both moments of each."""
    tensors = model.sharded_state_dict()
    moments = optimizer.state_dict()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    optim_state_to_sharding_state(
        moments, get_param_id_to_sharded_param_map(tensors, parameters), exclude_keys=("step",)
    )
    return {"model": tensors, "moments": moments["state"]}


@contextmanager
def _write_here() -> Iterator[None]:
    """Write a checkpoint's files in this process.

    Megatron starts a queue server, which imports the main module once more and outlives a kill, and forks a writer,
    which can hang beside the threads of a transfer engine. A save that is waited for needs neither.
    """
    writer = filesystem_async.FileSystemWriterAsync
    forking, server = writer.write_preloaded_data_multiproc, filesystem_async._results_queue

    def write_all(transforms: Any, use_msc: bool, rank: int, parts: list[Any], results: queue.Queue[Any]) -> None:
        written: dict[int, Any] = {}
        for i, part in enumerate(parts):
            done: queue.Queue[Any] = queue.Queue()
            pending: queue.Queue[Any] = queue.Queue()
            pending.put(i)
            writer.write_preloaded_data(transforms, i, part, done, pending, use_fsync=True)
            _, written[i] = done.get()
        results.put(next((w for w in written.values() if isinstance(w, Exception)), written))

    writer.write_preloaded_data_multiproc = staticmethod(write_all)
    filesystem_async._results_queue = queue.Queue()
    try:
        yield
    finally:
        writer.write_preloaded_data_multiproc = staticmethod(forking)
        filesystem_async._results_queue = server


def _reason(error: BaseException) -> str:
    """torch's CheckpointException is no Exception; its text holds the stacks of all ranks, and the reason last."""
    return (str(error).strip() or repr(error)).splitlines()[-1]
