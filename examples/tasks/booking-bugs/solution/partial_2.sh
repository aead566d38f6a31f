#!/bin/bash
set -e
cat > booking.py <<'EOF'
"""Bookings of one room: nights from `start` (included) to `end` (not included)."""

from datetime import date, timedelta


def nights(start, end):
    return (end - start).days


def overlaps(a, b):
    return a[0] < b[1] and b[0] < a[1]


def free(bookings, start, end):
    return not any(overlaps(each, (start, end)) for each in bookings)


def next_free(bookings, start, length):
    """The first day from `start` on which `length` nights are free."""
    day = start
    while not free(bookings, day, day + timedelta(length)):
        day += timedelta(7)
    return day


def parse(text):
    """`2026-01-31..2026-02-02`"""
    start, end = (date.fromisoformat(part) for part in text.split(".."))
    return start, end
EOF
