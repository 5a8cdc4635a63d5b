"""``bulk-pipeline doctor``."""

import os
from typing import TYPE_CHECKING

import click
import dagster as dg

from bulk_pipeline.cli.datasets import find_dataset
from bulk_pipeline.cli.options import json_option, module_option
from bulk_pipeline.gpu_pool import pool_problem
from bulk_pipeline.spec import GeneratorSettings

if TYPE_CHECKING:
    from bulk_pipeline.engine.doctor import Report


@click.command()
@module_option
@click.option("--model", help="Model folder or hub id, in place of the dataset's.")
@json_option
@click.argument("dataset", required=False)
def doctor(module: str, model: str | None, as_json: bool, dataset: str | None) -> None:
    """Tell what fits here and what would stop a run.

    Of the GPU, the libraries and a dataset's model. No weights are loaded. The exit code is 1
    if a problem would stop a run.
    """
    found = find_dataset(module, dataset) if dataset else None
    settings, root = (found.settings, found.spec.output.root) if found else (None, None)
    if model is not None:
        values = settings.model_dump() if settings else {}
        settings = GeneratorSettings(**values | {"model": model, "revision": None})

    from bulk_pipeline.engine.doctor import examine
    from bulk_pipeline.stages.structured import check_structured

    report = examine(settings, root)
    if found is not None:
        try:
            check_structured(found.spec.sampling.structured_output)
        except ValueError as error:
            report.note(f"sampling.{error}", stops=True)
    _examine_pool(report, settings)
    click.echo(report.to_json() if as_json else report)
    if report.stops:
        raise click.exceptions.Exit(1)


def _examine_pool(report: "Report", settings: GeneratorSettings | None) -> None:
    """Compare the GPUs with the pool of Dagster's instance, where one is set."""
    if report.device != "cuda" or not os.environ.get("DAGSTER_HOME"):
        return
    num_gpus = len(report.machine.gpus)
    gpus_each = (settings.gpu_count or num_gpus) if settings else 1
    with dg.DagsterInstance.get() as instance:
        if problem := pool_problem(instance, num_gpus, gpus_each):
            report.note(problem)
