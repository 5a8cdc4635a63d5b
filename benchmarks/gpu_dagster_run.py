"""The sample dataset through Dagster on a GPU: both partitions, one run, one model load.

    python benchmarks/gpu_dagster_run.py MODEL_FOLDER

Prints the materialisations' numbers, the checks, and a few answers.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import dagster as dg
import polars as pl

from bulk_pipeline import build_bulk_inference_defs, scan_table

ROOT = Path(__file__).parent.parent
TABLES = ("raw_dataset", "prompts", "completions", "output")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        spec = {
            "name": "demo",
            "source": {"path": "data/demo"},
            "partitions": {"by": "file"},
            "prompt": {
                "column": "question",
                "system": "You are a helpful assistant. Answer briefly.",
            },
            "sampling": {"temperature": 0, "max_new_tokens": 64},
            "generator": {"model": sys.argv[1], "max_batch_size": 64},
            "output": {"root": folder},
        }
        defs = build_bulk_inference_defs(spec, ROOT)
        with dg.DagsterInstance.ephemeral() as instance:
            defs.resolve_job_def("demo_sync_partitions").execute_in_process(
                {"loggers": {"console": {"config": {"log_level": "ERROR"}}}}, instance
            )
            started = time.monotonic()
            result = dg.materialize(
                list(defs.assets or []),
                instance=instance,
                resources=defs.resources,
                run_config={"loggers": {"console": {"config": {"log_level": "INFO"}}}},
                tags={
                    "dagster/asset_partition_range_start": "everyday",
                    "dagster/asset_partition_range_end": "knowledge_and_code",
                },
            )
            print(f"success {result.success} in {time.monotonic() - started:.1f} s")
            for table in TABLES:
                for event in result.asset_materializations_for_node(f"demo__{table}"):
                    numbers = {
                        name: round(value.value, 2)
                        for name, value in event.metadata.items()
                        if isinstance(value.value, int | float)
                    }
                    print(table, event.partition, json.dumps(numbers))
            for check in result.get_asset_check_evaluations():
                print("check", check.check_name, check.passed)
        table = scan_table(folder, "demo").collect()
        produced = scan_table(folder, "demo", "completions").select("produced_by").collect()
        print(table.height, dict(table.group_by("status").len().iter_rows()))
        print(produced["produced_by"].drop_nulls().unique().to_list())
        english = table.filter((pl.col("language") == "en") & (pl.col("status") == "stop"))
        for row in english.head(8).iter_rows(named=True):
            print("Q:", row["question"][:100].replace("\n", " "))
            print("A:", row["completion"][:200].replace("\n", " "))


if __name__ == "__main__":
    main()
