"""Pure. The config of an evaluation: a run without steps, whose groups are all of purpose `eval`.

What is not asked for stays as the base has it: the config of the run that the checkpoint comes from, or the defaults.
"""

import msgspec

from gyre.config import Config, EvalConfig, checked
from gyre.errors import ConfigError


def evaluation_config(
    base: Config,
    *,
    policy: str,
    harness: str = "",
    num_tasks: int,
    seed: int,
    split: str,
    temperature: float,
    num_samples: int,
    pass_at: int = 0,
    num_goals: int = 0,
) -> Config:
    """`harness`, `num_goals`: empty and 0 leave the base's. Raises ConfigError for what cannot be meant."""
    if num_tasks < 1 or num_samples < 1:
        raise ConfigError(f"gyre eval: --tasks {num_tasks}, --samples {num_samples}: both must be at least 1")
    if pass_at > num_samples:
        raise ConfigError(f"gyre eval: --pass-at {pass_at} needs as many samples a task: give --samples {pass_at}")
    if temperature < 0:
        raise ConfigError(f"gyre eval: --temperature {temperature:g}: expected 0 (greedy) or more")
    if temperature == 0 and num_samples > 1:
        raise ConfigError(f"gyre eval: --samples {num_samples} of a greedy policy are all alike: add --temperature 1")
    if split not in ("heldout", "train"):
        raise ConfigError(f"gyre eval: --split {split}: expected heldout or train")
    replace = msgspec.structs.replace
    config = replace(
        base,
        policy=replace(base.policy, path=policy, init=False),
        harness=replace(base.harness, name=harness or base.harness.name),
        tasks=replace(base.tasks, num_goals=num_goals or base.tasks.num_goals),
        pipeline=replace(base.pipeline, num_steps=0),
        evaluation=EvalConfig(
            num_tasks=num_tasks,
            executions_per_task=num_samples,
            split="heldout" if split == "heldout" else "train",
            seed=seed,
            temperatures=(temperature,),
        ),
    )
    return checked(config, "gyre eval")
