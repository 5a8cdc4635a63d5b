"""What Dagster loads: a dataset whose partitions spread over a Ray cluster."""

from pathlib import Path

import dagster as dg
from dagster_ray import ray_executor

from bulk_pipeline import build_bulk_inference_defs

QUESTIONS = {
    "name": "questions",
    "source": {"path": "data/questions"},
    "partitions": {"by": "file", "max_per_run": 1},  # a run a partition, so that they spread
    "prompt": {"column": "question"},
    "sampling": {"temperature": 0, "max_new_tokens": 48},
    "generator": {"model": "data/models/smollm2-135m-instruct"},
    "op_tags": {"completions": {"dagster-ray/config": {"num_gpus": 1}}},
}
STEPS = {
    "num_cpus": 1,  # of every step; without it a step would run on the head node
    "env_vars": ["DAGSTER_HOME", "PYTHONPATH", "RAY_DASHBOARD"],
}


@dg.definitions
def defs() -> dg.Definitions:
    """The dataset, and the executor that makes each step a job on Ray."""
    return dg.Definitions.merge(
        build_bulk_inference_defs(QUESTIONS, Path(__file__).parent),
        dg.Definitions(executor=ray_executor.configured({"ray": STEPS})),
    )
