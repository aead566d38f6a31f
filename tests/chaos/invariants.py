"""What must hold of the log of a completed run, whatever was killed while it was made.

Events -> what is wrong, in words; nothing but the log is looked at.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from gyre.config import Config
from gyre.events import types as e
from gyre.events.codec import Recorded
from gyre.events.order import Chain
from gyre.workers.claims import Claims
from gyre.workers.claims import evolve as evolve_claims


def broken(events: Sequence[Recorded], config: Config, seen: Mapping[int, str]) -> tuple[str, ...]:
    """Everything that does not hold. seen: sequence -> digest, as a reader saw them while the run was going on."""
    return (
        *_not_lost(events, seen),
        *_calls(events),
        *broken_executions(events, config),
        *_steps(events, config),
        *_cells(events),
        *_schedulers(events),
        *_end(events),
    )


def _not_lost(events: Sequence[Recorded], seen: Mapping[int, str]) -> Iterable[str]:
    chain = Chain()
    for recorded in events:
        chain.observe(recorded)
    yield from (f"chain: {fault}" for fault in chain.faults())
    digests = {recorded.seq: recorded.digest for recorded in events}
    for seq, digest in seen.items():
        if digests.get(seq) != digest:
            yield f"sequence {seq}: a reader saw {digest[:12]}, the log has {digests.get(seq, 'nothing')[:12]}"


def _calls(events: Sequence[Recorded]) -> Iterable[str]:
    started = Counter(r.event.call for r in events if isinstance(r.event, e.CallStarted))
    ends = Counter(r.event.call for r in events if isinstance(r.event, e.CallCompleted | e.CallCut | e.CallFailed))
    yield from (f"call {call}: started {num} times" for call, num in started.items() if num != 1)
    yield from (f"call {call}: ended {ends[call]} times" for call in started if ends[call] != 1)
    yield from (f"call {call}: ended and never started" for call in ends if call not in started)


def broken_executions(events: Sequence[Recorded], config: Config) -> Iterable[str]:
    """Each that was started ends once, scored or dropped, and each slot that was wanted is settled once."""
    pipeline, evaluation = config.pipeline, config.evaluation
    groups = [r.event for r in events if isinstance(r.event, e.GroupDispatched)]
    slots = Counter((group.group, slot) for group in groups for slot in range(group.num_slots))
    wanted = {
        "train": pipeline.num_steps * pipeline.groups_per_step,
        "eval": (1 + (pipeline.num_steps > 0)) * evaluation.num_tasks * len(evaluation.temperatures),
    }
    found = Counter(group.purpose for group in groups)
    for purpose, num in wanted.items():
        if found[purpose] != num:
            yield f"{purpose} groups: {found[purpose]}, expected {num}"
    yield from (f"slot {slot}: dispatched {num} times" for slot, num in slots.items() if num != 1)

    slot_of: dict[str, tuple[str, int]] = {}
    settled: Counter[tuple[str, int]] = Counter()
    gone: set[str] = set()
    for recorded in events:
        match recorded.event:
            case e.ExecutionStarted(execution=execution) as event:
                if execution in slot_of:
                    yield f"execution {execution}: started twice"
                slot_of[execution] = (event.group, event.slot)
            case e.ExecutionScored(execution=execution) | e.ExecutionDropped(execution=execution) as event:
                if execution in gone:
                    yield f"sequence {recorded.seq}: execution {execution}: scored or dropped a second time"
                gone.add(execution)
                settled[slot_of[execution]] += isinstance(event, e.ExecutionScored) or event.final
            case _:
                pass
    yield from (f"slot {slot}: settled {settled[slot]} times" for slot in slots if settled[slot] != 1)
    yield from (f"execution {execution}: never ended" for execution in slot_of if execution not in gone)


def _steps(events: Sequence[Recorded], config: Config) -> Iterable[str]:
    numbers = list(range(1, config.pipeline.num_steps + 1))
    consumed = [r.event for r in events if isinstance(r.event, e.CohortConsumed)]
    batches = [r.event for r in events if isinstance(r.event, e.BatchAssembled)]
    completed = [r.event for r in events if isinstance(r.event, e.StepCompleted)]
    published = [r.event for r in events if isinstance(r.event, e.PolicyPublished)]
    accepted = Counter((r.event.step, r.event.microstep) for r in events if isinstance(r.event, e.MicrostepAccepted))
    for what, found in (("cohorts", consumed), ("batches", batches), ("steps", completed)):
        if [event.step for event in found] != numbers:
            yield f"{what}: of steps {[event.step for event in found]}, expected {numbers}"
    if [event.version for event in published] != [0, *numbers]:
        yield f"versions: {[event.version for event in published]}, expected {[0, *numbers]}"
    digests = {event.step: event.weights_digest for event in completed}
    for event in published[1:]:
        if event.digest != digests.get(event.version):
            yield f"version {event.version}: published {event.digest[:12]}, its step made {digests.get(event.version)}"
    idle = {event.step for event in completed if not event.num_targets}  # all executions of each group scored the same
    changed = [event.digest for event in published if event.version not in idle]
    if len(set(changed)) != len(changed) or len(changed) < 2:
        yield "versions: two have the same weights, so these runs prove nothing"
    yield from (f"micro-step {key}: accepted {num} times" for key, num in accepted.items() if num != 1)
    for batch in batches:
        if sum(step == batch.step for step, _ in accepted) != batch.num_microsteps:
            yield f"step {batch.step}: not all of its micro-steps were accepted"
    names = Counter(name for event in consumed for name in event.groups)
    yield from (f"group {name}: consumed by {num} steps" for name, num in names.items() if num != 1)


def _cells(events: Sequence[Recorded]) -> Iterable[str]:
    """One role an epoch, and no gradient of a cell that never held its micro-steps."""
    epochs: dict[str, int] = {}
    claims, held = Claims(), set[tuple[int, int, str]]()
    for recorded in events:
        claims = evolve_claims(claims, recorded)
        held |= {(claims.step, claim.microstep, claim.cell) for claim in claims.held}
        match recorded.event:
            case e.CellLeased(cell=cell, epoch=epoch):
                if epoch <= epochs.get(cell, 0):
                    yield f"sequence {recorded.seq}: {cell} leased epoch {epoch} after {epochs[cell]}"
                epochs[cell] = epoch
            case e.MicrostepAccepted(step=step, microstep=microstep, cell=cell):
                if (step, microstep, cell) not in held:
                    yield f"sequence {recorded.seq}: {cell} never held micro-step {microstep} of step {step}"
            case _:
                pass


def _schedulers(events: Sequence[Recorded]) -> Iterable[str]:
    """Terms rise; what is decided and commanded in one is of the scheduler that started it, each command once."""
    leaders: dict[int, tuple[str, int]] = {}
    commands = Counter(
        (r.event.term, r.event.cell, r.event.epoch) for r in events if isinstance(r.event, e.SwitchRequested)
    )
    yield from (f"command {key}: given {num} times" for key, num in commands.items() if num > 1)
    for recorded in events:
        writer = (recorded.envelope.writer, recorded.envelope.incarnation)
        match recorded.event:
            case e.TermStarted(term=term):
                if term <= max(leaders, default=0):
                    yield f"sequence {recorded.seq}: term {term} after {max(leaders)}"
                leaders[term] = writer
            case e.Decided(term=term) | e.SwitchRequested(term=term) | e.Ticked(term=term):
                if leaders.get(term) != writer:
                    yield f"sequence {recorded.seq}: of term {term}, from {writer}, which did not start it"
            case _:
                pass


def _end(events: Sequence[Recorded]) -> Iterable[str]:
    ends = [r.event for r in events if isinstance(r.event, e.RunFinished | e.RunResumed | e.TablesRecorded)]
    finished = [event for event in ends if isinstance(event, e.RunFinished)]
    if [event.reason for event in finished] != ["completed"]:
        yield f"run.finished: {[event.reason for event in finished]}, expected once, completed"
    if not ends or not isinstance(ends[-1], e.TablesRecorded):
        yield "run.tables_recorded: is not there after the end"
