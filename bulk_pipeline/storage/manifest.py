"""A partition's manifest: which of its immutable parts are the table, and who may change that.

From the bytes of ``manifest.json`` comes a `Manifest`, or an error that says what to do. Between
two manifests of a partition, the epoch rises with each writer.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"


class Part(BaseModel):
    """One immutable Parquet file of a partition.

    `first_index` and `last_index` are the smallest and largest ``row_index`` in it.
    """

    name: str
    rows: int
    bytes: int
    first_index: int
    last_index: int

    def problem(self, sizes: Mapping[str, int]) -> str | None:
        """What is wrong with the part, going by the sizes of the files that are there."""
        size = sizes.get(self.name)
        if size is None:
            return "is missing"
        return None if size == self.bytes else f"is torn ({size} of {self.bytes} bytes)"


class Writer(BaseModel):
    """Who holds a partition for writing, or held it last."""

    id: str
    host: str
    pid: int
    started: float


class Manifest(BaseModel):
    """The committed state of one partition of one table.

    `kept` are parts whose rows the table does not hold now, for when they are asked for again.
    """

    schema_version: int = SCHEMA_VERSION
    table: str
    partition: str
    epoch: int = 0
    writer: Writer | None = None
    complete: bool = False
    parts: list[Part] = []
    kept: list[Part] = []
    inputs: dict[str, Any] = {}
    meta: dict[str, Any] = {}
    replaced: list[str] = []  # parts that the last commit replaced; deleted, or about to be

    @property
    def num_rows(self) -> int:
        """Rows of the table."""
        return sum(part.rows for part in self.parts)

    @property
    def stored(self) -> list[Part]:
        """All parts: those kept, then the table's."""
        return [*self.kept, *self.parts]


class DamagedManifestError(ValueError):
    """A manifest that cannot be read; the next writer makes a new one from the parts."""


def parse_manifest(data: bytes, path: str, table: str) -> Manifest:
    """What a manifest file holds.

    Raises
    ------
    ValueError
        If it cannot be read, or was written by a newer version; the message names `path`.
    """
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError:
        raise DamagedManifestError(
            f"{path} is not a manifest; materialise {table} again, which makes it anew"
        ) from None
    if manifest.schema_version > SCHEMA_VERSION:
        raise ValueError(
            f"{path} has schema version {manifest.schema_version}, this version reads up to "
            f"{SCHEMA_VERSION}; upgrade bulk_pipeline"
        )
    return manifest
