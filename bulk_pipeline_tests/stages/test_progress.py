import os
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from bulk_pipeline.progress_view import progress_numbers
from bulk_pipeline.stages import sink as sink_module
from bulk_pipeline.stages.complete import complete_partition
from bulk_pipeline.stages.progress import (
    MAX_POINTS,
    PROGRESS_FILE,
    Progress,
    is_alive,
    merge_runs,
    read_progress,
    seconds_left,
    watching,
)
from bulk_pipeline.storage.schemas import COMPLETIONS
from bulk_pipeline_tests.factories import (
    KEY,
    EchoGenerator,
    make_prompt,
    make_spec,
    make_store,
    write_prompts,
)


@pytest.fixture
def spec(tmp_path):
    return make_spec(tmp_path)


@pytest.fixture
def store(spec):
    return make_store(spec)


def complete(spec, store, generator, on_step=None, **kwargs):
    return complete_partition(spec, store, KEY, lambda: generator, "model", **kwargs)


def runs(store) -> list[dict]:
    return store.partition(COMPLETIONS, KEY).manifest().meta["runs"]


def test_a_finished_run_is_kept_in_the_manifest_and_its_file_is_gone(spec, store):
    write_prompts(store, [make_prompt(i) for i in range(6)])
    report = complete(spec, store, EchoGenerator())
    (run,) = runs(store)
    assert (run["requests"], run["done"]) == (6, 6)
    assert (run["prompt_tokens"], run["completion_tokens"]) == (24, 24)
    assert run["busy_seconds"] == 3.0
    assert run["points"][-1][1:3] == [6, 24]
    assert report.metadata["generation_seconds"] == run["seconds"]
    assert read_progress(store.partition(COMPLETIONS, KEY)) is None


def test_a_run_without_requests_leaves_no_record(spec, store):
    write_prompts(store, [make_prompt(0)])
    complete(spec, store, EchoGenerator())
    before = runs(store)
    complete(spec, store, EchoGenerator())
    assert runs(store) == before


def test_the_next_run_takes_over_what_a_failed_one_left(spec, store):
    write_prompts(store, [make_prompt(i) for i in range(6)])
    with pytest.raises(RuntimeError, match="the generator broke"):
        complete(spec, store, EchoGenerator(fails_at=[4]))
    left = read_progress(store.partition(COMPLETIONS, KEY))
    assert (left["done"], left["requests"], left["pid"]) == (4, 6, os.getpid())
    complete(spec, store, EchoGenerator())
    assert [run["done"] for run in runs(store)] == [4, 2]
    assert merge_runs(runs(store))["completion_tokens"] == 24


def test_other_processes_can_read_how_far_a_run_is(spec, store, monkeypatch):
    monkeypatch.setattr(sink_module, "PROGRESS_SECONDS", 0.0)
    write_prompts(store, [make_prompt(i) for i in range(6)])
    seen = []

    class Looking(EchoGenerator):
        def _answer(self, request):
            seen.append(read_progress(store.partition(COMPLETIONS, KEY)))
            return super()._answer(request)

    complete(spec, store, Looking())
    assert [record["done"] for record in seen] == sorted(record["done"] for record in seen)
    assert seen[0]["done"] == 0
    assert 0 < seen[-1]["done"] < 6
    assert all(is_alive(record) for record in seen)


def test_a_watcher_of_the_process_sees_the_run_and_no_later_one(spec, store):
    write_prompts(store, [make_prompt(i) for i in range(4)])
    seen = []
    with watching(lambda progress: seen.append(progress.done)):
        complete(spec, store, EchoGenerator())
    complete(spec, store, EchoGenerator(), redo="all")
    assert (seen[0], seen[-1]) == (0, 4)
    assert seen.count(4) == 1


def test_batches_are_those_that_the_engine_counts(spec, store):
    write_prompts(store, [make_prompt(i) for i in range(4)])

    class Counting(EchoGenerator):
        stats = SimpleNamespace(rows=100, steps=10)

        def _answer(self, request):
            self.stats.rows += 3
            self.stats.steps += 1
            return super()._answer(request)

    assert complete(spec, store, Counting()).metadata["mean_batch"] == 3.0
    assert runs(store)[0]["mean_batch"] == 3.0
    assert runs(store)[0]["points"][-1][3] == 3.0


def test_drafts_of_a_run_are_told(spec, store):
    write_prompts(store, [make_prompt(i) for i in range(4)])

    class Drafting(EchoGenerator):
        stats = SimpleNamespace(rows=0, steps=0, drafted_tokens=7, accepted_tokens=7)

        def _answer(self, request):
            self.stats.drafted_tokens += 4
            self.stats.accepted_tokens += 3
            return super()._answer(request)

    said = []
    with watching(lambda progress: said.append((str(progress), progress_numbers(progress)))):
        assert complete(spec, store, Drafting()).metadata["draft_acceptance"] == 0.75
    assert (runs(store)[0]["drafted_tokens"], runs(store)[0]["accepted_tokens"]) == (16, 12)
    text, numbers = said[-1]
    assert "75% of drafted tokens right" in text
    assert numbers["draft_acceptance"] == 0.75


def test_without_drafts_nothing_is_said_of_them(spec, store):
    write_prompts(store, [make_prompt(0)])
    said = []
    with watching(lambda progress: said.append((str(progress), progress_numbers(progress)))):
        assert "draft_acceptance" not in complete(spec, store, EchoGenerator()).metadata
    assert "draft" not in str(said)


def test_a_torn_progress_file_is_none(store):
    folder = store.partition(COMPLETIONS, KEY).path
    os.makedirs(folder)
    with open(f"{folder}/{PROGRESS_FILE}", "w") as file:
        file.write('{"done": ')
    assert read_progress(store.partition(COMPLETIONS, KEY)) is None


def test_the_curve_of_a_long_run_stays_short_and_keeps_its_end(monkeypatch):
    progress, now = Progress("all", 10_000), 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    progress.start({})
    for step in range(10_000):
        now, progress.done = step * 5.0, step
        progress.mark()
    progress.stop()
    seconds = [point[0] for point in progress.points]
    assert MAX_POINTS / 3 < len(seconds) <= MAX_POINTS + 1
    assert seconds == sorted(seconds)
    assert progress.points[-1][:2] == [9999 * 5.0, 9999]


def test_whether_the_writer_of_a_record_is_alive():
    here = {"host": socket.gethostname(), "updated": time.time()}
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert is_alive(here | {"pid": os.getpid()})
    assert not is_alive(here | {"pid": ended.pid})
    assert not is_alive(here | {"pid": os.getpid(), "updated": 0})  # another process had the number
    assert is_alive({"host": "elsewhere", "pid": 1, "updated": time.time()})
    assert not is_alive({"host": "elsewhere", "pid": 1, "updated": time.time() - 3600})


def points_of(seconds: float, warm_up: float, batch: int, turn: float, every: float = 5.0):
    """The curve of a run whose answers come a batch at a time, and how many are done by then."""

    def done(at: float) -> int:
        return batch * max(0, int((at - warm_up) / turn))

    times = [every * i for i in range(1, int(seconds / every) + 1)]
    return [[at, done(at), 0, batch] for at in times], done(seconds)


@pytest.mark.parametrize("seconds", [5, 30, 40, 45, 60])
def test_there_is_no_estimate_before_a_steady_rate(seconds):
    # 30 s of compilation, then 64 answers every 20 s
    points, done = points_of(seconds, warm_up=30, batch=64, turn=20)
    assert seconds_left(6400, done, seconds, 64, points) is None


@pytest.mark.parametrize("seconds", [70, 110, 150, 490])
def test_what_came_before_the_steady_rate_is_not_in_the_estimate(seconds):
    points, done = points_of(seconds, warm_up=30, batch=64, turn=20)
    left = seconds_left(6400, done, seconds, 64, points)
    assert left == pytest.approx((6400 - done) / 64 * 20)


CASES = {  # requests, done, seconds, batch, points; seconds left
    "nothing is done": ((100, 0, 60.0, 8.0, []), None),
    "one of a small batch": ((100, 1, 2.0, 1.0, []), None),
    "no curve": ((100, 20, 40.0, 8.0, []), 160.0),
    "steady since the first point": ((100, 20, 40.0, 8.0, [[30.0, 10, 0, 8.0]]), 80.0),
    "too little since the first point": ((100, 17, 40.0, 8.0, [[30.0, 10, 0, 8.0]]), None),
    "all is done": ((20, 20, 40.0, 8.0, []), 0.0),
    "all of a small batch is done": ((2, 2, 4.0, 2.0, []), 0.0),
}


@pytest.mark.parametrize(("run", "left"), CASES.values(), ids=CASES.keys())
def test_seconds_left(run, left):
    assert seconds_left(*run) == left
