"""What several commands share: options, and checks of what was given."""

import json
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from bulk_pipeline.cli.loading import WrongUseError

OWN_MODULE = "bulk_pipeline.definitions"


def project_module() -> str | None:
    """The definitions of the Dagster project in this folder, if it is one."""
    try:
        settings = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))
    except FileNotFoundError:
        settings = {}
    except ValueError as error:
        raise WrongUseError(f"pyproject.toml: {error}; correct it or give --module") from None
    project = settings.get("tool", {}).get("dg", {}).get("project", {})
    package = project.get("root_module")
    return project.get("code_location_target_module", package and f"{package}.definitions")


module_option = click.option(
    "-m",
    "--module",
    default=lambda: project_module() or OWN_MODULE,
    show_default="of the Dagster project in this folder",
    help="Python module that holds the Dagster definitions.",
)

partition_option = click.option(
    "--partition", "keys", multiple=True, help="A partition; may be given again. Default: all."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
price_option = click.option(
    "--price-per-hour",
    type=click.FloatRange(min=0),
    help="What an hour of the machine costs, in place of output.price_per_hour.",
)


def need_home(without: str) -> None:
    """Refuse to go on without a DAGSTER_HOME, saying what would be lost."""
    if not os.environ.get("DAGSTER_HOME"):
        raise WrongUseError(
            f"DAGSTER_HOME is not set, so {without}; set it to the folder that holds dagster.yaml"
        )


def to_json(value: Any) -> str:
    """A value as JSON to read."""
    return json.dumps(value, indent=1, ensure_ascii=False)


def write_file(option: str, path: Path, data: bytes) -> None:
    """Write a file that an option names."""
    try:
        path.write_bytes(data)
    except OSError as error:
        raise click.ClickException(f"{option}: {path}: {error.strerror}") from None


def check_partitions(dataset: str, asked: Sequence[str], known: Sequence[str]) -> None:
    """Raise a one-line error that names the partitions there are, if one asked for is not."""
    if unknown := sorted(set(asked) - set(known)):
        raise WrongUseError(
            f"--partition: {dataset} has no {', '.join(unknown)}; there are "
            f"{', '.join(known) or 'none'}"
        )
