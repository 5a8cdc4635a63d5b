"""The tables of one dataset, on a local disk or object storage: where they are, and what is begun.

``<root>/<dataset>/<table>/<partition>/`` is a `Partition`, whose key can be part of a path. Beside
them are slices of completions and JSON values, each replaced in one step.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import IO, Any, TypeVar

from fsspec.implementations.local import LocalFileSystem

from bulk_pipeline.storage.atomic_files import new_file, new_object
from bulk_pipeline.storage.manifest import Manifest
from bulk_pipeline.storage.objects import SCHEMES, ObjectStorage, Version, is_object_url
from bulk_pipeline.storage.partition import Partition
from bulk_pipeline.storage.partition_writer import SET_ASIDE
from bulk_pipeline.storage.schemas import COMPLETIONS, SLICES, TABLES

READERS = 16  # requests to object storage at once, where many small files are read
PARTITION_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,149}")

T = TypeVar("T")
R = TypeVar("R")


def is_partition_key(key: str) -> bool:
    """Whether a path may be built from `key`."""
    return PARTITION_KEY.fullmatch(key) is not None and ".." not in key


def check_partition_key(key: str) -> str:
    """Return `key` if a path may be built from it.

    Raises
    ------
    ValueError
        If it does not match ``[A-Za-z0-9][A-Za-z0-9_.-]{0,149}`` or holds ``..``.
    """
    if not is_partition_key(key):
        raise ValueError(
            f"partition key must be 1 to 150 letters, digits, '_', '-' or single '.', "
            f"starting with a letter or digit, got {key!r}; rename it"
        )
    return key


class Store:
    """All tables of one dataset.

    Parameters
    ----------
    root
        Local folder, or a URL: s3://, gs://, az:// or memory://.
    dataset
        The dataset's name, a folder under `root`.
    storage_options
        Options of `ObjectStorage`.

    Raises
    ------
    ValueError
        If `root` is another kind of URL, or an option is unknown.
    """

    def __init__(self, root: str, dataset: str, storage_options: dict[str, Any] | None = None):
        self.dataset = dataset
        self.is_local = not is_object_url(root)
        if self.is_local:
            if "://" in root and not root.startswith(("file://", "local://")):
                raise ValueError(
                    f"output.root must be a folder or a URL that starts with one of "
                    f"{', '.join(f'{scheme}://' for scheme in SCHEMES)}, got {root!r}; set another"
                )
            self.fs, path = LocalFileSystem(), LocalFileSystem._strip_protocol(root)
        else:
            self.fs, path = ObjectStorage(root.partition("://")[0], **(storage_options or {})), root
        self.path = f"{path.rstrip('/')}/{dataset}"

    def partition(self, table: str, key: str) -> Partition:
        """One partition of one of `TABLES`, whether or not it exists yet."""
        assert table in TABLES, table
        return Partition(self, table, check_partition_key(key))

    def slice(self, key: str, number: int, of: int) -> Partition:
        """One of the slices in which a partition's completions are made, counted from 1."""
        return Partition(self, COMPLETIONS, check_partition_key(key), f"{number}-of-{of}")

    def slices(self, key: str) -> list[Partition]:
        """The slices of a partition's completions that were begun, however it was cut."""
        names = self._names(f"{SLICES}/{check_partition_key(key)}")
        return [Partition(self, COMPLETIONS, key, name) for name in names]

    def partition_keys(self, table: str) -> list[str]:
        """Keys of the partitions of a table that were begun, sorted."""
        return self._names(table)

    def _names(self, folder: str) -> list[str]:
        try:
            folders = self.fs.ls(f"{self.path}/{folder}", detail=False)
        except FileNotFoundError:
            return []
        names = (folder.rstrip("/").rpartition("/")[2] for folder in folders)
        return sorted(name for name in names if is_partition_key(name))

    def manifests(self, table: str, keys: Sequence[str]) -> dict[str, Manifest | None]:
        """The manifests of many partitions, read at the same time where each is a request."""
        partitions = [self.partition(table, key) for key in keys]
        return dict(zip(keys, self.read_many(Partition.manifest, partitions), strict=True))

    def read_many(self, read: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """What `read` makes of each item; at the same time on object storage, where it waits."""
        if self.is_local:
            return [read(item) for item in items]
        with ThreadPoolExecutor(READERS) as pool:
            return list(pool.map(read, items))

    def set_aside_sizes(self) -> list[int]:
        """Bytes of each file that was found torn or foreign; lists everything of the dataset."""
        found = self.fs.find(self.path, detail=True)
        return [each["size"] for path, each in found.items() if f"/{SET_ASIDE}/" in path]

    def read_json(self, name: str) -> Any:
        """The value stored under `name`, or None."""
        try:
            return json.loads(self.fs.cat_file(f"{self.path}/{name}"))
        except FileNotFoundError:
            return None

    def write_json(self, name: str, value: Any) -> None:
        """Store `value` under `name`, in one step."""
        text = json.dumps(value, indent=1, sort_keys=True)
        with self.open_atomic(f"{self.path}/{name}") as file:
            file.write(text.encode())

    def read_seen_json(self, name: str) -> tuple[Any, Version | None]:
        """The value stored under `name`, or None, and what `replace_json` wants to know."""
        if self.is_local:
            return self.read_json(name), None
        try:
            data, seen = self.fs.read_version(f"{self.path}/{name}")
        except FileNotFoundError:
            return None, None
        return json.loads(data), seen

    def replace_json(self, name: str, value: Any, seen: Version | None) -> None:
        """Store `value` under `name`; on object storage, only if it is still what was seen.

        Raises
        ------
        ChangedError
            If somebody else has changed it.
        """
        if self.is_local:
            self.write_json(name, value)
            return
        text = json.dumps(value, indent=1, sort_keys=True)
        self.fs.replace(f"{self.path}/{name}", text.encode(), seen)

    def open_atomic(self, path: str) -> AbstractContextManager[IO[bytes]]:
        """Open `path` for writing; it appears, whole, only when the block ends without error."""
        return new_file(path) if self.is_local else new_object(self.fs, path)
