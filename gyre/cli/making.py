"""Shell. Commands that make what a run needs: `gyre policy`."""

from pathlib import Path
from typing import Annotated

import typer

from gyre.cli.apps import RunPath, policy_app
from gyre.cli.wiring import config_of, find_run, new_place, seen_policy
from gyre.errors import ConfigError


@policy_app.command("init", epilog="Example: `gyre policy init policies/tiny --seed 1`")
def policy_init(
    path: Annotated[Path, typer.Argument(help="Directory to make.")] = Path("policies/tiny"),
    seed: Annotated[int, typer.Option(min=0, help="Fixes tokenizer, weights and warm start.")] = 1,
    family: Annotated[str, typer.Option(help="Family of tasks that it is warmed up on.")] = "files",
    num_goals: Annotated[int, typer.Option(min=1, help="Goals of one task.")] = 2,
    warm_start: Annotated[bool, typer.Option("--warm-start/--random", help="Supervised steps first, or none.")] = True,
    num_threads: Annotated[int, typer.Option(min=1, help="Threads of the warm start.")] = 2,
    size: Annotated[str, typer.Option(help="tiny: 1.1 million parameters; small: 2.6 million.")] = "tiny",
) -> None:
    """Make a tiny policy: tokenizer, template and weights, warmed up on oracle demonstrations."""
    from gyre.workers.output import tell
    from gyre.workers.tiny_policy import SHAPES, init_policy

    if size not in SHAPES:
        raise ConfigError(f"--size {size}: choose one of {', '.join(SHAPES)}")
    with new_place(path):
        if warm_start:
            from gyre.workers.warm_start import warm_policy

            digest = warm_policy(
                path,
                seed,
                family=family,
                num_goals=num_goals,
                num_threads=num_threads,
                show=tell,
                shape=SHAPES[size],
            )
        else:
            digest = init_policy(path, seed, family=family, shape=SHAPES[size])
    tell(f"{path}: {digest}")


@policy_app.command("export", epilog="Example: `gyre policy export runs/quickstart out/policy`")
def policy_export(
    run_path: RunPath,
    target: Annotated[Path, typer.Argument(help="Directory to make, in Hugging Face format.")],
    step: Annotated[int, typer.Option(help="Step to export; 0: the last checkpoint.")] = 0,
) -> None:
    """Write a checkpoint of a run as a Hugging Face model directory."""
    run_dir = find_run(run_path)
    written = run_dir.kept_step(step)
    from gyre.workers.export import export_policy

    config = config_of(run_path)
    begun = seen_policy(config.policy.path, "")
    with new_place(target):
        export_policy(run_dir.checkpoints / f"step-{written}", begun, target, config.seed)
    print(f"{target}: the policy after step {written}")
