"""A session without a gateway: requests and replies are decided, and their events folded."""

from typing import Any

import msgspec
from scripted import RENDERER, config, generation

from gyre.agents import endings, session
from gyre.agents.dialect import Request
from gyre.agents.messages import Message
from gyre.agents.renderer import Renderer
from gyre.agents.session import Session
from gyre.events.types import Event, SessionOpened

CONFIG = msgspec.structs.replace(config(), engine=msgspec.structs.replace(config().engine, context_tokens=10**6))


def opened() -> Session:
    return session.open_session(SessionOpened(execution="x", session="s", temperature=1.0, top_p=1.0))


class Play:
    """A session without a gateway: decides and folds."""

    def __init__(self, renderer: Renderer = RENDERER) -> None:
        self.renderer = renderer
        self.state = opened()
        self.events: list[Event] = []
        self.started: list[session.Started] = []

    def fold(self, *events: Event) -> None:
        for event in events:
            self.state = session.evolve(self.state, event)
            self.events.append(event)

    def start(self, messages: tuple[Message, ...], tools: tuple[Any, ...] = (), **fields: Any) -> session.Started:
        request = Request(messages=messages, tools=tools, **fields)
        started = session.decide_start(self.state, request, self.renderer, cell="c0", config=CONFIG)
        self.fold(*started.events)
        self.started.append(started)
        return started

    def fail(self, started: session.Started) -> None:
        self.fold(endings.decide_no_reply(started, None, status=503, reason="gone"))

    def complete(self, started: session.Started, text: str, *, closed: bool = True) -> Message:
        ids = self.renderer.tokenizer.encode(text, add_special_tokens=False).ids
        ids = [*ids, *([self.renderer.end_of_turn_id] if closed else [])]
        whole = generation(ids, "stop" if closed else "length", num_prompt_tokens=len(started.input_ids))
        done = endings.decide_completed(started, "m", whole, self.renderer, created=0, num_retries=0)
        self.fold(done.event)
        return done.answer.message

    def turn(self, messages: tuple[Message, ...], text: str = "reply", **options: Any) -> Message:
        return self.complete(self.start(messages), text, **options)
