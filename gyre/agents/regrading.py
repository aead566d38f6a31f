"""Shell. A finished run, graded again from its snapshots alone: log, snapshots -> grader -> `execution.regraded`.

Invariant: it adds events and changes nothing: neither the scores of the run nor any batch is made of them. An
execution without a snapshot is passed over and counted; a grader that fails is an event with its reason.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

from gyre.agents.evaluator import grade
from gyre.agents.grading import grade_snapshot, graded_parts
from gyre.agents.places import AnySandbox
from gyre.agents.snapshots import Snapshots
from gyre.agents.tasks import Task
from gyre.errors import EvaluationError, MissingError
from gyre.events.log import Log, Writer
from gyre.events.types import ExecutionRegraded, ExecutionScored, ExecutionStarted, GroupDispatched, Part, SnapshotTaken

FindTask = Callable[[str, int, str], Task]
"""(purpose, index, name) of a group's task."""


class Regrading:
    """One grader over the executions of one run."""

    def __init__(
        self, log: Log, writer: Writer, sandbox: AnySandbox, folder: Path, grader: str, find_task: FindTask
    ) -> None:
        """folder: the run directory."""
        self._log, self._writer, self._sandbox, self._find_task = log, writer, sandbox, find_task
        self._snapshots, self._scratch, self._grader = Snapshots(folder / "snapshots"), folder / "grading", grader
        self._groups: dict[str, GroupDispatched] = {}
        self._group_of: dict[str, str] = {}
        self._ends: dict[str, tuple[int, str]] = {}
        """Execution -> (sequence, snapshot) of its end."""
        self._scores: dict[str, float] = {}

    async def run(self, execution: str, parallel: int, say: Callable[[str], None]) -> None:
        """Raises MissingError when nothing can be graded again."""
        async for recorded in self._log.read(1, until=await self._log.last_seq()):
            match recorded.event:
                case GroupDispatched() as event:
                    self._groups[event.group] = event
                case ExecutionStarted() as event:
                    self._group_of[event.execution] = event.group
                case SnapshotTaken(kind="end") as event:
                    self._ends[event.execution] = (recorded.seq, event.snapshot)
                case ExecutionScored() as event:
                    self._scores[event.execution] = event.score
                case _:
                    pass
        chosen = [name for name in self._ends if execution in ("", name)]
        if not chosen:
            raise MissingError(f"gyre grade: {execution or 'the run'}: no snapshot of a workspace's end is on the log")
        turn = asyncio.Semaphore(parallel)

        async def one(name: str) -> float | None:
            async with turn:
                score = await self._regrade(name)
            before = self._scores.get(name)
            say(f"{name:<16} {_shown(before)} -> {_shown(score)}")
            return score

        scores = [score for score in await asyncio.gather(*map(one, chosen)) if score is not None]
        mean = sum(scores) / len(scores) if scores else 0.0
        say(f"{len(scores)} of {len(chosen)} graded with {self._grader}, mean {mean:.3f}")

    async def _regrade(self, name: str) -> float | None:
        seq, digest = self._ends[name]
        group = self._groups[self._group_of[name]]
        task = self._find_task(group.purpose, group.task_index, group.task)
        reason, score = "", None
        parts: tuple[Part, ...] = ()
        try:
            found = await grade_snapshot(
                self._snapshots, digest, task, lambda t, path: grade(self._sandbox, path, t), self._scratch / name
            )
            score, parts = found.score, graded_parts(found)
        except EvaluationError as error:
            reason = str(error)
        regraded = ExecutionRegraded(
            execution=name, snapshot=digest, grader=self._grader, score=score, parts=parts, reason=reason
        )
        await self._writer.append(regraded, cause=seq)
        return score


def _shown(score: float | None) -> str:
    return "none" if score is None else f"{score:.3f}"
