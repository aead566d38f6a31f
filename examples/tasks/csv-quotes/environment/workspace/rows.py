"""Rows of CSV text."""


def parse(text):
    return [line.split(",") for line in text.split("\n")]


def dump(rows):
    return "\n".join(",".join(row) for row in rows)
