"""A cell of several ranks, started by torchrun: what the first is asked, all do; one that dies ends all of them."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest
from typer.testing import CliRunner

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from tiny_policies import minibatches, random_rows, write_tiny_policy  # noqa: E402

from gyre.cli import app  # noqa: E402
from gyre.config import GuardsConfig, TrainerConfig, load_config  # noqa: E402
from gyre.errors import ConfigError, TrainingError  # noqa: E402
from gyre.events.parent import die_with  # noqa: E402
from gyre.events.server import free_ports  # noqa: E402
from gyre.projections.batches import Row  # noqa: E402
from gyre.workers import guards  # noqa: E402
from gyre.workers.cell import torchrun  # noqa: E402
from gyre.workers.ranks import Ranks, follow, is_follower  # noqa: E402
from gyre.workers.trainer import Trainer  # noqa: E402

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]
CONFIG = TrainerConfig(learning_rate=1e-3, num_threads=1, warmup_steps=0, weight_decay=0.1)
LIMIT_S = 200
TOLERANCE = 1e-5
"""Of the largest value of a gradient: ranks add up in another order than one does, in float32."""


def broken_rows() -> list[Row]:
    rows = random_rows(4, seed=9)
    return [msgspec.structs.replace(rows[0], logprob=rows[0].logprob * float("nan")), *rows[1:]]


def everything(policy: Path, folder: Path, tensor_parallel: int, ranks: Ranks | None) -> dict[str, object]:
    """What a cell asks of its trainer, and what came of it; gradients and weights go to `folder`."""
    config = msgspec.structs.replace(CONFIG, tensor_parallel=tensor_parallel)
    trainer = Trainer(policy, config, seed=1, ranks=ranks)
    refused = []
    metrics = trainer.train_step(minibatches(random_rows(6)))
    trainer.publish()
    trainer.save(folder / "saved")
    for microstep in (random_rows(5, seed=2), random_rows(1, seed=3)):
        trainer.gradients(microstep)
    gradient, result = trainer.gradient.clone(), trainer.result
    weights = {name: weight.clone() for name, weight in trainer.own_weights().items()}
    try:
        trainer.gradients(broken_rows())
    except TrainingError as error:
        refused.append(str(error)[:20])
    trainer.discard()
    trainer.gradients(random_rows(4, seed=4))
    trainer.add_gradient(gradient, result)  # as another cell's
    both = trainer.gradient.clone()
    try:
        trainer.commit(10, check=partial(guards.check, guards=GuardsConfig(min_entropy=99.0), moved=False))
    except TrainingError as error:
        refused.append(error.guard)
    trainer.configure(msgspec.structs.replace(config, learning_rate=2e-3))
    trainer.commit(10)
    trainer.load(folder / "saved")
    trainer.take_weights(weights, is_first=True)
    trainer.restart(policy)
    torch.save({"gradient": gradient, "both": both, "weights": weights, "named": trainer.published.named}, folder / "t")
    return {
        "refused": refused,
        "loss": metrics.loss,
        "norm": metrics.grad_norm,
        "gap": metrics.logprob_gap_max,
        "targets": metrics.num_targets,
        "step": trainer.step,
    }


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def ranks_of(mode: str, *args: object) -> list[str]:
    return [__file__, mode, *map(str, args)]


def start(argv: Sequence[str], *, num_hosts: int = 1, directory: Path = Path()) -> list[subprocess.Popen[str]]:
    """Two ranks a host; all hosts are this one. On the second it is `gyre cell ranks` that starts them."""
    meet = f"127.0.0.1:{free_ports(1)[0]}"
    first = torchrun(argv, num_hosts=num_hosts, host=0, ranks_per_host=2, rendezvous=meet)
    other = [sys.executable, "-m", "gyre.cli", "cell", "ranks", meet, "--ranks", "2", "--dir", str(directory / "there")]
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parent), *sys.path]))
    env, pipe = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}, subprocess.PIPE
    commands = (first, other)[:num_hosts]
    return [subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True) for command in commands]


@pytest.mark.parametrize(("num_hosts", "tensor_parallel"), [(1, 1), (2, 2)])
def test_ranks_of_a_cell_give_the_gradients_of_one(tmp_path: Path, num_hosts: int, tensor_parallel: int) -> None:
    """Two models; and two hosts with a model each, in two parts: the same calls on the first rank, the same gradients
    within `TOLERANCE`."""
    policy = write_tiny_policy(tmp_path / "policy")
    folders = [tmp_path / "ranks", tmp_path / "one"]
    for folder in folders:
        folder.mkdir()
    groups = start(ranks_of("lead", policy, folders[0], tensor_parallel), num_hosts=num_hosts, directory=tmp_path)
    try:
        output, errors = groups[0].communicate(timeout=LIMIT_S)
        assert groups[0].returncode == 0, errors[-3000:]
        assert all(group.wait(LIMIT_S) == 0 for group in groups)
    finally:
        for group in groups:
            group.terminate()
    found = json.loads(output.strip().splitlines()[-1])
    expected = everything(policy, folders[1], 1, None)
    assert found["refused"] == expected["refused"] and len(found["refused"]) == 2
    assert found["step"] == expected["step"] == 0
    assert found["targets"] == expected["targets"]
    for name, tolerance in (("loss", 1e-4), ("norm", 1e-4), ("gap", 1e-3)):
        assert found[name] == pytest.approx(expected[name], rel=tolerance)
    theirs, ours = (torch.load(folder / "t") for folder in folders)
    for name in ("gradient", "both"):
        assert theirs[name].shape == ours[name].shape
        assert distance(theirs[name], ours[name]) < TOLERANCE
    assert theirs["weights"].keys() == ours["weights"].keys()
    assert all(torch.allclose(theirs["weights"][n], w, atol=1e-4) for n, w in ours["weights"].items())
    assert all(torch.equal(theirs["named"][n], w) for n, w in ours["named"].items())  # those of the policy again


def test_a_rank_that_dies_ends_all_of_them() -> None:
    (group,) = start(ranks_of("wait"))
    assert group.stdout is not None
    pids = dict(sorted(group.stdout.readline().split() for _ in range(2)))
    ranks = [psutil.Process(int(pid)) for pid in pids.values()]
    os.kill(int(pids["1"]), signal.SIGKILL)
    assert group.wait(LIMIT_S) != 0
    assert not psutil.wait_procs(ranks, timeout=120)[1]


def test_a_cell_of_hosts_or_ranks_that_cannot_be_meant_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cells\.rendezvous: 0 addresses for 2 cells of 2 hosts"):
        load_config("cells: {count: 2, hosts: 2}")
    for address in ("nonsense", "10.0.0.1:", ":29500", "10.0.0.1:99999"):
        with pytest.raises(ConfigError, match=rf"cells\.rendezvous: '{address}' is no HOST:PORT, as in"):
            load_config(f"cells: {{count: 1, hosts: 2, rendezvous: ['{address}']}}")
        done = CliRunner().invoke(app, ["cell", "ranks", address])
        assert isinstance(done.exception, ConfigError) and f"{address!r} is no HOST:PORT" in str(done.exception)
    with pytest.raises(ConfigError, match=r"cells\.elsewhere: 1 of 1 cells: the core is where `gyre run` is"):
        load_config("cells: {elsewhere: 1}")
    with pytest.raises(ConfigError, match=r"cells\.elsewhere: the embedded server is for this host alone"):
        load_config("cells: {count: 2, elsewhere: 1}")
    with pytest.raises(ConfigError, match=r"tensor_parallel: 2 ranks hold a model, but a cell has 3"):
        load_config("{cells: {ranks_per_host: 3}, trainer: {tensor_parallel: 2}}")


def main(mode: str, *args: str) -> None:
    die_with(os.getppid())
    if mode == "wait":
        ranks = Ranks()
        os.write(1, f"{os.environ['RANK']} {os.getpid()}\n".encode())  # at once: both write to one pipe
        ranks.hear() if is_follower() else signal.pause()
    elif is_follower():
        follow(Trainer)
    else:
        ranks = Ranks()
        print(json.dumps(everything(Path(args[0]), Path(args[1]), int(args[2]), ranks)), flush=True)
        ranks.end()


if __name__ == "__main__":
    main(*sys.argv[1:])
