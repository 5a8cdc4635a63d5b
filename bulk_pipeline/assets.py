"""The four assets of a dataset: thin shells over `stages`, the only place they meet Dagster.

Each works on one partition after the other (`partition_loop`).
"""

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import dagster as dg

# Dagster has no other name for a value that is an object in this process and a text elsewhere.
from dagster._core.definitions.metadata.metadata_value import ObjectMetadataValue
from pydantic import Field, create_model

from bulk_pipeline.checks import check_specs
from bulk_pipeline.gpu_pool import GPU_POOL
from bulk_pipeline.partition_loop import run_partitions
from bulk_pipeline.progress_view import observer
from bulk_pipeline.resources import ExLlamaV2Resource
from bulk_pipeline.spec import BulkInferenceSpec, SamplingSpec
from bulk_pipeline.stages.stage_report import StageReport
from bulk_pipeline.storage.schemas import COMPLETIONS, OUTPUT, PROMPTS, RAW_DATASET, SLICES, TABLES
from bulk_pipeline.storage.store import Store

SPEC = "bulk_pipeline/spec"  # metadata of the completions asset: the dataset's settings
ALL = "all"  # the only key of a dataset that is not cut


# What Dagster's configuration has no type for; `change_sampling` checks the values.
_CONFIG_TYPES = {
    "banned_token_ids": list[int],
    "allowed_token_ids": list[int],
    "bad_words": list[str],
    "banned_strings": list[str],
    "logit_bias": Any,
    "structured_output": Any,
    "loop_guard": Any,
    "from_columns": Any,
}


def _sampling_config() -> type[dg.Config]:
    """The settings of `SamplingSpec`, none of which has to be given; Dagster checks their types."""
    fields: dict[str, Any] = {}
    for name, field in SamplingSpec.model_fields.items():
        plain: Any = _CONFIG_TYPES.get(name, field.annotation)
        fields[name] = (plain | None, Field(None, description=field.description))
    return create_model("SamplingConfig", __base__=dg.Config, **fields)


SamplingConfig = _sampling_config()


class PromptsConfig(dg.Config):
    """What a run may change for its partitions, in the launchpad or on the command line."""

    sampling: SamplingConfig = Field(  # type: ignore[valid-type]
        SamplingConfig(),
        description="Values that take the place of the dataset's sampling, for the partitions of "
        "this run. They stay with each of them, whatever runs it next, until reset_sampling.",
    )
    reset_sampling: bool = Field(
        False,
        description="Forget what earlier runs put in place of the dataset's sampling, before the "
        "values of this run count.",
    )


class CompletionsConfig(dg.Config):
    """What a run may ask of the completions, in the launchpad or on the command line."""

    redo: str = Field(
        "none",
        description="Stored completions to make anew: none, all, or those of some statuses, "
        "separated by commas, such as length,error.",
    )


def open_store(spec: BulkInferenceSpec) -> Store:
    """The store that holds the dataset's tables."""
    return Store(spec.output.root, spec.name, spec.output.storage_options)


def partitions_definition(spec: BulkInferenceSpec) -> dg.PartitionsDefinition:
    """One definition a dataset, the same on all four assets."""
    if spec.partitions.by == "none":
        return dg.StaticPartitionsDefinition([ALL])
    return dg.DynamicPartitionsDefinition(name=f"{spec.name}_partitions")


def asset_key(spec: BulkInferenceSpec, table: str) -> dg.AssetKey:
    """``<dataset>/<table>``."""
    return dg.AssetKey([spec.name, table])


def build_assets(spec: BulkInferenceSpec, resource_key: str) -> list[dg.AssetsDefinition]:
    """raw_dataset → prompts → completions → output, over one partitions definition."""
    return [
        _raw_dataset(spec),
        _prompts(spec, resource_key),
        _completions(spec, resource_key),
        _output(spec, resource_key),
    ]


def asset_keys(spec: BulkInferenceSpec, tables: Sequence[str] = TABLES) -> list[dg.AssetKey]:
    """The assets that make some of the tables."""
    slices = [SLICES] if spec.partitions.slices > 1 and COMPLETIONS in tables else []
    return [asset_key(spec, name) for name in (*tables, *slices)]


def partition_options(spec: BulkInferenceSpec) -> dict[str, Any]:
    """What all assets of a dataset have alike."""
    limit = spec.partitions.max_per_run
    return {
        "group_name": spec.name,
        "partitions_def": partitions_definition(spec),
        "backfill_policy": (
            dg.BackfillPolicy.multi_run(limit) if limit else dg.BackfillPolicy.single_run()
        ),
        "automation_condition": (
            dg.AutomationCondition.eager() if spec.automation.mode == "conditions" else None
        ),
    }


def _asset_options(spec: BulkInferenceSpec, table: str, upstream: Sequence[str]) -> dict[str, Any]:
    key = asset_key(spec, table)
    return {
        "key": key,
        "deps": [asset_key(spec, name) for name in upstream],
        **partition_options(spec),
        "op_tags": getattr(spec.op_tags, table),
        "check_specs": check_specs(table, key),
        "metadata": {
            "bulk_pipeline/root": spec.output.root,
            **({SPEC: _spec_metadata(spec)} if table == COMPLETIONS else {}),
        },
        "kinds": {"parquet"},
    }


def redo_names(redo: str) -> list[str]:
    """What a run's configuration asks to make anew, name by name."""
    return [name.strip() for name in redo.split(",")]


def _spec_metadata(spec: BulkInferenceSpec) -> ObjectMetadataValue:
    """The settings themselves, for this process; the UI shows the sampling."""
    sampling = spec.sampling.model_dump(mode="json", exclude_unset=True)
    shown = ", ".join(f"{name} {json.dumps(value)}" for name, value in sampling.items())
    return ObjectMetadataValue(f"sampling: {shown or 'neutral'}", instance=spec)


def _raw_dataset(spec: BulkInferenceSpec) -> dg.AssetsDefinition:
    @dg.asset(
        **_asset_options(spec, RAW_DATASET, []),
        description="The source's rows, each with an identity and a place.",
    )
    def raw_dataset(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
        from bulk_pipeline.stages.ingest import ingest_partition

        store = open_store(spec)
        return run_partitions(
            context, spec, store, RAW_DATASET, lambda key: ingest_partition(spec, store, key)
        )

    return raw_dataset


def _prompts(spec: BulkInferenceSpec, resource_key: str) -> dg.AssetsDefinition:
    @dg.asset(
        **_asset_options(spec, PROMPTS, [RAW_DATASET]),
        required_resource_keys={resource_key},
        description="Each row rendered with the chat template and tokenised.",
    )
    def prompts(context: dg.AssetExecutionContext, config: PromptsConfig) -> dg.MaterializeResult:
        from bulk_pipeline.stages.format import format_partition

        store, model = open_store(spec), _model(context, resource_key)
        changes = config.model_dump(exclude_none=True)["sampling"]
        return run_partitions(
            context,
            spec,
            store,
            PROMPTS,
            lambda key: format_partition(spec, store, key, model, changes, config.reset_sampling),
            lambda key: _described(context, lambda: _plan(spec, store, model, key)),
        )

    return prompts


def _described(
    context: dg.AssetExecutionContext, describe: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Metadata that only describes a partition, which counts also where it cannot be made."""
    try:
        return describe()
    except Exception as error:
        context.log.warning(f"metadata left out: {error}", exc_info=sys.exc_info())
        return {}


def _plan(
    spec: BulkInferenceSpec, store: Store, model: ExLlamaV2Resource, key: str
) -> dict[str, Any]:
    """What the model would have to do with the prompts."""
    from bulk_pipeline import plan_view
    from bulk_pipeline.engine.adapter_files import found_fingerprints
    from bulk_pipeline.plan import current_fingerprint, plan_partition

    plan = plan_partition(
        spec,
        store,
        key,
        current_fingerprint(model),
        look_elsewhere=False,
        adapters=found_fingerprints(model),
    )
    return plan_view.numbers(plan) | {"plan": dg.MetadataValue.md(plan_view.to_markdown(plan))}


def _completions(spec: BulkInferenceSpec, resource_key: str) -> dg.AssetsDefinition:
    upstream = [PROMPTS, SLICES] if spec.partitions.slices > 1 else [PROMPTS]

    @dg.asset(
        **_asset_options(spec, COMPLETIONS, upstream),
        required_resource_keys={resource_key},
        pool=GPU_POOL,
        description="The model's answer to every prompt, sample by sample.",
    )
    def completions(
        context: dg.AssetExecutionContext, config: CompletionsConfig
    ) -> dg.MaterializeResult:
        from bulk_pipeline.engine.adapter_files import adapter_fingerprints
        from bulk_pipeline.engine.loading import settings_fingerprint
        from bulk_pipeline.stages.complete import complete_partition

        store, model = open_store(spec), _model(context, resource_key)
        fingerprint = settings_fingerprint(model)
        adapters = adapter_fingerprints(model)

        def work(key: str) -> StageReport:
            return complete_partition(
                spec,
                store,
                key,
                lambda: model.generator(spec.name),
                fingerprint,
                cache_tokens=model.cache_tokens,
                on_progress=observer(context),
                redo=redo_names(config.redo),
                adapters=adapters,
            )

        return run_partitions(
            context,
            spec,
            store,
            COMPLETIONS,
            work,
            metadata=lambda: {"model_loads": model.num_loads},
        )

    return completions


def _output(spec: BulkInferenceSpec, resource_key: str) -> dg.AssetsDefinition:
    @dg.asset(
        **_asset_options(spec, OUTPUT, [RAW_DATASET, COMPLETIONS]),
        required_resource_keys={resource_key},
        description="Every answer beside its row, in the source's order.",
    )
    def output(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
        from bulk_pipeline.stages.join import join_partition, preview

        store, model = open_store(spec), _model(context, resource_key)

        def extra(key: str) -> dict[str, Any]:
            report = _described(context, lambda: _report(spec, store, key))
            if not spec.output.preview:
                return report
            rows = preview(store.partition(OUTPUT, key))
            return report | (
                {"preview": dg.MetadataValue.md(_markdown_table(rows))} if rows else {}
            )

        return run_partitions(
            context, spec, store, OUTPUT, lambda key: join_partition(spec, store, key, model), extra
        )

    return output


def _model(context: dg.AssetExecutionContext, resource_key: str) -> ExLlamaV2Resource:
    return getattr(context.resources, resource_key)


def _report(spec: BulkInferenceSpec, store: Store, key: str) -> dict[str, Any]:
    """The partition's report: in the metadata, and as a file beside its output."""
    from bulk_pipeline import report_view
    from bulk_pipeline.report import report_partition

    report = report_partition(spec, store, key)
    path = report_view.write_html(store, report)
    return report.numbers() | {
        "report": dg.MetadataValue.md(report_view.to_markdown(report)),
        "path_report": dg.MetadataValue.path(path),
    }


def _markdown_table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as a Markdown table; row text cannot end a cell or start a tag."""
    from bulk_pipeline.report_view import markdown_table

    names = list(rows[0])
    return "\n".join(markdown_table([names, *([row[name] for name in names] for row in rows)]))
