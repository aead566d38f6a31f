"""From harness to events: dialects, renderer, lineage, gateway, sandbox, tasks."""
