#!/bin/bash
set -e
cat > order.py <<'EOF'
"""The order in which things are built: each after what it needs."""


def build_order(needs):
    """`needs`: name -> names it needs. Ties are broken by name."""
    order, done = [], set()
    for name in sorted(needs):
        visit(name, needs, order, done, ())
    return order


def visit(name, needs, order, done, path):
    if name in done:
        return
    if name in path:
        raise ValueError("cycle: " + " -> ".join([*path[path.index(name):], name]))
    for each in sorted(needs.get(name, ())):
        visit(each, needs, order, done, (*path, name))
    done.add(name)
    order.append(name)
EOF
