"""The command line: ``bulk-pipeline``, a module for each command or a few that are kin."""

from typing import Any

import click

from bulk_pipeline.cli.doctor import doctor
from bulk_pipeline.cli.init import init
from bulk_pipeline.cli.partitions import partitions
from bulk_pipeline.cli.plan import plan
from bulk_pipeline.cli.results import export, report, show
from bulk_pipeline.cli.run import run, status


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; what object storage refuses is its message, not a traceback."""
        from bulk_pipeline.storage.objects import StorageError

        try:
            return super().invoke(ctx)
        except StorageError as error:
            raise click.ClickException(str(error)) from None


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Put whole datasets of prompts through a language model.

    Exit codes: 0 fine; 1 something failed, or would; 2 the command was used wrongly.
    """


for command in (init, partitions, plan, run, status, show, report, export, doctor):
    main.add_command(command)
