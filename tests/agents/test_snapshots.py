"""A snapshot gives back what was there, whatever an agent left, and keeps the same content once."""

import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.agents import snapshots as snapshots_module
from gyre.agents.snapshots import Snapshots, clear
from gyre.errors import EvaluationError

NAMES = st.text("abc.é ", min_size=1, max_size=6).filter(lambda name: name.strip(". "))


def tree_of(folder: Path) -> dict[str, object]:
    return {
        str(path.relative_to(folder)): (
            ("link", os.readlink(path))  # noqa: PTH115
            if path.is_symlink()
            else ("file", path.read_bytes(), bool(path.stat().st_mode & 0o100))
            if path.is_file()
            else "folder"
        )
        for path in sorted(folder.rglob("*"))
    }


@settings(max_examples=50)
@given(st.dictionaries(st.tuples(NAMES, NAMES), st.binary(max_size=50), max_size=8))
def test_what_is_taken_can_be_restored(files: dict[tuple[str, str], bytes]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        workspace, target = Path(scratch, "w"), Path(scratch, "t")
        workspace.mkdir()
        for (folder, name), content in files.items():
            (workspace / folder).mkdir(exist_ok=True)
            (workspace / folder / name).write_bytes(content)
        snapshots = Snapshots(Path(scratch, "s"))
        taken = snapshots.take(workspace)
        snapshots.restore(taken.digest, target)
        assert tree_of(target) == tree_of(workspace)
        again = snapshots.take(target)
        assert (again.digest, again.new_bytes) == (taken.digest, 0)


def test_only_what_is_new_is_kept(tmp_path: Path) -> None:
    workspace = tmp_path / "w"
    workspace.mkdir()
    (workspace / "a").write_bytes(b"x" * 1000)
    snapshots = Snapshots(tmp_path / "s")
    first = snapshots.take(workspace)
    (workspace / "b").write_bytes(b"y" * 10)
    (workspace / "copy of a").write_bytes(b"x" * 1000)
    second = snapshots.take(workspace)
    assert first.new_bytes > 1000
    assert second.new_bytes < 600, "ten bytes and a manifest"
    assert second.num_bytes == 2010


@pytest.mark.parametrize("size", [0, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (3 << 20) + 7])
def test_files_of_any_size_come_back_and_are_kept_once(tmp_path: Path, size: int) -> None:
    workspace = tmp_path / "w"
    workspace.mkdir()
    for name in "ab":
        (workspace / name).write_bytes(os.urandom(1) * size)
    (workspace / "c").write_bytes((workspace / "a").read_bytes())
    snapshots = Snapshots(tmp_path / "s")
    taken = snapshots.take(workspace)
    snapshots.restore(taken.digest, tmp_path / "t")
    assert tree_of(tmp_path / "t") == tree_of(workspace)
    kept = sorted(path.stat().st_size for path in (tmp_path / "s").rglob("*") if path.is_file())
    contents = {path.read_bytes() for path in workspace.iterdir()}
    assert len(kept) == len(contents) + 1, "with the manifest, and no draft"


def test_a_file_that_keeps_its_time_of_change_is_seen_all_the_same(tmp_path: Path) -> None:
    workspace = tmp_path / "w"
    workspace.mkdir()
    file = workspace / "a"
    file.write_text("one")
    os.utime(file, (1, 1))
    snapshots = Snapshots(tmp_path / "s")
    first = snapshots.take(workspace)
    file.write_text("two")
    os.utime(file, (1, 1))
    assert snapshots.take(workspace).digest != first.digest


def test_a_change_at_the_same_time_of_the_kernel_s_clock_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which stands still for up to 10 ms: in these, a change of the same size shows no other time."""
    walk = snapshots_module._walk

    def coarse(folder: Path) -> Iterator[tuple[Path, str, object]]:
        for path, name, info in walk(folder):
            ctime_ns = info.st_ctime_ns // 10_000_000 * 10_000_000
            kept = {"st_mode": info.st_mode, "st_ino": info.st_ino, "st_size": info.st_size}
            yield path, name, SimpleNamespace(**kept, st_ctime_ns=ctime_ns)

    monkeypatch.setattr(snapshots_module, "_walk", coarse)
    workspace = tmp_path / "w"
    workspace.mkdir()
    file, snapshots, digests = workspace / "a", Snapshots(tmp_path / "s"), list[str]()
    for number in range(100):
        file.write_text(f"{number:04}")
        digests.append(snapshots.take(workspace).digest)
    assert len(set(digests)) == 100


def test_what_did_not_change_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace, read = tmp_path / "w", list[str]()
    workspace.mkdir()
    (workspace / "old").write_text("old")
    snapshots = Snapshots(tmp_path / "s")
    put_file = Snapshots._put_file

    def spied(self: Snapshots, path: Path) -> tuple[str, int]:
        read.append(path.name)
        return put_file(self, path)

    monkeypatch.setattr(Snapshots, "_put_file", spied)
    time.sleep(0.2)
    snapshots.take(workspace)
    (workspace / "new").write_text("new")
    snapshots.take(workspace)
    assert read == ["old", "new"]


def test_many_may_keep_the_same_content_at_once(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path / "s")
    workspaces = [tmp_path / str(n) for n in range(16)]
    for workspace in workspaces:
        workspace.mkdir()
        (workspace / "a").write_text("the same")
    with ThreadPoolExecutor(16) as pool:
        taken = list(pool.map(snapshots.take, workspaces))
    assert len({one.digest for one in taken}) == 1
    assert [path.name for path in (tmp_path / "s/objects").iterdir() if path.name.startswith(".")] == []


def test_links_are_kept_as_links_and_nothing_is_written_through_them(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("no")
    workspace = tmp_path / "w"
    workspace.mkdir()
    (workspace / "out").symlink_to(outside)
    (workspace / "gone").symlink_to("/nowhere")
    snapshots = Snapshots(tmp_path / "s")
    taken = snapshots.take(workspace)
    assert [(entry.path, entry.kind) for entry in snapshots.entries(taken.digest)] == [
        ("gone", "link"),
        ("out", "link"),
    ]
    snapshots.restore(taken.digest, tmp_path / "t")
    assert (tmp_path / "t/out").is_symlink()


def test_pipes_modes_and_names_that_an_agent_leaves(tmp_path: Path) -> None:
    workspace = tmp_path / "w"
    (workspace / "shut").mkdir(parents=True)
    (workspace / "shut/a").write_text("a")
    (workspace / "shut/a").chmod(0)
    (workspace / "shut").chmod(0)
    os.mkfifo(workspace / "pipe")
    (Path(os.fsdecode(os.fsencode(workspace) + b"/\xff"))).write_text("odd")
    snapshots = Snapshots(tmp_path / "s")
    taken = snapshots.take(workspace)
    assert taken.num_files == 2
    snapshots.restore(taken.digest, tmp_path / "t")
    assert (tmp_path / "t/shut/a").read_text() == "a"
    clear(workspace)
    assert not workspace.exists()


def test_a_workspace_that_is_too_large_is_refused(tmp_path: Path) -> None:
    workspace = tmp_path / "w"
    workspace.mkdir()
    with (workspace / "hole").open("wb") as file:
        file.truncate(2 << 30)
    with pytest.raises(EvaluationError, match="more than 1 MiB"):
        Snapshots(tmp_path / "s", max_bytes=1 << 20).take(workspace)
    with pytest.raises(EvaluationError, match="0 files"):
        Snapshots(tmp_path / "s", max_files=0).take(workspace)


def test_a_store_that_was_altered_or_cleared_says_so(tmp_path: Path) -> None:
    workspace = tmp_path / "w"
    workspace.mkdir()
    (workspace / "a").write_text("one")
    snapshots = Snapshots(tmp_path / "s")
    taken = snapshots.take(workspace)
    content = snapshots.entries(taken.digest)[0].content
    path = tmp_path / "s/objects" / content[:2] / content
    path.write_text("two")
    with pytest.raises(EvaluationError, match="altered"):
        snapshots.restore(taken.digest, tmp_path / "t")
    path.unlink()
    with pytest.raises(EvaluationError, match="cleared"):
        snapshots.restore(taken.digest, tmp_path / "u")
