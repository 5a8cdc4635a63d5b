"""What Dagster loads: a dataset with a sensor and a schedule, a run for each file."""

from pathlib import Path

import dagster as dg

from bulk_pipeline import build_bulk_inference_defs

TICKETS = {
    "name": "tickets",
    "source": {"path": "data/tickets"},
    "partitions": {"by": "file", "max_per_run": 1},
    "automation": {"cron": "0 2 * * *", "sensor_seconds": 60, "settle_seconds": 60},
    "prompt": {"template": "Sum up in one sentence: {{ text }}"},
    "sampling": {"temperature": 0, "max_new_tokens": 48},
    "generator": {"model": "data/models/smollm2-135m-instruct"},
}


@dg.definitions
def defs() -> dg.Definitions:
    """The dataset."""
    return build_bulk_inference_defs(TICKETS, Path(__file__).parent)
