"""``bulk-pipeline init``."""

import os
import sys
from pathlib import Path

import click

from bulk_pipeline.cli.loading import WrongUseError
from bulk_pipeline.init import (
    Look,
    Project,
    dataset_name,
    defs_yaml,
    find_project,
    look_at,
    write_dataset,
)

SMALL_MODEL = "data/models/smollm2-135m-instruct"  # what the demo runs on

COLUMN_SETTINGS = ("column", "messages_column", "turns_column")  # of `prompt`


@click.command()
@click.option("--name", help="Name of the dataset. Default: from the file's.")
@click.option("--column", help="Column that holds the prompt. Default: the likeliest.")
@click.option(
    "--template", help="Jinja template over the columns, such as '{{ title }}: {{ body }}'."
)
@click.option("--model", help="Model folder or hub id.")
@click.option(
    "--project",
    "folder",
    default=".",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the Dagster project; one is made where there is none.",
)
@click.option("-y", "--yes", is_flag=True, help="Ask nothing, take what was found.")
@click.argument("file", required=False)
def init(
    name: str | None,
    column: str | None,
    template: str | None,
    model: str | None,
    folder: Path,
    yes: bool,
    file: str | None,
) -> None:
    """Set up a dataset from a file of rows.

    It looks at FILE, guesses the prompt, and writes a defs.yaml that loads. FILE is CSV, TSV,
    JSONL, JSON, Parquet or text; a folder or glob makes a partition of each file. On a terminal
    it asks for what no option gives. A batch file of OpenAI's gives a dataset whose rows have
    their own settings and whose results are such a file too. Nothing is overwritten.
    """
    if column and template:
        raise WrongUseError("set --column or --template, not both")
    asks = not yes and sys.stdin.isatty()
    if file is None and not asks:
        raise WrongUseError("FILE is missing; name a file of rows")
    try:
        project = find_project(folder)
        file = file or click.prompt("File of rows")
        look = look_at(file)
        click.echo(
            f"{file}: {look.num_files} file(s), looked at {look.num_rows} rows; columns "
            f"{', '.join(look.columns)}"
        )
        prompt = _choose_prompt(look, column, template, asks)
        model = model or _choose_model(folder, asks)
        name = name or dataset_name(file)
        name = click.prompt("Name of the dataset", default=name) if asks else name
        path = write_dataset(project, name, defs_yaml(project, file, name, prompt, model, look))
    except FileExistsError as error:
        raise WrongUseError(str(error)) from None
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from None
    _tell_next_steps(project, name, path, prompt)


def _choose_prompt(
    look: Look, column: str | None, template: str | None, asks: bool
) -> dict[str, str]:
    """The prompt's settings: as given, as answered, or as guessed."""
    if template:
        return {"template": template}
    if asks and not column:
        guess = next(filter(None, map(look.prompt.get, COLUMN_SETTINGS)), None)
        if "template" in look.prompt:
            return look.prompt
        column = click.prompt("Column that holds the prompt", default=guess)
    if column is None and not look.prompt:
        raise WrongUseError(
            f"no column holds text; name one with --column, out of {', '.join(look.columns)}"
        )
    if column is None or column in map(look.prompt.get, COLUMN_SETTINGS):
        return look.prompt
    if column not in look.columns:
        raise WrongUseError(
            f"--column: there is no {column!r}; there are {', '.join(look.columns)}"
        )
    return {"column": column}


def _choose_model(folder: Path, asks: bool) -> str:
    has_small = (folder / SMALL_MODEL).is_dir()
    if asks:
        return click.prompt("Model folder or hub id", default=SMALL_MODEL if has_small else None)
    if has_small:
        return SMALL_MODEL
    raise WrongUseError(
        "--model is missing: a model folder, or a hub id (owner/name); for a small one to try, run "
        f"python -m bulk_pipeline.embedded_model {SMALL_MODEL}"
    )


def _tell_next_steps(project: Project, name: str, path: Path, prompt: dict[str, str]) -> None:
    for setting, value in prompt.items():
        click.echo(f"prompt.{setting}: {value!r}")
    click.echo(f"wrote {path}")
    lines = [
        f"cd {project.folder}" if project.folder.resolve() != Path.cwd() else "",
        "" if os.environ.get("DAGSTER_HOME") else "export DAGSTER_HOME=$PWD/.dagster_home",
        f"bulk-pipeline run --until prompts {name}",
        f"bulk-pipeline plan {name}",
        f"bulk-pipeline run {name}",
        f"bulk-pipeline show {name}",
        f"# or in Dagster's UI: dagster dev -m {project.module}",
    ]
    click.echo("next:\n" + "\n".join(f"  {line}" for line in lines if line))
