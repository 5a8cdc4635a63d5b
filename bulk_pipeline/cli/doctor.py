"""``bulk-pipeline doctor``."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click
import dagster as dg

from bulk_pipeline.cli.datasets import Dataset, find_dataset, find_datasets
from bulk_pipeline.cli.options import (
    OWN_MODULE,
    json_option,
    module_option,
    project_module,
    to_json,
)
from bulk_pipeline.gpu_pool import pool_problem
from bulk_pipeline.spec import GeneratorSettings

if TYPE_CHECKING:
    from bulk_pipeline.engine.doctor import Machine, Report


@click.command()
@module_option
@click.option("--model", help="Model folder or hub id, in place of the dataset's.")
@json_option
@click.argument("dataset", required=False)
def doctor(module: str, model: str | None, as_json: bool, dataset: str | None) -> None:
    """Tell what fits here and what would stop a run.

    Of the GPU, the libraries and a dataset's model; without one, of all datasets' models, or in
    no Dagster project of the machine alone. No weights are loaded. The exit code is 1 if a
    problem would stop a run.
    """
    from bulk_pipeline.engine.doctor import examine_machine

    is_project = module != OWN_MODULE or project_module() == OWN_MODULE
    if dataset is None and model is None and is_project:
        datasets, bad = find_datasets(module)
        if datasets:
            _tell_of_all(datasets, bad, as_json)
            return
        if bad:
            raise click.ClickException("\n".join(bad.values()))
    found = [find_dataset(module, dataset)] if dataset else []
    settings = found[0].settings if found else None
    if model is not None:
        values = settings.model_dump() if settings else {}
        settings = GeneratorSettings(**values | {"model": model, "revision": None})
    report = _examine(found, examine_machine(), settings)
    click.echo(report.to_json() if as_json else report)
    if report.stops:
        raise click.exceptions.Exit(1)


def _tell_of_all(datasets: dict[str, Dataset], bad: dict[str, str], as_json: bool) -> None:
    """The machine once, each model once, and what is wrong with datasets that are left out."""
    from bulk_pipeline.engine.doctor import examine_machine

    machine = examine_machine()
    reports = [
        (names, _examine([datasets[name] for name in names], machine))
        for names in _by_model(datasets)
    ]
    if as_json:
        found = [{"datasets": names} | json.loads(report.to_json()) for names, report in reports]
        click.echo(to_json({"reports": found, "bad": bad}))
    else:
        shown = ""
        for names, report in reports:
            if report.machine_text != shown:
                shown = report.machine_text
                click.echo(shown)
            click.echo(f"dataset {', '.join(names)}\n{report.model_text}")
    if bad:
        raise click.ClickException("\n".join(bad.values()))
    if any(report.stops for _, report in reports):
        raise click.exceptions.Exit(1)


def _by_model(datasets: Mapping[str, Dataset]) -> list[list[str]]:
    """The names of the datasets that have the same model, settings and place of tables."""
    names: dict[str, list[str]] = {}
    for name, each in datasets.items():
        model = f"{each.settings.model_dump_json()} {each.spec.output.root}"
        names.setdefault(model, []).append(name)
    return list(names.values())


def _examine(
    datasets: Sequence[Dataset], machine: "Machine", settings: GeneratorSettings | None = None
) -> "Report":
    """Look at the machine, at a model and at datasets that it answers, with tables in one place.

    Parameters
    ----------
    settings
        The model, in place of the datasets' own.
    """
    from bulk_pipeline.engine.doctor import examine
    from bulk_pipeline.stages.structured import check_structured

    root = datasets[0].spec.output.root if datasets else None
    settings = settings or (datasets[0].settings if datasets else None)
    report = examine(settings, root, machine)
    for each in datasets:
        try:
            check_structured(each.spec.sampling.structured_output)
        except ValueError as error:
            report.note(f"{each.spec.name}: sampling.{error}", stops=True)
    _examine_pool(report, settings)
    return report


def _examine_pool(report: "Report", settings: GeneratorSettings | None) -> None:
    """Compare the GPUs with the pool of Dagster's instance, where one is set."""
    if report.device != "cuda" or not os.environ.get("DAGSTER_HOME"):
        return
    num_gpus = len(report.machine.gpus)
    gpus_each = (settings.gpu_count or num_gpus) if settings else 1
    with dg.DagsterInstance.get() as instance:
        if problem := pool_problem(instance, num_gpus, gpus_each):
            report.note(problem)
