"""Pure. A consumer that meters a run: tokens, seconds and GPU-seconds of each cell by role, executions an hour.

`gyre consume meter RUN_DIR`. Seconds are differences of one writer's recorded times: a cell is in a role from its
`cell.switched` to its next `cell.fenced`, and switching from there to the next `cell.switched`. What is still going
on is counted up to the newest time seen. A rank of a cell has a GPU to itself, and so has a standalone engine: a cell's
GPU-seconds are its seconds in every role, switching too, times these.
"""

from itertools import groupby

import msgspec

from gyre.events import types as e
from gyre.events.codec import Recorded
from gyre.events.consumer import consumer

RUN = "run"
_NS = 1e9


class Tokens(msgspec.Struct, kw_only=True):
    """Of one class of calls: prompts (of which cached), and what was sampled, by policy version."""

    num_calls: int = 0
    prompt: int = 0
    cached: int = 0
    sampled: dict[int, int] = {}


class Clock(msgspec.Struct, kw_only=True):
    """Seconds by role, and the role that goes on; empty for none."""

    seconds: dict[str, float] = {}
    role: str = ""
    since_ns: int = 0

    def enter(self, role: str, at_ns: int) -> None:
        self.seconds, self.role, self.since_ns = self.total(at_ns), role, at_ns

    def total(self, at_ns: int) -> dict[str, float]:
        if not self.role:
            return self.seconds
        passed = max(at_ns - self.since_ns, 0) / _NS
        return {**self.seconds, self.role: self.seconds.get(self.role, 0.0) + passed}


class Meter(msgspec.Struct, kw_only=True):
    """Changed in place, so that an event costs the same however long the run is."""

    tokens: dict[str, Tokens] = {}
    """By class of the call."""
    classes: dict[str, str] = {}
    """Of calls that are open."""
    cells: dict[str, Clock] = {}
    num_ranks: int = 1
    """Of a cell, as the run's config has it."""
    num_gpus: dict[str, int] = {}
    """By cell."""
    run: Clock = msgspec.field(default_factory=Clock)
    num_scored: int = 0
    num_dropped: int = 0
    now_ns: int = 0


def report(state: Meter) -> str:
    lines = [f"{'tokens':<20}{'calls':>8}{'prompt':>12}{'cached':>12}{'sampled':>12}  by version"]
    for name, tokens in sorted(state.tokens.items()):
        total = sum(tokens.sampled.values())
        counts = f"{tokens.num_calls:>8}{tokens.prompt:>12}{tokens.cached:>12}{total:>12}"
        lines.append(f"{name:<20}{counts}  {_by_version(tokens.sampled)}")
    lines.append(f"{'cell':<20}{'rollout s':>12}{'train s':>12}{'switching s':>14}{'GPUs':>6}{'GPU s':>12}")
    for cell, clock in sorted(state.cells.items()):
        seconds, gpus = clock.total(state.now_ns), state.num_gpus.get(cell, 1)
        cells = [f"{seconds.get(role, 0.0):.1f}" for role in ("rollout", "train", "switching")]
        gpu_s = f"{gpus * sum(seconds.values()):.1f}"
        lines.append(f"{cell:<20}{cells[0]:>12}{cells[1]:>12}{cells[2]:>14}{gpus:>6}{gpu_s:>12}")
    ran_s = state.run.total(state.now_ns).get(RUN, 0.0)
    rate = f"{state.num_scored / ran_s * 3600:.0f} an hour" if ran_s else "no time yet"
    lines.append(f"executions: {state.num_scored} scored, {state.num_dropped} dropped; {rate} over {ran_s:.0f} s")
    return "\n".join(lines)


@consumer(report=report)
async def meter(
    event: e.CallStarted
    | e.CallCompleted
    | e.CallCut
    | e.CallFailed
    | e.CellJoined
    | e.CellSwitched
    | e.CellFenced
    | e.SwitchRolledBack
    | e.CellLost
    | e.ExecutionScored
    | e.ExecutionDropped
    | e.RunStarted
    | e.RunResumed
    | e.RunFinished,
    state: Meter,
    recorded: Recorded,
) -> Meter:
    at_ns = recorded.envelope.time_ns
    state.now_ns = max(state.now_ns, at_ns)
    match event:
        case e.CallStarted():
            state.classes[event.call] = event.role_class
        case e.CallCompleted():
            tokens = _tokens_of(state, event.call)
            tokens.prompt += event.num_prompt_tokens
            tokens.cached += event.num_cached_tokens
            _add_sampled(tokens, event.spans)
        case e.CallCut():
            _add_sampled(_tokens_of(state, event.call), event.spans)
        case e.CallFailed():
            state.classes.pop(event.call, None)
        case e.CellJoined():
            state.num_gpus[event.cell] = 1 if event.standalone else state.num_ranks
        case e.CellSwitched() | e.SwitchRolledBack():
            state.cells.setdefault(event.cell, Clock()).enter(event.role, at_ns)
        case e.CellFenced():
            state.cells.setdefault(event.cell, Clock()).enter("switching", at_ns)
        case e.CellLost():
            state.cells.setdefault(event.cell, Clock()).enter("", at_ns)
        case e.ExecutionScored():
            state.num_scored += 1
        case e.ExecutionDropped():
            state.num_dropped += 1
        case e.RunStarted() | e.RunResumed():
            state.run.enter(RUN, at_ns)
            if isinstance(event, e.RunStarted):
                state.num_ranks = _num_ranks(event.config)
        case e.RunFinished():
            for clock in (state.run, *state.cells.values()):
                clock.enter("", at_ns)
    return state


def _num_ranks(config: str) -> int:
    """Of whatever gyre wrote it: what else it says does not matter here."""
    cells = msgspec.json.decode(config).get("cells", {})
    return int(cells.get("hosts", 1) * cells.get("ranks_per_host", 1))


def _tokens_of(state: Meter, call: str) -> Tokens:
    tokens = state.tokens.setdefault(state.classes.pop(call, "unknown"), Tokens())
    tokens.num_calls += 1
    return tokens


def _add_sampled(tokens: Tokens, spans: tuple[e.VersionSpan, ...]) -> None:
    for span in spans:
        tokens.sampled[span.version] = tokens.sampled.get(span.version, 0) + span.end - span.start


def _by_version(sampled: dict[int, int]) -> str:
    """`v0 120, v1-v8 4000`: runs of versions beyond the newest three are added up."""
    newest = sorted(sampled)[-3:]
    parts = []
    for is_new, versions in groupby(sorted(sampled), key=lambda version: version in newest):
        group = list(versions)
        if is_new or len(group) == 1:
            parts += [f"v{version} {sampled[version]}" for version in group]
        else:
            parts.append(f"v{group[0]}-v{group[-1]} {sum(sampled[version] for version in group)}")
    return ", ".join(parts)
