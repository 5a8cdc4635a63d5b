"""The command line: ``bulk-pipeline``."""

import importlib
import os
import sys
from collections.abc import Mapping, Sequence

import click
import dagster as dg
import polars as pl

from bulk_pipeline.automation import RANGE_TAGS, STATUS_TAG, SYNC_TAG, contiguous_ranges
from bulk_pipeline.gpu_pool import GPU_POOL, release_dead_runs
from bulk_pipeline.resources import ExLlamaV2Resource
from bulk_pipeline.spec import GeneratorSettings
from bulk_pipeline.store import COMPLETIONS, COMPLETIONS_SCHEMA, OUTPUT, ROW_FIELDS
from bulk_pipeline.tables import scan_table

CONSOLE = {"loggers": {"console": {"config": {"log_level": "INFO"}}}}
QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
SHOWN = ("status", "completion_tokens", "completion")

module_option = click.option(
    "-m",
    "--module",
    default="bulk_pipeline.definitions",
    show_default=True,
    help="Python module that holds the Dagster definitions.",
)


@click.group()
def main() -> None:
    """Put whole datasets of prompts through a language model."""


@main.group()
def partitions() -> None:
    """The partitions of the datasets."""


@partitions.command()
@module_option
@click.argument("datasets", nargs=-1)
def sync(module: str, datasets: Sequence[str]) -> None:
    """Register the sources' partitions with Dagster; of all datasets, or of those named."""
    _need_home("nothing would remember the partitions")
    jobs = _tagged_jobs(module, SYNC_TAG)
    _check_names(datasets, jobs, module)
    problems = []
    with dg.DagsterInstance.get() as instance:
        for run_id in release_dead_runs(instance):
            click.echo(f"run {run_id} is dead; its place in the pool {GPU_POOL} is free again")
        for name in datasets or sorted(jobs):
            try:
                result = jobs[name].execute_in_process(QUIET, instance)
            except ValueError as error:
                problems.append(f"{name}: {error}")
                continue
            new = result.output_for_node(f"{name}_find_partitions")
            click.echo(f"{name}: {len(new)} new partitions{': ' if new else ''}{', '.join(new)}")
    if problems:
        raise click.ClickException("\n".join(problems))


@partitions.command()
@module_option
@click.argument("datasets", nargs=-1)
def status(module: str, datasets: Sequence[str]) -> None:
    """Tell what is missing or stale, and why; of all datasets, or of those named."""
    jobs = _tagged_jobs(module, STATUS_TAG)
    _check_names(datasets, jobs, module)
    for name in datasets or sorted(jobs):
        try:
            result = jobs[name].execute_in_process(QUIET)
        except ValueError as error:
            raise click.ClickException(f"{name}: {error}") from None
        state = result.output_for_node(f"{name}_judge_partitions")
        reasons = state["reasons"]
        click.echo(f"{name}: {len(state['keys'])} partitions, {len(reasons)} missing or stale")
        for key, reason in reasons.items():
            click.echo(f"  {key}: {reason}")
        for key in state["removed"]:
            click.echo(f"  {key}: its source is gone, its results stay")


@main.command()
@module_option
@click.option("--partition", "keys", multiple=True, help="A partition; may be given again.")
@click.option("--redo", default="none", show_default=True, help="none, all, or statuses: a,b.")
@click.argument("dataset")
def run(module: str, keys: Sequence[str], redo: str, dataset: str) -> None:
    """Run a dataset's four assets in this process; over all its partitions, or those named.

    With --redo stored completions are made anew: all, or those of some statuses.
    """
    _need_home("nothing would remember the run")
    definitions = _load_definitions(module)
    jobs = _tagged_jobs(module, SYNC_TAG)
    _check_names([dataset], jobs, module)
    job = definitions.resolve_job_def(f"{dataset}_job")
    config = {f"{dataset}__{COMPLETIONS}": {"config": {"redo": redo}}}
    failed = []
    with dg.DagsterInstance.get() as instance:
        assert job.partitions_def is not None
        registered = list(job.partitions_def.get_partition_keys(dynamic_partitions_store=instance))
        missing = sorted(set(keys) - set(registered))
        if missing or not registered:
            raise click.ClickException(
                f"--partition: {dataset} has no {', '.join(missing) or 'partitions'}; there are "
                f"{', '.join(registered) or 'none: run partitions sync first'}"
            )
        for neighbours in contiguous_ranges(keys or registered, registered):
            ends = (neighbours[0], neighbours[-1])
            tags = dict(zip(RANGE_TAGS, ends, strict=True))
            result = job.execute_in_process(
                CONSOLE | {"ops": config}, instance, tags=tags, raise_on_error=False
            )
            if not result.success:
                failed.append("...".join(ends))
    if failed:
        raise click.ClickException(f"{dataset}: the run over {', '.join(failed)} failed; see above")


@main.command()
@module_option
@click.option("--rows", default=20, show_default=True, help="Most rows to show; 0 for all.")
@click.option("--columns", help="Columns to show, separated by commas.")
@click.argument("dataset")
def show(module: str, rows: int, columns: str | None, dataset: str) -> None:
    """Print a dataset's output table, and where it is."""
    roots = {
        key.path[0]: str(metadata["bulk_pipeline/root"])
        for key, metadata in _asset_metadata(_load_definitions(module)).items()
        if key.path[-1] == OUTPUT and "bulk_pipeline/root" in metadata
    }
    _check_names([dataset], roots, module)
    try:
        table = scan_table(roots[dataset], dataset).collect()
    except (FileNotFoundError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    ours = {field.name for field in (*ROW_FIELDS, *COMPLETIONS_SCHEMA)}
    names = (
        columns.split(",")
        if columns
        else [
            *(name for name in table.columns if name not in ours and name != "partition"),
            *SHOWN,
        ]
    )
    if missing := [name for name in names if name not in table.columns]:
        raise click.ClickException(
            f"--columns: no column {', '.join(missing)}; there are {', '.join(table.columns)}"
        )
    # A line a row: white space within a value is shown as one blank.
    shown = table.select(names).with_columns(pl.col(pl.String).str.replace_all(r"\s+", " "))
    with pl.Config(
        tbl_rows=-1,
        tbl_cols=-1,
        fmt_str_lengths=60,
        tbl_width_chars=200,
        tbl_hide_dataframe_shape=True,
        tbl_hide_column_data_types=True,
    ):
        click.echo(shown.head(rows) if rows else shown)
    counts = table.group_by("status").len().sort("len", "status", descending=[True, False])
    by_status = ", ".join(f"{count} {status}" for status, count in counts.iter_rows())
    click.echo(f"{table.height} rows ({by_status})")
    click.echo(f"{roots[dataset]}/{dataset}/{OUTPUT}")


@main.command()
@module_option
@click.option("--model", help="Model folder or hub id, in place of the dataset's.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.argument("dataset", required=False)
def doctor(module: str, model: str | None, as_json: bool, dataset: str | None) -> None:
    """Show the GPU, the libraries, the model of a dataset, what fits, and each problem.

    No weights are loaded. The exit code is 1 if a problem would stop a run.
    """
    settings, root = _dataset_settings(module, dataset) if dataset else (None, None)
    if model is not None:
        values = settings.model_dump() if settings else {}
        settings = GeneratorSettings(**values | {"model": model, "revision": None})

    from bulk_pipeline.engine.doctor import examine

    report = examine(settings, root)
    click.echo(report.to_json() if as_json else report)
    if report.stops:
        raise click.exceptions.Exit(1)


def _dataset_settings(module: str, dataset: str) -> tuple[GeneratorSettings, str]:
    """The model settings of a dataset, and the folder of its tables."""
    definitions = _load_definitions(module)
    assets = {
        asset.key.path[0]: asset
        for asset in definitions.resolve_asset_graph().assets_defs
        if asset.key.path[-1] == COMPLETIONS and "bulk_pipeline/root" in _metadata(asset)
    }
    _check_names([dataset], assets, module)
    asset = assets[dataset]
    resources = {
        key: (definitions.resources or {}).get(key) for key in asset.required_resource_keys
    }
    for resource in resources.values():
        if isinstance(resource, ExLlamaV2Resource):
            with resource.process_config_and_initialize_cm() as resolved:  # reads EnvVars
                values = {name: getattr(resolved, name) for name in GeneratorSettings.model_fields}
            return GeneratorSettings(**values), str(_metadata(asset)["bulk_pipeline/root"])
    raise click.ClickException(
        f"{dataset}: no ExLlamaV2Resource among its resources ({', '.join(sorted(resources))}); "
        "add one to the definitions under its generator_resource"
    )


def _metadata(asset: dg.AssetsDefinition) -> Mapping[str, object]:
    return asset.metadata_by_key[asset.key]


def _tagged_jobs(module: str, tag: str) -> dict[str, dg.JobDefinition]:
    """The jobs that carry a tag, by its value: the dataset's name."""
    jobs = _load_definitions(module).resolve_all_job_defs()
    return {job.tags[tag]: job for job in jobs if tag in job.tags}


def _need_home(without: str) -> None:
    if not os.environ.get("DAGSTER_HOME"):
        raise click.ClickException(
            f"DAGSTER_HOME is not set, so {without}; set it to the folder that holds dagster.yaml"
        )


def _load_definitions(module: str) -> dg.Definitions:
    sys.path.insert(0, os.getcwd())
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise click.ClickException(f"--module: cannot import {module}: {error}") from None
    found = getattr(loaded, "defs", None)
    try:
        definitions = found() if callable(found) else found
    except Exception as error:  # whatever a user's definitions raise
        raise click.ClickException(f"--module: {module}: {_root_cause(error)}") from None
    if not isinstance(definitions, dg.Definitions):
        raise click.ClickException(f"--module: {module} has no Definitions named defs; name one")
    return definitions


def _root_cause(error: BaseException) -> str:
    """The message at the bottom of a chain of exceptions, without Dagster's frames around it."""
    while cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        error = cause
    return str(error) or repr(error)


def _asset_metadata(definitions: dg.Definitions) -> dict[dg.AssetKey, dict]:
    graph = definitions.resolve_asset_graph()
    return {key: dict(graph.get(key).metadata) for key in graph.get_all_asset_keys()}


def _check_names(asked: Sequence[str], known: Mapping[str, object], module: str) -> None:
    if unknown := [name for name in asked if name not in known]:
        raise click.ClickException(
            f"no dataset {', '.join(unknown)} in {module}; there are {', '.join(sorted(known))}"
        )
