"""Pure. The tables of a run: names, keys, columns and what they mean.

Invariant: every row is made from the log alone. Times are nanoseconds of the writer's clock (`_ns`), for reading;
`seq` is the stream sequence, the only order. NULL means that the log says nothing (yet).
"""

from collections.abc import Iterable
from functools import cached_property
from typing import Any, Literal

import msgspec
import orjson

ColumnType = Literal["int", "float", "text", "bool"]
SQL_TYPES: dict[ColumnType, str] = {"int": "BIGINT", "float": "DOUBLE", "text": "VARCHAR", "bool": "BOOLEAN"}

Row = dict[str, Any]
"""Column -> value; a column that is missing is NULL, or, in a change, left as it was."""
Key = tuple[Any, ...]


class Column(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    type: ColumnType
    doc: str


class Table(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    name: str
    key: tuple[str, ...]
    doc: str
    columns: tuple[Column, ...]
    num_later: int = 0
    """Of the columns, the last: they came after the others, one by one, and older runs have sealed tables without."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(c.name for c in self.columns)

    @cached_property
    def name_set(self) -> frozenset[str]:
        return frozenset(self.names)

    @property
    def ddl(self) -> str:
        columns = ", ".join(f'"{c.name}" {SQL_TYPES[c.type]}' for c in self.columns)
        key = ", ".join(f'"{name}"' for name in self.key)
        return f'CREATE TABLE IF NOT EXISTS "{self.name}" ({columns}, PRIMARY KEY ({key}))'


def canonical(values: Iterable[Any]) -> bytes:
    """One row as the bytes that a table's digest is over; rows come in the order of their keys."""
    return orjson.dumps(list(values)) + b"\n"


def _table(name: str, key: str, doc: str, columns: str, num_later: int = 0) -> Table:
    """`columns`: one a line, `name type meaning`."""
    parsed = [line.split(None, 2) for line in columns.strip().splitlines()]
    return Table(
        name=name,
        key=tuple(key.split()),
        doc=doc,
        columns=tuple(Column(name=n, type=t, doc=d) for n, t, d in parsed),  # type: ignore[arg-type]
        num_later=num_later,
    )


TABLES: tuple[Table, ...] = (
    _table(
        "runs",
        "run",
        "One row: the run.",
        """
        run text id of the run
        state text running, completed, interrupted, paused or failed
        detail text why it ended so
        seed int fixes tasks, policy and selection
        config text canonical JSON of the config now in force
        config_digest text of that config
        num_threads int of the trainer
        num_resumed int times that it went on after it had ended
        started_ns int run.started
        ended_ns int the last run.finished
        """,
    ),
    _table(
        "groups",
        "group_id",
        "Executions of one task at one dispatch: the baseline of the advantage.",
        """
        group_id text id
        index int place in dispatch order, per purpose
        purpose text train or eval
        task text id of the task
        task_digest text of the task
        task_index int place in the task set
        num_slots int executions wanted
        policy_version int at dispatch
        temperature float at which its executions sample
        num_scored int slots settled by a score
        num_dropped int slots given up
        score_mean float over the scored slots
        score_min float over the scored slots
        score_max float over the scored slots
        step int that consumed it
        rejected bool whether a guard rejected that step
        dispatched_seq int group.dispatched
        dispatched_ns int group.dispatched
        complete_seq int the event that settled its last slot
        complete_ns int the event that settled its last slot
        """,
    ),
    _table(
        "skips",
        "seq",
        "A task that was passed over (`tasks.curriculum`), instead of a group.",
        """
        seq int of group.skipped
        task text id of the task
        task_index int place in the task set
        reason text all_passed or all_failed
        because text the group whose scores say so
        """,
    ),
    _table(
        "executions",
        "execution",
        "One attempt of a harness at a task, from start to training.",
        """
        execution text id
        group_id text its group
        slot int place in the group
        attempt int 0, or the number of the refill
        harness text its name
        sandbox text its kind
        deadline_s float after which the harness is stopped
        session text opened last: the one that is scored
        timed_out text harness or overall
        spent text the budget that it used up: calls, output_tokens, or tool_calls or tool_seconds and the tool
        finished text completed, timed_out, harness_failed or interrupted
        exit_code int of the harness
        wall_s float from start to the end of the harness
        detail text tail of the output where the harness failed
        held_s float of wall_s: no engine could answer, so its clock stood still
        score float fraction of graded tests that pass; NULL is no score, not 0
        graded float the grader's score where a finding changed it; else NULL
        snapshot text digest of the workspace that was graded; empty: it was not kept
        num_passed int graded tests that pass
        num_parts int graded tests
        num_grade_failures int times that grading failed
        dropped text why it was dropped
        dropped_final bool whether its slot was given up with it
        step int whose cohort it was in; see rejected of its group
        in_baseline bool whether its score counts in the group's baseline
        in_loss bool whether its tokens are trained
        out_reason text why it is not in the loss
        advantage float of the group's baseline
        staleness int trained step minus version at dispatch
        num_trajectories int selected
        num_targets int trained tokens
        started_ns int execution.started
        finished_ns int execution.finished
        settled_ns int execution.scored or execution.dropped
        grading_s float seconds of the grading that gave the score
        """,
        num_later=1,
    ),
    _table(
        "scores",
        "execution number",
        "One graded test of a scored execution.",
        """
        execution text its execution
        number int place among the tests
        name text of the test
        passed bool whether it passes
        """,
    ),
    _table(
        "milestones",
        "seq",
        "What an execution had reached while it ran; no score of the execution.",
        """
        seq int of execution.milestone_scored
        execution text its execution
        snapshot text digest of the workspace as it was
        after_s float since the start of the harness
        score float of the workspace as it was
        num_passed int graded tests that passed
        num_parts int graded tests
        """,
    ),
    _table(
        "snapshots",
        "seq",
        "A workspace that was kept: it can be graded again.",
        """
        seq int of execution.snapshot_taken
        execution text its execution
        snapshot text digest of its manifest
        kind text milestone or end
        after_s float since the start of the harness
        num_files int files in it
        num_bytes int of all files
        new_bytes int of these the store did not have yet
        """,
    ),
    _table(
        "regrades",
        "seq",
        "A snapshot graded again (`gyre grade`); it changes no score and no batch.",
        """
        seq int of execution.regraded
        execution text its execution
        snapshot text what was graded
        grader text by what
        score float NULL is no score, not 0
        num_passed int graded tests that passed
        num_parts int graded tests
        reason text why there is no score
        """,
    ),
    _table(
        "findings",
        "execution number",
        "Signs that a workspace was made to please its grader.",
        """
        execution text its execution
        number int place among its findings
        rule text as `agents/tampering.py` has them
        path text of the file in the workspace
        """,
    ),
    _table(
        "calls",
        "call",
        "One model request and its response.",
        """
        call text id
        execution text its execution
        session text its session
        base text the call that it builds on
        shared int tokens of the base that it keeps
        role_class text main, main-summary, sub-agent, sub-agent-summary or auxiliary
        rule text by which it was placed
        placed_by text what that rule found: tool-call-id, reply, request, prefix or nothing
        classed_by text what the class follows from: see call.started in events.md
        header text name of the header by which the harness labelled it
        cell text that it was first sent to
        num_context int new context tokens
        num_sampled int sampled tokens
        status text open, completed, cut or failed
        finish text stop, length or tool_calls; else why it was cut or failed
        delivered bool whether the last byte of the reply went out
        superseded_by text the call that asked the same again before anything went on from the reply
        version_min int oldest policy version that sampled it
        version_max int newest
        logprob_mean float of the sampled tokens
        num_prompt_tokens int as the engine counted
        num_cached_tokens int of those, found in its KV cache
        num_retries int transparent ones
        engine_s float seconds in the engine
        temperature float asked of the engine
        max_tokens int bound on the reply
        started_seq int call.started
        started_ns int call.started
        ended_ns int call.completed, call.cut or call.failed
        tools text tools that the reply asks for: their names, one a tool call, with spaces between; NULL: none
        tool_s float what the tools took that the call's base asked for: from its reply to this call; NULL: not known
        """,
        num_later=2,
    ),
    _table(
        "forks",
        "seq",
        "Where a tree branches, is compacted, or gets a sub-agent.",
        """
        seq int of the event
        execution text its execution
        call text the call that branches
        kind text compaction, sub-agent, retry, edit, drift, summary or spawn
        base text the call that it branches from
        shared int tokens kept
        """,
    ),
    _table(
        "trees",
        "execution",
        "The tree of an execution when it was settled.",
        """
        execution text its execution
        session text its session
        num_calls int calls
        num_leaves int calls whose last token is on no other call's path
        num_tokens int of all calls, shared prefixes once
        num_sampled int of those, sampled
        num_targets int of those, fit to be trained
        depth int calls on the longest chain of bases
        """,
    ),
    _table(
        "left_out",
        "execution reason",
        "Tokens that a consumed execution's step did not train, by reason.",
        """
        execution text its execution
        reason text a code of the tree, of the scores, not_selected, beyond_budget or stale
        num_tokens int tokens
        """,
    ),
    _table(
        "cells",
        "cell",
        "The cells, as they are now.",
        """
        cell text id
        index int place in the fixed order; the core is 0
        capacity int executions that it serves at once
        engine_url text of its engine
        model_digest text that it joined with
        standalone bool an engine without a trainer, which always serves
        role text rollout or train
        epoch int fencing number of its lease
        version int policy version of its engine
        num_switches int completed
        lost text why it was lost
        drained bool the operator wants no work on it
        joined_ns int cell.joined
        """,
    ),
    _table(
        "switches",
        "seq",
        "One role switch that was completed or rolled back.",
        """
        seq int of cell.switched or cell.rolled_back
        cell text its cell
        role text the new role; the old one where it was rolled back
        epoch int of the lease
        version int policy version
        outcome text switched or rolled_back
        reason text why it was rolled back
        phase_s float sum of the phases
        wall_s float from the request
        num_sessions int that the gateway held at the cell
        num_calls_moved int calls that waited or moved
        requested_seq int cell.switch_requested; NULL for the first role
        ended_ns int of seq
        """,
    ),
    _table(
        "kv_moves",
        "seq",
        "What became of the KV of a session whose cell left rollout: moved, or to be computed again.",
        """
        seq int cell.kv_migrated or cell.kv_missed
        cell text that left
        epoch int of its lease
        session text whose KV it is
        target text cell that has it now; NULL where it was missed
        num_tokens int moved with it, or to be prefilled again
        num_bytes int moved; NULL where it was missed
        digest text of keys and checksums of all pages; NULL where it was missed
        reason text why it was missed; NULL where it was moved
        """,
    ),
    _table(
        "decisions",
        "seq",
        "What the scheduler decided.",
        """
        seq int scheduler.decided
        cause int the prefix that it was decided over ends here
        term int of the scheduler
        policy text its name
        cell text to be switched
        role text the role asked for
        epoch int of the lease asked for
        waterlevel int executions dispatched minus finished
        capacity int of all cells in rollout
        cell_capacity int of this cell
        reason text in words
        inputs_digest text of all that it looked at
        """,
    ),
    _table(
        "steps",
        "step",
        "One optimizer step.",
        """
        step int 1, 2, 3, ...: the version that it makes
        num_groups int consumed
        num_executions int in the loss
        num_trajectories int selected
        num_tokens int in the batch
        num_targets int trained
        num_microsteps int in the batch
        seed int of the selection
        cohort_digest text of the cohort
        batch_digest text of the batch
        weights_digest text after the step
        loss float two-level mean
        grad_norm float before clipping
        entropy float mean over targets
        clip_fraction float of targets whose ratio was clipped
        logprob_gap_mean float mean |engine - trainer| over targets
        logprob_gap_max float its maximum
        kl float of the trained policy from the one that sampled, mean over targets; estimated
        staleness_mean float of executions in the loss
        staleness_max int of executions in the loss
        learning_rate float used
        score_mean float of the baselines
        num_rejected int cohorts that guards rejected before this one
        phase_s float sum of the phases
        completed_seq int policy.step_completed
        consumed_ns int policy.cohort_consumed
        assembled_ns int policy.batch_assembled
        completed_ns int policy.step_completed
        """,
    ),
    _table(
        "microsteps",
        "step attempt microstep",
        "What a cell claims at once.",
        """
        step int its step
        attempt int 0, or the number of cohorts that guards rejected before
        microstep int place in the step
        cell text of the last claim
        epoch int of the last claim
        num_claims int more than one where a cell was lost
        loss_sum float as accepted by the core
        claimed_ns int the last claim
        accepted_ns int policy.microstep_accepted
        """,
    ),
    _table(
        "rejections",
        "seq",
        "A step that a guard refused: nothing of it was kept.",
        """
        seq int policy.step_rejected
        step int its number, which the next cohort takes again
        attempt int 0, or the number of cohorts that guards rejected before
        guard text that refused
        value float measured; 0 for non_finite
        bound float of the config; 0 for non_finite
        detail text in words
        action text pause or rollback
        num_groups int used up by it
        cohort_digest text of its cohort
        to_version int that was gone back to
        rejected_ns int policy.step_rejected
        rolled_back_ns int policy.rolled_back
        """,
    ),
    _table(
        "demonstrations",
        "seq",
        "Stages of the warm start that made the policy which the run began with; never targets of a batch.",
        """
        seq int policy.demonstrations_learned
        stage text its name
        num_steps int supervised steps
        num_demonstrations int histories, each met once; 0: random tokens, repeated
        num_tokens int of these histories
        num_targets int said by the assistant
        loss float of the last step
        digest text of ids and weights
        """,
    ),
    _table(
        "versions",
        "version",
        "Published policy versions; 0 is what the run began with.",
        """
        version int number of the last completed step
        digest text of the weights
        num_bytes int of the weights
        checkpoint text directory, relative to the run's
        published_seq int policy.published
        published_ns int policy.published
        """,
    ),
    _table(
        "phases",
        "seq number",
        "Seconds by phase of switches, weight pulls and steps.",
        """
        seq int of the event that reports it
        number int place in the event
        name text of the phase
        seconds float spent
        """,
    ),
    _table(
        "events",
        "seq",
        "Every event of the log.",
        """
        seq int place in the total order
        type text versioned name
        aggregate text part of the subject
        id text part of the subject
        writer text who wrote it
        incarnation int of the writer
        writer_seq int number within the incarnation
        cause int sequence of the event that led here; 0 for none
        time_ns int clock of the writer
        digest text of its body
        payload text JSON of the fields; NULL for call.* events, which have a table of their own
        """,
    ),
)

BY_NAME: dict[str, Table] = {table.name: table for table in TABLES}


GAPS = """
CREATE OR REPLACE VIEW gaps AS
SELECT writer, incarnation, before + 1 AS first, writer_seq - 1 AS last, seq FROM (
    SELECT *, lag(writer_seq, 1, 0) OVER (PARTITION BY writer, incarnation ORDER BY writer_seq) AS before FROM events
) WHERE writer_seq > before + 1
"""
_ABOUT_GAPS = """## gaps

A view of `events`: numbers `first` to `last` of a `writer` and its `incarnation` are not on the log, and the event
after them is at `seq`. A process that was killed leaves one, a retry fills it later; neither is damage, which
`gyre log verify` looks for.
"""


def describe() -> str:
    """The reference of all tables, as Markdown."""
    lines = ["# Tables", "", (__doc__ or "").split("\n\n", 1)[1].strip(), ""]
    for table in TABLES:
        lines += [f"## {table.name}", "", f"{table.doc} Key: {', '.join(f'`{k}`' for k in table.key)}.", ""]
        lines += ["| Column | Type | Meaning |", "|---|---|---|"]
        lines += [f"| `{c.name}` | {c.type} | {c.doc.replace('|', chr(92) + '|')} |" for c in table.columns]
        lines.append("")
    return "\n".join([*lines, _ABOUT_GAPS])
