"""``bulk-pipeline show``, ``report`` and ``export``."""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import click
import polars as pl

from bulk_pipeline.assets import open_store
from bulk_pipeline.cli.datasets import find_dataset, find_specs
from bulk_pipeline.cli.loading import WrongUseError
from bulk_pipeline.cli.options import (
    check_partitions,
    json_option,
    module_option,
    partition_option,
    price_option,
    to_json,
    write_file,
)
from bulk_pipeline.export import FORMATS, export_output, open_new
from bulk_pipeline.storage.schemas import COMPLETIONS, COMPLETIONS_SCHEMA, OUTPUT, ROW_FIELDS
from bulk_pipeline.tables import finished_partitions, scan_table
from bulk_pipeline.wording import counted

SHOWN = ("status", "completion_tokens", "completion")


@click.command()
@module_option
@partition_option
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="One .html, .md or .json file over all the partitions. Default: report.html beside the "
    "output of each.",
)
@price_option
@json_option
@click.argument("dataset")
def report(
    module: str,
    keys: Sequence[str],
    out: Path | None,
    price_per_hour: float | None,
    as_json: bool,
    dataset: str,
) -> None:
    """Write a report of finished partitions.

    What they hold and what they took, an HTML file for each: statuses, lengths, the rate over
    the run, the slowest rows, samples of each status, and cost where a price is set. With
    output.preview off no row's text is in it.
    """
    from bulk_pipeline import report_view
    from bulk_pipeline.report import report_partition

    if out is not None and out.suffix not in report_view.FORMATS:
        raise WrongUseError(f"--out must end in .html, .md or .json, got {out}")
    specs = find_specs(module, [dataset])
    spec, store = specs[dataset], open_store(specs[dataset])
    check_partitions(dataset, keys, store.partition_keys(COMPLETIONS))
    try:
        wanted = keys or finished_partitions(store, COMPLETIONS)
        reports = [report_partition(spec, store, key, price_per_hour) for key in wanted]
    except (ValueError, OSError) as error:
        raise click.ClickException(f"{dataset}: {error}") from None
    if not reports:
        raise click.ClickException(f"{dataset}: no partition is finished; run some first")
    if as_json:
        click.echo(to_json([report_view.to_json(each) for each in reports]))
    elif out is not None:
        write_file("--out", out, report_view.FORMATS[out.suffix](reports).encode())
        click.echo(out)
    else:
        for each in reports:
            click.echo(report_view.write_html(store, each))


@click.command()
@module_option
@partition_option
@click.option(
    "--to",
    "format_",
    type=click.Choice(FORMATS),
    help="Format; the ending of --out tells it by default.",
)
@click.option(
    "--out",
    required=True,
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    help="File to write, or - for standard output.",
)
@click.option("--force", is_flag=True, help="Replace the file if it is there.")
@click.argument("dataset")
def export(
    module: str, keys: Sequence[str], format_: str | None, out: Path, force: bool, dataset: str
) -> None:
    """Write the output table to one file.

    Of all finished partitions, or of those named. The rows come partition after partition, in
    the source's order, with the column partition beside the table's own. In CSV, lists and
    structs are JSON text; openai_batch has a result line for each input row, as OpenAI's batch
    API.
    """
    format_ = format_ or out.suffix.removeprefix(".")
    if format_ not in FORMATS:
        raise WrongUseError(f"--to must be one of {', '.join(FORMATS)}, got {format_!r}; set it")
    found = find_dataset(module, dataset)
    store = found.store
    check_partitions(dataset, keys, store.partition_keys(OUTPUT))
    try:
        wanted = keys or finished_partitions(store, OUTPUT)
        if not wanted:
            raise ValueError("no partition is finished; run some first")
        is_stream = str(out) == "-"
        with nullcontext(sys.stdout.buffer) if is_stream else open_new(out, force) as file:
            rows = export_output(store, wanted, format_, file, found.settings)
            file.flush()
    except FileExistsError as error:
        raise WrongUseError(f"--out: {error}") from None
    except (ValueError, OSError) as error:
        raise click.ClickException(f"{dataset}: {error}") from None
    click.echo(f"{counted(rows, 'row')} of {counted(len(wanted), 'partition')}: {out}", err=True)


@click.command()
@module_option
@click.option("--rows", default=20, show_default=True, help="Most rows to show; 0 for all.")
@click.option("--columns", help="Columns to show, separated by commas.")
@click.argument("dataset")
def show(module: str, rows: int, columns: str | None, dataset: str) -> None:
    """Print a dataset's output table.

    And how many rows ended how, and where the table is.
    """
    specs = find_specs(module, [dataset])
    output = specs[dataset].output
    try:
        table = scan_table(output.root, dataset, storage_options=output.storage_options).collect()
    except (FileNotFoundError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    ours = {field.name for field in (*ROW_FIELDS, *COMPLETIONS_SCHEMA)}
    names = (
        columns.split(",")
        if columns
        else [
            *(name for name in table.columns if name not in ours and name != "partition"),
            *(["turn"] if "turn" in table.columns and table["turn"].max() else []),
            *SHOWN,
        ]
    )
    if missing := [name for name in names if name not in table.columns]:
        raise WrongUseError(
            f"--columns: no column {', '.join(missing)}; there are {', '.join(table.columns)}"
        )
    shown = table.select(names).with_columns(_on_a_line(pl.col(pl.String)))
    with pl.Config(
        tbl_rows=-1,
        tbl_cols=-1,
        fmt_str_lengths=60,
        tbl_width_chars=200,
        tbl_hide_dataframe_shape=True,
        tbl_hide_column_data_types=True,
    ):
        click.echo(shown.head(rows) if rows else shown)
    counts = table.group_by("status").len().sort("len", "status", descending=[True, False])
    by_status = ", ".join(f"{count} {status}" for status, count in counts.iter_rows())
    click.echo(f"{table.height} rows ({by_status})")
    click.echo(f"{output.root}/{dataset}/{OUTPUT}")


def _on_a_line(text: pl.Expr) -> pl.Expr:
    """White space within a value as one blank; a value of nothing else quoted, to be seen."""
    escaped = text.str.replace_many(["\n", "\r", "\t"], [r"\n", r"\r", r"\t"])
    is_blank = text.str.contains(r"^\s+$")
    quoted = pl.format('"{}"', escaped)
    one_line = text.str.replace_all(r"\s+", " ")
    return pl.when(is_blank).then(quoted).otherwise(one_line).name.keep()
