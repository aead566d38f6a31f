#!/bin/bash
set -e
cat > buffer.py <<'EOF'
"""A text buffer with a cursor."""


class Buffer:
    def __init__(self, text=""):
        self.text = text
        self.cursor = len(text)
        self._past = []
        self._future = []

    def _note(self):
        self._past.append((self.text, self.cursor))
        self._future.clear()

    def undo(self):
        if not self._past:
            return False
        self._future.append((self.text, self.cursor))
        self.text, self.cursor = self._past.pop()
        return True

    def redo(self):
        if not self._future:
            return False
        self._past.append((self.text, self.cursor))
        self.text, self.cursor = self._future.pop()
        return True

    def insert(self, text):
        if not text:
            return
        self._note()
        self.text = self.text[: self.cursor] + text + self.text[self.cursor :]
        self.cursor += len(text)

    def delete(self, count=1):
        """Delete `count` characters before the cursor."""
        start = max(self.cursor - count, 0)
        if start == self.cursor:
            return
        self._note()
        self.text = self.text[:start] + self.text[self.cursor :]
        self.cursor = start

    def move(self, offset):
        self.cursor = min(max(self.cursor + offset, 0), len(self.text))
EOF
