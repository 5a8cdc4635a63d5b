"""Partition keys, and what runs by itself: the sync step, the job, and the sensor."""

import dagster as dg

from bulk_pipeline.assets import ALL, asset_key, open_store, partitions_definition
from bulk_pipeline.spec import BulkInferenceSpec
from bulk_pipeline.store import TABLES

SYNC_TAG = "bulk_pipeline/sync_partitions"  # marks the jobs that `partitions sync` runs


def sync_partitions(instance: dg.DagsterInstance, spec: BulkInferenceSpec) -> list[str]:
    """Register the source's partitions with Dagster; returns the new keys, sorted.

    Keys whose files are gone stay registered: their results are still there.
    """
    definition = partitions_definition(spec)
    new = find_new_partitions(instance, spec)
    if new and isinstance(definition, dg.DynamicPartitionsDefinition):
        assert definition.name is not None
        instance.add_dynamic_partitions(definition.name, new)
    return new


def find_new_partitions(instance: dg.DagsterInstance, spec: BulkInferenceSpec) -> list[str]:
    """The keys that the source has and Dagster does not, sorted."""
    from bulk_pipeline.stages.partitions import plan_partitions

    definition = partitions_definition(spec)
    planned = plan_partitions(spec, open_store(spec))
    registered = definition.get_partition_keys(dynamic_partitions_store=instance)
    return sorted(set(planned) - set(registered))


def build_jobs(spec: BulkInferenceSpec) -> tuple[dg.JobDefinition, object]:
    """The job that registers partitions, and the one that runs all four assets."""

    @dg.op(name=f"{spec.name}_find_partitions")
    def find_partitions(context: dg.OpExecutionContext) -> list[str]:
        new = sync_partitions(context.instance, spec)
        context.log.info(f"{len(new)} new partitions: {', '.join(new[:20]) or 'none'}")
        return new

    @dg.job(
        name=f"{spec.name}_sync_partitions",
        description="Register the source's partitions with Dagster.",
        tags={SYNC_TAG: spec.name},
        executor_def=dg.in_process_executor,
    )
    def sync_job() -> None:
        find_partitions()

    assets_job = dg.define_asset_job(
        f"{spec.name}_job",
        selection=dg.AssetSelection.assets(*(asset_key(spec, table) for table in TABLES)),
        description="Run the dataset's four assets over the chosen partitions.",
    )
    return sync_job, assets_job


def build_sensor(spec: BulkInferenceSpec, job: object) -> dg.SensorDefinition:
    """A sensor that registers new partitions and asks for one run over them."""

    @dg.sensor(
        name=f"{spec.name}_new_partitions",
        job=job,  # type: ignore[arg-type]
        minimum_interval_seconds=60,
        description="Runs the dataset's assets over partitions that are new in the source.",
    )
    def new_partitions(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        definition = partitions_definition(spec)
        if not isinstance(definition, dg.DynamicPartitionsDefinition):
            if context.cursor:
                return dg.SkipReason("the only partition was asked for before")
            request = dg.RunRequest(run_key=ALL, partition_key=ALL)
            return dg.SensorResult(run_requests=[request], cursor=ALL)
        new = find_new_partitions(context.instance, spec)
        if not new:
            return dg.SkipReason("no new partitions")
        # Registered last, the new keys are a range of their own at the end.
        return dg.SensorResult(
            run_requests=[
                dg.RunRequest(
                    run_key=f"{new[0]}...{new[-1]}:{len(new)}",
                    tags={
                        "dagster/asset_partition_range_start": new[0],
                        "dagster/asset_partition_range_end": new[-1],
                    },
                )
            ],
            dynamic_partitions_requests=[definition.build_add_request(new)],
        )

    return new_partitions
