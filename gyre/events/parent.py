"""Shell. A process that ends with the one that started it, whatever ends that: a signal that the kernel sends."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
# Loaded before any fork: between fork and exec only the call itself may run.
_libc = ctypes.CDLL(None)


def die_with(parent: int, number: int = signal.SIGTERM) -> None:
    """Have the kernel send this process a signal when `parent` ends, which started it. Linux; elsewhere a no-op.

    Called by the process itself, or as what it does before exec: `partial(die_with, os.getpid())`. The kernel takes the
    end of the thread that forked for the parent's.
    """
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:  # it ended before the line above
            os._exit(1)
