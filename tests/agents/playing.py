"""A session without a gateway: requests and replies are decided, and their events folded."""

from typing import Any

from scripted import RENDERER, config, encode, generation

from gyre.agents import session
from gyre.agents.dialect import Request
from gyre.agents.messages import Message
from gyre.agents.session import Session
from gyre.events.types import Event, SessionOpened


def opened() -> Session:
    return session.open_session(SessionOpened(execution="x", session="s", temperature=1.0, top_p=1.0))


class Play:
    """A session without a gateway: decides and folds."""

    def __init__(self) -> None:
        self.state = opened()
        self.events: list[Event] = []

    def fold(self, *events: Event) -> None:
        for event in events:
            self.state = session.evolve(self.state, event)
            self.events.append(event)

    def start(self, messages: tuple[Message, ...], tools: tuple[Any, ...] = (), **fields: Any) -> session.Started:
        request = Request(messages=messages, tools=tools, **fields)
        started = session.decide_start(self.state, request, RENDERER, cell="c0", config=config())
        self.fold(*started.events)
        return started

    def complete(self, started: session.Started, text: str, *, closed: bool = True) -> Message:
        ids = [*encode(text), *([RENDERER.end_of_turn_id] if closed else [])]
        whole = generation(ids, "stop" if closed else "length", num_prompt_tokens=len(started.input_ids))
        done = session.decide_completed(started, "m", whole, RENDERER, created=0, num_retries=0)
        self.fold(done.event)
        return done.answer.message

    def turn(self, messages: tuple[Message, ...], text: str = "reply", **options: Any) -> Message:
        return self.complete(self.start(messages), text, **options)
