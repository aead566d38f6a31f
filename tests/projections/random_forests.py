"""Branches of random trees, as rows of a batch: what tests of tree training share."""

import numpy as np

from gyre.projections.batches import Row


def random_branches(
    seed: int,
    *,
    num_branches: int,
    depth: int,
    num_executions: int = 1,
    max_node: int = 4,
    vocab: int = 40,
    targets: str = "once",
) -> list[Row]:
    """Rows of trees that grow a branch at a time: from a place on an earlier branch of the same execution, or from the
    root, to a leaf up to `depth` nodes below the root.

    `once`: a sampled token is a target of the first branch that holds it. `branches`: of all that hold it.
    """
    rng = np.random.default_rng(seed)
    out: list[Row] = []
    for e in range(num_executions):
        paths: list[list[tuple[int, bool, float, int]]] = []
        nodes: list[list[int]] = []
        for b in range(num_branches):
            path: list[tuple[int, bool, float, int]] = []
            ends: list[int] = []
            if paths and rng.random() < 0.95:
                base = int(rng.integers(len(paths)))
                keep = int(rng.integers(len(nodes[base])))
                ends = nodes[base][:keep]
                path = paths[base][: ends[-1] if ends else 0]
            wanted = depth if b == 0 else int(rng.integers(len(ends), depth + 1))
            for _ in range(len(ends), max(wanted, len(ends) + 1)):
                is_sampled = bool(path) and rng.random() < 0.6
                for _ in range(int(rng.integers(1, max_node + 1))):
                    path = [*path, (int(rng.integers(vocab)), is_sampled, float(rng.normal(-3.7, 0.3)), b)]
                ends = [*ends, len(path)]
            paths.append(path)
            nodes.append(ends)
        mine = [[s and (targets == "branches" or b == own) for _, s, _, own in path] for b, path in enumerate(paths)]
        share = np.float32(1 / max(sum(map(sum, mine)), 1))
        advantage = float(rng.standard_normal())
        for path, picked in zip(paths, mine, strict=True):
            target = np.array(picked, np.bool_)
            logprob = np.array([lp for _, _, lp, _ in path], np.float32)
            out.append(
                Row(
                    execution=f"e{e}",
                    call=f"c{len(out)}",
                    ids=np.array([i for i, _, _, _ in path], np.int32),
                    target=target,
                    logprob=np.where(target, logprob, np.float32(0)),
                    weight=np.where(target, share, np.float32(0)),
                    advantage=advantage,
                    spans=(),
                )
            )
    return out
