"""Processes that act: scheduler, cell, rollout engine, trainer, weights."""
