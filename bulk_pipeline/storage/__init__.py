"""Partitioned tables on a disk or an object storage: what is committed is whole, and stays."""
