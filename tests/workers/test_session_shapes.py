"""Recorded sessions as shapes, as events, and what the benchmark makes of them."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from gyre.errors import ConfigError
from gyre.projections import tree
from gyre.projections.tree import Tree
from gyre.workers.bench_tree import bench_tree
from gyre.workers.session_shapes import RECORDED, MadeUp, call_events, read_sessions

SESSION: list[dict[str, Any]] = [
    {"in": 100, "out": 10, "base": -1, "shared": 0},
    {"in": 130, "out": 7, "base": 0, "shared": 64},
    {"in": None, "out": None, "base": -1, "shared": 0},
    {"in": 300, "out": 5, "base": -1, "shared": 0, "parent": 1},
    {"in": 80, "out": 4, "base": 1, "shared": 64},
    {"in": 304, "out": 5, "base": 3, "shared": 256},
]


def written(path: Path, *lines: Any) -> Path:
    path.write_bytes(gzip.compress("".join(f"{json.dumps(line)}\n" for line in lines).encode()))
    return path


def test_a_request_that_shares_all_blocks_continues_and_any_other_forks(tmp_path: Path) -> None:
    (shapes,) = read_sessions(written(tmp_path / "s.gz", {"requests": SESSION}))
    assert [(s.base, s.shared, s.num_context, s.num_sampled) for s in shapes] == [
        (-1, 0, 100, 10),
        (0, 110, 20, 7),
        (-1, 0, 300, 5),
        (1, 64, 16, 4),
        (2, 305, 1, 5),
    ]
    assert [s.role_class for s in shapes] == ["main", "main", "sub-agent", "main", "sub-agent"]


def test_every_recorded_call_has_its_place() -> None:
    num_calls = 0
    for number, session in enumerate(read_sessions(RECORDED)):
        if number % 25:
            continue
        grown, made_up = Tree("s"), MadeUp(max(shape.end for shape in session))
        for triple in call_events(session, made_up):
            for event in triple:
                grown = tree.evolve(grown, event)
        assert {reason for _, reason, _ in tree.left_out(grown)} == {"context"}
        assert [call.end for call in grown.calls] == [shape.end for shape in session]
        num_calls += len(session)
    assert num_calls > 1_000


def test_a_file_of_another_form_is_named_with_its_line(tmp_path: Path) -> None:
    good = {"requests": SESSION}
    for line in ({"requests": [{"in": 1}]}, {"requests": [*SESSION, {"in": 9, "out": 1, "base": 17, "shared": 0}]}):
        with pytest.raises(ConfigError, match="line 2"):
            list(read_sessions(written(tmp_path / "s.gz", good, line)))
    with pytest.raises(ConfigError, match="nowhere"):
        list(read_sessions(tmp_path / "nowhere.gz"))
    (tmp_path / "plain").write_text("{}")
    with pytest.raises(ConfigError, match="plain"):
        list(read_sessions(tmp_path / "plain"))
    with pytest.raises(ConfigError, match="no session"):
        bench_tree(written(tmp_path / "s.gz"))


def test_the_figures_of_a_small_file(tmp_path: Path) -> None:
    found = bench_tree(written(tmp_path / "s.gz", {"requests": SESSION}))
    rows = 110 + 137 + 305 + 84 + 311
    added = 110 + 27 + 305 + 20 + 6
    assert (found["calls"].value, found["leaves"].value, found["tokens"].value) == (5, 3, added / 1e6)
    assert found["tokens_of_a_row_a_call"].value == pytest.approx(rows / added, rel=1e-3)
    assert found["tokens_of_a_row_a_leaf"].value == pytest.approx((137 + 84 + 311) / added, rel=1e-3)
    assert found["calls_a_second"].goal == "value >= 20000"
    assert found["memory"].reference == pytest.approx(4 * (rows + 31) / 1e9, rel=1e-3)
