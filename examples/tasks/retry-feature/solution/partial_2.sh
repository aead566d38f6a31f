#!/bin/bash
set -e
cat > calls.py <<'EOF'
"""Calls a function that may fail."""


class GaveUp(Exception):
    pass


def call(function, attempts=1, only=(Exception,)):
    for number in range(1, attempts + 1):
        try:
            return function()
        except only as error:
            if number == attempts:
                raise GaveUp(f"after {attempts} attempts: {error}") from error
EOF
