"""From configuration to Dagster definitions: the YAML component and the Python factory."""

from pathlib import Path
from typing import Any

import dagster as dg
from pydantic import BaseModel

from bulk_pipeline.assets import build_assets
from bulk_pipeline.automation import build_jobs, build_schedule, build_sensor
from bulk_pipeline.resources import ExLlamaV2Resource
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
    assets = build_assets(spec, resource_key)
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


class BulkInferenceComponent(dg.Component):
    """A dataset put through a language model; its attributes are a `BulkInferenceSpec`."""

    def __init__(self, spec: BulkInferenceSpec):
        self.spec = spec

    @classmethod
    def get_model_cls(cls) -> type[BaseModel]:
        """The schema of the YAML's attributes."""
        return BulkInferenceSpec

    @classmethod
    def load(
        cls, attributes: BaseModel | None, context: dg.ComponentLoadContext
    ) -> "BulkInferenceComponent":
        """Resolve templates such as ``{{ env.MODEL }}`` and validate what they give.

        ``prompt.template`` is the row's, and stays as it is.
        """
        assert attributes is not None
        values = attributes.model_dump(exclude_unset=True)
        template = values["prompt"].pop("template", None)
        resolved = dict(context.resolution_context.resolve_value(values))
        if template is not None:
            resolved["prompt"] = {**resolved["prompt"], "template": template}
        return cls(load_spec(resolved))

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Build the dataset's definitions."""
        return build_bulk_inference_defs(self.spec, context.project_root)
