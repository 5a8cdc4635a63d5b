"""The datasets of a module of Dagster definitions: each with its settings, tables and model."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import click
import dagster as dg

from bulk_pipeline.assets import SPEC, open_store
from bulk_pipeline.cli.loading import Loaded, WrongUseError, innermost_message, load_definitions
from bulk_pipeline.resources import ExLlamaV2Resource
from bulk_pipeline.spec import BulkInferenceSpec, GeneratorSettings
from bulk_pipeline.storage.schemas import COMPLETIONS
from bulk_pipeline.storage.store import Store


@dataclass(frozen=True, slots=True)
class Dataset:
    """A dataset as its definitions have it; paths are resolved."""

    spec: BulkInferenceSpec
    store: Store
    settings: GeneratorSettings


def find_dataset(module: str, name: str) -> Dataset:
    """A dataset by its name, with the model that it runs on.

    Raises
    ------
    ClickException
        One line, if there is no such dataset, or its model is not defined.
    """
    loaded = load_definitions(module)
    assets = _completions_assets(loaded.definitions)
    check_names([name], assets, loaded)
    return _dataset(loaded.definitions, assets[name])


def find_datasets(module: str) -> tuple[dict[str, Dataset], dict[str, str]]:
    """All datasets by name, and what is wrong with those that are left out."""
    loaded = load_definitions(module)
    found, bad = {}, dict(loaded.bad)
    for name, asset in sorted(_completions_assets(loaded.definitions).items()):
        try:
            found[name] = _dataset(loaded.definitions, asset)
        except click.ClickException as error:
            bad[name] = error.message
    return found, bad


def _dataset(definitions: dg.Definitions, asset: dg.AssetsDefinition) -> Dataset:
    spec = _spec(asset)
    return Dataset(spec, open_store(spec), _model_settings(definitions, asset, spec.name))


def find_specs(module: str, names: Iterable[str]) -> dict[str, BulkInferenceSpec]:
    """The settings of all datasets of a module, by name; those of `names` must be among them."""
    loaded = load_definitions(module)
    specs = specs_in(loaded.definitions)
    check_names(names, specs, loaded)
    return specs


def specs_in(definitions: dg.Definitions) -> dict[str, BulkInferenceSpec]:
    """The settings of all datasets in some definitions, by name."""
    assets = _completions_assets(definitions)
    return {name: _spec(asset) for name, asset in sorted(assets.items())}


def tagged_jobs(definitions: dg.Definitions, tag: str) -> dict[str, dg.JobDefinition]:
    """The jobs that carry a tag, by its value: the dataset's name."""
    jobs = definitions.resolve_all_job_defs()
    return {job.tags[tag]: job for job in jobs if tag in job.tags}


def check_names(asked: Iterable[str], known: Mapping[str, object], loaded: Loaded) -> None:
    """Raise a one-line error if a dataset asked for is not there; warn of other bad files.

    The error says what is wrong with the dataset's file, or names the datasets there are.
    """
    unknown = [name for name in asked if name not in known]
    if bad := [loaded.bad[name] for name in unknown if name in loaded.bad]:
        raise click.ClickException("\n".join(bad))
    for problem in loaded.bad.values():
        click.echo(f"left out: {problem}", err=True)
    if unknown:
        raise WrongUseError(
            f"no dataset {', '.join(unknown)} in {loaded.module}; there are "
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
            try:
                with resource.process_config_and_initialize_cm() as resolved:  # reads EnvVars
                    names = GeneratorSettings.model_fields
                    return GeneratorSettings(**{name: getattr(resolved, name) for name in names})
            except (dg.DagsterError, ValueError) as error:
                raise click.ClickException(f"{name}: {innermost_message(error)}") from None
    raise click.ClickException(
        f"{name}: no ExLlamaV2Resource among its resources ({', '.join(sorted(resources))}); "
        "add one to the definitions under its generator_resource"
    )
