"""Shell. The live view of a run: one line that changes on a terminal, a log line a phase elsewhere."""

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status

from gyre.config import Config
from gyre.projections.progress import Progress
from gyre.projections.report import failures, status_line
from gyre.workers.output import tell

REFRESH_S = 0.25
"""Of the line on a terminal."""
QUIET_S = 30.0
"""Without a terminal a line is also printed when nothing changed for this long."""
MANY_FAILURES = 8
"""Harnesses that fail one after the other: no accident any more."""


class LiveView:
    """Shows `progress`, which somebody else folds, while the block runs."""

    def __init__(self, progress: Progress, config: Config, console: Console) -> None:
        self._progress, self._config, self._console = progress, config, console
        self._shown: tuple[str, bool, int, int] | None = None
        self._has_warned = False
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._terminal() if self._console.is_terminal else self._quiet())
        self.saw()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def saw(self) -> None:
        """To be called after each event: many may be folded at once, and each phase has its line."""
        if self._task is None:
            return
        now = self._progress
        if now.num_failed_in_a_row >= MANY_FAILURES and not self._has_warned:
            self.say(failures(now))
        self._has_warned = now.num_failed_in_a_row >= MANY_FAILURES
        if self._console.is_terminal:
            return
        key = (now.role, now.finished is not None, now.counts["StepCompleted"], max(now.version, 0))
        if key != self._shown:
            self._shown = key
            self._line()

    def _line(self) -> None:
        self.say(status_line(self._progress, self._config))

    def say(self, text: str) -> None:
        """One line beside what it shows anyhow."""
        if self._console.is_terminal:
            self._console.print(text, soft_wrap=True, markup=False, highlight=False)
            return
        with suppress(OSError):  # a disk that is full, say: no reason to stop a run
            tell(text, self._console.file)

    async def _quiet(self) -> None:
        while True:
            before = self._shown
            await asyncio.sleep(QUIET_S)
            if self._shown == before:
                self._line()

    async def _terminal(self) -> None:
        with Status(status_line(self._progress, self._config), console=self._console) as status:
            while True:
                await asyncio.sleep(REFRESH_S)
                status.update(status_line(self._progress, self._config))
