"""Requests in, completions out: no Dagster and no Parquet in here."""
