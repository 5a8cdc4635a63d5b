"""What Dagster loads: everything in the folder defs."""

from pathlib import Path

import dagster as dg


@dg.definitions
def defs() -> dg.Definitions:
    """All assets of this project."""
    return dg.load_from_defs_folder(project_root=Path(__file__).parent.parent)
