"""One process a GPU on this machine, whoever started it: lock files keyed by the GPUs' UUIDs.

Dagster's pool keeps the runs of one instance apart; this is for two instances, a script beside
Dagster, or a pool without a limit. A lock is free once its holder is gone, however it ended.
"""

import json
import logging
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import filelock

REPORT_SECONDS = 30.0  # between two lines that say what is waited for
POLL_SECONDS = 0.5

log = logging.getLogger(__name__)


def visible_gpus() -> list[str]:
    """The UUIDs of the GPUs that this process may use; CUDA_VISIBLE_DEVICES is heeded."""
    import torch

    count = torch.cuda.device_count()
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]


@contextmanager
def hold_gpus(
    uuids: Sequence[str],
    user: str,
    wait_seconds: float | None = None,
    folder: Path | None = None,
) -> Iterator[None]:
    """Hold GPUs for this process; those that it holds already are given again.

    Parameters
    ----------
    user
        Who wants them, as others will read it: dataset and run.
    wait_seconds
        How long to wait for other processes; None waits for ever.
    folder
        Where the locks are; the same for all processes of the machine by default.

    Raises
    ------
    TimeoutError
        If another process still holds one of them after `wait_seconds`; the message names it.
    """
    folder = folder or Path(tempfile.gettempdir()) / "bulk_pipeline"
    _make_folder(folder)
    deadline = None if wait_seconds is None else time.monotonic() + wait_seconds
    with ExitStack() as stack:
        for uuid in sorted(uuids):  # all in one order, so that no two wait for each other
            path = folder / f"gpu-{uuid}.lock"
            # Not the file's owner alone may open it; within the process it can be taken again.
            lock = filelock.FileLock(path, mode=0o666, thread_local=False, is_singleton=True)
            _acquire(lock, uuid, path.with_suffix(".json"), deadline)
            stack.callback(lock.release)
            _write_holder(path.with_suffix(".json"), user)
        yield


def _acquire(lock: filelock.BaseFileLock, uuid: str, holder: Path, deadline: float | None) -> None:
    next_report = time.monotonic()
    while True:
        try:
            lock.acquire(blocking=False)
            return
        except filelock.Timeout:
            pass
        now = time.monotonic()
        if deadline is not None and now >= deadline:
            raise TimeoutError(
                f"GPU {uuid} is held by {_read_holder(holder)}; wait for it or stop it, or raise "
                f"generator.gpu_wait_seconds"
            )
        if now >= next_report:
            log.warning("waiting for GPU %s, held by %s", uuid, _read_holder(holder))
            next_report = now + REPORT_SECONDS
        time.sleep(POLL_SECONDS)


def _make_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        folder.chmod(0o777)  # not sticky: Linux then keeps other users from opening the locks
    except PermissionError:
        pass  # another user made it


def _write_holder(path: Path, user: str) -> None:
    """Say who holds the lock; a file of its own, which is replaced in one step."""
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "user": user, "since": time.time()}
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(holder))
    temporary.replace(path)


def _read_holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text())
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["since"]))
        return f"{holder['user']} (process {holder['pid']} on {holder['host']}, since {since})"
    except (OSError, ValueError, KeyError):
        return "another process"
