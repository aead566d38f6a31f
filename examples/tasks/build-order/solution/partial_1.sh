#!/bin/bash
set -e
cat > order.py <<'EOF'
"""The order in which things are built: each after what it needs."""


def build_order(needs):
    """`needs`: name -> names it needs. Ties are broken by name."""
    order = []
    for name in needs:
        visit(name, needs, order)
    return order


def visit(name, needs, order):
    if name in order:
        return
    for each in needs[name]:
        visit(each, needs, order)
    order.append(name)
EOF
