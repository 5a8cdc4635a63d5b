"""The command line as ``python -m bulk_pipeline.cli``."""

from bulk_pipeline.cli import main

main()
