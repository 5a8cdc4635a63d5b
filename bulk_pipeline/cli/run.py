"""``bulk-pipeline run`` and ``bulk-pipeline status``."""

import json
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import click
import dagster as dg
import yaml

from bulk_pipeline.assets import asset_keys, open_store, redo_names
from bulk_pipeline.automation import RANGE_TAGS, contiguous_ranges, listed, sync_partitions
from bulk_pipeline.cli.datasets import check_names, find_specs, specs_in
from bulk_pipeline.cli.loading import WrongUseError, load_definitions
from bulk_pipeline.cli.options import (
    json_option,
    module_option,
    need_home,
    partition_option,
    to_json,
)
from bulk_pipeline.gpu_pool import telling_of_a_wait
from bulk_pipeline.progress_view import progress_bar
from bulk_pipeline.spec import BulkInferenceSpec, SamplingSpec, change_sampling
from bulk_pipeline.status import RUNNING, STOPPED, read_status, set_aside_text, to_text
from bulk_pipeline.storage.schemas import COMPLETIONS, OUTPUT, PROMPTS, RAW_DATASET, TABLES
from bulk_pipeline.wording import counted

CONSOLE: dict[str, Any] = {"loggers": {"console": {"config": {"log_level": "INFO"}}}}
WARNINGS: dict[str, Any] = {"loggers": {"console": {"config": {"log_level": "WARNING"}}}}
MANY_TOKENS = 1 << 31  # more than any min_new_tokens


@click.command()
@module_option
@partition_option
@click.option("--redo", default="none", show_default=True, help="none, all, or statuses: a,b.")
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="sampling.NAME=VALUE",
    help="Change the sampling of these partitions until it is reset; may be given again.",
)
@click.option(
    "--reset-sampling", is_flag=True, help="Put the sampling back to that of the settings."
)
@click.option(
    "--until",
    type=click.Choice(TABLES),
    default=OUTPUT,
    show_default=True,
    help="The last asset to run; prompts needs no model, and plan can then count.",
)
@json_option
@click.argument("dataset")
def run(
    module: str,
    keys: Sequence[str],
    redo: str,
    changes: Sequence[str],
    reset_sampling: bool,
    until: str,
    as_json: bool,
    dataset: str,
) -> None:
    """Run a dataset in this process.

    Its four assets over all its partitions, those that are new in the source too, or over those
    named; a partition whose source is gone is left out. With --redo stored completions are made
    anew: all, or those of some statuses. With --set the partitions' sampling differs from the
    settings, in every later run too, until --reset-sampling brings the answers of before back. On
    a terminal a bar shows how far it is; elsewhere lines do. The exit code is 1 if a partition
    failed.
    """
    _check_redo(redo)
    if redo != "none" and until not in (COMPLETIONS, OUTPUT):
        raise WrongUseError(f"--redo needs completions, and --until {until} ends before; drop one")
    if (changes or reset_sampling) and until == RAW_DATASET:
        raise WrongUseError(
            f"sampling is changed in the prompts, and --until {until} ends before; drop one"
        )
    sampling = _sampling_changes(changes)
    need_home("nothing would remember the run")
    loaded = load_definitions(module)
    specs = specs_in(loaded.definitions)
    check_names([dataset], specs, loaded)
    job = loaded.definitions.resolve_job_def(f"{dataset}_job")
    tables = TABLES[: TABLES.index(until) + 1]
    assets = asset_keys(specs[dataset], tables)
    is_shown = sys.stderr.isatty()
    config = dict(WARNINGS if is_shown else CONSOLE)
    wanted = {
        PROMPTS: {"sampling": sampling, "reset_sampling": reset_sampling},
        COMPLETIONS: {"redo": redo},
    }
    config["ops"] = {
        f"{dataset}__{table}": {"config": wanted[table]} for table in tables if table in wanted
    }
    with dg.DagsterInstance.get() as instance, ExitStack() as stack:
        gone = [] if keys else _sync(instance, specs[dataset])
        order = _registered_partitions(job, instance, dataset, keys)
        chosen = keys or [key for key in order if key not in gone]
        if is_shown:
            stack.enter_context(progress_bar(dataset))
        failed, reasons = [], []
        for neighbours in contiguous_ranges(chosen, order):
            ends = (neighbours[0], neighbours[-1])
            tags = dict(zip(RANGE_TAGS, ends, strict=True))
            run_id = str(uuid.uuid4())
            with telling_of_a_wait(instance, run_id, partial(click.echo, err=True)):
                result = job.execute_in_process(
                    config, instance, tags=tags, raise_on_error=False, asset_selection=assets,
                    run_id=run_id,
                )  # fmt: skip
            if not result.success:
                failed.append("...".join(dict.fromkeys(ends)))
                reasons += [reason for reason in _reasons(result) if reason not in reasons]
    statuses = [
        # what failed here has this process as its writer, which still lives
        replace(each, state=STOPPED) if failed and each.state == RUNNING else each
        for each in read_status(open_store(specs[dataset]), specs[dataset].sampling, until)
        if each.partition in chosen
    ]
    if as_json:
        found = [each.to_json() for each in statuses]
        click.echo(to_json({"failed": failed, "reasons": reasons, "partitions": found}))
    else:
        click.echo(to_text(dataset, statuses, until))
    if failed:
        why = f": {'; '.join(reasons)}" if reasons else "; see above"
        raise click.ClickException(f"{dataset}: the run over {', '.join(failed)} failed{why}")


def _reasons(result: dg.ExecuteInProcessResult) -> list[str]:
    """The message of each failed step, as it was raised."""
    found = []
    for event in result.filter_events(lambda event: event.is_step_failure):
        error = event.step_failure_data.error
        while error is not None and error.cause is not None:
            error = error.cause
        if error is not None:
            name, _, text = error.message.strip().partition(": ")
            is_class = name.rpartition(".")[2] == error.cls_name
            found.append(text if is_class else error.message.strip())
    return found


def _sampling_changes(changes: Sequence[str]) -> dict[str, Any]:
    """The values of --set by name; they go with some settings, if not with every partition's."""
    values = {}
    for change in changes:
        name, has_value, text = change.partition("=")
        if not has_value or not name.startswith("sampling."):
            raise WrongUseError(f"--set must be sampling.NAME=VALUE, got {change!r}")
        try:
            values[name.removeprefix("sampling.")] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise WrongUseError(f"--set: {change!r}: the value is not YAML; quote it") from None
    try:
        sampling = change_sampling(SamplingSpec(max_new_tokens=MANY_TOKENS), values)
    except ValueError as error:
        raise WrongUseError(f"--set: {error}") from None
    return sampling.model_dump(include=set(values))


def _check_redo(redo: str) -> None:
    from bulk_pipeline.stages.stored import check_redo

    try:
        check_redo(redo_names(redo))
    except ValueError as error:
        raise WrongUseError(f"--{error}") from None


def _sync(instance: dg.DagsterInstance, spec: BulkInferenceSpec) -> list[str]:
    """Register what is new in the source; return what is gone from it, and tell both."""
    if spec.partitions.by == "none":
        return []
    try:
        new, gone = sync_partitions(instance, spec)
    except ValueError as error:
        raise click.ClickException(f"{spec.name}: {error}") from None
    if new:
        click.echo(f"{spec.name}: {counted(len(new), 'new partition')}: {listed(new)}", err=True)
    if gone:
        click.echo(
            f"{spec.name}: {counted(len(gone), 'partition')} left out, source gone, results stay: "
            f"{listed(gone)}; bulk-pipeline partitions forget {spec.name} KEY... drops them",
            err=True,
        )
    return gone


def _registered_partitions(
    job: dg.JobDefinition, instance: dg.DagsterInstance, dataset: str, keys: Sequence[str]
) -> list[str]:
    """The partitions that Dagster knows, in its order; those of `keys` must be among them."""
    assert job.partitions_def is not None
    registered = list(job.partitions_def.get_partition_keys(dynamic_partitions_store=instance))
    if not registered:
        raise WrongUseError(
            f"{dataset} has no partitions yet; run bulk-pipeline partitions sync {dataset} first"
        )
    if missing := sorted(set(keys) - set(registered)):
        raise WrongUseError(
            f"--partition: {dataset} has no {', '.join(missing)}; there are {', '.join(registered)}"
        )
    return registered


@click.command()
@module_option
@click.option("--follow", is_flag=True, help="Go on until nothing runs any more.")
@click.option(
    "--seconds",
    default=2.0,
    show_default=True,
    type=click.FloatRange(min=0.1),
    help="Seconds between two looks of --follow.",
)
@json_option
@click.argument("datasets", nargs=-1)
def status(
    module: str, follow: bool, seconds: float, as_json: bool, datasets: Sequence[str]
) -> None:
    """Tell how far the partitions are.

    Also those that another process is running; of all datasets, or of those named. Read from
    the tables' folder alone: Dagster is not asked, and the run is not slowed. With --follow
    --json each look is a line.
    """
    specs = find_specs(module, datasets)
    stores = {name: open_store(specs[name]) for name in datasets or specs}
    while True:
        found = {name: read_status(store, specs[name].sampling) for name, store in stores.items()}
        if as_json:
            value = {name: [each.to_json() for each in found[name]] for name in found}
            click.echo(json.dumps(value) if follow else to_json(value))
        else:
            if follow and sys.stdout.isatty():
                click.clear()
            click.echo("\n".join(to_text(name, found[name]) for name in found))
        if not follow and not as_json:
            for line in filter(None, (set_aside_text(*each) for each in stores.items())):
                click.echo(line)
        is_running = any(each.state == RUNNING for each in chain.from_iterable(found.values()))
        if not follow or not is_running:
            return
        time.sleep(seconds)
