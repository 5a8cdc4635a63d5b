"""A Dagster project that uses bulk_pipeline as a plugin."""
