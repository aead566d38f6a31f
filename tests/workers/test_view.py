"""The live view without a terminal: each phase has its line, however many events are read at once."""

import asyncio
import io

from rich.console import Console

from gyre.config import Config
from gyre.events import types as e
from gyre.events.codec import Envelope, Recorded
from gyre.projections.progress import Progress
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
