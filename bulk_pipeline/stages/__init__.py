"""The work of each asset, without Dagster: plain functions over the store."""
