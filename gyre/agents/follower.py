"""Shell. What the gateway knows: the fold of the log up to where it has been read, and a way to wait for it.

log -> sessions, routes, whether the run has ended. Invariant: a call event that this gateway appended is
folded at its acknowledgement, those of earlier gateways and all other events when they are read, and none twice.
"""

from collections.abc import Callable

from gyre.agents import routes, session
from gyre.agents.lineage import TreeEvent
from gyre.agents.session import BranchEvent, Session
from gyre.events import follow
from gyre.events.codec import Recorded
from gyre.events.log import Log, Writer
from gyre.events.subjects import ALL_BUT_CALLS
from gyre.events.types import (
    BudgetSpent,
    ExecutionDropped,
    ExecutionFinished,
    RunFinished,
    RunResumed,
    SessionOpened,
    SessionsRerouted,
)

CallEvent = TreeEvent | BranchEvent | BudgetSpent


class Follower(follow.Waits):
    def __init__(self, log: Log, writer: Writer) -> None:
        super().__init__()
        self.log = log
        self.writer = writer
        self.sessions: dict[str, Session] = {}
        self.opened_s: dict[str, float] = {}
        """When each session was opened, in seconds since 1970, as the log says."""
        self.routes: routes.Routes = {}
        self.run_finished = False
        self.on_finished: Callable[[str], None] = lambda session: None
        """Called with each session whose execution has just finished."""
        self._reading = follow.Follower(log, self._fold, lambda _: self.notify(), only=ALL_BUT_CALLS)
        self._sessions_of: dict[str, list[str]] = {}

    async def follow(self) -> None:
        """Consumes the log from its first event; produces the state that `wait_for` waits for. Endless."""
        await self._reading.run()

    async def catch_up(self) -> None:
        """Returns when all that is on the log now has been read."""
        await self._reading.catch_up()

    async def record(self, *events: CallEvent) -> None:
        """Append and fold: the session's next request may come before they have been read back. All are one fact."""
        await self.writer.append_all(events)
        for event in events:
            self._evolve(event)

    async def answer_fence(self, route: routes.Route, answer: SessionsRerouted) -> None:
        seq = await self.writer.append(answer, cause=route.fence_seq)
        self.routes = routes.evolve(self.routes, answer, seq)

    def _fold(self, recorded: Recorded) -> None:
        event, envelope = recorded.event, recorded.envelope
        match event:
            case SessionOpened():
                self.sessions[event.session] = session.open_session(event)
                self.opened_s[event.session] = envelope.time_ns / 1e9
                self._sessions_of.setdefault(event.execution, []).append(event.session)
            case ExecutionFinished() | ExecutionDropped():
                for name in self._sessions_of.pop(event.execution, ()):
                    self.sessions[name] = session.evolve(self.sessions[name], event)
                    self.on_finished(name)
            case _ if isinstance(event, CallEvent):
                if (envelope.writer, envelope.incarnation) != (self.writer.name, self.writer.incarnation):
                    self._evolve(event)
            case RunFinished() | RunResumed():
                self.run_finished = isinstance(event, RunFinished)
            case _:
                self.routes = routes.evolve(self.routes, event, recorded.seq)

    def _evolve(self, event: CallEvent) -> None:
        if event.session in self.sessions:
            self.sessions[event.session] = session.evolve(self.sessions[event.session], event)
