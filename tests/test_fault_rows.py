"""Faults that users of comparable systems reported: each behaviour that keeps gyre from one of them has a test by name.

The reports are public (repository#number). The tables map them to tests of other modules. A row fails when one of its
tests is renamed, removed or skipped, so that what it shows is not lost unnoticed; so does a test of the modules of rows
that no row names.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
TRAJECTORIES, GATEWAY = "agents/test_fault_rows_trajectories.py", "agents/test_fault_rows_gateway.py"

BUILDING_TRAJECTORIES: dict[str, tuple[str, ...]] = {
    "rllm#772, #773": (f"{TRAJECTORIES}::test_rllm_772_interleaved_parent_and_sub_agent_keep_one_open_tip_each",),
    "uni-agent#51": (f"{TRAJECTORIES}::test_uni_agent_51_a_tree_holds_every_fork_kind_with_every_drift",),
    "NeMo-RL#2821, prime-rl#1334, NeMo-Gym#1787": (
        f"{TRAJECTORIES}::test_nemo_rl_2821_old_reasoning_stays_over_48_tool_turns",
        f"{TRAJECTORIES}::test_nemo_gym_1787_a_reply_that_came_back_changed_is_an_event_and_no_assertion",
    ),
    "verifiers#955": (f"{TRAJECTORIES}::test_verifiers_955_the_tool_set_is_part_of_what_is_matched",),
    "miles#2292": (f"{TRAJECTORIES}::test_miles_2292_a_rewind_of_177_turns_is_a_branch",),
    "miles#3311": (f"{TRAJECTORIES}::test_miles_3311_an_invalid_request_changes_nothing",),
    "prime-rl#3478": ("projections/test_tree.py::test_rejected_attempts_claim_no_shared_prefix",),
    "AReaL#1627": (
        f"{TRAJECTORIES}::test_areal_1627_orphans_of_retries_are_no_leaves_of_their_own",
        "projections/test_tree.py::test_retry_orphans_are_no_tips",
    ),
    "slime#2230, AReaL#1419": (
        "projections/test_scores.py::test_equal_rewards_give_exactly_zero",
        "projections/test_batches.py::test_groups_are_grouped_by_id_however_uneven",
    ),
    "miles#2378, agent-lightning#593, uni-agent#185": (
        "projections/test_batches.py::test_executions_with_more_rows_weigh_no_more",
        "workers/test_trainer.py::test_loss_is_the_mean_over_executions_of_means_over_targets",
    ),
}
GATEWAYS: dict[str, tuple[str, ...]] = {
    "vllm#36829, claude-code#68900": (
        f"{GATEWAY}::test_vllm_36829_a_nonce_in_the_system_prompt_is_no_part_of_the_history",
    ),
    "miles#1714": (
        f"{GATEWAY}::test_miles_1714_a_retry_of_a_reply_that_nobody_saw_is_answered",
        "projections/test_tree.py::test_an_undelivered_reply_is_no_target_until_a_request_builds_on_it",
    ),
    "verifiers#2211": (f"{GATEWAY}::test_verifiers_2211_the_log_has_a_reply_before_its_client_sees_a_byte",),
    "verifiers#1756": (
        f"{GATEWAY}::test_verifiers_1756_upstream_status_and_retry_after_are_relayed",
        f"{GATEWAY}::test_verifiers_1756_official_clients_try_again_and_get_through",
        f"{GATEWAY}::test_verifiers_1756_anthropic_clients_know_an_overloaded_engine",
    ),
    "NeMo-Gym#1349": (f"{GATEWAY}::test_nemo_gym_1349_sessions_run_side_by_side",),
    "agent-lightning (gateway)": (f"{GATEWAY}::test_agent_lightning_every_dialect_streams_and_does_not",),
}
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
        "agents/test_sandbox.py::test_what_a_dead_run_left_is_removed_and_that_of_others_is_not",
        "agents/test_sandbox.py::test_nothing_outlives_its_time_though_nobody_ends_it",
        "agents/test_containers.py::test_what_is_left_of_dead_runs_is_removed_by_label_and_by_time",
        "chaos/test_execution_kills.py::test_an_execution_ends_once_and_says_how",
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
ROWS = BUILDING_TRAJECTORIES | GATEWAYS | SCORES_TIMEOUTS | SCHEDULER_DURABILITY_INSPECTION


@cache
def functions(module: str) -> dict[str, ast.FunctionDef]:
    path = TESTS / module
    tree = ast.parse(path.read_text()) if path.exists() else ast.Module(body=[], type_ignores=[])
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("reports", ROWS)
def test_a_reported_fault_has_its_tests(reports: str) -> None:
    assert ROWS[reports]
    for named in ROWS[reports]:
        module, _, name = named.partition("::")
        found = functions(module).get(name)
        assert found is not None, f"{reports}: {named} is not there: name the test that took its place"
        decorators = [ast.unparse(decorator) for decorator in found.decorator_list]
        assert not [text for text in decorators if "skip" in text or "xfail" in text], (
            f"{reports}: {named} does not run"
        )


@pytest.mark.parametrize("module", [TRAJECTORIES, GATEWAY])
def test_no_test_of_a_row_is_without_one(module: str) -> None:
    named = {name.partition("::")[2] for names in ROWS.values() for name in names if name.startswith(module)}
    assert {name for name in functions(module) if name.startswith("test_")} == named


def test_all_rows_are_there() -> None:
    tables = (BUILDING_TRAJECTORIES, GATEWAYS, SCORES_TIMEOUTS, SCHEDULER_DURABILITY_INSPECTION)
    assert tuple(map(len, tables)) == (10, 6, 5, 12)
