"""The datasets of a module of Dagster definitions: each with its settings, tables and model."""

import importlib
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import click
import dagster as dg

from bulk_pipeline.assets import SPEC, open_store
from bulk_pipeline.resources import ExLlamaV2Resource
from bulk_pipeline.spec import BulkInferenceSpec, GeneratorSettings
from bulk_pipeline.store import COMPLETIONS, Store


class WrongUseError(click.ClickException):
    """A command that cannot be meant so; exit code 2."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Dataset:
    """A dataset as its definitions have it; paths are resolved."""

    spec: BulkInferenceSpec
    store: Store
    settings: GeneratorSettings


def load_definitions(module: str) -> dg.Definitions:
    """The Dagster definitions of a module, by its name.

    Raises
    ------
    ClickException
        One line, if it cannot be imported, raises, or has none.
    """
    sys.path.insert(0, os.getcwd())
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise WrongUseError(f"--module: cannot import {module}: {error}") from None
    found = getattr(loaded, "defs", None)
    try:
        definitions = found() if callable(found) else found
    except Exception as error:  # whatever a user's definitions raise
        raise click.ClickException(f"--module: {module}: {_root_cause(error)}") from None
    if not isinstance(definitions, dg.Definitions):
        raise WrongUseError(f"--module: {module} has no Definitions named defs; name one")
    return definitions


def find_dataset(module: str, name: str) -> Dataset:
    """A dataset by its name, with the model that it runs on.

    Raises
    ------
    ClickException
        One line, if there is no such dataset, or its model is not defined.
    """
    definitions = load_definitions(module)
    assets = _completions_assets(definitions)
    check_names([name], assets, module)
    spec = _spec(assets[name])
    return Dataset(spec, open_store(spec), _model_settings(definitions, assets[name], name))


def find_specs(module: str) -> dict[str, BulkInferenceSpec]:
    """The settings of all datasets of a module, by name."""
    assets = _completions_assets(load_definitions(module))
    return {name: _spec(asset) for name, asset in sorted(assets.items())}


def tagged_jobs(module: str, tag: str) -> dict[str, dg.JobDefinition]:
    """The jobs that carry a tag, by its value: the dataset's name."""
    jobs = load_definitions(module).resolve_all_job_defs()
    return {job.tags[tag]: job for job in jobs if tag in job.tags}


def check_names(asked: Iterable[str], known: Mapping[str, object], module: str) -> None:
    """Raise a one-line error that names the datasets there are, if one asked for is not."""
    if unknown := [name for name in asked if name not in known]:
        raise WrongUseError(
            f"no dataset {', '.join(unknown)} in {module}; there are "
            f"{', '.join(sorted(known)) or 'none'}"
        )


def _completions_assets(definitions: dg.Definitions) -> dict[str, dg.AssetsDefinition]:
    return {
        asset.key.path[0]: asset
        for asset in definitions.resolve_asset_graph().assets_defs
        if asset.keys and asset.key.path[-1] == COMPLETIONS and SPEC in _metadata(asset)
    }


def _spec(asset: dg.AssetsDefinition) -> BulkInferenceSpec:
    spec = getattr(_metadata(asset)[SPEC], "instance", None)
    assert isinstance(spec, BulkInferenceSpec)
    return spec


def _metadata(asset: dg.AssetsDefinition) -> Mapping[str, object]:
    return asset.metadata_by_key[asset.key]


def _model_settings(
    definitions: dg.Definitions, asset: dg.AssetsDefinition, name: str
) -> GeneratorSettings:
    resources = {
        key: (definitions.resources or {}).get(key) for key in asset.required_resource_keys
    }
    for resource in resources.values():
        if isinstance(resource, ExLlamaV2Resource):
            with resource.process_config_and_initialize_cm() as resolved:  # reads EnvVars
                values = {name: getattr(resolved, name) for name in GeneratorSettings.model_fields}
            return GeneratorSettings(**values)
    raise click.ClickException(
        f"{name}: no ExLlamaV2Resource among its resources ({', '.join(sorted(resources))}); "
        "add one to the definitions under its generator_resource"
    )


def _root_cause(error: BaseException) -> str:
    """The message at the bottom of a chain of exceptions, without Dagster's frames around it."""
    while cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        error = cause
    return str(error) or repr(error)
