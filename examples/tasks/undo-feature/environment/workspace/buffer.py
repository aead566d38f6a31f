"""A text buffer with a cursor."""


class Buffer:
    def __init__(self, text=""):
        self.text = text
        self.cursor = len(text)

    def insert(self, text):
        self.text = self.text[: self.cursor] + text + self.text[self.cursor :]
        self.cursor += len(text)

    def delete(self, count=1):
        """Delete `count` characters before the cursor."""
        start = max(self.cursor - count, 0)
        self.text = self.text[:start] + self.text[self.cursor :]
        self.cursor = start

    def move(self, offset):
        self.cursor = min(max(self.cursor + offset, 0), len(self.text))
