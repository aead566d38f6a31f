"""gyre: event-sourced, elastic reinforcement learning for long-horizon agents."""

__version__ = "0.1.0"
