"""GPUs of one's own, on this machine, whoever started the process: lock files keyed by UUID.

Dagster's pool bounds how many steps of one instance run at once; this says which GPU each of them
gets, and keeps out two instances, a script beside Dagster, or a pool without a limit. A lock is
free once its holder is gone, however it ended.
"""

import json
import logging
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import filelock

REPORT_SECONDS = 30.0  # between two lines that say what is waited for
POLL_SECONDS = 0.5
DRIVER_SECONDS = 30  # nvidia-smi can hang where a driver does
VISIBLE = "CUDA_VISIBLE_DEVICES"  # CUDA reads it once a process, when it is first used

# PyTorch then asks the driver whether there is a GPU. To ask CUDA, as any library may on its
# import, would fix for this process which GPUs it sees, before one is chosen.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

log = logging.getLogger(__name__)


def visible_gpus() -> list[str]:
    """The UUIDs of the GPUs that this process may use; starts CUDA in it."""
    import torch

    count = torch.cuda.device_count()
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]


def list_gpus() -> list[str]:
    """The UUIDs of the GPUs that this process may use, as the driver names them.

    CUDA_VISIBLE_DEVICES is heeded, and CUDA is not started. Empty where nvidia-smi gives no answer.
    """
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=DRIVER_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    found = re.findall(r"\(UUID: ([\w/-]+)\)", done.stdout)
    # A GPU that is cut up is used through its instances alone.
    gpus = [uuid for uuid in found if uuid.startswith("MIG-")] or found
    if (visible := os.environ.get(VISIBLE)) is None:
        return gpus
    chosen = []
    for name in map(str.strip, visible.split(",")):
        matches = [gpu for gpu in gpus if name and gpu.startswith(name)]
        if name.isdecimal():
            matches = gpus[int(name) : int(name) + 1]
        if len(matches) != 1:  # CUDA too takes those before the first that is none
            break
        chosen += matches
    return chosen


@contextmanager
def take_gpus(
    count: int | None,
    user: str,
    wait_seconds: float | None = None,
    folder: Path | None = None,
) -> Iterator[list[str]]:
    """Hold GPUs that no other process holds, and let CUDA see no other; their UUIDs.

    It must come before CUDA is first used in the process. In a process that uses CUDA already, and
    where nvidia-smi does not say what there is, all GPUs that the process sees are held.

    Parameters
    ----------
    count
        How many; None takes all that the process may use.
    user, wait_seconds, folder
        As in `hold_gpus`.

    Raises
    ------
    ValueError
        If the process may not use so many.
    TimeoutError
        If fewer are free after `wait_seconds`.
    """
    listed = [] if _uses_cuda() else list_gpus()
    if not listed:
        seen = visible_gpus()
        _check_seen(count, len(seen))
        with hold_gpus(seen, user, wait_seconds, folder):
            yield seen
        return
    count = len(listed) if count is None else count
    if count > len(listed):
        raise ValueError(
            f"generator.gpus: {count} to be taken, and this process may use {len(listed)} "
            f"({VISIBLE}={os.environ.get(VISIBLE, '(not set)')}); lower it"
        )
    with _hold_some(listed, count, user, wait_seconds, folder) as taken:
        before = os.environ.get(VISIBLE)
        os.environ[VISIBLE] = ",".join(taken)
        try:
            yield taken
        finally:  # for processes that this one starts later
            if before is None:
                del os.environ[VISIBLE]
            else:
                os.environ[VISIBLE] = before


def check_taken(taken: Sequence[str]) -> None:
    """Raise a ValueError if CUDA sees other GPUs than those taken; starts it."""
    seen = visible_gpus()
    if len(seen) != len(taken) or (
        not taken[0].startswith("MIG-") and {*map(_bare, seen)} != {*map(_bare, taken)}
    ):
        raise ValueError(
            f"generator.gpus: {', '.join(taken)} taken, but CUDA sees {', '.join(seen) or 'none'}, "
            f"since this process has used it before; run it in a process of its own, or start it "
            f"with {VISIBLE}={','.join(taken)}"
        )


def _check_seen(count: int | None, num_seen: int) -> None:
    """Say that a process with GPUs that it cannot choose among has not the number asked for."""
    reason = "it uses CUDA already" if _uses_cuda() else "nvidia-smi does not name them"
    if count is not None and count > num_seen:
        raise ValueError(
            f"generator.gpus: {count} to be taken, and this process sees {num_seen}; lower it"
        )
    if count is not None and count < num_seen:
        log.warning(
            "generator.gpus: %d to be taken, but this process keeps all %d that it sees (%s); "
            "start it with %s set to those that it is to have",
            count, num_seen, reason, VISIBLE,
        )  # fmt: skip


def _uses_cuda() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def _bare(uuid: str) -> str:
    """A UUID as PyTorch writes it: without the driver's mark."""
    return uuid.removeprefix("GPU-")


@contextmanager
def _hold_some(
    uuids: Sequence[str],
    count: int,
    user: str,
    wait_seconds: float | None,
    folder: Path | None,
) -> Iterator[list[str]]:
    """Hold the first `count` that are free: at once all of them or, while it waits, none."""
    if count == len(uuids):
        with hold_gpus(uuids, user, wait_seconds, folder):
            yield list(uuids)
        return
    waiting = _Waiting(wait_seconds)
    while True:
        with ExitStack() as stack:
            taken: list[str] = []
            for uuid in uuids:
                if len(taken) < count:
                    try:
                        stack.enter_context(_held(uuid, user, folder))
                    except filelock.Timeout:
                        continue
                    taken.append(uuid)
            if len(taken) == count:
                yield taken
                return
        holders = (_read_holder(_lock_path(uuid, folder)) for uuid in uuids)
        waiting.wait(
            f"{count} of {len(uuids)} GPUs", "; ".join(dict.fromkeys(h for h in holders if h))
        )


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
    waiting = _Waiting(wait_seconds)
    with ExitStack() as stack:
        for uuid in sorted(uuids):  # all in one order, so that no two wait for each other
            while True:
                try:
                    stack.enter_context(_held(uuid, user, folder))
                    break
                except filelock.Timeout:
                    holder = _read_holder(_lock_path(uuid, folder)) or "another process"
                    waiting.wait(f"GPU {_bare(uuid)}", holder)
        yield


@contextmanager
def _held(uuid: str, user: str, folder: Path | None) -> Iterator[None]:
    """Hold one GPU that is free, and say so beside the lock; raises `filelock.Timeout`."""
    path = _lock_path(uuid, folder)
    _make_folder(path.parent)
    # Not the file's owner alone may open it; within the process it can be taken again.
    lock = filelock.FileLock(path, mode=0o666, thread_local=False, is_singleton=True)
    with lock.acquire(blocking=False):
        _write_holder(path.with_suffix(".json"), user)
        yield


def _lock_path(uuid: str, folder: Path | None) -> Path:
    folder = folder or Path(tempfile.gettempdir()) / "bulk_pipeline"
    return folder / f"gpu-{_bare(uuid).replace('/', '-')}.lock"


class _Waiting:
    """Waits a little at a time, tells for what, and gives up when the time is over."""

    def __init__(self, seconds: float | None):
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._next_report = time.monotonic()

    def wait(self, what: str, holder: str) -> None:
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline:
            raise TimeoutError(
                f"{what} is held by {holder}; wait for it or stop it, or raise "
                f"generator.gpu_wait_seconds"
            )
        if now >= self._next_report:
            log.warning("waiting for %s, held by %s", what, holder)
            self._next_report = now + REPORT_SECONDS
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


def _read_holder(lock: Path) -> str:
    """Who holds a lock, or held it last; empty where that is not known."""
    try:
        holder = json.loads(lock.with_suffix(".json").read_text())
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["since"]))
        return f"{holder['user']} (process {holder['pid']} on {holder['host']}, since {since})"
    except (OSError, ValueError, KeyError):
        return ""
