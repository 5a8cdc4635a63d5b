"""What a dead process left in the journal counts; what one that ended in order left does not."""

import os
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from bulk_pipeline.stages import journal as journal_module
from bulk_pipeline.stages.journal import JOURNAL, Journal
from bulk_pipeline.storage.partition import Partition
from bulk_pipeline.storage.schemas import COMPLETIONS
from bulk_pipeline.storage.store import Store

A, B, C = ("a" * 32, "b" * 32, "c" * 32)


@pytest.fixture
def partition(any_root) -> Partition:
    return Store(any_root, "data").partition(COMPLETIONS, "all")


def content(partition: Partition) -> bytes | None:
    fs = partition.store.fs
    paths = find(partition)
    return b"".join(fs.cat_file(path) for path in paths) if paths else None


def find(partition: Partition) -> list[str]:
    """The journals of the partition."""
    fs = partition.store.fs
    names = fs.ls(partition.path, detail=False) if fs.exists(partition.path) else []
    return [name for name in names if name.endswith(JOURNAL)]


def test_what_was_in_flight_counts_as_a_death_each_time(partition):
    Journal(partition).start([A, B])
    Journal(partition).start([B])
    assert Journal(partition).failures == {A: 1, B: 2}
    assert Journal(partition).failures == {A: 1, B: 2}  # nothing was in flight since


def test_an_orderly_end_counts_against_none_and_keeps_what_is_known(partition):
    Journal(partition).start([A])
    journal = Journal(partition)
    journal.start([A, B])
    journal.close()
    assert Journal(partition).failures == {A: 1}


def test_nothing_is_left_when_nothing_is_known(partition):
    journal = Journal(partition)
    journal.start([A])
    journal.finish(A)
    journal.close()
    assert content(partition) is None


def test_a_finished_request_is_crossed_out(partition):
    journal = Journal(partition)
    journal.start([A])
    journal.finish(A)
    journal.start([B])
    assert Journal(partition).failures == {B: 1}


def test_deaths_can_be_forgotten(partition):
    Journal(partition).start([A, B])
    journal = Journal(partition)
    journal.forget([A, C])
    assert Journal(partition).failures == {B: 1}


def test_the_journal_stays_small(partition, monkeypatch):
    monkeypatch.setattr(journal_module, "MAX_BYTES", 1000)
    journal = Journal(partition)
    for number in range(500):
        key = f"{number:032x}"
        journal.start([key])
        if number != 7:
            journal.finish(key)
    assert len(content(partition) or b"") < 1200
    journal.start([A])  # object storage learns of what is done with the next start
    assert Journal(partition).failures == {f"{7:032x}": 1, A: 1}


def test_a_torn_last_line_is_passed_over(partition):
    journal = Journal(partition)
    journal.start([A])
    journal.finish(A)
    journal.start([B])
    whole = content(partition)
    assert whole is not None
    (path,) = find(partition)
    partition.store.fs.pipe_file(path, whole + b"+" + C[:9].encode())
    assert Journal(partition).failures == {B: 1}


def test_a_process_that_was_overtaken_and_ends_in_order_counts_against_none():
    partition = Store(f"memory://{uuid.uuid4().hex}", "data").partition(COMPLETIONS, "all")
    for _ in range(5):
        overtaken = Journal(partition)
        overtaken.start([A])
        later = Journal(partition)
        later.start([A])
        overtaken.close()
        assert Journal(partition).failures == {A: 1}  # the later one's, were it dead now
        later.close()
    assert Journal(partition).failures == {}
    assert find(partition) == []


# --- interrupts, which count against none --------------------------------------------------------


def interrupted_once(call: Callable[..., Any], *, is_done: bool) -> Callable[..., Any]:
    """`call`, whose first time an interrupt comes before or after what it does."""
    left = [KeyboardInterrupt()]

    def interrupted(*args: Any) -> Any:
        if not left:
            return call(*args)
        if is_done:
            call(*args)
        raise left.pop()

    return interrupted


@pytest.mark.parametrize("is_done", [False, True])
def test_an_interrupt_while_it_closes_counts_against_none(partition, monkeypatch, is_done):
    journal = Journal(partition)
    journal.start([A])
    fs = partition.store.fs
    monkeypatch.setattr(fs, "rm_file", interrupted_once(fs.rm_file, is_done=is_done))
    with pytest.raises(KeyboardInterrupt):
        journal.close()
    assert Journal(partition).failures == {}
    assert find(partition) == []


@pytest.mark.parametrize("is_done", [False, True])
def test_an_interrupt_while_it_keeps_failures_counts_against_no_other(
    partition, monkeypatch, is_done
):
    journal = Journal(partition)
    journal.start([A, B])
    journal.blame([A])
    if partition.store.is_local:
        monkeypatch.setattr(os, "replace", interrupted_once(os.replace, is_done=is_done))
    else:
        fs = partition.store.fs
        monkeypatch.setattr(fs, "pipe_file", interrupted_once(fs.pipe_file, is_done=is_done))
    with pytest.raises(KeyboardInterrupt):
        journal.close()
    monkeypatch.undo()
    assert Journal(partition).failures == {A: 1}


@pytest.mark.parametrize("is_done", [False, True])
def test_an_interrupt_while_it_notes_its_first_requests_counts_against_none(monkeypatch, is_done):
    partition = Store(f"memory://{uuid.uuid4().hex}", "data").partition(COMPLETIONS, "all")
    journal = Journal(partition)
    fs = partition.store.fs
    monkeypatch.setattr(fs, "pipe_file", interrupted_once(fs.pipe_file, is_done=is_done))
    with pytest.raises(KeyboardInterrupt):
        journal.start([A])
    journal.close()
    assert find(partition) == []
