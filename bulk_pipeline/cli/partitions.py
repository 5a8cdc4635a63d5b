"""``bulk-pipeline partitions``."""

from collections.abc import Sequence

import click
import dagster as dg

from bulk_pipeline.assets import open_store
from bulk_pipeline.automation import STATUS_TAG, SYNC_TAG, forget_partitions, listed
from bulk_pipeline.cli.datasets import check_names, find_specs, tagged_jobs
from bulk_pipeline.cli.loading import WrongUseError, load_definitions
from bulk_pipeline.cli.options import json_option, module_option, need_home, to_json
from bulk_pipeline.gpu_pool import GPU_POOL, release_dead_runs
from bulk_pipeline.storage.schemas import SLICES, TABLES
from bulk_pipeline.wording import counted

QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}


@click.group()
def partitions() -> None:
    """Register partitions, tell their state, and forget those whose source is gone."""


@partitions.command()
@module_option
@click.argument("datasets", nargs=-1)
def sync(module: str, datasets: Sequence[str]) -> None:
    """Register the sources' partitions with Dagster; of all datasets, or of those named."""
    need_home("nothing would remember the partitions")
    loaded = load_definitions(module)
    jobs = tagged_jobs(loaded.definitions, SYNC_TAG)
    check_names(datasets, jobs, loaded)
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
            count = counted(len(new), "new partition")
            click.echo(f"{name}: {count}{': ' if new else ''}{', '.join(new)}")
    if problems:
        raise click.ClickException("\n".join(problems))
    if loaded.bad and not datasets:
        raise click.exceptions.Exit(1)


@partitions.command("status")
@module_option
@json_option
@click.argument("datasets", nargs=-1)
def partitions_status(module: str, as_json: bool, datasets: Sequence[str]) -> None:
    """Tell what is missing or stale, and why; of all datasets, or of those named."""
    loaded, states = load_definitions(module), {}
    jobs = tagged_jobs(loaded.definitions, STATUS_TAG)
    check_names(datasets, jobs, loaded)
    for name in datasets or sorted(jobs):
        try:
            result = jobs[name].execute_in_process(QUIET)
        except ValueError as error:
            raise click.ClickException(f"{name}: {error}") from None
        state = states[name] = result.output_for_node(f"{name}_judge_partitions")
        if as_json:
            continue
        reasons = state["reasons"]
        click.echo(
            f"{name}: {counted(len(state['keys']), 'partition')}, {len(reasons)} missing or stale"
        )
        for key, reason in reasons.items():
            click.echo(f"  {key}: {reason}")
        for key in state["removed"]:
            click.echo(f"  {key}: its source is gone, its results stay")
    if as_json:
        click.echo(to_json(states))


@partitions.command()
@module_option
@click.argument("dataset")
@click.argument("keys", nargs=-1, required=True)
def forget(module: str, dataset: str, keys: Sequence[str]) -> None:
    """Drop partitions whose source is gone from those that Dagster knows.

    Their tables stay on disk, and are read as before. A file that comes back gets its key, and
    with it its tables, back at the next sync.
    """
    need_home("there are no partitions to forget")
    spec = find_specs(module, [dataset])[dataset]
    keys = list(dict.fromkeys(keys))
    with dg.DagsterInstance.get() as instance:
        try:
            forget_partitions(instance, spec, keys)
        except ValueError as error:
            raise WrongUseError(f"{dataset}: {error}") from None
    store = open_store(spec)
    click.echo(f"{dataset}: {counted(len(keys), 'partition')} forgotten: {listed(keys)}")
    stored = {table: store.partition_keys(table) for table in (*TABLES, SLICES)}
    for key in keys:
        if tables := [table for table in stored if key in stored[table]]:
            click.echo(f"  {key}: its tables stay: {store.path}/*/{key} ({', '.join(tables)})")
