#!/bin/bash
# The oracle.
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

    def remove(self, start, end):
        kept = []
        for a, b in self._pairs:
            if a < min(b, start):
                kept.append((a, min(b, start)))
            if max(a, end) < b:
                kept.append((max(a, end), b))
        self._pairs = kept

    def __contains__(self, number):
        return any(a <= number < b for a, b in self._pairs)

    def __len__(self):
        return sum(b - a for a, b in self._pairs)

    def __iter__(self):
        return iter(self._pairs)

    def __and__(self, other):
        found = IntervalSet()
        for a, b in self:
            for c, d in other:
                if max(a, c) < min(b, d):
                    found.add(max(a, c), min(b, d))
        return found
EOF
