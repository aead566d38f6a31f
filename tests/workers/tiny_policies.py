"""Tiny policies and rows that the trainer's tests share."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from gyre.projections.batches import Microstep, Minibatch, Row
from gyre.projections.packing import pack
from gyre.workers.policy_files import save_policy
from gyre.workers.policy_shape import read_shape, tensor_shapes

VOCAB = 120


def tiny_config(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    } | changes


def tiny_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, axes in tensor_shapes(read_shape(config)).items():
        noise = torch.randn(axes, generator=generator)
        out[name] = 1 + 0.1 * noise if "norm" in name else 0.1 * noise
    return out


def write_tiny_policy(path: Path, **changes: Any) -> Path:
    config = tiny_config(**changes)
    save_policy(path, config, tiny_tensors(config))
    return path


def random_rows(num_executions: int, *, seed: int = 0, rows_each: int = 1, low: int = 12, high: int = 60) -> list[Row]:
    """Rows whose weights are one over the targets of their execution, as packed batches carry them."""
    rng = np.random.default_rng(seed)
    out = []
    for e in range(num_executions):
        targets = []
        for _ in range(rows_each):
            target = rng.random(int(rng.integers(low, high))) < 0.4
            target[0], target[-1] = False, True
            targets.append(target)
        share = 1 / sum(int(t.sum()) for t in targets)
        advantage = float(rng.standard_normal())
        for target in targets:
            logprob = -4.8 + 0.3 * rng.standard_normal(len(target))
            out.append(
                Row(
                    execution=f"e{e}",
                    call=f"c{len(out)}",
                    spans=(),
                    ids=rng.integers(0, VOCAB, len(target)).astype(np.int32),
                    target=target,
                    logprob=np.where(target, logprob, 0).astype(np.float32),
                    advantage=advantage,
                    weight=(target * share).astype(np.float32),
                )
            )
    return out


def minibatches(rows: list[Row], num: int = 1, max_tokens: int = 200) -> list[Minibatch]:
    """Rows as a batch packs them; executions stand for groups."""
    names = list(dict.fromkeys(row.execution for row in rows))
    out = []
    for i in range(num):
        mine = names[i * len(names) // num : (i + 1) * len(names) // num]
        packed = pack([row for row in rows if row.execution in mine], max_tokens)
        steps = tuple(Microstep(index=k, minibatch=i, rows=run) for k, run in enumerate(packed))
        out.append(Minibatch(index=i, groups=tuple(mine), num_executions=len(mine), microsteps=steps))
    return out
