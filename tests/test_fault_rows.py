"""Every known fault of comparable systems, of building trajectories and of gateways, has a test that carries its name.

The reports are public (repository#number). A row without its tests fails here; so does a test that no row names.
"""

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TRAJECTORIES, GATEWAY = "agents/test_fault_rows_trajectories.py", "agents/test_fault_rows_gateway.py"

ROWS: dict[str, tuple[str, ...]] = {
    # building trajectories
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
    # gateway
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


def named_tests(path: str) -> set[str]:
    tree = ast.parse((HERE / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize("row", ROWS)
def test_a_row_has_its_tests(row: str) -> None:
    assert ROWS[row]
    for name in ROWS[row]:
        path, _, function = name.partition("::")
        assert function in named_tests(path), f"{row}: {name} is gone: what it showed must be shown again"


@pytest.mark.parametrize("path", [TRAJECTORIES, GATEWAY])
def test_no_test_of_a_row_is_without_one(path: str) -> None:
    named = {name.partition("::")[2] for names in ROWS.values() for name in names if name.startswith(path)}
    assert named_tests(path) == named


def test_all_rows_are_there() -> None:
    """10 of building trajectories, 6 of gateways."""
    assert len(ROWS) == 16
