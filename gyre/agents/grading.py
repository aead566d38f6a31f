"""Shell. From a workspace to a score on the log: snapshot -> copy -> grader -> findings -> events.

Invariant: what is graded was kept first, so every score can be looked at again; a grader that fails gives no score:
it is asked again, then the execution is dropped with its reason. A milestone's score never is the execution's.
Direction: workspace -> Snapshots -> `execution.snapshot_taken` -> Runner.grade -> `execution.scored`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from gyre.agents.held_clock import HeldClock
from gyre.agents.redaction import Redactor
from gyre.agents.snapshots import Snapshots, clear
from gyre.agents.tampering import Change, find_tampering
from gyre.agents.task_folder import original
from gyre.agents.tasks import Task
from gyre.agents.verifier import Grade
from gyre.config import GradingConfig
from gyre.errors import EvaluationError, GraderKilled
from gyre.events.log import Writer
from gyre.events.types import (
    EvaluationFailed,
    ExecutionDropped,
    ExecutionScored,
    Finding,
    MilestoneScored,
    Part,
    SnapshotTaken,
)

MAX_LOOKED_AT = 256 << 10
"""Bytes of a changed file that are looked at for tampering."""
KILLED = "grader_killed"
"""The rule of a finding: every grader of the workspace was ended by a signal, and none had reported anything."""
GradeWorkspace = Callable[[Task, Path], Awaitable[Grade]]
"""Raises EvaluationError: no score. It may change the workspace that it is given."""


class Grading:
    """Snapshots and scores of all executions of a run."""

    def __init__(
        self, writer: Writer, grade: GradeWorkspace, folder: Path, config: GradingConfig, redactor: Redactor
    ) -> None:
        """folder: the run directory."""
        self._writer, self._grade, self._config, self._redactor = writer, grade, config, redactor
        self.snapshots = Snapshots(folder / "snapshots", max_bytes=config.max_snapshot_mb << 20)
        self._scratch = folder / "grading"
        self._turn = asyncio.Semaphore(config.max_concurrent)

    async def milestones(self, execution: str, task: Task, workspace: Path, clock: HeldClock) -> None:
        """Keep and grade the live workspace at each configured second of `clock`, until cancelled: what was kept by
        then is graded all the same, before this ends."""
        grading = []
        try:
            for after_s in sorted(self._config.milestones_s):
                await clock.reach(after_s)
                grading.append(asyncio.create_task(self._milestone(execution, task, workspace, after_s)))
        finally:
            await asyncio.gather(*grading)

    async def _milestone(self, execution: str, task: Task, workspace: Path, after_s: float) -> None:
        try:
            digest, cause = await self._keep(execution, workspace, "milestone", after_s, 0)
            grade, _ = await self._grade_copy(f"{execution}-at-{after_s:g}", task, digest)
        except EvaluationError as error:
            await self._failed(execution, 0, f"milestone at {after_s:g} s: {error}", 0)
            return
        scored = MilestoneScored(
            execution=execution,
            snapshot=digest,
            after_s=after_s,
            score=grade.score,
            parts=graded_parts(grade),
            wall_s=grade.wall_s,
        )
        await self._writer.append(scored, cause=cause)

    async def score(
        self, execution: str, task: Task, workspace: Path, after_s: float, cause: int
    ) -> tuple[ExecutionScored | ExecutionDropped, int]:
        """(what is still to be written: the score of what the execution left, or its drop; its cause)."""
        digest, num_killed = "", 0
        for attempt in range(1, self._config.attempts + 1):
            try:
                if not digest:
                    digest, cause = await self._keep(execution, workspace, "end", after_s, cause)
                grade, findings = await self._grade_end(execution, task, workspace, digest)
            except EvaluationError as error:
                cause = await self._failed(execution, attempt, str(error), cause)
                num_killed += isinstance(error, GraderKilled)
            else:
                return self._scored(execution, digest, grade, findings), cause
        if num_killed == self._config.attempts and self._config.on_tampering != "record":
            # Each time, and nobody else was there: what it was to grade did it, and is worth nothing.
            return self._scored(execution, digest, Grade(score=0.0, parts=()), (Finding(rule=KILLED, path="."),)), cause
        return ExecutionDropped(execution=execution, reason="evaluation failed", final=True), cause

    def _scored(
        self, execution: str, digest: str, grade: Grade, findings: tuple[Finding, ...]
    ) -> ExecutionScored | ExecutionDropped:
        if findings and self._config.on_tampering == "drop":
            rules = ", ".join(sorted({finding.rule for finding in findings}))
            return ExecutionDropped(execution=execution, reason=f"tampering: {rules}", final=True)
        is_void = bool(findings) and self._config.on_tampering == "zero" and grade.score > 0
        return ExecutionScored(
            execution=execution,
            score=0.0 if is_void else grade.score,
            parts=graded_parts(grade),
            wall_s=grade.wall_s,
            snapshot=digest,
            findings=findings,
            graded=grade.score if is_void else None,
        )

    async def _keep(self, execution: str, workspace: Path, kind: str, after_s: float, cause: int) -> tuple[str, int]:
        kept = await asyncio.to_thread(self.snapshots.take, workspace)
        taken = SnapshotTaken(
            execution=execution,
            snapshot=kept.digest,
            kind="end" if kind == "end" else "milestone",
            after_s=after_s,
            num_files=kept.num_files,
            num_bytes=kept.num_bytes,
            new_bytes=kept.new_bytes,
        )
        return kept.digest, await self._writer.append(taken, cause=cause)

    async def _grade_end(
        self, execution: str, task: Task, workspace: Path, digest: str
    ) -> tuple[Grade, tuple[Finding, ...]]:
        if task.folder is None:
            async with self._turn:  # its grader only reads, and nobody else is there any more
                return await self._grade(task, workspace), ()
        return await self._grade_copy(execution, task, digest)

    async def _grade_copy(self, name: str, task: Task, digest: str) -> tuple[Grade, tuple[Finding, ...]]:
        async with self._turn:
            findings = await asyncio.to_thread(find_in_snapshot, self.snapshots, digest, task)
            return await grade_snapshot(self.snapshots, digest, task, self._grade, self._scratch / name), findings

    async def _failed(self, execution: str, attempt: int, reason: str, cause: int) -> int:
        failed = EvaluationFailed(execution=execution, attempt=attempt, reason=self._redactor.text(reason))
        return await self._writer.append(failed, cause=cause)


async def grade_snapshot(snapshots: Snapshots, digest: str, task: Task, grade: GradeWorkspace, scratch: Path) -> Grade:
    """Grade a copy in `scratch`, which is removed. Raises EvaluationError."""
    try:
        await asyncio.to_thread(clear, scratch)  # of a dispatcher that was killed
        await asyncio.to_thread(snapshots.restore, digest, scratch)
        return await grade(task, scratch)
    except OSError as error:
        raise EvaluationError(f"snapshot: {digest}: {error}") from error
    finally:
        await asyncio.to_thread(clear, scratch)


def find_in_snapshot(snapshots: Snapshots, digest: str, task: Task) -> tuple[Finding, ...]:
    """Signs of tampering in what the execution added, changed or deleted; a generated task has no files to guard."""
    folder = task.folder
    if folder is None:
        return ()
    changes, seen = [], set()
    for entry in snapshots.entries(digest):
        seen.add(entry.path)
        if entry.kind != "file":
            continue
        before = _text(path.read_bytes() if (path := original(folder, entry.path)) and path.is_file() else None)
        after = _text(snapshots.read(entry.content)) if entry.size <= MAX_LOOKED_AT else ""
        if after != before:
            changes.append(Change(path=entry.path, before=before, after=after or ""))
    for copy in folder.copies:
        source = Path(folder.path) / "environment" / copy.source
        for path in (source,) if source.is_file() else source.rglob("*"):
            name = str(Path(copy.target) / path.relative_to(source)) if source.is_dir() else copy.target
            if path.is_file() and name not in seen:
                changes.append(Change(path=name, before=_text(path.read_bytes()), after=None))
    found = find_tampering(changes, folder.protected)
    return tuple(Finding(rule=finding.rule, path=finding.path) for finding in found)


def _text(content: bytes | None) -> str | None:
    return None if content is None else content[:MAX_LOOKED_AT].decode("utf-8", "replace")


def graded_parts(grade: Grade) -> tuple[Part, ...]:
    return tuple(Part(name=name, passed=passed) for name, passed in grade.parts)
