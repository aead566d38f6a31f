#!/bin/bash
# The oracle.
set -e
cat > order.py <<'EOF'
"""The order in which things are built: each after what it needs."""


def build_order(needs):
    """`needs`: name -> names it needs. Ties are broken by name."""
    order, done, path = [], set(), []
    stack = [(name, False) for name in sorted(needs, reverse=True)]
    on_path = set()
    while stack:
        name, is_end = stack.pop()
        if is_end:
            path.pop()
            on_path.discard(name)
            done.add(name)
            order.append(name)
        elif name in on_path:
            raise ValueError("cycle: " + " -> ".join([*path[path.index(name):], name]))
        elif name not in done:
            path.append(name)
            on_path.add(name)
            stack.append((name, True))
            stack += [(each, False) for each in sorted(needs.get(name, ()), reverse=True)]
    return order
EOF
