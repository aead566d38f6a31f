"""Shell. A run's checkpoint -> a policy in Hugging Face format, loadable by any tool that reads one."""

from pathlib import Path

from gyre.config import TrainerConfig
from gyre.workers.policy_files import save_policy
from gyre.workers.trainer import Trainer


def export_policy(checkpoint: Path, policy_dir: Path, target: Path, seed: int) -> None:
    """Write a checkpoint to `target`. Raises PolicyError when it is torn or of another shape.

    policy_dir: the policy that the run began with, for its config, tokenizer and template.
    """
    trainer = Trainer(policy_dir, TrainerConfig(), seed=seed)
    trainer.load(checkpoint)
    save_policy(target, trainer.hf_config, dict(trainer.published.named), tokenizer_files_from=policy_dir)
