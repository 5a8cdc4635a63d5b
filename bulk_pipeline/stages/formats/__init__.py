"""File formats: one module a format, from an open file to batches of rows."""
