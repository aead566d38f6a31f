"""Where events stand, and which names may stand there."""

from typing import get_args

import pytest

from gyre.errors import ConfigError
from gyre.events.subjects import (
    ALL_BUT_CALLS,
    aggregate_subjects,
    check_token,
    event_subject,
    is_own_subject,
    key_subject,
    run_subjects,
)
from gyre.events.types import Aggregate, CellLost
from tests.events.events import failed

LOST = CellLost(cell="c0", reason="r")


@pytest.mark.parametrize("name", ["a", "Z-9_", "x" * 64])
def test_a_name_is_returned_as_it_is(name: str) -> None:
    assert check_token(name, "run") == name


@pytest.mark.parametrize("name", ["", "x" * 65, "a.b", "*", ">", "a b", "a\n", "\u00e9"])
def test_what_a_subject_would_take_for_more_than_a_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="use 1 to 64 letters"):
        check_token(name, "run")
    with pytest.raises(ConfigError):
        run_subjects(name)
    with pytest.raises(ConfigError):
        aggregate_subjects(name, ALL_BUT_CALLS)


@pytest.mark.parametrize("run", ["r", "call", "execution"])
def test_an_event_has_one_subject_but_for_calls_of_older_logs(run: str) -> None:
    lost, call = event_subject(run, LOST), event_subject(run, failed(1))
    assert (lost, call) == (f"gyre.{run}.cell.c0", f"gyre.{run}.call.g0001-0")
    assert is_own_subject(run, lost, LOST) and is_own_subject(run, call, failed(1))
    assert is_own_subject(run, f"gyre.{run}.execution.g0001-0", failed(1))
    for other in (f"gyre.{run}.execution.c0", f"gyre.{run}.cell.c1", "gyre.other.cell.c0", call):
        assert not is_own_subject(run, other, LOST)
    assert not is_own_subject(run, lost, failed(1))


def test_a_run_is_steered_by_all_but_its_calls() -> None:
    assert {*ALL_BUT_CALLS} == {*get_args(Aggregate)} - {"call"}
    assert aggregate_subjects("r", ("run", "cell")) == ("gyre.r.run.*", "gyre.r.cell.*")
    assert run_subjects("r") == "gyre.r.>"
    assert key_subject("r", "alive.c1") == "$KV.gyre-r.alive.c1"
    with pytest.raises(ConfigError, match="key"):
        key_subject("r", "alive.")
