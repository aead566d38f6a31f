"""The language of gyre and its log: event types, codec, streams, readers and writers."""
