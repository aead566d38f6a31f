"""From events to read models: trees, batches, tables, replay."""
