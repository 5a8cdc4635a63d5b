"""``bulk-pipeline plan``."""

from collections.abc import Sequence
from pathlib import Path

import click

from bulk_pipeline.charts import Chart, to_png, to_svg
from bulk_pipeline.cli.datasets import find_dataset
from bulk_pipeline.cli.loading import WrongUseError
from bulk_pipeline.cli.options import (
    json_option,
    module_option,
    partition_option,
    price_option,
    to_json,
    write_file,
)


@click.command()
@module_option
@partition_option
@json_option
@click.option(
    "--picture", type=click.Path(dir_okay=False, path_type=Path), help="Write a .png or .svg file."
)
@click.option(
    "--tokens-per-second",
    type=click.FloatRange(min=0, min_open=True),
    help="Expect this rate of completion tokens, in place of the one measured last.",
)
@price_option
@click.option(
    "--sizes",
    is_flag=True,
    help="Also tell the batch and the cache that auto stands for here; imports PyTorch, loads no "
    "weights.",
)
@click.option(
    "--bad-rows",
    type=click.IntRange(min=0),
    help="Most rows that cannot run to name, of each partition; 0 for all. Default: 10 of each, 30 "
    "in a text.",
)
@click.argument("dataset")
def plan(
    module: str,
    keys: Sequence[str],
    as_json: bool,
    picture: Path | None,
    tokens_per_second: float | None,
    price_per_hour: float | None,
    sizes: bool,
    bad_rows: int | None,
    dataset: str,
) -> None:
    """Tell what a run would do, before it.

    Rows, lengths, rows that cannot run, requests to run and why, time and cost. No model is
    loaded. Prompts must exist for lengths and requests to be counted: materialise the asset
    prompts, or bulk-pipeline run --until prompts; neither needs a GPU. The exit code is 1 if a
    problem would stop a run.
    """
    from bulk_pipeline import plan_view
    from bulk_pipeline.plan import MAX_EXAMPLES, add_sizes, plan_dataset

    if picture is not None:
        _check_picture_name(picture)
    found = find_dataset(module, dataset)
    max_examples = MAX_EXAMPLES if bad_rows is None else bad_rows or None
    try:
        result = plan_dataset(
            found.spec, found.store, found.settings, keys, tokens_per_second, price_per_hour,
            max_examples,
        )  # fmt: skip
    except KeyError as error:
        raise WrongUseError(error.args[0]) from None
    except (ValueError, OSError) as error:
        raise click.ClickException(f"{dataset}: {error}") from None
    if sizes:
        add_sizes(result, found.settings)
    if as_json:
        click.echo(to_json(plan_view.to_json(result)))
    else:
        most = plan_view.MAX_BAD_ROWS if bad_rows is None else None
        click.echo(plan_view.to_text(result, most))
    if picture is not None:
        _write_picture(picture, plan_view.picture(result))
    if result.problems:
        raise click.exceptions.Exit(1)


def _check_picture_name(path: Path) -> None:
    if path.suffix not in (".png", ".svg"):
        raise WrongUseError(f"--picture must end in .png or .svg, got {path}")


def _write_picture(path: Path, chart: Chart) -> None:
    try:
        data = to_png(chart) if path.suffix == ".png" else to_svg(chart).encode()
    except RuntimeError as error:  # no Pillow
        raise click.ClickException(f"--picture: {error}") from None
    write_file("--picture", path, data)
    click.echo(path, err=True)
