"""What Dagster loads: a dataset whose steps are Kubernetes jobs, one of which asks for a GPU."""

import os
from typing import Any

import dagster as dg
from dagster_k8s import k8s_job_executor

from bulk_pipeline import build_bulk_inference_defs

# Where the volume is mounted in every pod: source, tables and models (dagster.yaml).
ROOT = os.environ.get("BULK_ROOT", "/bulk")

GPU_STEP: dict[str, Any] = {
    "container_config": {
        "resources": {
            "requests": {"cpu": "4", "memory": "16Gi"},
            "limits": {"nvidia.com/gpu": "1", "memory": "32Gi"},
        },
    },
    "pod_spec_config": {
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        # A pod that is told to end has this long to write what it has finished.
        "termination_grace_period_seconds": 120,
    },
}
CPU_STEP: dict[str, Any] = {
    "container_config": {
        "resources": {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"memory": "4Gi"}},
    },
}

QUESTIONS: dict[str, Any] = {
    "name": "questions",
    "source": {"path": "source/questions"},
    "partitions": {"by": "file", "max_per_run": 1},  # a run a partition, so that they spread
    "prompt": {"column": "question"},
    "sampling": {"temperature": 0, "max_new_tokens": 256},
    "generator": {"model": "models/my-model"},
    "output": {"root": "tables"},
    "op_tags": {
        "raw_dataset": {"dagster-k8s/config": CPU_STEP},
        "prompts": {"dagster-k8s/config": CPU_STEP},
        "completions": {"dagster-k8s/config": GPU_STEP},
        "output": {"dagster-k8s/config": CPU_STEP},
    },
}


@dg.definitions
def defs() -> dg.Definitions:
    """The dataset, and the executor that makes each step a Kubernetes job."""
    return dg.Definitions.merge(
        build_bulk_inference_defs(QUESTIONS, ROOT),
        dg.Definitions(executor=k8s_job_executor),
    )
