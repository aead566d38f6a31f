"""What `gyre status` and `gyre cells` say, at prefixes of a whole run."""

import asyncio

import orjson
import pytest
from synthetic_run import written

from gyre.events.codec import Recorded
from gyre.events.types import (
    CellFenced,
    CellSwitched,
    DrainRequested,
    ExecutionStarted,
    GroupDispatched,
    MicrostepClaimed,
    MoveRefused,
    RunFinished,
    SwitchRequested,
)
from gyre.projections.status import NUM_SWITCHES, Status, cell_lines, status_lines


async def _recorded() -> list[Recorded]:
    log = await written()
    return [item async for item in log.read(1, until=await log.last_seq())]


RECORDED = asyncio.run(_recorded())


def at(kind: type, num: int = 1) -> Status:
    """The status right after the `num`-th event of a kind."""
    status = Status()
    for recorded in RECORDED:
        status.evolve(recorded)
        num -= isinstance(recorded.event, kind)
        if not num:
            return status
    raise AssertionError(f"{kind.__name__} is not there")


def test_roles_and_versions_follow_the_switches() -> None:
    serving = at(CellSwitched).figures()["cells"][0]
    assert (serving["cell"], serving["state"], serving["version"]) == ("c0", "SERVING", 0)
    commanded = at(SwitchRequested).figures()
    assert commanded["decision"]["state"] == "commanded" and commanded["decision"]["role"] == "train"
    assert at(CellFenced).figures()["cells"][0]["state"] == "FENCED"
    training = at(CellSwitched, 2).figures()
    assert training["cells"][0]["state"] == "TRAINING" and training["capacity"] == 0
    assert training["decision"] is None


def test_waterlevel_and_queues_follow_the_executions() -> None:
    first = at(GroupDispatched).figures()
    size = first["waterlevel"]
    assert size > 0 and first["queues"]["executions_waiting"] == size
    begun = at(ExecutionStarted).figures()["queues"]
    assert begun["executions_live"] == 1
    claimed = at(MicrostepClaimed).figures()
    assert (claimed["queues"]["microsteps_claimed"], claimed["queues"]["microsteps_accepted"]) == (1, 0)
    assert claimed["cells"][0]["microsteps_claimed"] == 1
    assert claimed["queues"]["microsteps"] >= 1


def test_the_last_switches_say_what_led_to_them() -> None:
    last = at(RunFinished).figures()["switches"]
    assert 0 < len(last) <= NUM_SWITCHES
    decided = next(item for item in last if item["policy"])
    assert decided["waterlevel"] is not None and decided["capacity"] is not None and decided["reason"]
    assert [item["seq"] for item in last] == sorted(item["seq"] for item in last)


def test_a_refused_move_is_shown_until_something_is_decided() -> None:
    refused = at(MoveRefused)
    assert refused.figures()["refused"]["cell"] == "c1"
    assert "refused: c1 to train" in "\n".join(status_lines(refused.figures()))
    assert at(SwitchRequested).figures()["refused"] is None


def test_a_drain_of_the_core_is_not_shown_as_one() -> None:
    assert at(DrainRequested).figures()["cells"][0]["drained"] is False


@pytest.mark.parametrize("kind", [GroupDispatched, SwitchRequested, MicrostepClaimed, RunFinished])
def test_every_prefix_can_be_printed_and_is_json(kind: type) -> None:
    figures = at(kind).figures()
    assert orjson.loads(orjson.dumps(figures)) == figures
    text = "\n".join(status_lines(figures))
    assert all(line in text for line in cell_lines(figures))
    assert f"w {figures['waterlevel']}, C_R {figures['capacity']}" in text


def test_before_the_first_event_there_is_nothing_to_show() -> None:
    figures = Status().figures()
    assert figures["state"] == "not started" and len(cell_lines(figures)) == 1
