#!/bin/bash
set -e
cat > ini.py <<'EOF'
def parse(text):
    sections, current = {"": {}}, ""
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line[0] in "#;":
            continue
        if line[0] == "[":
            if line[-1] != "]" or not line[1:-1].strip():
                raise ValueError(f"line {number}: bad section")
            current = line[1:-1].strip()
            sections.setdefault(current, {})
            continue
        key, equals, value = line.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"line {number}: no key")
        sections[current][key.strip().lower()] = _value(value.strip())
    return sections


def _value(text):
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    if text.lower() in ("yes", "true", "on"):
        return True
    if text.lower() in ("no", "false", "off"):
        return False
    try:
        return int(text)
    except ValueError:
        return text
EOF
