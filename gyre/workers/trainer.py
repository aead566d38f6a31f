"""Shell. The trainer of one cell as a library: rows in, weights out. It knows no log and no clock.

Invariant: same rows in the same order, same seed, same number of threads and ranks: same bytes of weights. A call that
raises has changed nothing. Direction: policy folder -> parameters -> gradients of micro-steps -> commit -> published
buffers.

A micro-step adds the sum of its executions' means; the commit divides by the number of executions, once. Gradients
of other cells come in by `add_gradient`, in the order that the log gives. Several ranks hold one sum: each of their
models takes its share of a micro-step's rows, and what they found is added up before the micro-step ends.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from gyre.config import TrainerConfig
from gyre.errors import PolicyError, TrainingError
from gyre.projections.batches import Minibatch
from gyre.projections.packing import Layout
from gyre.workers import megatron
from gyre.workers.algorithms import learning_rate, supervised_loss
from gyre.workers.batch_tensors import LAYOUTS, BatchTensors, Row, check_tokens, passes
from gyre.workers.checkpoint_map import to_megatron
from gyre.workers.earlier_weights import EarlierWeights
from gyre.workers.forward import backward, predictions
from gyre.workers.megatron_checkpoint import load_checkpoint, save_checkpoint
from gyre.workers.offload import offload_of
from gyre.workers.optimizer import build_optimizer
from gyre.workers.policy_files import load_policy
from gyre.workers.policy_shape import PolicyShape, read_shape
from gyre.workers.published_weights import PublishedWeights
from gyre.workers.ranks import BUILD, Ranks, on_all_ranks, over_models, share
from gyre.workers.step_metrics import MicrostepResult, StepMetrics, merge_updates, step_metrics
from gyre.workers.whole_model import WholeModel

# Tokens of one forward pass on a CPU, with pads: its activations should stay near the cache, and a tree in one piece.
_TOKENS_PER_PASS = {"paths": 2048, "tree": 4096}


class Trainer:
    """Parameters, optimizer and published buffers of one process. One trainer a process: Megatron's groups are global.

    `temperature` is that of the rollouts: the engine's log-probabilities are of the distribution it samples.
    """

    def __init__(
        self,
        policy_dir: str | Path,
        config: TrainerConfig,
        *,
        seed: int,
        temperature: float = 1.0,
        commits: bool = True,
        ranks: Ranks | None = None,
    ) -> None:
        """`commits` False: a satellite's, which sums gradients and has no moments; only the core commits.

        `ranks`: of the first of several ranks; the others then do what is asked of this trainer.
        """
        options = {"seed": seed, "temperature": temperature, "commits": commits}
        self.ranks = ranks
        with ranks.told(BUILD, (policy_dir, config), options) if ranks else nullcontext():
            self._build(policy_dir, config, seed=seed, temperature=temperature, commits=commits)

    def _build(
        self, policy_dir: str | Path, config: TrainerConfig, *, seed: int, temperature: float, commits: bool
    ) -> None:
        megatron.start_process_group(seed, config.num_threads, config.tensor_parallel)
        hf_config, tensors = load_policy(policy_dir)
        self.config, self.hf_config, self.step, self.version = config, hf_config, 0, 0
        self.shape: PolicyShape = read_shape(hf_config, f"{policy_dir}/config.json")
        # A greedy engine reports the plain softmax.
        self._temperature = temperature or 1.0
        on_cpu = megatron.device().type == "cpu"
        self._tokens_per_pass = _TOKENS_PER_PASS if on_cpu else dict.fromkeys(LAYOUTS, config.max_tokens_per_microstep)
        self._model = megatron.build_model(self.shape)
        megatron.copy_weights(self._model, to_megatron(self.shape, tensors, str(policy_dir)))
        self._parameters: dict[str, torch.nn.Parameter] = dict(self._model.named_parameters())
        self._optimizer = build_optimizer(tuple(self._parameters.values()), config, has_moments=commits)
        size = sum(p.numel() for p in self._parameters.values())
        # Autograd adds into `_fresh`; only a finite gradient goes on into `_sum`.
        self._fresh, self._sum = (torch.zeros(size, device=megatron.device()) for _ in range(2))
        start = 0
        for parameter in self._parameters.values():
            parameter.grad = self._fresh[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
        self._result = MicrostepResult()
        self._earlier = EarlierWeights(self._model, config)
        self.published = PublishedWeights(self.shape, self._model)
        """What engines read; a commit writes new values in place."""
        self._whole = WholeModel(self._model) if megatron.is_parted() else None
        """Where ranks hold parts of the model: what they hold together."""
        self._offload = offload_of(megatron.device())
        self._publish()

    @property
    def gradient(self) -> Tensor:
        """The sum so far [number of parameters], float32: what a cell sends to the core. A view: copy to keep it."""
        if self._whole is None:
            return self._sum
        self._gather_gradient()
        return self._whole.gradient

    @property
    def result(self) -> MicrostepResult:
        """What goes with `gradient`: the sums of the micro-steps in it."""
        return self._result

    def own_weights(self) -> Mapping[str, Tensor]:
        """Megatron's name -> parameter, in the precision that is trained: what satellites compute on.

        Addresses are stable until `offload`. A commit writes new values in place.
        """
        if self._whole is not None:
            return self._whole.weights
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    @on_all_ranks
    def take_weights(self, weights: Mapping[str, Tensor], *, is_first: bool) -> None:
        """Of the core, for the micro-steps of one update; forgets the sum. `is_first`: of the updates of a step.

        For a later one this trainer must hold the weights of the first, or of one after it.
        Raises PolicyError when they are not those of this policy.
        """
        if is_first:
            self._earlier.forget()
        else:
            self._earlier.keep(self.config)
        megatron.copy_weights(self._model, weights)
        self.discard()

    @on_all_ranks
    def configure(self, config: TrainerConfig) -> None:
        """What may change while a run is away."""
        self.config = config

    @on_all_ranks
    def gradients(self, microstep: Sequence[Row]) -> MicrostepResult:
        """Forward and backward of one micro-step, added to `gradient`.

        Raises TrainingError for a loss or gradient that is not finite, or a token that the policy does not have; then
        nothing was added.
        """
        check_tokens(microstep, self.shape.vocab)
        self._fresh.zero_()
        own = share(microstep)
        total = MicrostepResult(num_tokens=sum(len(row.ids) for row in own))
        for batch in self._passes(own, self.config.layout):
            total = total.plus(self._backward(batch))
        total = over_models(self._fresh, total)
        self._check(self._fresh, total.loss, f"micro-step of {len(microstep)} rows")
        self._add(self._fresh, total)
        return total

    @on_all_ranks
    def add_gradient(self, gradient: Tensor, result: MicrostepResult) -> None:
        """Add what another cell has summed. Raises PolicyError for another size, TrainingError if not finite."""
        expected = tuple((self._sum if self._whole is None else self._whole.gradient).shape)
        if (found := tuple(gradient.shape)) != expected:
            raise PolicyError(f"gradient of another cell has shape {found}, expected {expected}: same policy?")
        self._check(gradient, result.loss, "gradient of another cell")
        self._add(gradient if self._whole is None else self._whole.own_part(gradient), result)

    @on_all_ranks
    def discard(self) -> None:
        """Forget the sum: a cell after it has sent it, or a core that starts the step again."""
        self._sum.zero_()
        self._result = MicrostepResult()

    @on_all_ranks
    def commit(
        self, num_executions: int, *, last: bool = True, check: Callable[[StepMetrics], None] | None = None
    ) -> StepMetrics:
        """One optimizer update by the mean over executions; the sum starts again at zero and the weights are published.

        `num_executions` counts those of every cell. `last` is False for all but the last mini-batch of a
        step. Without an execution the weights stay as they are.

        Raises TrainingError when the norm is not finite, and what `check` raises of the measures; weights, moments,
        sum and counters are then unchanged.
        """
        if num_executions < 0 or (num_executions == 0 and self._result.num_targets):
            raise ValueError(f"commit: {num_executions} executions for {self._result.num_targets} targets")
        rate = learning_rate(self.config.learning_rate, self.step, self.config.warmup_steps)
        torch.div(self._sum, max(num_executions, 1), out=self._fresh)
        norm = self._norm() if num_executions else 0.0
        metrics = step_metrics(
            self._result, step=self.step + 1, num_executions=num_executions, grad_norm=norm, rate=rate
        )
        if check is not None:
            check(metrics)
        if num_executions:
            if not last:
                self._earlier.keep(self.config)
            self._update(norm, rate)
        if last:
            self._earlier.forget()
        self.discard()
        self.step += last
        return metrics

    def train_step(self, minibatches: Sequence[Minibatch]) -> StepMetrics:
        """A whole step on one cell, as `Batch.minibatches` divides it: one update for each, one step in all."""
        updates = []
        for i, part in enumerate(minibatches):
            for microstep in part.microsteps:
                self.gradients(microstep.rows)
            updates.append(self.commit(part.num_executions, last=i == len(minibatches) - 1))
        return merge_updates(updates or [self.commit(0)])

    def supervised_step(self, rows: Sequence[Row], *, rate: float) -> float:
        """One update by weighted cross-entropy; returns `sum(w * -log p) / sum(w)` over all targets. Warm start only.

        Raises TrainingError when it is not finite; nothing was changed.
        """
        self._fresh.zero_()
        total_weight = sum(float(row.weight[row.target].sum()) for row in rows)
        if not total_weight > 0:
            raise ValueError(f"supervised step of {len(rows)} rows: the weights of its targets sum to {total_weight}")
        loss = 0.0
        for batch in self._passes(rows, "paths"):
            part = supervised_loss(predictions(self._model, batch), batch.token_P, batch.weight_N) / total_weight
            torch.autograd.backward(part)
            loss += float(part.detach())
        self._check(self._fresh, loss, f"supervised step of {len(rows)} rows")
        self._update(self._norm(), rate)
        return loss

    def token_accuracy(self, rows: Sequence[Row]) -> float:
        """Share of all targets that are the most likely token. Changes nothing."""
        num_hits = num_targets = 0
        with torch.no_grad():
            for batch in self._passes(rows, "paths"):
                num_hits += int((predictions(self._model, batch).argmax(-1) == batch.token_P).sum())
                num_targets += len(batch.token_P)
        return num_hits / max(num_targets, 1)

    @on_all_ranks
    def publish(self) -> int:
        """The version of the weights as they are now: the step. Recorded in checkpoints."""
        self.version = self.step
        return self.version

    @on_all_ranks
    def save(self, folder: str | Path) -> None:
        """Write parameters, moments and counters as a Megatron distributed checkpoint, whole or not at all."""
        counters = {"step": self.step, "version": self.version}
        save_checkpoint(Path(folder), self._model, self._optimizer, counters)

    @on_all_ranks
    def load(self, folder: str | Path) -> None:
        """Resume from `save`, bit for bit. Raises MissingError for an absent folder, PolicyError for another policy."""
        counters = load_checkpoint(Path(folder), self._model, self._optimizer)
        self.step, self.version = counters["step"], counters["version"]
        self._earlier.forget()
        self.discard()
        self._publish()

    @on_all_ranks
    def restart(self, policy_dir: str | Path) -> None:
        """Begin again from the policy folder, bit for bit as a new trainer would. Raises PolicyError."""
        megatron.copy_weights(self._model, to_megatron(self.shape, load_policy(policy_dir)[1], str(policy_dir)))
        for state in self._optimizer.state.values():
            for value in state.values():
                value.zero_()
        self.step = self.version = 0
        self._earlier.forget()
        self.discard()
        self._publish()

    @on_all_ranks
    def offload(self) -> None:
        """Do without the device's memory until `onload`; meanwhile only published weights may be read."""
        moments = (value for state in self._optimizer.state.values() for value in state.values())
        kept = (*self._parameters.values(), self._sum, *moments, *self._earlier.copies)
        self._offload.leave(kept=kept, void=(self._fresh,))

    @on_all_ranks
    def onload(self) -> None:
        self._offload.come_back()

    def _passes(self, rows: Sequence[Row], layout: Layout) -> Iterator[BatchTensors]:
        return passes(rows, self._tokens_per_pass[layout], layout, megatron.device())

    def _backward(self, batch: BatchTensors) -> MicrostepResult:
        proximal_N, reference_N = self._earlier.logprobs(batch, self._temperature)
        return backward(
            self._model, batch, self.config, self._temperature, proximal_N=proximal_N, reference_N=reference_N
        )

    @on_all_ranks
    def _gather_gradient(self) -> None:
        if self._whole is not None:
            sizes = [parameter.numel() for parameter in self._parameters.values()]
            pieces = zip(self._parameters.items(), torch.split(self._sum, sizes), strict=True)
            self._whole.gather_gradient({name: piece.view_as(parameter) for (name, parameter), piece in pieces})

    def _check(self, gradient: Tensor, loss: float, what: str) -> None:
        # Infinities and NaNs survive a sum: the second pass runs only when a sum of finite values overflows.
        finite = bool(torch.isfinite(gradient.sum())) or bool(torch.isfinite(gradient).all())
        if not megatron.on_every_rank(finite and math.isfinite(loss)):
            raise TrainingError(
                f"{what}: loss {loss} or its gradient is not finite; nothing was changed; "
                "lower trainer.learning_rate, or look for what made the rows"
            )

    def _add(self, gradient: Tensor, result: MicrostepResult) -> None:
        self._sum += gradient
        self._result = self._result.plus(result)

    def _norm(self) -> float:
        """Of the gradient in `_fresh`."""
        norm = megatron.norm(self._fresh, self._model)
        if not math.isfinite(norm):
            raise TrainingError(f"gradient norm is {norm}; nothing was changed; lower trainer.learning_rate")
        return norm

    def _update(self, norm: float, rate: float) -> None:
        """Clip what is in `_fresh`, step the optimizer, publish."""
        if norm > self.config.max_grad_norm:
            self._fresh *= self.config.max_grad_norm / norm
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._publish()

    def _publish(self) -> None:
        self.published.write(self._model)
        if self._whole is not None:
            self._whole.gather_weights(self._model)
