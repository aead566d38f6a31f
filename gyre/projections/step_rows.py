"""Pure. Events of the policy -> changes of the rows of steps, of what they consumed and of what they made.

Invariant: rows of a step that is trained again do not overwrite those of an attempt that was rejected; claims are
counted within an attempt, attempts within a step. Direction: event, and the `Experience` that a step consumes -> `put`.
"""

from gyre.config import Config
from gyre.events import types as e
from gyre.events.codec import Recorded
from gyre.projections.changes import Put, columns_of, put_phases
from gyre.projections.cohorts import consumed_cohort
from gyre.projections.experience import Experience
from gyre.projections.members import choose


class StepRows:
    """The fold."""

    def __init__(self, put: Put) -> None:
        self._put = put
        self._claims: dict[int, int] = {}
        """Of each micro-step of the step under way."""
        self._num_rejected = 0
        """Cohorts of the step under way."""
        self._rejected_seq = 0
        self._consumed: e.CohortConsumed | None = None

    def evolve(self, recorded: Recorded, experience: Experience, config: Config) -> None:
        event, seq, at = recorded.event, recorded.seq, recorded.envelope.time_ns
        match event:
            case e.CohortConsumed():
                self._consumed, digest = event, event.digest
                self._put("steps", event.step, num_groups=len(event.groups), cohort_digest=digest, consumed_ns=at)
                self._put("steps", event.step, num_rejected=self._num_rejected)
                for group in event.groups:
                    self._put("groups", group, step=event.step, rejected=False)
            case e.BatchAssembled():
                copied = ("seed", "num_executions", "num_trajectories", "num_tokens", "num_targets", "num_microsteps")
                self._put("steps", event.step, **{f: getattr(event, f) for f in copied})
                self._put("steps", event.step, batch_digest=event.digest, assembled_ns=at)
                self._chosen(event.step, experience, config)
            case e.MicrostepClaimed():
                key = (event.step, self._num_rejected, event.microstep)
                claims = self._claims[event.microstep] = self._claims.get(event.microstep, 0) + 1
                self._put("microsteps", *key, cell=event.cell, epoch=event.epoch)
                self._put("microsteps", *key, num_claims=claims, claimed_ns=at)
            case e.MicrostepAccepted():
                key = (event.step, self._num_rejected, event.microstep)
                self._put("microsteps", *key, loss_sum=event.loss_sum, accepted_ns=at)
            case e.StepCompleted():
                columns = columns_of(event, "step", "phases", "num_tokens", "num_targets")
                self._put("steps", event.step, **columns, completed_seq=seq, completed_ns=at)
                self._put("steps", event.step, phase_s=sum((p.seconds for p in event.phases), 0.0))
                put_phases(self._put, seq, event.phases)
                self._claims.clear()
                self._num_rejected = 0
            case e.StepRejected():
                self._put("rejections", seq, **columns_of(event), attempt=self._num_rejected, rejected_ns=at)
                if self._consumed is not None and self._consumed.step == event.step:
                    digest = self._consumed.digest
                    self._put("rejections", seq, num_groups=len(self._consumed.groups), cohort_digest=digest)
                    for group in self._consumed.groups:
                        self._put("groups", group, rejected=True)
                self._rejected_seq = seq
                self._num_rejected += 1
                self._claims.clear()
            case e.PolicyRolledBack() if self._rejected_seq:
                self._put("rejections", self._rejected_seq, to_version=event.to_version, rolled_back_ns=at)
            case e.DemonstrationsLearned():
                self._put("demonstrations", seq, **columns_of(event))
            case e.PolicyPublished():
                self._put("versions", event.version, **columns_of(event, "version"), published_seq=seq, published_ns=at)
            case _:
                pass

    def _chosen(self, step: int, experience: Experience, config: Config) -> None:
        """What became of every execution and token of the step's cohort."""
        cohort = consumed_cohort(experience.cohorts, step)
        if cohort is None:
            return
        for chosen in choose(experience, cohort, config, step):
            member = chosen.member
            copied = ("in_baseline", "in_loss", "advantage", "staleness", "num_trajectories", "num_targets")
            self._put("executions", member.execution, **{f: getattr(member, f) for f in copied})
            self._put("executions", member.execution, step=step, out_reason=member.reason)
            for left in chosen.left_out():
                self._put("left_out", left.execution, left.reason, num_tokens=left.num_tokens)
