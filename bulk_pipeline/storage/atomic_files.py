"""Files that appear whole or not at all, on a disk and on object storage.

What is written to an open one is at its path when the block has ended without error: on a disk it
has reached the disk by then, with the folder that names it. Until then, and after an error, what
was at the path before is there.
"""

import errno
import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from bulk_pipeline.storage.faults import fault_point
from bulk_pipeline.storage.manifest import MANIFEST
from bulk_pipeline.storage.objects import ObjectStorage

TEMPORARY = ".tmp-"  # starts the name of a file that no manifest will ever name


@contextmanager
def new_file(path: str) -> Iterator[IO[bytes]]:
    """Open `path` on a local disk for writing."""
    folder, _, name = path.rpartition("/")
    kind = _kind(name)
    fault_point(f"{kind} open")
    temporary = f"{folder}/{TEMPORARY}{uuid.uuid4().hex}-{name}"
    with disk_errors(path):
        os.makedirs(folder, exist_ok=True)
        try:
            with open(temporary, "wb") as file:
                yield file
                fault_point(f"{kind} flush")
                file.flush()
                fault_point(f"{kind} sync")
                os.fsync(file.fileno())
            fault_point(f"{kind} replace")
            os.replace(temporary, path)
        except BaseException:
            _remove_if_there(temporary)
            raise
        fault_point(f"{kind} sync folder")
        _sync_folder(folder)


@contextmanager
def new_object(storage: ObjectStorage, path: str) -> Iterator[IO[bytes]]:
    """Open `path` on object storage for writing; it is uploaded when the block ends."""
    kind = _kind(path.rpartition("/")[2])
    fault_point(f"{kind} open")
    # Never a file that is open on the storage: closing it would commit what is there.
    with tempfile.TemporaryFile() as spool:
        yield spool
        spool.seek(0)
        fault_point(f"{kind} upload")
        storage.upload(path, spool)
    fault_point(f"{kind} uploaded")


@contextmanager
def disk_errors(path: str) -> Iterator[None]:
    """Say in one line what is wrong with the disk, where, and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason = "the disk is full; free some space"
        elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            reason = "the disk cannot be written; make it writable, or set another output.root"
        else:
            raise
        raise OSError(
            error.errno, f"{path}: {reason}, then run again: what was committed is kept"
        ) from None


def _kind(name: str) -> str:
    """What a file is, as fault points name it: manifest, part, piece or the name's ending."""
    if name.endswith(".parquet"):
        return "piece" if name.startswith(TEMPORARY) else "part"
    return "manifest" if name == MANIFEST else name


def _remove_if_there(path: str) -> None:
    try:
        os.remove(path)
    except FileNotFoundError:
        pass


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
