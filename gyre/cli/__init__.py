"""Shell. The command line, and the only place that wires processes together.

Every command is thin: it finds the run, builds what a shell module needs of another folder, and calls it. Imports are
inside the commands, so that `gyre --help` and the small processes start fast.
"""

from gyre.cli import running  # first: `gyre --help` lists commands in the order of their modules

# isort: split
from gyre.cli import asking, batches, cells, grading, harnesses, hosts, keeping, making, processes, serving, tasking
from gyre.cli.apps import app, main

__all__ = [
    "app",
    "asking",
    "batches",
    "cells",
    "grading",
    "harnesses",
    "hosts",
    "keeping",
    "main",
    "making",
    "processes",
    "running",
    "serving",
    "tasking",
]
