"""Figures, their goals, and the page that shows them."""

import msgspec
import pytest

from gyre.workers.bench import Machine, Result, decode_result, encode_result, figure, render_page

MACHINE = Machine(cores=2, memory_gb=16.0, cpu="Some CPU", os="Linux 6", python="3.11.7", versions={"torch": "2"})


def test_a_ratio_follows_from_value_and_reference() -> None:
    found = figure(1.0, "s", reference=8.0, max_ratio=0.1)
    assert (found.ratio, found.goal, found.holds) == (0.125, "ratio <= 0.1", False)
    assert figure(0.8, "s", reference=8.0, max_ratio=0.1).holds is True
    assert figure(3.0, "s", max_value=2.0).holds is False
    assert (figure(3.0, "1/s", min_value=2.0).goal, figure(3.0, "1/s", min_value=4.0).holds) == ("value >= 2", False)
    assert figure(3.0, "s").holds is None


def test_a_goal_without_a_reference_is_refused() -> None:
    with pytest.raises(ValueError, match="reference"):
        figure(1.0, "s", max_ratio=0.1)
    with pytest.raises(ValueError, match="reference"):
        figure(1.0, "s", reference=0.0, max_ratio=0.1)


def test_digits_that_are_noise_are_left_out() -> None:
    found = figure(1.23456789, "s", reference=3.0)
    assert (found.value, found.ratio) == (1.235, 0.4115)


def test_a_result_is_one_json_object_with_all_keys() -> None:
    result = Result(bench="loop", machine=MACHINE, figures={"a": figure(1.0, "s")})
    encoded = encode_result(result)
    assert b"\n" not in encoded
    assert decode_result(encoded) == result
    loose = msgspec.json.decode(encoded)
    assert set(loose) == {"bench", "machine", "figures"}
    assert set(loose["figures"]["a"]) == {"value", "unit", "reference", "ratio", "goal", "holds"}


def test_the_page_shows_every_figure_and_the_machine() -> None:
    figures = {"added": figure(1.0, "s", reference=8.0, max_ratio=0.1), "plain": figure(12345.6, "events")}
    page = render_page([Result(bench="loop", machine=MACHINE, figures=figures)], {"loop": "What it is."})
    assert "## loop\n\nWhat it is.\n" in page
    assert "| added | 1 | s | 8 | 0.125 | ratio <= 0.1 | **no** |" in page
    assert "| plain | 12350 | events |  |  |  |  |" in page
    assert "2 cores, 16 GB, Some CPU" in page
    assert page == render_page([Result(bench="loop", machine=MACHINE, figures=figures)], {"loop": "What it is."})
