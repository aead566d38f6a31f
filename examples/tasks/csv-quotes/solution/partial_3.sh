#!/bin/bash
set -e
cat > rows.py <<'EOF'
"""Rows of CSV text."""


def parse(text):
    rows, row, field, quoted, at = [], [], "", False, 0
    text = text.replace("\r\n", "\n")
    while at < len(text):
        mark = text[at]
        at += 1
        if quoted:
            if mark != '"':
                field += mark
            else:
                quoted = False
        elif mark == '"' and not field:
            quoted = True
        elif mark == ",":
            row, field = [*row, field], ""
        elif mark == "\n":
            rows, row, field = [*rows, [*row, field]], [], ""
        else:
            field += mark
    return [*rows, [*row, field]] if row or field else rows


def dump(rows):
    return "".join(",".join(map(_field, row)) + "\n" for row in rows)


def _field(text):
    if any(mark in text for mark in ',"\n\r'):
        return '"' + text.replace('"', '""') + '"'
    return text
EOF
