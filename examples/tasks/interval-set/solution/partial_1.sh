#!/bin/bash
set -e
cat > intervals.py <<'EOF'
class IntervalSet:
    """Half-open integer intervals, disjoint and in order."""

    def __init__(self, pairs=()):
        self._pairs = []
        for start, end in pairs:
            self.add(start, end)

    def add(self, start, end):
        if start >= end:
            raise ValueError(f"empty interval: {start}, {end}")
        kept = []
        for a, b in self._pairs:
            if b < start or a > end:
                kept.append((a, b))
            else:
                start, end = min(a, start), max(b, end)
        self._pairs = sorted([*kept, (start, end)])

    def __iter__(self):
        return iter(self._pairs)
EOF
