"""The way of a row through all four stages, however the dataset is cut, changed and interrupted."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bulk_pipeline.engine.request import request_seed
from bulk_pipeline.stages.complete import complete_partition
from bulk_pipeline.stages.format import format_partition
from bulk_pipeline.stages.ingest import ingest_partition
from bulk_pipeline.stages.join import join_partition
from bulk_pipeline.stages.partitions import plan_partitions
from bulk_pipeline.storage.schemas import OUTPUT
from bulk_pipeline_tests.factories import EchoGenerator, make_spec, make_store, read_rows

TEXTS = ["one", "two words", "drei Wörter hier", "四", "", "   ", None]
CUTS: list[dict[str, Any]] = [
    {"by": "none"},
    {"by": "file"},
    {"by": "folder"},
    *({"by": "rows", "rows": rows} for rows in (1, 3, 100)),
]
dataset = st.lists(st.lists(st.sampled_from(TEXTS), max_size=6), min_size=1, max_size=3)


class Interrupted(Exception):
    pass


class FailingGenerator(EchoGenerator):
    """Breaks down after a number of requests."""

    def __init__(self, after: int):
        super().__init__()
        self.after = after

    def run(self, requests, on_step=None):
        def counted():
            for number, request in enumerate(requests):
                if number == self.after:
                    raise Interrupted
                yield request

        return super().run(counted(), on_step)


def write_files(folder: Path, files: list[list[str | None]]) -> None:
    for path in folder.rglob("*.jsonl"):
        path.unlink()
    for number, texts in enumerate(files):
        path = folder / f"part{number % 2}" / f"file{number}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def run_all(spec, generator) -> Counter:
    """All partitions through all stages; the table's rows, without where they stand."""
    store = make_store(spec)
    found: Counter = Counter()
    for key in sorted(plan_partitions(spec, store)):
        ingest_partition(spec, store, key)
        format_partition(spec, store, key, spec.generator)
        complete_partition(spec, store, key, lambda: generator, "model")
        join_partition(spec, store, key)
        rows = read_rows(store, OUTPUT, key)
        order = [(row["row_index"], row["sample_index"]) for row in rows]
        assert order == sorted(order)
        assert len(set(order)) == len(order)
        for row in rows:
            if row["seed"] is not None:
                assert row["seed"] == request_seed(7, row["row_id"], row["sample_index"])
            found[row["text"], row["sample_index"], row["status"]] += 1
    return found


@given(
    before=dataset,
    after=dataset,
    cuts=st.tuples(st.sampled_from(CUTS), st.sampled_from(CUTS)),
    fails_after=st.none() | st.integers(0, 8),
    temperature=st.sampled_from([0.0, 1.0]),
)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_every_row_comes_out_as_often_as_asked_for(
    tmp_path_factory, toy, before, after, cuts, fails_after, temperature
):
    """Conservation and order hold over a changed dataset, another cut and an interruption."""
    root = tmp_path_factory.mktemp("way")

    def spec(cut):
        return make_spec(
            root,
            source={"path": f"{root}/rows"},
            partitions=cut,
            generator={"model": str(toy)},
            sampling={"n": 2, "temperature": temperature, "seed": 7, "max_new_tokens": 4},
            output={"flush_rows": 2},
        )

    def expected(files) -> Counter:
        counts: Counter = Counter()
        for text in (text for texts in files for text in texts):
            status = "invalid" if text is None else "stop" if text.strip() else "empty"
            counts.update((text, sample, status) for sample in range(2))
        return counts

    write_files(root / "rows", before)
    try:
        first = EchoGenerator() if fails_after is None else FailingGenerator(fails_after)
        found = run_all(spec(cuts[0]), first)
        assert found == expected(before)
    except Interrupted:
        pass
    write_files(root / "rows", after)
    again = EchoGenerator()
    assert run_all(spec(cuts[1]), again) == expected(after)
    idle = EchoGenerator()
    assert run_all(spec(cuts[1]), idle) == expected(after)
    assert idle.requests == []
