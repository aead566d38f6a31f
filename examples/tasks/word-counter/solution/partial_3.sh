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
    parser.add_argument("--top", type=int)
    parser.add_argument("--ignore-case", action="store_true")
    parser.add_argument("files", nargs="+")
    args = parser.parse_args(argv)
    total, seen, failed = 0, Counter(), 0
    for name in args.files:
        text = open(name).read()
        if args.ignore_case:
            text = text.lower()
        seen.update(text.split())
        count = len(text.splitlines()) if args.lines else len(text.split())
        total += count
        if len(args.files) > 1 and not args.top:
            print(f"{count} {name}")
    if args.top:
        for word, count in sorted(seen.items(), key=lambda item: (-item[1], item[0]))[: args.top]:
            print(f"{count} {word}")
        return failed
    print(f"{total} total" if len(args.files) > 1 else total)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
EOF
