"""The five ways in which a history forks x what a harness does to the replies that it sends back.

Each scene goes from requests through session and lineage to events, and from events to the tree that is trained.
Drift: `none`, the replies come back as they were sampled; `re-rendered`, they mean the same and are spelled anew;
`diverging`, a reply comes back changed, so that its tokens are nobody's prefix.
"""

import json
from collections.abc import Callable

import msgspec
import pytest
from scripted import BASH, RENDERER, config, decode, encode, full_ids, generation, tool_call

from gyre.agents import endings, session
from gyre.agents.dialect import Hint, Request
from gyre.agents.messages import Message, ToolCall, to_wire
from gyre.events.tokens import num_tokens, unpack_ids
from gyre.events.types import (
    BranchForked,
    CallCompleted,
    CallCut,
    CallDelivered,
    CallStarted,
    CallSuperseded,
    ContextCompacted,
    Event,
    SessionOpened,
    SubAgentSpawned,
)
from gyre.projections import tree
from gyre.projections.draw import draw
from gyre.projections.selection import select
from gyre.projections.tree import Tree

TASK = Message(role="user", content="mend the parser, please")
NEXT = Message(role="user", content="and now the printer")
SUMMARISE = Message(role="user", content="sum up what was done")
PROMPT = "look for the lexer's tests"
History = tuple[Message, ...]


class Scene:
    """A session played without a gateway; `echo` is what the harness makes of a reply before it sends it back."""

    def __init__(self, drift: str) -> None:
        self.state = session.open_session(SessionOpened(execution="x", session="s", temperature=1.0, top_p=1.0))
        self.events: list[Event] = []
        self.drift = drift

    def fold(self, *events: Event) -> None:
        for event in events:
            self.state = session.evolve(self.state, event)
            self.events.append(event)

    def ask(self, history: History, hint: Hint = "") -> session.Started:
        request = Request(messages=history, tools=(BASH,), hint=hint)
        started = session.decide_start(self.state, request, RENDERER, cell="c0", config=config())
        self.fold(*started.events)
        if self.drift != "re-rendered":
            prompt = RENDERER.render_text([to_wire(m) for m in history], [BASH])
            assert decode(started.input_ids) == prompt, "what the policy sees is the request"
        assert started.input_ids.tolist() == list(full_ids(self.events, started.call.call))
        return started

    def say(self, started: session.Started, text: str) -> Message:
        ids = [*encode(text), RENDERER.end_of_turn_id]
        whole = generation(ids, "stop", num_prompt_tokens=len(started.input_ids))
        done = endings.decide_completed(started, "m", whole, RENDERER, created=0, num_retries=0)
        self.fold(done.event, CallDelivered(execution="x", session="s", call=started.call.call, delivered=True))
        return done.answer.message

    def turn(self, history: History, text: str, hint: Hint = "") -> Message:
        return self.say(self.ask(history, hint), text)

    def echo(self, reply: Message) -> Message:
        if self.drift == "re-rendered":
            calls = tuple(
                ToolCall(id=f"other-{n}", name=c.name, arguments=json.dumps(json.loads(c.arguments), indent=1))
                for n, c in enumerate(reply.tool_calls)
            )
            return msgspec.structs.replace(reply, tool_calls=calls)
        if self.drift == "diverging":
            return msgspec.structs.replace(reply, content=reply.content + " (edited)")
        return reply

    def begin(self) -> History:
        """Two turns, as every scene begins."""
        first = self.turn((TASK,), tool_call("ls"))
        history = (TASK, self.echo(first), Message(role="tool", content="rc=0", tool_call_id="t"))
        return (*history, self.echo(self.turn(history, "it is mended")), NEXT)

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events if isinstance(event, BranchForked)]

    def grown(self) -> Tree:
        grown = Tree("s")
        for event in self.events:
            grown = tree.evolve(grown, event)
        return grown


def compaction(scene: Scene) -> None:
    history = scene.begin()
    summary = scene.turn((*history[:-1], SUMMARISE), "the parser was mended, the printer is left", "summary")
    scene.turn((Message(role="user", content=f"So far: {summary.content}"),), "on with the printer")


def sub_agent(scene: Scene) -> None:
    history = scene.begin()
    call = scene.turn(history, tool_call(PROMPT))
    found = scene.turn((Message(role="user", content=PROMPT),), "they are in tests/lexer")
    result = Message(role="tool", content=found.content, tool_call_id="t")
    scene.turn((*history, scene.echo(call), result), "thanks")


def best_of_n(scene: Scene) -> None:
    history = scene.begin()
    open_calls = [scene.ask(history) for _ in range(3)]
    replies = [scene.say(started, f"way {n}") for n, started in enumerate(open_calls)]
    scene.turn((*history, scene.echo(replies[1]), NEXT), "the second was best")


def retry(scene: Scene) -> None:
    history = scene.begin()
    started = scene.ask(history)
    half = generation(encode("on w"), "abort", num_prompt_tokens=len(started.input_ids))
    scene.fold(endings.decide_no_reply(started, half, status=0, reason="client went away"))
    scene.turn(history, "on with it")


def edit(scene: Scene) -> None:
    history = scene.begin()
    scene.turn((*history, Message(role="user", content="in C")), "on with it")
    scene.turn((*history, Message(role="user", content="in Rust")), "on with it, in Rust")


SCENES: dict[str, Callable[[Scene], None]] = {
    "compaction": compaction,
    "sub-agent": sub_agent,
    "best-of-N": best_of_n,
    "retry": retry,
    "edit": edit,
}
FORKS = {
    "compaction": [],  # the new history begins at the root: an event of its own tells of it
    "sub-agent": [],
    "best-of-N": ["retry", "retry"],
    "retry": ["retry"],
    "edit": ["edit"],
}
"""Of a scene whose replies come back as they were."""
DIVERGED = {
    "compaction": ["drift", "drift"],
    "sub-agent": ["drift", "drift", "drift"],
    "best-of-N": ["drift", "drift", "retry", "retry", "drift"],
    "retry": ["drift", "drift", "retry"],
    "edit": ["drift", "drift", "edit"],
}
TIPS = {"compaction": 2, "sub-agent": 2, "best-of-N": 3, "retry": 1, "edit": 2}
"""Branches that are trained, of a scene whose replies come back as they were."""


def trained(grown: Tree, **options: int) -> list[tuple[int, int]]:
    """(call, position) of every target, as often as it is one."""
    found = select(grown, seed=1, execution="x", **({"max_trajectories": 0} | options))
    return [(part.index, at) for t in found for part in t.targets for at in range(part.start, part.end)]


@pytest.mark.parametrize("drift", ["none", "re-rendered", "diverging"])
@pytest.mark.parametrize("kind", SCENES)
def test_every_delivered_token_is_trained_once_however_the_history_forks(kind: str, drift: str) -> None:
    scene = Scene(drift)
    SCENES[kind](scene)
    grown = scene.grown()
    sampled = [
        (call.index, at)
        for call in grown.calls
        if call.status == "completed"
        for at in range(call.prompt_end, call.end)
    ]
    assert sampled and sorted(trained(grown)) == sampled
    some = trained(grown, max_trajectories=1)
    assert len(set(some)) == len(some)
    assert set(some) <= set(sampled) and (len(some) < len(sampled) or len(tree.tips(grown)) == 1)
    ids = {e.call: unpack_ids(e.sampled).tolist() for e in scene.events if isinstance(e, CallCompleted | CallCut)}
    for trajectory in select(grown, seed=1, execution="x", max_trajectories=0):
        path = tree.token_ids(grown, trajectory.index, trajectory.num_tokens).tolist()
        for part in trajectory.targets:
            assert path[part.start : part.end] == ids[grown.calls[part.index].call], "a target is what was sampled"
    reasons = {reason for _, reason, _ in tree.left_out(grown)}
    assert reasons == ({"context", "cut"} if kind == "retry" else {"context"})


@pytest.mark.parametrize("drift", ["none", "re-rendered", "diverging"])
@pytest.mark.parametrize("kind", SCENES)
def test_forks_are_told_by_their_kind_and_drift_is_told_too(kind: str, drift: str) -> None:
    scene = Scene(drift)
    SCENES[kind](scene)
    assert scene.kinds() == (DIVERGED if drift == "diverging" else FORKS)[kind]
    assert sum(isinstance(event, ContextCompacted) for event in scene.events) == (kind == "compaction")
    assert sum(isinstance(event, SubAgentSpawned) for event in scene.events) == (kind == "sub-agent")
    if drift != "diverging":
        assert len(tree.tips(scene.grown())) == TIPS[kind]


@pytest.mark.parametrize("kind", SCENES)
def test_what_is_only_spelled_anew_makes_the_same_tree(kind: str) -> None:
    shapes = []
    for drift in ("none", "re-rendered"):
        scene = Scene(drift)
        SCENES[kind](scene)
        starts = [event for event in scene.events if isinstance(event, CallStarted)]
        shapes.append([(e.call, e.base, e.shared, e.role_class, e.rule, num_tokens(e.context)) for e in starts])
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("kind", SCENES)
def test_a_reply_that_comes_back_changed_is_context_there_and_a_target_where_it_was_sampled(kind: str) -> None:
    plain, changed = Scene("none"), Scene("diverging")
    for scene in (plain, changed):
        SCENES[kind](scene)
    one, other = (scene.grown() for scene in (plain, changed))
    assert tree.stats(other).num_sampled == tree.stats(one).num_sampled
    assert tree.stats(other).num_targets == tree.stats(one).num_targets
    assert len(tree.tips(other)) > len(tree.tips(one)), "the tokens that nothing builds on are branches of their own"


def lost(scene: Scene) -> None:
    """The gateway handed the reply over, and the line broke: the same request comes again, twice."""
    history = scene.begin()
    for text in ("gone", "gone too", "here"):
        reply = scene.turn(history, text)
    scene.turn((*history, scene.echo(reply), NEXT), "done")


def superseded(scene: Scene) -> list[tuple[str, str]]:
    return [(event.call, event.by) for event in scene.events if isinstance(event, CallSuperseded)]


def test_a_reply_that_is_asked_for_again_before_it_is_gone_on_with_is_no_target() -> None:
    """`call.delivered` says only that its last byte went out."""
    scene = Scene("none")
    lost(scene)
    grown = scene.grown()
    assert superseded(scene) == [("s-c2", "s-c3"), ("s-c3", "s-c4")]
    assert all(call.delivered for call in grown.calls)
    assert {call.call for call in grown.calls if not call.num_targets} == {"s-c2", "s-c3"}
    assert {reason for _, reason, _ in tree.left_out(grown)} == {"context", "superseded"}
    assert len(tree.tips(grown)) == 1
    drawn = [line.strip() for line in draw(grown) if "not trained" in line]
    assert [line.partition(" ")[0] for line in drawn] == ["c2", "c3"]
    assert all(line.endswith("not trained: superseded, leaf") for line in drawn)
    again = session.open_session(SessionOpened(execution="x", session="s", temperature=1.0, top_p=1.0))
    for event in scene.events:
        again = session.evolve(again, event)
    assert again == scene.state, "a gateway that starts again knows it from the log"


def test_a_reply_that_comes_back_after_all_is_a_target() -> None:
    scene = Scene("none")
    history = scene.begin()
    first, _ = scene.turn(history, "one"), scene.turn(history, "two")
    scene.turn((*history, first, NEXT), "the first it is")
    assert superseded(scene) == [("s-c2", "s-c3")]
    assert all(call.num_targets for call in scene.grown().calls)


def test_what_was_asked_for_side_by_side_or_taken_up_supersedes_nothing() -> None:
    scene = Scene("none")
    best_of_n(scene)
    assert not superseded(scene), "three samples"
    scene = Scene("none")
    history = scene.begin()
    scene.turn((*history, scene.turn(history, "one"), NEXT), "on")
    scene.turn(history, "another way")
    assert not superseded(scene), "a rewind: the first reply was gone on with"
    scene = Scene("none")
    compaction(scene)
    asked = (*scene.begin()[:-1], SUMMARISE)
    scene.turn(asked, "once more", "summary")
    assert not superseded(scene), "the summary opened a chain"
    scene = Scene("none")
    started = scene.ask(scene.begin())
    scene.fold(endings.decide_no_reply(started, None, status=503, reason="gone"))
    scene.turn((*scene.begin(),), "on")
    assert not superseded(scene), "there was no reply"


def test_of_sub_agents_with_the_same_prompt_none_supersedes_another() -> None:
    scene = Scene("none")
    history = scene.begin()
    scene.turn(history, tool_call(PROMPT) + tool_call(PROMPT))
    child = (Message(role="user", content=PROMPT),)
    for _ in range(3):  # the third is one of the two, come again: nothing tells which
        scene.turn(child, "they are in tests/lexer")
    assert scene.kinds()[-1] == "retry" and not superseded(scene)


def test_a_reply_that_is_put_together_from_two_branches_off_where_the_first_began() -> None:
    """Qwen Code, when its line broke within the second block of a reply; see docs/harnesses.md."""
    scene = Scene("none")
    resume = Message(role="user", content="go on where you stopped")
    whole = scene.turn((TASK,), "One command does it." + tool_call("ls"))
    text = msgspec.structs.replace(whole, tool_calls=())
    again = scene.turn((TASK, text, resume), "Once more." + tool_call("ls"))
    merged = msgspec.structs.replace(again, content=text.content + again.content)
    result = Message(role="tool", content="rc=0", tool_call_id=again.tool_calls[0].id)
    scene.turn((TASK, merged, result), "done")
    starts = [event for event in scene.events if isinstance(event, CallStarted)]
    task_end = scene.grown().calls[0].prompt_end - len(RENDERER.opening)
    assert [(e.rule, e.base, e.shared) for e in starts[1:]] == [("fork", "s-c0", task_end)] * 2
    assert scene.kinds() == ["drift", "drift"] and not superseded(scene)
    assert all(call.num_targets == call.end - call.prompt_end for call in scene.grown().calls)
    assert {reason for _, reason, _ in tree.left_out(scene.grown())} == {"context"}
