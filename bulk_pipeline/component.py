"""From configuration to Dagster definitions: the YAML component and the Python factory."""

from pathlib import Path
from typing import Any

import dagster as dg
from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import SandboxedEnvironment
from pydantic import BaseModel, GetJsonSchemaHandler, RootModel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from bulk_pipeline.assets import build_assets
from bulk_pipeline.automation import build_jobs, build_schedule, build_sensor
from bulk_pipeline.resources import ExLlamaV2Resource
from bulk_pipeline.slices import build_slices
from bulk_pipeline.spec import BulkInferenceSpec, load_spec


def build_bulk_inference_defs(
    spec: BulkInferenceSpec | dict[str, Any], project_root: Path | str = "."
) -> dg.Definitions:
    """Build the assets, checks, jobs, sensors, schedule and model resource of one dataset.

    Parameters
    ----------
    spec
        The dataset, validated or as plain values.
    project_root
        Where relative paths in the spec start.

    Raises
    ------
    ValueError
        If the spec is not valid; one line a problem.
    """
    if not isinstance(spec, BulkInferenceSpec):
        spec = load_spec(spec)
    spec = spec.resolve_paths(Path(project_root).resolve())
    resource_key = spec.generator_resource or f"{spec.name}_model"
    jobs, assets_job = build_jobs(spec, resource_key)
    raw_dataset, *others = build_assets(spec, resource_key)
    assets = [_after(raw_dataset, spec), *others]
    if spec.partitions.slices > 1:
        assets.append(build_slices(spec, resource_key))
    resources = {}
    if spec.generator is not None:
        resources[resource_key] = ExLlamaV2Resource(**spec.generator.model_dump())
    sensors = [build_sensor(spec, assets_job)] if spec.automation.mode != "none" else []
    if spec.automation.mode == "conditions":
        sensors.append(
            dg.AutomationConditionSensorDefinition(
                f"{spec.name}_automation", target=dg.AssetSelection.assets(*assets)
            )
        )
    has_schedule = spec.automation.cron is not None
    return dg.Definitions(
        assets=assets,
        jobs=[*jobs, assets_job],
        sensors=sensors,
        schedules=[build_schedule(spec, assets_job, resource_key)] if has_schedule else [],
        resources=resources,
    )


def _after(raw_dataset: dg.AssetsDefinition, spec: BulkInferenceSpec) -> dg.AssetsDefinition:
    """Put the assets that write the source upstream of `raw_dataset`."""
    keys = [dg.AssetKey.from_user_string(name) for name in spec.source.deps]
    if not keys:
        return raw_dataset
    # Which partition of theirs writes what a partition of ours reads is not known.
    deps = [dg.AssetDep(key, partition_mapping=dg.AllPartitionMapping()) for key in keys]
    shown = raw_dataset.map_asset_specs(lambda asset: asset.merge_attributes(deps=deps))
    # Dagster 1.13 shows the new dependencies so, and does not wait for them within a run.
    shown_deps = [dep.asset_key for asset in shown.specs for dep in asset.deps]
    inputs = dict(zip(shown.op.ins, shown_deps, strict=True))
    return dg.AssetsDefinition(**shown.get_attributes_dict() | {"keys_by_input_name": inputs})


class _Attributes(RootModel[dict[str, Any]]):
    """The attributes of a defs.yaml as they stand there; they are validated once filled in.

    Their schema, for editors and Dagster's documentation, is that of the settings.
    """

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return handler(BulkInferenceSpec.__pydantic_core_schema__)


class BulkInferenceComponent(dg.Component):
    """A dataset put through a language model; its attributes are a `BulkInferenceSpec`."""

    def __init__(self, spec: BulkInferenceSpec):
        self.spec = spec

    @classmethod
    def get_model_cls(cls) -> type[BaseModel]:
        """The schema of the YAML's attributes."""
        return _Attributes

    @classmethod
    def load(
        cls, attributes: BaseModel | None, context: dg.ComponentLoadContext
    ) -> "BulkInferenceComponent":
        """Fill in templates such as ``{{ env.MODEL }}`` and validate what they give.

        ``prompt.template`` is the row's, and stays as it is.
        """
        if not isinstance(attributes, _Attributes):
            raise ValueError("attributes is missing; set name, source, prompt and generator in it")
        values, scope = dict(attributes.root), dict(context.resolution_context.scope)
        prompt, template = values.get("prompt"), None
        if isinstance(prompt, dict):
            values["prompt"] = prompt = dict(prompt)
            template = prompt.pop("template", None)
        filled = _fill_in(values, scope)
        if template is not None:
            filled["prompt"]["template"] = template
        return cls(load_spec(filled))

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Build the dataset's definitions."""
        return build_bulk_inference_defs(self.spec, context.project_root)


def _fill_in(value: Any, scope: dict[str, Any]) -> Any:
    """Render the texts in `value` that hold ``{{``; every other text stays to the letter.

    Dagster's own resolution would read each text as a Python value: '"quoted"', '42' and a
    final newline would not come through.
    """
    if isinstance(value, dict):
        return {name: _fill_in(item, scope) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_fill_in(item, scope) for item in value]
    if isinstance(value, str) and "{{" in value:
        environment = SandboxedEnvironment(
            undefined=StrictUndefined, keep_trailing_newline=True, finalize=_something
        )
        try:
            return environment.from_string(value).render(scope)
        except TemplateError as error:
            raise ValueError(f"cannot fill in {value!r}: {error}; correct it") from None
    return value


def _something(value: Any) -> Any:
    """What ``{{ ... }}`` gives; Dagster gives None for a variable that is not set."""
    if value is None:
        raise TemplateError("it gives nothing")
    return value
