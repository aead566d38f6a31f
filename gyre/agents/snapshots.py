"""Shell. Content-addressed snapshots of workspaces, beside the log: workspace -> digest -> workspace.

Invariants: a snapshot is named by the digest of its manifest, which names every file by the digest of its content; a
digest that was returned can be restored as long as the store is there; the same content is kept once. What an agent
made is never followed and never run: links are kept as links, sockets, pipes and devices are left out. A name that is
not UTF-8 is kept in an escaped form.
Layout: `objects/<first two digits>/<digest>`, manifests among them.
"""

import hashlib
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path
from typing import Literal

import msgspec

from gyre.errors import EvaluationError

MAX_BYTES = 2 << 30
MAX_FILES = 100_000
_CHUNK = 1 << 20
_TICK_NS = 50_000_000
"""More than the kernel's clock of changes takes from one value to the next, 10 ms at most."""
_DRAFT = ".draft-"


class Entry(msgspec.Struct, frozen=True, array_like=True):
    path: str
    kind: Literal["file", "folder", "link"]
    is_executable: bool = False
    content: str = ""
    """Of a file the digest, of a link where it leads."""
    size: int = 0


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    digest: str
    num_files: int
    num_bytes: int
    new_bytes: int
    """What the store did not have yet."""


class Snapshots:
    """One store. Files that did not change since the last snapshot of the same workspace are not read again."""

    def __init__(self, folder: Path, *, max_bytes: int = MAX_BYTES, max_files: int = MAX_FILES) -> None:
        self._objects = folder / "objects"
        self._max_bytes, self._max_files = max_bytes, max_files
        self._known: dict[Path, dict[str, tuple[tuple[int, int, int], str]]] = {}
        """Workspace -> path -> (inode, size, time of change, which no program can set), digest."""

    def take(self, workspace: Path) -> Snapshot:
        """Raises EvaluationError for a workspace that is too large to be kept."""
        before, now = self._known.get(workspace, {}), dict[str, tuple[tuple[int, int, int], str]]()
        settled_ns = time.time_ns() - _TICK_NS
        entries, total, new_bytes = list[Entry](), 0, 0
        for path, name, info in _walk(workspace):
            if stat.S_ISLNK(info.st_mode):
                leads_to = os.fsencode(path.readlink()).decode("utf-8", "backslashreplace")
                entries.append(Entry(name, "link", content=leads_to))
            elif stat.S_ISDIR(info.st_mode):
                entries.append(Entry(name, "folder"))
            elif stat.S_ISREG(info.st_mode):
                total += info.st_size
                if total > self._max_bytes or len(entries) >= self._max_files:
                    raise EvaluationError(
                        f"snapshot: {workspace.name}: more than {self._max_bytes >> 20} MiB or {self._max_files} files"
                    )
                key = (info.st_ino, info.st_size, info.st_ctime_ns)
                try:
                    digest, size = (before[name][1], 0) if before.get(name, ((),))[0] == key else self._put_file(path)
                except FileNotFoundError:
                    continue  # a live workspace: it was there a moment ago
                if info.st_ctime_ns < settled_ns:  # else another change may have the same time
                    now[name] = (key, digest)
                new_bytes += size
                entries.append(Entry(name, "file", bool(info.st_mode & 0o100), digest, info.st_size))
        manifest = msgspec.json.encode(entries)
        digest = hashlib.sha256(manifest).hexdigest()
        self._known[workspace] = now
        return Snapshot(
            digest=digest,
            num_files=sum(entry.kind == "file" for entry in entries),
            num_bytes=total,
            new_bytes=new_bytes + self._put(digest, manifest),
        )

    def clear_drafts(self) -> None:
        """Of a process that was killed while it kept something; nobody else may be at it."""
        for path in self._objects.glob(f"{_DRAFT}*"):
            path.unlink(missing_ok=True)

    def forget(self, workspace: Path) -> None:
        """The workspace is gone; its snapshots stay."""
        self._known.pop(workspace, None)

    def entries(self, digest: str) -> tuple[Entry, ...]:
        """Raises EvaluationError when the store does not have it, or not whole."""
        return msgspec.json.decode(self.read(digest), type=tuple[Entry, ...])

    def read(self, digest: str) -> bytes:
        """Raises EvaluationError, as `entries` does."""
        try:
            content = self._path(digest).read_bytes()
        except OSError as error:
            raise EvaluationError(f"snapshot: {digest}: {error.strerror}: was its run directory cleared?") from None
        if hashlib.sha256(content).hexdigest() != digest:
            raise EvaluationError(f"snapshot: {digest}: its content was altered")
        return content

    def restore(self, digest: str, target: Path) -> None:
        """Into `target`, which is empty or not there. Raises EvaluationError."""
        target.mkdir(parents=True, exist_ok=True)
        links = []
        for entry in self.entries(digest):
            path = target / entry.path
            if entry.kind == "folder":
                path.mkdir(exist_ok=True)
            elif entry.kind == "link":
                links.append((path, entry.content))
            else:
                path.write_bytes(self.read(entry.content))
                path.chmod(0o755 if entry.is_executable else 0o644)
        for path, leads_to in links:  # last, so that nothing is written through one
            path.symlink_to(leads_to)

    def _put_file(self, path: Path) -> tuple[str, int]:
        """(digest, bytes that are new). What was read is what is kept, also while somebody writes."""
        try:
            source = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except PermissionError:
            path.chmod(0o600)
            source = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            start = os.read(source, _CHUNK)
            if chunk := os.read(source, _CHUNK):
                return self._put_large(path, source, start + chunk)
        finally:
            os.close(source)
        digest = hashlib.sha256(start).hexdigest()
        return digest, self._put(digest, start)

    def _put_large(self, path: Path, source: int, chunk: bytes) -> tuple[str, int]:
        """`chunk` is what was read of it. Through a file of its own: the digest is known only at the end."""
        draft = self._draft()
        total, size = hashlib.sha256(), 0
        try:
            with draft.open("wb") as out:
                while chunk:
                    total.update(chunk)
                    size += len(chunk)
                    if size > self._max_bytes:
                        raise EvaluationError(f"snapshot: {path.name}: more than {self._max_bytes >> 20} MiB")
                    out.write(chunk)
                    chunk = os.read(source, _CHUNK)
            digest = total.hexdigest()
            return digest, size if self._keep(draft, digest) else 0
        finally:
            draft.unlink(missing_ok=True)

    def _put(self, digest: str, content: bytes) -> int:
        if self._path(digest).exists():
            return 0
        draft = self._draft()
        try:
            draft.write_bytes(content)
            return len(content) if self._keep(draft, digest) else 0
        finally:
            draft.unlink(missing_ok=True)

    def _draft(self) -> Path:
        """A file of this caller alone: many threads may keep the same content at once."""
        self._objects.mkdir(parents=True, exist_ok=True)
        file, name = tempfile.mkstemp(dir=self._objects, prefix=_DRAFT)
        os.close(file)
        return Path(name)

    def _keep(self, draft: Path, digest: str) -> bool:
        path = self._path(digest)
        if path.exists():
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.rename(path)
        return True

    def _path(self, digest: str) -> Path:
        return self._objects / digest[:2] / digest


def clear(folder: Path) -> None:
    """Remove a workspace, if it is there, whatever modes an agent left."""

    def again(function: object, path: str, error: object) -> None:
        with_parent = Path(path)
        with_parent.parent.chmod(0o700)
        if not with_parent.is_symlink():
            with_parent.chmod(0o700)
        shutil.rmtree(path, ignore_errors=True) if with_parent.is_dir() else with_parent.unlink(missing_ok=True)

    if folder.exists():
        shutil.rmtree(folder, onerror=again)


def _walk(workspace: Path) -> list[tuple[Path, str, os.stat_result]]:
    """Everything below it, a folder before what it holds, in the order of names."""
    found = []
    waiting = [(workspace, "")]
    while waiting:
        folder, prefix = waiting.pop()
        try:
            children = sorted(os.scandir(folder), key=lambda child: child.name)
        except PermissionError:
            folder.chmod(0o700)
            children = sorted(os.scandir(folder), key=lambda child: child.name)
        except FileNotFoundError:
            continue  # a live workspace: it was there a moment ago
        below = []
        for child in children:
            try:
                info = child.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            found.append((Path(child.path), prefix + child.name, info))
            if stat.S_ISDIR(info.st_mode):
                below.append((Path(child.path), f"{prefix}{child.name}/"))
        waiting += reversed(below)
    return [(path, name.encode("utf-8", "backslashreplace").decode(), info) for path, name, info in found]
