"""The pool that keeps two runs from the GPU, and its slots that dead runs still hold.

A run dies without a word when it is killed, out of memory, or its machine is switched off.
Dagster's run monitoring watches only runs that its daemon launched; one started from a shell and
killed would hold its slot, and keep everybody waiting, for ever.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import dagster as dg
import psutil  # type: ignore[import-untyped]

GPU_POOL = "gpu"  # limited in dagster.yaml to as many steps as have GPUs of their own
LOOK_SECONDS = 2.0  # between two looks at whether a run waits for the pool


def release_dead_runs(instance: dg.DagsterInstance) -> list[str]:
    """Free the slots of the pool that dead runs hold, and mark those runs as failed.

    A run is dead when every process that wrote an event of it is gone. That can be known only
    where all runs are on this machine, so only an instance in SQLite files is looked at, and one
    that does not launch its runs elsewhere (on Ray, in Kubernetes, in containers).

    Returns
    -------
    The ids of the runs whose slots were freed.
    """
    storage = instance.event_log_storage
    is_local = "sqlite" in type(storage).__name__.lower() and isinstance(
        instance.run_launcher, dg.DefaultRunLauncher
    )
    if not is_local or not storage.supports_global_concurrency_limits:
        return []
    info = storage.get_concurrency_info(GPU_POOL)
    released = []
    holders = {slot.run_id for slot in info.claimed_slots}
    for run_id in sorted(holders | {step.run_id for step in info.pending_steps}):
        run = instance.get_run_by_id(run_id)
        if run is not None and not run.is_finished:
            if any(_is_alive(*process) for process in _processes(instance, run_id).items()):
                continue
            instance.report_run_failed(run, "its processes are gone; they ended without a word")
        storage.free_concurrency_slots_for_run(run_id)
        released.append(run_id)
    return released


def pool_problem(instance: dg.DagsterInstance, num_gpus: int, gpus_each: int) -> str | None:
    """What is wrong with the pool's limit on a machine of so many GPUs, in one line; or None."""
    fits = num_gpus // gpus_each
    limit = _limit(instance)
    if not fits or limit == fits:
        return None
    remedy = f"dagster instance concurrency set {GPU_POOL} {fits}"
    if limit is None:
        return f"the pool {GPU_POOL} has no limit, which limits nothing; {remedy}"
    each = f"{num_gpus} GPUs for steps that take {gpus_each}"
    if limit < fits:
        idle = num_gpus - limit * gpus_each
        return (
            f"the pool {GPU_POOL} lets {limit} at once, and here are {each}: {idle} idle; {remedy}"
        )
    return (
        f"the pool {GPU_POOL} lets {limit} at once, and here are {each}: the others hold a place "
        f"and wait; {remedy}, unless its steps run on other machines too"
    )


@contextmanager
def telling_of_a_wait(
    instance: dg.DagsterInstance, run_id: str, tell: Callable[[str], None]
) -> Iterator[None]:
    """Tell once, in a line, if a run of this process waits for a place in the pool.

    Dagster notes that in the run's events alone.
    """
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(LOOK_SECONDS):
            info = instance.event_log_storage.get_concurrency_info(GPU_POOL)
            if run_id in info.active_run_ids:
                return
            if run_id in info.pending_run_ids:
                holders = [_holder(instance, held_by) for held_by in sorted(info.active_run_ids)]
                tell(
                    f"waiting for the pool {GPU_POOL} ({info.slot_count} at once), held by "
                    f"{', '.join(holders) or 'nobody'}; see bulk-pipeline status, and if what "
                    f"holds it is dead, bulk-pipeline partitions sync frees it"
                )
                return

    if not instance.event_log_storage.supports_global_concurrency_limits:
        yield
        return
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _holder(instance: dg.DagsterInstance, run_id: str) -> str:
    """A run as somebody who waits for it wants it: its job, its id and its processes."""
    run = instance.get_run_by_id(run_id)
    processes = ", ".join(map(str, sorted(_processes(instance, run_id))))
    name = f"run {run_id} of {run.job_name}" if run else f"run {run_id}"
    return f"{name} (process {processes})" if processes else name


def _limit(instance: dg.DagsterInstance) -> int | None:
    """How many steps of the pool run at once; None where nothing limits them."""
    storage = instance.event_log_storage
    if storage.supports_global_concurrency_limits:
        for pool in storage.get_pool_limits():
            if pool.name == GPU_POOL and not pool.from_default:
                return pool.limit
    return instance.global_op_concurrency_default_limit


def _processes(instance: dg.DagsterInstance, run_id: str) -> dict[int, float]:
    """The processes that wrote events of a run: pid to the time of the last event."""
    found: dict[int, float] = {}
    for entry in instance.all_logs(run_id):
        event = entry.dagster_event
        if event is not None and event.pid is not None:
            found[event.pid] = max(found.get(event.pid, 0.0), entry.timestamp)
    return found


def _is_alive(pid: int, last_event: float) -> bool:
    """Whether the process that wrote an event at that time still runs, and not another."""
    try:
        return psutil.Process(pid).create_time() <= last_event
    except psutil.NoSuchProcess:
        return False
