"""Faults that users of comparable systems reported: each behaviour that keeps gyre from one of them has a test by name.

The table maps reports to tests of other modules. It fails when one of those is renamed, removed or skipped, so that
what it shows is not lost unnoticed.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

SCORES_TIMEOUTS: dict[str, tuple[str, ...]] = {
    # a missing reward file equalled 0.0
    "OpenEnv#1025": (
        "agents/test_verifier.py::test_there_is_no_score_and_the_reason_is_named",
        "agents/test_dispatch.py::test_a_grader_that_fails_gives_no_score_and_no_zero",
        "projections/test_scores.py::test_no_score_is_not_a_score_of_zero",
    ),
    # invalid rewards entered baselines
    "NeMo-RL#431, #2207, verl#4417": (
        "agents/test_verifier.py::test_any_bytes_give_a_score_in_bounds_or_a_reason",
        "projections/test_scores.py::test_invalid_scores_enter_no_baseline",
    ),
    # a pad token with mask 1 for an empty rollout corrupted GRPO
    "agentcore-rl-toolkit#122": (
        "projections/test_batches.py::test_a_placeholder_has_no_targets",
        "projections/test_batches.py::test_an_execution_without_targets_is_not_in_the_loss",
    ),
    # masked timeouts still shifted their siblings
    "NeMo-RL#4029": (
        "projections/test_scores.py::test_the_table",
        "projections/test_batches.py::test_masked_timeouts_do_not_shift_their_siblings",
        "agents/test_grading.py::test_an_execution_beyond_its_overall_deadline_is_discarded",
    ),
    # one infrastructure failure dropped the whole group
    "miles#2800": (
        "agents/test_dispatch.py::test_an_infrastructure_failure_is_refilled_and_given_up_after_three_attempts",
        "projections/test_cohorts.py::test_one_infrastructure_failure_does_not_drop_the_group",
    ),
}
"""Reports (repository#number) -> tests. All rows of the group of that name; as below."""

SCHEDULER_DURABILITY_INSPECTION: dict[str, tuple[str, ...]] = {
    # a version bump aborted every request in flight
    "miles#2589, #2372": (
        "workers/test_engine.py::test_calls_in_flight_survive_an_update",
        "e2e/test_run.py::test_every_sampled_token_knows_its_version_and_weights_travelled_verified",
    ),
    # aborted samples mixed policy versions untracked
    "slime#2092": (
        "agents/test_gateway.py::test_aborted_generation_goes_on_from_its_tokens_with_a_span_a_version",
        "workers/test_engine.py::test_calls_in_flight_survive_an_update",
    ),
    # staleness aborted whole groups
    "prime-rl#2960": ("projections/test_batches.py::test_a_stale_execution_leaves_the_loss_and_stays_in_the_baseline",),
    # a crash lost thousands of trajectory-seconds
    "verl#7579": (
        "chaos/test_chaos.py::test_a_run_completes_whatever_is_killed_and_its_log_holds",
        "events/test_jetstream.py::test_kill_9_while_publishing_loses_and_doubles_nothing",
    ),
    # no resume in mid-trajectory
    "NeMo-RL#2415": (
        "agents/test_gateway.py::test_killed_gateway_starts_again_from_any_prefix_of_the_log",
        "workers/test_trainer_loop.py::test_a_crash_changes_no_weights_and_counts_nothing_twice",
    ),
    # deterministic replay wanted; a step means the cohort that was consumed
    "AReaL#1343, Relax#171, #175, #223, NeMo-Gym#775": (
        "projections/test_replay.py::test_a_log_is_the_same_as_recorded",
        "projections/test_replay.py::test_a_decision_that_the_log_does_not_call_for_is_named",
        "workers/test_scheduler.py::test_whatever_happens_decisions_replay_and_cells_leave_only_below_the_waterlevel",
    ),
    # users cannot see why a row was skipped
    "slime#85, NeMo-RL#938, agent-lightning#586": (
        "projections/test_tables.py::test_every_token_of_a_consumed_execution_is_trained_or_has_a_reason",
        "projections/test_tree.py::test_every_token_is_a_target_or_has_a_reason",
    ),
    # orphaned containers ran for a day
    "uni-agent#199, OpenEnv#991": (
        "agents/test_sandbox.py::test_strays_of_one_run_are_ended_and_others_are_not",
        "agents/test_sandbox.py::test_deadline_ends_everything",
        "agents/test_sandbox.py::test_death_of_the_parent_ends_everything",
    ),
    # the engine resumed on new weights, then the commit of the router failed
    "Relax#242": (
        "workers/test_cell.py::test_a_switch_that_takes_too_long_is_rolled_back",
        "workers/test_cell.py::test_without_the_published_weights_it_stays_in_training",
        "agents/test_routes.py::test_what_comes_late_or_twice_of_a_switch_that_has_ended_changes_nothing",
        "protocol/test_protocol_model.py::test_no_state_within_reach_breaks_an_invariant",
    ),
    # an unnotified abort held decode slots for minutes; a healthy pair stayed marked as failed
    "sglang#28651, sglang#13054": (
        "workers/test_signs_of_life.py::test_a_satellite_is_lost_when_its_lease_is_over_and_not_before",
        "workers/test_engine.py::test_a_late_or_cancelled_call_leaves_nothing_running",
        "workers/test_cell.py::test_an_engine_that_dies_in_rollout_is_lost_and_joins_again_with_the_same_version",
        "workers/test_cell.py::test_a_switch_that_takes_too_long_is_rolled_back",
    ),
    # throughput left rollout GPUs out of the denominator
    "verl#7049": ("projections/test_consumers.py::test_the_meter_adds_up_roles_tokens_and_executions",),
    # the client library lost and doubled messages, and readers stalled
    "nats.py#985, #541, #703, nats-server#7564": (
        "events/test_jetstream.py::test_kill_9_while_publishing_loses_and_doubles_nothing",
        "events/test_jetstream.py::test_an_idle_reader_goes_on_after_a_restart",
        "events/test_jetstream.py::test_a_slow_reader_holds_a_bounded_number_of_events",
        "events/test_log_contract.py::test_2000_concurrent_appends_keep_the_order_of_the_calls",
    ),
}
ROWS = SCORES_TIMEOUTS | SCHEDULER_DURABILITY_INSPECTION


@cache
def functions(module: str) -> dict[str, ast.FunctionDef]:
    path = TESTS / module
    tree = ast.parse(path.read_text()) if path.exists() else ast.Module(body=[], type_ignores=[])
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("reports", ROWS)
def test_a_reported_fault_has_its_tests(reports: str) -> None:
    for named in ROWS[reports]:
        module, _, name = named.partition("::")
        found = functions(module).get(name)
        assert found is not None, f"{reports}: {named} is not there: name the test that took its place"
        decorators = [ast.unparse(decorator) for decorator in found.decorator_list]
        assert not [text for text in decorators if "skip" in text or "xfail" in text], (
            f"{reports}: {named} does not run"
        )


def test_all_rows_are_there() -> None:
    assert (len(SCORES_TIMEOUTS), len(SCHEDULER_DURABILITY_INSPECTION)) == (5, 12)
