"""Shell. How the memory of a cell's device changes hands: the engine has it, or the trainer, each from its own process.

Invariant: nobody takes it before the other has let go. Whoever has it holds a lock on one file of the cell, which the
kernel takes back from a process that ends, as it does the memory itself: after a crash, whenever it comes, both sides
can begin again. Each of the four calls can be made again and does nothing the second time.

Direction: the log says who may have it; the lock says that the other has it no more.

    to training:  engine releases, lets go -> `cell.engine_released`, `cell.switched` -> trainer takes, loads
    to rollout:   `cell.leased` -> trainer offloads, lets go -> engine takes, restores -> weights are pulled

What is given back depends on the device: `engine_host.py` for the engine, `offload.py` for the trainer.
Two things are outside of it. A process that starts takes what its start needs without asking, and is bound from its
first hand-over on. An engine that hangs when a switch to rollout is rolled back is not waited for.
"""

import asyncio
import fcntl
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol, Self

POLL_S = 0.02


class DeviceMemory(Protocol):
    """One side. Both calls can be repeated."""

    async def take(self) -> None:
        """Wait until the other side has let go, then have the memory again."""
        ...

    async def let_go(self) -> None:
        """Give the memory back, then let the other side know."""
        ...


class Tenancy:
    """The lock of one side; a context that lets go at its end. Processes of one host only, as the two sides are."""

    def __init__(self, run_dir: Path, cell: str) -> None:
        self._path = run_dir / "memory" / f"{cell}.lock"
        self._file: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def is_held(self) -> bool:
        return self._file is not None

    async def begin(self) -> None:
        while not self._try():  # noqa: ASYNC110 - the kernel tells nobody; blocked in a thread, it could not be given up
            await asyncio.sleep(POLL_S)

    def _try(self) -> bool:
        if self._file is not None:
            return True
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        self._file = file
        return True

    def end(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class Releasable(Protocol):
    """Of an engine: idle when it releases; failures are EngineErrors."""

    async def release(self) -> None: ...
    async def restore(self) -> None: ...


class EngineMemory:
    """The engine's side, in the process of its cell. A failure of the engine leaves the lock as it is."""

    def __init__(self, tenancy: Tenancy, engine: Releasable) -> None:
        self.tenancy, self._engine = tenancy, engine

    async def take(self) -> None:
        """Its weights are void until the next pull. Raises EngineError."""
        await self.tenancy.begin()
        await self._engine.restore()

    async def let_go(self) -> None:
        """Raises EngineError while a call is in flight."""
        await self._engine.release()
        self.tenancy.end()

    def forget(self) -> None:
        """The engine is gone, or hangs and is not waited for."""
        self.tenancy.end()


class Offloadable(Protocol):
    """`Trainer`."""

    def offload(self) -> None: ...
    def onload(self) -> None: ...


class TrainerMemory:
    """The trainer's side, in its own process; of several ranks, in the first one's, for all of them."""

    def __init__(
        self,
        tenancy: Tenancy,
        trainer: Offloadable,
        in_thread: Callable[[Callable[[], None]], Awaitable[None]],
        *,
        show: Callable[[], None] = lambda: None,
        hide: Callable[[], None] = lambda: None,
    ) -> None:
        """`show` makes what others read of the trainer's memory readable, `hide` ends that: addresses may change."""
        self.tenancy, self._trainer, self._in_thread = tenancy, trainer, in_thread
        self._show, self._hide = show, hide
        self.is_away = False

    async def take(self) -> None:
        await self.tenancy.begin()
        if self.is_away:
            await self._in_thread(self._come_back)
            self.is_away = False

    async def let_go(self) -> None:
        if not self.is_away:
            await self._in_thread(self._leave)
            self.is_away = True
        self.tenancy.end()

    def _come_back(self) -> None:
        self._trainer.onload()
        self._show()

    def _leave(self) -> None:
        self._hide()
        self._trainer.offload()
