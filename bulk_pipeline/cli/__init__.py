"""The command line: ``bulk-pipeline``, a module for each command or a few that are kin."""

import click

from bulk_pipeline.cli.doctor import doctor
from bulk_pipeline.cli.init import init
from bulk_pipeline.cli.partitions import partitions
from bulk_pipeline.cli.plan import plan
from bulk_pipeline.cli.results import export, report, show
from bulk_pipeline.cli.run import run, status


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Put whole datasets of prompts through a language model.

    Exit codes: 0 fine; 1 something failed, or would; 2 the command was used wrongly.
    """


for command in (init, partitions, plan, run, status, show, report, export, doctor):
    main.add_command(command)
