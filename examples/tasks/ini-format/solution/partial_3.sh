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


def dump(sections):
    lines = []
    for name, pairs in sections.items():
        if name:
            lines.append(f"[{name}]")
        for key, value in pairs.items():
            if isinstance(value, bool):
                value = "yes" if value else "no"
            elif isinstance(value, str) and False:
                value = f'"{value}"'
            lines.append(f"{key} = {value}")
    return "".join(f"{line}\n" for line in lines)
EOF
