"""Shell. What is said while work goes on: text -> whoever still reads it.

Invariant: work that is worth something by itself goes on when `head`, or whoever reads its output, has read enough.
"""

import os
import sys
from typing import IO


def tell(text: str, stream: IO[str] | None = None) -> None:
    """Print it, on standard output by default; once nobody reads that, nothing more."""
    stream = stream or sys.stdout
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        silence(stream)


def silence(stream: IO[str]) -> None:
    """From now on it takes everything, what it still holds too, and keeps nothing."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
