"""What only a GPU can show, in one go: `make gpu-check`, at most 8 minutes, offline.

    python -m tests.gpu_check [attention | model | trainer | engine] [--on-cpu]

Each check is a process of its own with a deadline, since Megatron and SGLang both want the device for themselves; the
last line says which hold. Exit codes: 0 all that were asked for hold, 1 one does not, 2 there is no GPU.

With `--on-cpu` a machine without one runs what can run there: to try the script itself, not to show anything.
"""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "workers")]

from tests.projections.random_forests import random_branches  # noqa: E402

if TYPE_CHECKING:
    from gyre.workers.trainer import Trainer

CHECKS = {"attention": 100, "model": 110, "trainer": 80, "engine": 170}
"""Deadlines, in seconds: 460 in all."""
ON_CPU = "--on-cpu" in sys.argv
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
POLICY = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "vocab_size": 640}


def demand(what: str, value: float, bound: float) -> None:
    """Says the figure, and fails when it is beyond its bound."""
    print(f"  {what}: {value:.3g} (bound {bound:g})", flush=True)
    if not value <= bound:
        raise SystemExit(f"  {what} is {value:.3g}, beyond {bound:g}")


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


# ------------------------------------------------------------ FlexAttention


def attention() -> None:
    """FlexAttention under block masks against masked attention, forward and backward; then how fast each is."""
    from gyre.projections.forest import plant
    from gyre.workers.tree_attention import RUN, TreeMask, attend, dense_mask

    for num_branches, heads, groups, size in ((1, 4, 4, 64), (40, 8, 2, 64), (200, 4, 2, 128)):
        forest = plant(random_branches(num_branches, num_branches=num_branches, depth=30, vocab=1000))
        pads = np.arange(forest.num_tokens, -(-forest.num_tokens // RUN) * RUN)
        mask = TreeMask(np.append(forest.end, pads + 1), DEVICE)
        dense = dense_mask(torch.from_numpy(mask.end).to(DEVICE))
        for dtype, bound in ((torch.float32, 2e-3), (torch.bfloat16, 3e-2)):
            torch.manual_seed(1)
            shapes = [(1, h, len(mask.end), size) for h in (heads, groups, groups)]
            inputs = [torch.randn(s, device=DEVICE, dtype=dtype, requires_grad=True) for s in shapes]
            weight = torch.randn(shapes[0], device=DEVICE, dtype=dtype)
            exact = [x.detach().double().requires_grad_() for x in inputs]
            results = []
            for mixed, of in (
                (attend(*inputs, mask), inputs),
                (functional.scaled_dot_product_attention(*exact, attn_mask=dense, enable_gqa=True), exact),
            ):
                results.append([mixed, *torch.autograd.grad((mixed * weight).sum(), of)])
            name = f"{num_branches} branches, {len(mask.end)} tokens, {heads}/{groups} heads of {size}, {dtype}"
            worst = max(distance(a.detach(), b.detach()) for a, b in zip(*results, strict=True))
            demand(f"{name}: output and gradients differ by", worst, bound)


# ------------------------------------------------------------ Megatron-Core


def tree_gradient(layout: str) -> torch.Tensor:
    from tiny_policies import tiny_config, tiny_tensors

    from gyre.config import TrainerConfig
    from gyre.workers import megatron
    from gyre.workers.batch_tensors import passes
    from gyre.workers.checkpoint_map import to_megatron
    from gyre.workers.forward import backward
    from gyre.workers.policy_shape import read_shape

    config = tiny_config(**POLICY, max_position_embeddings=4096)
    shape = read_shape(config)
    megatron.start_process_group(1, 2)
    model = megatron.build_model(shape)
    megatron.copy_weights(model, to_megatron(shape, tiny_tensors(config)))
    rows = random_branches(7, num_branches=60, depth=30, num_executions=3, vocab=POLICY["vocab_size"])
    trainer = TrainerConfig(clip_low=0.9, clip_high=9.0)
    for batch in passes(rows, 1 << 20, layout, megatron.device()):  # type: ignore[arg-type]
        backward(model, batch, trainer, 1.0)
    return torch.cat([p.grad.flatten() for p in model.parameters()]).cpu()


def model() -> None:
    """Megatron's layers with tree attention: the gradient of the tree against that of the paths, and the CPU's."""
    found, expected = tree_gradient("tree"), tree_gradient("paths")
    demand("tree and paths on this device: gradients differ by", distance(found, expected), 2e-3)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gradient.pt"
        env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        subprocess.run([sys.executable, "-m", "tests.gpu_check", "_gradient", str(path)], env=env, check=True, cwd=ROOT)
        demand("tree here and on the CPU: gradients differ by", distance(found, torch.load(path)), 2e-3)


def trainer() -> None:
    """Steps of the trainer in both layouts; the same bytes twice; a checkpoint; tokens a second."""
    from tiny_policies import write_tiny_policy

    from gyre.config import TrainerConfig
    from gyre.projections.batches import Microstep, Minibatch
    from gyre.projections.packing import pack
    from gyre.workers.trainer import Trainer

    rows = random_branches(3, num_branches=50, depth=30, num_executions=8, vocab=POLICY["vocab_size"])
    with tempfile.TemporaryDirectory() as folder:
        policy = write_tiny_policy(Path(folder) / "policy", **POLICY, max_position_embeddings=4096)
        weights = {}
        for name, layout in (("paths", "paths"), ("tree", "tree"), ("again", "tree")):
            config = TrainerConfig(layout=layout, warmup_steps=0)  # type: ignore[arg-type]
            mine = Trainer(policy, config, seed=1)
            runs = pack(rows, config.max_tokens_per_microstep, config.layout)
            steps = tuple(Microstep(index=i, minibatch=0, rows=run) for i, run in enumerate(runs))
            part = Minibatch(index=0, groups=("g",), num_executions=8, microsteps=steps)
            begun = mine.published.buffer.clone()
            for _ in range(3):
                begin = time.perf_counter()
                metrics = mine.train_step([part])
                spent = time.perf_counter() - begin
            weights[name] = mine.published.buffer - begun
            print(f"  {name}: {metrics.num_tokens / spent:,.0f} tokens/s of branches in the third step", flush=True)
        demand("three steps on trees and on paths differ by", distance(weights["tree"], weights["paths"]), 5e-2)
        demand("the same trees twice differ by", float((weights["again"] - weights["tree"]).abs().max()), 0.0)
        mine.save(Path(folder) / "saved")
        held = mine.published.buffer.clone()
        mine.train_step([part])
        mine.load(Path(folder) / "saved")
        demand("a checkpoint comes back with a difference of", float((mine.published.buffer - held).abs().max()), 0.0)
        offload_and_back(mine)


def offload_and_back(mine: "Trainer") -> None:
    """While the engine has the device."""
    before = [weight.cpu().clone() for weight in mine.own_weights().values()]
    mine.offload()
    if DEVICE.type == "cuda":
        staying = sum(weight.untyped_storage().nbytes() for weight in mine.own_weights().values())
        demand("bytes of weights on the device after an offload", staying, 0.0)
    mine.onload()
    after = (weight.cpu() for weight in mine.own_weights().values())
    apart = max(float((b - a).abs().max()) for a, b in zip(after, before, strict=True))
    demand("weights come back from the host with a difference of", apart, 0.0)


# ------------------------------------------------------------ SGLang


def engine() -> None:
    """SGLang takes a trained version over Mooncake, hands its memory to the trainer and takes it back."""
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(_serve_and_train(Path(name)))


def make_policy(folder: Path) -> Path:
    """Random weights in bfloat16, with heads of a size that every attention backend has."""
    from gyre.workers.policy_files import load_policy, save_policy
    from gyre.workers.tiny_policy import TinyShape, init_policy

    init_policy(folder / "float32", 1, shape=TinyShape(hidden=256, num_heads=4, ffn=512))
    config, tensors = load_policy(folder / "float32")
    dtype = {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    save_policy(folder / "policy", dict(config) | dtype, {n: t.bfloat16() for n, t in tensors.items()})
    for file in (folder / "float32").iterdir():
        if not (folder / "policy" / file.name).exists():
            shutil.copy(file, folder / "policy")
    return folder / "policy"


def _start(argv: tuple[str, ...], env: dict[str, str], log: Path) -> "subprocess.Popen[bytes]":
    with log.open("wb") as file:
        return subprocess.Popen(argv, env=os.environ | env, stdout=file, stderr=file)


async def _serve_and_train(folder: Path) -> None:
    from test_engine import free_port

    from gyre.config import EngineConfig, TrainerConfig
    from gyre.projections.batches import Row
    from gyre.workers.batch_tensors import batch_tensors
    from gyre.workers.engine import SglangEngine, engine_command
    from gyre.workers.forward import target_logprobs
    from gyre.workers.trainer import Trainer
    from gyre.workers.transfer import TransferEndpoint, WeightSource

    policy, port = make_policy(folder), free_port()
    child = engine_command(policy, port, EngineConfig(context_tokens=1024, max_total_tokens=8192))
    prompt = list(range(5, 45))

    def row(output: tuple[int, ...], logprobs: tuple[float, ...]) -> Row:
        target = np.arange(len(prompt) + len(output)) >= len(prompt)
        column = np.zeros(len(target), np.float32)
        column[target] = logprobs
        share = np.where(target, np.float32(1 / len(output)), np.float32(0))
        ids = np.array([*prompt, *output], np.int32)
        return Row(
            execution="e", call="c", ids=ids, target=target, logprob=column, weight=share, advantage=1.0, spans=()
        )

    process = _start(*child, folder / "engine.log")
    try:
        async with SglangEngine(f"http://127.0.0.1:{port}") as sglang:
            begun = time.monotonic()
            await sglang.wait_ready(150)
            print(f"  engine ready after {time.monotonic() - begun:.0f} s", flush=True)
            mine = Trainer(policy, TrainerConfig(learning_rate=3e-3, warmup_steps=0), seed=1)

            async def sampled(rid: str, temperature: float = 0.0) -> Row:
                made = await sglang.generate(
                    rid, prompt, temperature=temperature, top_p=1.0, max_tokens=64, stop_token_ids=(), extra_key=rid
                )
                return row(made.output_ids, made.logprobs)

            def gaps(of: Row) -> torch.Tensor:
                """Trainer - engine, of each target."""
                with torch.no_grad():
                    logprob, _ = target_logprobs(mine._model, batch_tensors([of], DEVICE), 1.0)
                return logprob.cpu() - torch.from_numpy(of.logprob[of.target])

            def free_gb() -> float:
                return torch.cuda.mem_get_info()[0] / 1e9 if DEVICE.type == "cuda" else 0.0

            first = await sampled("first", 1.0)
            demand("mean |trainer - engine| of what version 0 sampled", float(gaps(first).abs().mean()), 0.05)
            before = free_gb()
            await sglang.release()
            after = free_gb()
            print(f"  the engine released {after - before:.1f} GB of the device", flush=True)
            if DEVICE.type == "cuda":
                demand("free memory of the device before, next to after", before / after, 0.9)
            for _ in range(3):
                mine.gradients([first])
                mine.commit(1)
            source = WeightSource(mine.published.named, TransferEndpoint())
            await sglang.restore()
            report = await sglang.pull_weights(source.manifest(mine.publish()))
            print(f"  version {report.version} pulled: {report.seconds}", flush=True)
            second = await sampled("second", 1.0)
            demand(
                "mean |trainer - engine| of what the trained version sampled", float(gaps(second).abs().mean()), 0.05
            )
            demand("the tokens that were reinforced lost, in nats", -float(gaps(first).mean()), 0.0)
    except BaseException:
        print((folder / "engine.log").read_text(errors="replace")[-3000:], flush=True)
        raise
    finally:
        process.terminate()
        process.wait(20)


# ------------------------------------------------------------ all of them


def run_all(names: list[str]) -> int:
    begun, failed = time.monotonic(), []
    for name in names:
        print(f"gpu-check: {name}", flush=True)
        argv = [sys.executable, "-m", "tests.gpu_check", f"_{name}", *(["--on-cpu"] if ON_CPU else [])]
        try:
            code = subprocess.run(argv, cwd=ROOT, timeout=CHECKS[name], check=False).returncode
        except subprocess.TimeoutExpired:
            code = f"not done after {CHECKS[name]} s"
        if code:
            failed.append(name)
            print(f"  {name}: failed ({code})", flush=True)
    where = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "a CPU: this shows nothing about GPUs"
    held = ", ".join(name for name in names if name not in failed) or "none"
    print(
        f"gpu-check: {time.monotonic() - begun:.0f} s on {where}; hold: {held}; failed: {', '.join(failed) or 'none'}"
    )
    return int(bool(failed))


def main() -> int:
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    if words[:1] == ["_gradient"]:
        torch.save(tree_gradient("tree"), words[1])
        return 0
    inner: dict[str, Callable[[], None]] = {
        "_attention": attention,
        "_model": model,
        "_trainer": trainer,
        "_engine": engine,
    }
    if words and words[0] in inner:
        inner[words[0]]()
        return 0
    if unknown := [word for word in words if word not in CHECKS]:
        print(f"gpu-check: no check {unknown[0]!r}; there are: {', '.join(CHECKS)}", file=sys.stderr)
        return 1
    if DEVICE.type == "cpu" and not ON_CPU:
        print("gpu-check: torch sees no GPU here; nothing was checked", file=sys.stderr)
        return 2
    return run_all(words or list(CHECKS))


if __name__ == "__main__":
    sys.exit(main())
