"""The live view without a terminal: a line a phase, however many events are read at once; who reads may leave."""

import asyncio
import io
import os
from contextlib import suppress
from typing import Any

from rich.console import Console

from gyre.config import Config
from gyre.events import types as e
from gyre.events.codec import Envelope, Recorded
from gyre.projections.progress import Progress
from gyre.projections.report import closing
from gyre.workers.view import LiveView


def recorded(seq: int, event: e.Event) -> Recorded:
    envelope = Envelope(writer="w", incarnation=1, writer_seq=seq, prev="", time_ns=seq, cause=0, event=event)
    return Recorded(seq=seq, subject="", digest="", envelope=envelope)


def test_phases_that_are_read_in_one_go_have_a_line_each() -> None:
    def switched(role: e.Role) -> e.CellSwitched:
        return e.CellSwitched(cell="c0", role=role, epoch=1, version=0, phases=())

    events = [
        switched("rollout"),
        e.AdmissionResumed(),
        switched("train"),
        switched("rollout"),
        e.RunFinished(reason="completed", detail=""),
    ]

    async def main() -> list[str]:
        progress, out = Progress(), io.StringIO()
        view = LiveView(progress, Config(), Console(file=out))
        view.saw()  # not shown yet: what was read before is history
        async with view:
            for seq, event in enumerate(events, 1):
                progress.evolve(recorded(seq, event))
                view.saw()
        view.saw()
        return out.getvalue().splitlines()

    lines = asyncio.run(main())
    assert [line.split()[0] for line in lines] == ["starting", "rollout", "training", "rollout", "completed"]


def test_harnesses_that_fail_one_after_the_other_are_told_once() -> None:
    def finished(number: int, detail: str) -> e.ExecutionFinished:
        reason: Any = "harness_failed" if detail else "completed"
        return e.ExecutionFinished(execution=f"g-{number}", reason=reason, exit_code=1, wall_s=1.0, detail=detail)

    events = [finished(n, "text\nexit code 127: agent: not found\n") for n in range(20)]
    events += [finished(20, ""), *(finished(n, "other") for n in range(21, 29))]

    async def main() -> list[str]:
        progress, out = Progress(), io.StringIO()
        view = LiveView(progress, Config(), Console(file=out))
        async with view:
            for seq, event in enumerate(events, 1):
                progress.evolve(recorded(seq, event))
                view.saw()
        return out.getvalue().splitlines()[1:]

    first, second = asyncio.run(main())
    assert first.startswith("8 harnesses in a row failed, the last one (g-7) with: exit code 127: agent: not found;")
    assert second.startswith("8 harnesses in a row failed, the last one (g-28) with: other;")


def test_a_reader_that_leaves_does_not_stop_the_run() -> None:
    async def main() -> tuple[Progress, str]:
        reading, writing = os.pipe()
        with os.fdopen(writing, "w") as pipe:
            progress, console = Progress(), Console(file=pipe)
            view = LiveView(progress, Config(), console)
            async with view:
                first = os.read(reading, 1000).decode()
                os.close(reading)
                for seq in (1, 2, 3):
                    event = e.CellSwitched(cell="c0", role="rollout", epoch=seq, version=seq, phases=())
                    progress.evolve(recorded(seq, event))
                    progress.version = seq
                    view.saw()
            with suppress(BrokenPipeError):
                pipe.close()
        return progress, first

    progress, first = asyncio.run(main())
    assert first.startswith("starting") and progress.num_events == 3


def test_what_to_type_next_can_be_typed() -> None:
    assert "gyre tree 'my runs/x'" in closing(Progress().summary(), "my runs/x")
