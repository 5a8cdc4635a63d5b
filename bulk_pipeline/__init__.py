"""Bulk inference with exllamav2 as Dagster assets."""
