"""Shell. Warm start: supervised steps that bring a random policy to where RL can begin.

(seed, family) -> policy directory, whole or not at all; same seed and threads, same bytes. What was learned from stands
in it, for the log of each run that begins with it (`policy.demonstrations_learned`). The curriculum has four stages,
because a small model sits for long on a plateau where its format is perfect and its arguments are guesses: (copy)
random tokens repeated, so that looking back comes first; (one) demonstrations of one goal; (clean) of all goals;
(noisy) some goals done wrong, so that the policy starts as a mixture of behaviours and RL has something to choose.
Copying must be exact before noise comes: below `MIN_ACCURACY` the warm start fails rather than hand over
a policy that RL would repair slowly.
"""

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from gyre.agents.renderer import Renderer
from gyre.config import TrainerConfig
from gyre.errors import PolicyError
from gyre.events.types import DemonstrationsLearned
from gyre.workers.batch_tensors import TokenRow
from gyre.workers.demonstrations import make_demonstration, make_messages, make_rows, make_team_history
from gyre.workers.policy_files import DEMONSTRATIONS, save_policy
from gyre.workers.tiny_policy import CHAT_TEMPLATE, TinyShape, init_policy, policy_digest
from gyre.workers.trainer import Trainer

MIN_ACCURACY = 0.99
_BATCH = 16
_OTHER_WEIGHT = 0.1
"""Of tokens that the assistant does not say: they teach what words there are."""
_WARMUP_STEPS = 20
_NUM_CHECKED = 128
_CHECK_SEED = 1_000_000_007
_SHOW_EVERY = 50


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    num_steps: int
    rate: float
    num_goals: int = 0
    """0: repeated random tokens in place of demonstrations."""
    noise: float = 0.0
    decay: bool = False
    """The rate falls to a tenth over the last two fifths, which takes the last few errors out of copying."""
    checked: bool = False
    team: bool = False
    """Histories of the harness `reference-team`."""


def make_stages(num_goals: int) -> tuple[Stage, ...]:
    return (
        Stage(name="copy", num_steps=150, rate=3e-3),
        Stage(name="one", num_steps=150, rate=3e-3, num_goals=1),
        Stage(name="clean", num_steps=500, rate=2e-3, num_goals=num_goals, decay=True, checked=True),
        Stage(name="noisy", num_steps=100, rate=1e-3, num_goals=num_goals, noise=0.7),
    )


def make_team_stages(num_goals: int) -> tuple[Stage, ...]:
    """For the harness `reference-team`; a sub-agent's history is that of a task of one goal. Copying is not checked:
    long instructions are copied to 97 or 98 tokens in a hundred after as many steps, and RL has that to mend too."""
    return (
        Stage(name="copy", num_steps=150, rate=3e-3),
        Stage(name="one", num_steps=250, rate=3e-3, num_goals=1, decay=True),
        Stage(name="team", num_steps=600, rate=2e-3, num_goals=num_goals, decay=True, team=True),
        Stage(name="noisy", num_steps=80, rate=1e-3, num_goals=num_goals, noise=0.6, team=True),
    )


def warm_policy(
    path: Path | str,
    seed: int,
    *,
    family: str = "files",
    num_goals: int = 2,
    num_threads: int = 2,
    show: Callable[[str], None] = lambda _: None,
    stages: Sequence[Stage] | None = None,
    shape: TinyShape | None = None,
) -> str:
    """Make a policy at `path`, which must not exist yet; returns its digest. `show` gets a line now and then.

    Raises PolicyError when the policy cannot copy arguments after the clean stage, or `path` exists.
    """
    target = Path(path)
    if target.exists():
        raise PolicyError(f"{target}: exists already: remove it or choose another directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        random_dir = scratch / "random"
        init_policy(random_dir, seed, family=family, shape=shape)
        trainer = Trainer(random_dir, TrainerConfig(num_threads=num_threads), seed=seed)
        renderer = Renderer(Tokenizer.from_file(str(random_dir / "tokenizer.json")), CHAT_TEMPLATE)
        course = _Course(trainer, renderer, family, seed, show)
        for stage in stages or make_stages(num_goals):
            course.run(stage)
            if stage.checked and not course.copies(stage):
                # An unlucky seed gets half as many steps again.
                course.run(msgspec.structs.replace(stage, num_steps=stage.num_steps // 2, rate=stage.rate / 2))
                if not course.copies(stage):
                    raise PolicyError(
                        f"warm start: seed {seed}: token accuracy is below {MIN_ACCURACY} after stage {stage.name}: "
                        "arguments are not copied exactly yet; use another seed"
                    )
        (random_dir / DEMONSTRATIONS).write_bytes(msgspec.json.encode(course.learned))
        save_policy(target, trainer.hf_config, trainer.published.named, tokenizer_files_from=random_dir)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return policy_digest(target)


class _Course:
    """One trainer on its way through the stages; no demonstration is met twice."""

    def __init__(
        self, trainer: Trainer, renderer: Renderer, family: str, seed: int, show: Callable[[str], None]
    ) -> None:
        self._trainer, self._renderer, self._family, self._seed, self._show = trainer, renderer, family, seed, show
        self._next_task = 0
        self.learned: list[DemonstrationsLearned] = []

    def run(self, stage: Stage) -> None:
        num_tokens = num_targets = 0
        loss, digest = 0.0, hashlib.sha256()
        for step, batch in enumerate(self._batches(stage)):
            rate = stage.rate * min(1.0, (step + 1) / _WARMUP_STEPS)
            if stage.decay:
                rate *= min(1.0, max(0.1, (stage.num_steps - step) / (0.4 * stage.num_steps)))
            loss = self._trainer.supervised_step(batch, rate=rate)
            if (step + 1) % _SHOW_EVERY == 0 or step + 1 == stage.num_steps:
                self._show(f"warm start: {stage.name}: step {step + 1} of {stage.num_steps}, loss {loss:.3f}")
            for row in batch:
                num_tokens += len(row.ids)
                num_targets += int((row.weight == 1).sum())
                digest.update(row.ids.tobytes() + row.weight.tobytes())
        learned = DemonstrationsLearned(
            stage=stage.name,
            num_steps=stage.num_steps,
            num_demonstrations=stage.num_steps * _BATCH if stage.num_goals else 0,
            num_tokens=num_tokens,
            num_targets=num_targets,
            loss=loss,
            digest=digest.hexdigest(),
        )
        self.learned.append(learned)

    def copies(self, stage: Stage) -> bool:
        """Whether arguments are exact, on demonstrations that no step meets: those of another seed."""
        clean = msgspec.structs.replace(stage, noise=0.0)
        accuracy = self._trainer.token_accuracy(
            self._demonstrate(clean, self._seed + _CHECK_SEED, 0, _NUM_CHECKED, 0.0)
        )
        self._show(f"warm start: {stage.name}: token accuracy {accuracy:.4f} on unseen demonstrations")
        return accuracy >= MIN_ACCURACY

    def _batches(self, stage: Stage) -> Iterator[Sequence[TokenRow]]:
        rng = np.random.default_rng([self._seed, self._next_task])
        for _ in range(stage.num_steps):
            if stage.num_goals:
                yield self._demonstrate(stage, self._seed, self._next_task, _BATCH, _OTHER_WEIGHT)
            else:
                yield _repeat_segments(rng, self._trainer.shape.vocab)
            self._next_task += _BATCH

    def _demonstrate(self, stage: Stage, seed: int, first: int, num_rows: int, other_weight: float) -> list[TokenRow]:
        tasks = [(self._family, seed, index, stage.num_goals, stage.noise) for index in range(first, first + num_rows)]
        if stage.team:
            histories = [make_team_history(*task) for task in tasks]
        else:
            histories = [make_messages(make_demonstration(*task)) for task in tasks]
        rows = make_rows(self._renderer, histories)
        return [_token_row(row.ids_T, row.target_T, other_weight) for row in rows]


def _repeat_segments(rng: np.random.Generator, vocab: int) -> list[TokenRow]:
    """A short random segment eight times; from its second occurrence on, each token can be looked up.

    Short segments are learned several times faster than long ones, and serve as well.
    """
    length = int(rng.integers(4, 9))
    said = np.arange(8 * length) >= length
    segments = rng.integers(0, vocab, size=(_BATCH, length), dtype=np.int32)
    return [_token_row(np.tile(segment, 8), said, 0.0) for segment in segments]


def _token_row(ids: NDArray[np.int32], said: NDArray[np.bool_], other_weight: float) -> TokenRow:
    """`said` tokens weigh 1, all others but the first `other_weight`."""
    weight = np.where(said, 1.0, other_weight).astype(np.float32)
    weight[0] = 0.0  # nothing predicts the first token
    return TokenRow(ids=ids, target=weight > 0, weight=weight, logprob=np.zeros(len(ids), np.float32))
