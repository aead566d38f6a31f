#!/bin/bash
set -e
mkdir -p minitemplate
cat > minitemplate/engine.py <<'EOF'
import re

_WORD = re.compile(r"\{\{\s*([\w.]+)((?:\s*\|\s*\w+)*)\s*\}\}")
_FILTERS = {"upper": str.upper, "lower": str.lower, "title": str.title, "trim": str.strip}


class TemplateError(Exception):
    pass


class Template:
    def __init__(self, text):
        self.text = text

    def render(self, **values):
        text = self.text
        return _WORD.sub(lambda m: _fill(m, values), text)


def _look_up(name, values):
    found = values
    for part in name.split("."):
        try:
            found = found[part]
        except (KeyError, TypeError):
            raise TemplateError(f"unknown name: {name}") from None
    return found


def _fill(match, values):
    text = str(_look_up(match[1], values))
    return text


EOF
cat > minitemplate/__init__.py <<'EOF'
from minitemplate.engine import Template, TemplateError

__all__ = ["Template", "TemplateError"]
EOF
