"""Large partitions in slices, each a step of its own that Dagster's executor places by a GPU.

Where `partitions.slices` is more than one, an asset stands between the prompts and the
completions. It fans out: a step for each slice of each partition of the run, all of them in the
pool of the GPUs. What they answer lies beside the completions, which take it over.
"""

from typing import Any

import dagster as dg

from bulk_pipeline.assets import asset_key, open_store, partition_options, redo_names
from bulk_pipeline.gpu_pool import GPU_POOL
from bulk_pipeline.partition_loop import failed_earlier_in_run, warn_of_dead_runs
from bulk_pipeline.spec import BulkInferenceSpec
from bulk_pipeline.storage.schemas import COMPLETIONS, PROMPTS, SLICES


def build_slices(spec: BulkInferenceSpec, resource_key: str) -> dg.AssetsDefinition:
    """The asset that answers partitions in slices."""
    of = spec.partitions.slices
    nothing = dg.In(dg.Nothing)

    # Steps know what they are for by their names; nothing has to be stored between them.
    @dg.op(
        name=f"{spec.name}__begin_slices", ins={"prompts": nothing}, out=dg.DynamicOut(dg.Nothing)
    )
    def begin(context: dg.OpExecutionContext) -> Any:
        from bulk_pipeline.stages.complete import begin_slices

        warn_of_dead_runs(context)
        failed = failed_earlier_in_run(context, spec)
        for place, key in enumerate(sorted(context.partition_keys)):
            if key in failed:
                context.log.warning(f"partition {key}: left out, it failed in {failed[key]}")
                continue
            begin_slices(open_store(spec), key, _redo_asked(context, spec))
            for number in range(1, of + 1):
                yield dg.DynamicOutput(None, mapping_key=f"{place}_slice_{number}_of_{of}")

    @dg.op(
        name=f"{spec.name}__answer_slice",
        ins={"begun": nothing},
        out=dg.Out(dg.Nothing),
        pool=GPU_POOL,
        required_resource_keys={resource_key},
        tags=spec.op_tags.completions,
    )
    def answer(context: dg.OpExecutionContext) -> None:
        from bulk_pipeline.engine.adapter_files import adapter_fingerprints
        from bulk_pipeline.engine.loading import settings_fingerprint
        from bulk_pipeline.stages.complete import complete_slice

        name = context.get_mapping_key()
        assert name is not None
        place, _, number, *_ = name.split("_")
        key = sorted(context.partition_keys)[int(place)]
        model = getattr(context.resources, resource_key)
        report = complete_slice(
            spec,
            open_store(spec),
            key,
            int(number),
            of,
            lambda: model.generator(spec.name),
            settings_fingerprint(model),
            cache_tokens=model.cache_tokens,
            on_progress=lambda progress: context.log.info(str(progress)),
            adapters=adapter_fingerprints(model),
        )
        context.log.info(f"partition {key}, slice {number} of {of}: {report.metadata}")

    @dg.op(name=f"{spec.name}__end_slices", ins={"answered": nothing}, out=dg.Out(dg.Nothing))
    def end(context: dg.OpExecutionContext) -> None:
        pass

    @dg.graph(
        name=f"{spec.name}__{SLICES}",
        ins={"prompts": dg.GraphIn()},
        description=f"The model's answers, made in {of} slices a partition at the same time.",
    )
    def slices(prompts: Any) -> Any:
        return end(begin(prompts).map(answer).collect())

    options = partition_options(spec)
    condition = options.pop("automation_condition")
    return dg.AssetsDefinition.from_graph(
        slices,
        keys_by_input_name={"prompts": asset_key(spec, PROMPTS)},
        keys_by_output_name={"result": asset_key(spec, SLICES)},
        automation_conditions_by_output_name={"result": condition} if condition else None,
        **options,
    )


def _redo_asked(context: dg.OpExecutionContext, spec: BulkInferenceSpec) -> list[str]:
    """The redo that the run's configuration asks of the completions."""
    ops: Any = context.run.run_config.get("ops", {})
    config = ops.get(f"{spec.name}__{COMPLETIONS}", {}).get("config", {})
    return redo_names(config.get("redo", "none"))
