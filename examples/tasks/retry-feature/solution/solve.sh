#!/bin/bash
# The oracle.
set -e
cat > calls.py <<'EOF'
"""Calls a function that may fail."""


import time


class GaveUp(Exception):
    pass


def call(function, attempts=1, only=(Exception,), delay=0.0, factor=2.0, max_delay=60.0, sleep=time.sleep):
    if attempts < 1:
        raise ValueError(f"attempts: {attempts}: at least 1")
    for number in range(1, attempts + 1):
        try:
            return function()
        except only as error:
            if number == attempts:
                raise GaveUp(f"after {attempts} attempts: {error}") from error
            sleep(min(delay * factor ** (number - 1), max_delay))
EOF
