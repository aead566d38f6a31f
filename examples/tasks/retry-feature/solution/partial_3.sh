#!/bin/bash
set -e
cat > calls.py <<'EOF'
"""Calls a function that may fail."""


import time


class GaveUp(Exception):
    pass


def call(function, attempts=1, only=(Exception,), delay=0.0, sleep=time.sleep):
    for number in range(1, attempts + 1):
        try:
            return function()
        except only as error:
            if number == attempts:
                raise GaveUp(f"after {attempts} attempts: {error}") from error
            sleep(delay)
EOF
