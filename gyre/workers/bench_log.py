"""Shell. `gyre bench log`: how fast the log takes events, hands them on, and becomes tables.

Each figure has a server of its own, started for it and ended with it, as the embedded one is; its name says how that
server syncs. What it is compared to runs on the same server, right before it: a C client that publishes bare bytes, and
a loop that fetches messages and writes rows. Both are in `benchmarks/`; where one cannot run, its figures stand
without a reference, and what is missing is said.

Direction: made-up run -> log -> seconds, memory -> figures.
"""

from collections.abc import Callable
from pathlib import Path

from gyre.workers.bench import Figure
from gyre.workers.bench_log_append import appends
from gyre.workers.bench_log_latency import latencies
from gyre.workers.bench_log_tables import Rebuild, into_tables

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NUM_EVENTS = 200_000


def bench_log(
    folder: Path, *, rebuild: Rebuild, num_events: int = NUM_EVENTS, say: Callable[[str], None]
) -> dict[str, Figure]:
    """In `folder`. num_events: of the log that becomes tables. Raises ProcessError."""
    return {
        **appends(folder, BENCHMARKS / "publish.c", say=say),
        **latencies(folder),
        **into_tables(folder, BENCHMARKS / "fetch_rows.py", rebuild=rebuild, num_events=num_events),
    }
