#!/bin/bash
set -e
cat > calls.py <<'EOF'
"""Calls a function that may fail."""


class GaveUp(Exception):
    pass


def call(function, attempts=1):
    for number in range(1, attempts + 1):
        try:
            return function()
        except Exception:
            if number == attempts:
                raise
EOF
