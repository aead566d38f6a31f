"""Shell. A run's checkpoint -> a policy in Hugging Face format, loadable by any tool that reads one."""

from pathlib import Path

from gyre.config import TrainerConfig
from gyre.errors import MissingError
from gyre.workers.policy_files import save_policy
from gyre.workers.trainer import Trainer


def export_policy(checkpoints: Path, policy_dir: Path, target: Path, step: int, seed: int) -> int:
    """Write the policy after `step` (0: the last one kept) to `target`; returns the step.

    policy_dir: the policy that the run began with, for its config, tokenizer and template. Raises MissingError.
    """
    steps = sorted(int(path.name.removeprefix("step-")) for path in checkpoints.glob("step-*"))
    if not steps or step not in (0, *steps):
        kept = f"steps {', '.join(map(str, steps))}" if steps else "none yet"
        raise MissingError(f"{checkpoints}: no checkpoint of step {step or 'any'}; there are: {kept}")
    chosen = step or steps[-1]
    trainer = Trainer(policy_dir, TrainerConfig(), seed=seed)
    trainer.load(checkpoints / f"step-{chosen}")
    save_policy(target, trainer.hf_config, dict(trainer.named_weights()), tokenizer_files_from=policy_dir)
    return chosen
