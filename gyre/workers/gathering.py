"""Shell. The gradients of one update, summed in the core's trainer: its own micro-steps, and those of satellites.

Invariants: every micro-step is in the sum once when `gather` returns; the sum is what the acceptances on the log say,
in their order, so whoever reads them computes the same bits. What was accepted before a crash is computed again here,
whoever computed it then: its memory is gone.

Consumes: claims and gradients of satellites, as the log tells of them; their gradients over Mooncake. Produces:
`policy.weights_exposed`, `microstep_claimed`, `claims_returned`, `microstep_accepted`. Waits for: the read-back of its
own claims; the gradient of a satellite. Is unblocked by: that gradient, the loss of the cell, the deadline of claims.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from gyre.errors import TransferError
from gyre.events.codec import Recorded
from gyre.events.follow import Follower
from gyre.events.log import Log
from gyre.events.types import ClaimsReturned, Event, MicrostepAccepted, MicrostepClaimed, WeightsExposed
from gyre.projections.batches import Minibatch, Row
from gyre.projections.cluster import Cell
from gyre.workers.claims import Claims, Offer, Part, evolve, next_offer, order_of, waited_for
from gyre.workers.step_metrics import MicrostepResult, StepMetrics, merge_updates
from gyre.workers.trainer import Trainer
from gyre.workers.transfer import BufferSink, WeightSource

T = TypeVar("T")
Rows = dict[int, tuple[Row, ...]]


class Append(Protocol):
    async def __call__(self, *events: Event, cause: int) -> int:
        """Several are one fact."""
        ...


class InThread(Protocol):
    """Run work in the one thread of torch."""

    def __call__(self, work: Callable[[], T]) -> Awaitable[T]: ...


class Gather(Protocol):
    async def __call__(self, step: int, minibatch: Minibatch, cause: int) -> int:
        """Sum the gradients of the mini-batch; returns the last sequence recorded of it, or `cause`."""
        ...


def add_accepted(trainer: Trainer, parts: tuple[Part, ...], rows: Mapping[int, Sequence[Row]]) -> tuple[Part, ...]:
    """Add what was accepted of these micro-steps, as it was added then; returns what that was.

    Those of a satellite's gradient are summed by themselves before, so that the bits are those that it sent.
    """
    accepted = tuple(part for part in parts if part.microsteps[0] in rows)
    for part in accepted:
        before, result = trainer.gradient.clone(), trainer.result
        if part.offer_seq:
            trainer.discard()
        for microstep in part.microsteps:
            trainer.gradients(rows[microstep])
        if part.offer_seq:
            trainer.add_gradient(before, result)  # a sum is the same whichever of the two comes first
    return accepted


def train_again(trainer: Trainer, minibatches: Sequence[Minibatch], parts: tuple[Part, ...]) -> StepMetrics:
    """A whole step as it was taken, by however many cells: one update for each mini-batch."""
    updates = []
    for minibatch in minibatches:
        add_accepted(trainer, parts, {m.index: m.rows for m in minibatch.microsteps})
        updates.append(trainer.commit(minibatch.num_executions, last=minibatch is minibatches[-1]))
    return merge_updates(updates or [trainer.commit(0)])


def apart_from_one_cell(trainer: Trainer, minibatch: Minibatch, parts: tuple[Part, ...]) -> float:
    """How far the gradient that several cells summed is from that of one cell that takes micro-step after micro-step:
    the largest difference over the largest value. Forgets the sum; the weights stay."""
    rows = {m.index: m.rows for m in minibatch.microsteps}
    trainer.discard()
    add_accepted(trainer, parts, rows)
    several = trainer.gradient.clone()
    trainer.discard()
    for microstep in minibatch.microsteps:
        trainer.gradients(microstep.rows)
    apart = float((trainer.gradient - several).abs().max() / several.abs().max().clamp(min=1e-30))
    trainer.discard()
    return apart


class Exchange(msgspec.Struct, frozen=True):
    """How gradients and weights of the core travel; a core without satellites has none."""

    source: WeightSource
    sink: BufferSink

    def close(self) -> None:
        self.source.close()
        self.sink.close()


class Gathering:
    """Of one step. Use it as a context: it follows the log meanwhile."""

    def __init__(
        self,
        log: Log,
        append: Append,
        in_thread: InThread,
        *,
        cell: Cell,
        trainer: Trainer,
        claims: Claims,
        exchange: Exchange | None,
        deadline_s: float,
    ) -> None:
        self.append, self.in_thread, self.cell, self.trainer = append, in_thread, cell, trainer
        self.claims, self.exchange, self.deadline_s = claims, exchange, deadline_s
        self.follower = Follower(log, self._evolve, after=claims.seq)
        self.last_seq = 0
        self.summed: tuple[tuple[int, ...], ...] = ()
        """What is in the sum, in the order in which it was added."""
        self.refused: frozenset[int] = frozenset()
        """Gradients that could not be read: of a satellite that ended, or is another's by now."""

    def _evolve(self, recorded: Recorded) -> None:
        self.claims = evolve(self.claims, recorded)

    async def __aenter__(self) -> "Gathering":
        self._following = asyncio.create_task(self.follower.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)

    async def _followed(self, wait: Coroutine[Any, Any, T]) -> T:
        """What waits for the log fails with it."""
        waiting = asyncio.ensure_future(wait)
        try:
            await asyncio.wait((waiting, self._following), return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                self._following.result()
            return await waiting
        finally:
            waiting.cancel()

    async def gather(self, step: int, minibatch: Minibatch, cause: int) -> int:
        """See `Gather`. Raises TrainingError for a gradient that is not finite."""
        rows: Rows = {m.index: m.rows for m in minibatch.microsteps}
        self.last_seq = cause
        await self._followed(self.follower.caught_up(cause))
        parts = self.claims.parts
        added = await self.in_thread(lambda: add_accepted(self.trainer, parts, rows))
        self.summed = order_of(added, rows)
        if set(rows) - self.claims.accepted:
            await self._expose(step, minibatch.index)
        while set(rows) - self.claims.accepted:
            await self._advance(step, rows)
        if order_of(parts := self.claims.parts, rows) != self.summed:
            # What a core before this one had accepted came to the log after this one had read it.
            self.trainer.discard()
            await self.in_thread(lambda: add_accepted(self.trainer, parts, rows))
        return self.last_seq

    async def _advance(self, step: int, rows: Rows) -> None:
        """One thing: compute what is held, claim what is free, or take, or wait for, what others computed."""
        cell, claims = self.cell, self.claims
        mine = [m for m in claims.held_by(cell.cell) if m in rows]
        if mine:
            await self._compute(step, mine[0], rows)
        elif free := claims.free(rows):
            await self._record(MicrostepClaimed(step=step, microstep=free[0], cell=cell.cell, epoch=cell.epoch))
        else:
            offer = next_offer(claims, rows)
            if offer is None or offer.seq in self.refused:
                await self._wait(step, rows)
            else:
                await self._take(step, offer)

    async def _compute(self, step: int, microstep: int, rows: Rows) -> None:
        result = await self.in_thread(lambda: self.trainer.gradients(rows[microstep]))
        self.summed += ((microstep,),)
        await self._accept(step, (microstep,), (result.loss,), self.cell.cell, self.cell.epoch)

    async def _take(self, step: int, offer: Offer) -> None:
        gradient, exchange = offer.gradient, self.exchange

        def add() -> None:
            if exchange is None:
                raise TransferError("trainer: a gradient was offered to a core without satellites; set cells.count")
            arrived = exchange.sink.pull(gradient.session, gradient.address, gradient.num_bytes, gradient.digest)
            self.trainer.add_gradient(arrived, MicrostepResult(**msgspec.structs.asdict(gradient.sums)))

        try:
            await self.in_thread(add)
        except TransferError as error:
            print(f"trainer: gradient of {gradient.cell}: {error}", file=sys.stderr, flush=True)
            self.refused |= {offer.seq}
            return
        self.summed += (gradient.microsteps,)
        await self._accept(step, gradient.microsteps, gradient.losses, gradient.cell, gradient.epoch, cause=offer.seq)

    async def _wait(self, step: int, rows: Rows) -> None:
        """For a change; the claims of a cell that was waited for too long go back."""
        cell = waited_for(self.claims, rows)
        seq = self.follower.seq
        try:
            async with asyncio.timeout(self.deadline_s):
                while waited_for(self.claims, rows) == cell:
                    seq = await self._followed(self.follower.changed(seq))
                    offer = next_offer(self.claims, rows)
                    if offer is not None and offer.seq not in self.refused:
                        return
        except TimeoutError:
            held = tuple(c for c in self.claims.held if c.cell == cell)
            if not held:
                return  # they went back at this very moment, with their cell
            reason = f"no gradient in {self.deadline_s:g} s"
            await self._record(
                ClaimsReturned(
                    step=step,
                    cell=cell,
                    epoch=held[0].epoch,
                    microsteps=tuple(c.microstep for c in held),
                    reason=reason,
                )
            )

    async def _expose(self, step: int, minibatch: int) -> None:
        if self.exchange is None:
            return
        source = self.exchange.source
        manifest = await self.in_thread(lambda: source.manifest(step - 1))
        await self._record(
            WeightsExposed(
                step=step,
                minibatch=minibatch,
                cell=self.cell.cell,
                epoch=self.cell.epoch,
                digest=manifest.digest,
                num_bytes=manifest.num_bytes,
                manifest=msgspec.json.encode(manifest).decode(),
            )
        )

    async def _accept(
        self,
        step: int,
        microsteps: Sequence[int],
        losses: Sequence[float],
        cell: str,
        epoch: int,
        *,
        cause: int = 0,
    ) -> None:
        """A gradient is accepted as a whole. `cause`: its offer, if it is another cell's."""
        accepted = [
            MicrostepAccepted(step=step, microstep=microstep, cell=cell, epoch=epoch, loss_sum=loss)
            for microstep, loss in zip(microsteps, losses, strict=True)
        ]
        await self._record(*accepted, cause=cause)

    async def _record(self, *events: Event, cause: int = 0) -> None:
        """And read it back: what follows from it is looked at only then."""
        self.last_seq = await self.append(*events, cause=cause or self.last_seq)
        await self._followed(self.follower.caught_up(self.last_seq))
