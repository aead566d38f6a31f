"""gyre: event-sourced, elastic reinforcement learning for long-horizon agents."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gyre.events.consumer import consumer as consumer

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """`gyre.consumer`, without making every process of a run import what it needs."""
    if name == "consumer":
        from gyre.events.consumer import consumer

        return consumer
    raise AttributeError(f"module 'gyre' has no attribute {name!r}")
