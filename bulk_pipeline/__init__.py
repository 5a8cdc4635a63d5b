"""Bulk inference with exllamav2 as Dagster assets."""

from bulk_pipeline.component import BulkInferenceComponent, build_bulk_inference_defs
from bulk_pipeline.resources import ExLlamaV2Resource
from bulk_pipeline.spec import BulkInferenceSpec, load_spec
from bulk_pipeline.tables import scan_table

__all__ = [
    "BulkInferenceComponent",
    "BulkInferenceSpec",
    "ExLlamaV2Resource",
    "build_bulk_inference_defs",
    "load_spec",
    "scan_table",
]
