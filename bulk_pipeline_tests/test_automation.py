"""What runs by itself: what the sensor and the schedule ask for, without running it."""

import json
import os
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from bulk_pipeline import build_bulk_inference_defs, cli
from bulk_pipeline.automation import (
    RANGE_TAGS,
    build_run_requests,
    contiguous_ranges,
    look_at_source,
)
from bulk_pipeline.stages import partitions
from bulk_pipeline.stages.ingest import ingest_partition
from bulk_pipeline.storage.schemas import OUTPUT, RAW_DATASET, TABLES
from bulk_pipeline_tests.factories import make_spec, make_store

NOW = time.time()


def write(root: Path, name: str, text: str = "a", age_seconds: float = 3600) -> None:
    path = root / "in" / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"text": text}) + "\n")
    os.utime(path, (NOW - age_seconds, NOW - age_seconds))


def values(root: Path, **changes: Any) -> dict[str, Any]:
    return {
        "name": "data",
        "source": {"path": f"{root}/in"},
        "partitions": {"by": "file"},
        "prompt": {"column": "text"},
        "generator": {"model": f"{root}/model"},
        "output": {"root": f"{root}/tables"},
    } | changes


class Watcher:
    """Looks at the source as the sensor does, from one look to the next."""

    def __init__(self, root: Path, **changes: Any):
        self.spec = make_spec(root, **values(root, **changes))
        self.store = make_store(self.spec)
        self.registered: list[str] = []
        self.cursor: str | None = None

    def look(self) -> Any:
        news = look_at_source(self.spec, self.store, self.registered, self.cursor, NOW)
        self.cursor = news.cursor
        self.registered += news.new
        return news

    def finish(self, key: str) -> None:
        """Ingest for real; the other tables are finished and empty."""
        ingest_partition(self.spec, self.store, key)
        for table in TABLES:
            if table != RAW_DATASET:
                with self.store.partition(table, key).writer() as writer:
                    writer.commit([], complete=True)


def test_new_files_are_new_once(tmp_path: Path) -> None:
    write(tmp_path, "b")
    write(tmp_path, "a")
    watcher = Watcher(tmp_path)
    assert watcher.look().new == ["a", "b"]
    assert watcher.look().new == []
    write(tmp_path, "c")
    assert watcher.look().new == ["c"]


def test_a_file_being_written_waits_until_two_looks_find_it_the_same(tmp_path: Path) -> None:
    write(tmp_path, "a")
    write(tmp_path, "b", "begun", age_seconds=20)
    watcher = Watcher(tmp_path)
    news = watcher.look()
    assert (news.new, news.unsettled) == (["a"], ["b.jsonl"])
    write(tmp_path, "b", "begun and grown", age_seconds=10)
    news = watcher.look()
    assert (news.new, news.unsettled) == ([], ["b.jsonl"])
    news = watcher.look()
    assert (news.new, news.unsettled) == (["b"], [])
    news = watcher.look()
    assert (news.new, news.unsettled) == ([], [])


def test_rows_of_a_file_being_written_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "a", age_seconds=20)
    watcher = Watcher(tmp_path, partitions={"by": "rows", "rows": 10})
    with monkeypatch.context() as patch:
        patch.setattr(partitions, "_count_rows", lambda *args: pytest.fail("counted"))
        assert watcher.look().new == []
    assert len(watcher.look().new) == 1


def test_nothing_but_the_listing_is_read_where_nothing_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "a")
    watcher = Watcher(tmp_path)
    watcher.look()
    monkeypatch.setattr(watcher.store, "read_json", lambda name: pytest.fail(f"{name} was read"))
    assert watcher.look().new == []


def test_a_changed_file_is_reported_once_and_a_touched_one_never(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write(tmp_path, name)
    watcher = Watcher(tmp_path)
    for key in watcher.look().new:
        watcher.finish(key)
    assert watcher.look().changed == {}
    write(tmp_path, "a", age_seconds=1000)
    write(tmp_path, "b", "other", age_seconds=1000)
    assert watcher.look().changed == {"b": "source changed: b.jsonl"}
    assert watcher.look().changed == {}


def test_a_removed_file_is_reported_once_and_its_results_stay(tmp_path: Path) -> None:
    write(tmp_path, "a")
    write(tmp_path, "b")
    watcher = Watcher(tmp_path)
    for key in watcher.look().new:
        watcher.finish(key)
    (tmp_path / "in/b.jsonl").unlink()
    assert watcher.look().removed == ["b.jsonl"]
    assert watcher.look().removed == []
    assert watcher.store.partition_keys(OUTPUT) == ["a", "b"]


def test_a_folder_waits_for_all_its_files(tmp_path: Path) -> None:
    write(tmp_path, "x/1")
    write(tmp_path, "x/2", age_seconds=1)
    write(tmp_path, "y/1")
    watcher = Watcher(tmp_path, partitions={"by": "folder"})
    assert watcher.look().new == ["y"]
    assert watcher.look().new == ["x"]


@pytest.mark.parametrize(
    ("keys", "order", "max_size", "expected"),
    [
        ("", "abcdef", None, []),
        ("abc", "abcdef", None, ["abc"]),
        ("ca", "abcdef", None, ["a", "c"]),
        ("bcd", "abcdef", 2, ["bc", "d"]),
        ("ef", "eabcdf", None, ["e", "f"]),
        ("x", "abcdef", None, []),
    ],
)
def test_ranges_are_neighbours_in_the_order(
    keys: str, order: str, max_size: int | None, expected: list[str]
) -> None:
    assert ["".join(range_) for range_ in contiguous_ranges(keys, order, max_size)] == expected


@given(st.permutations("abcdefgh"), st.sets(st.sampled_from("abcdefgh")), st.integers(1, 9))
def test_ranges_hold_each_key_once_and_no_other(order, keys, max_size) -> None:
    ranges = contiguous_ranges(keys, order, max_size)
    assert [key for range_ in ranges for key in range_] == [key for key in order if key in keys]
    for range_ in ranges:
        assert len(range_) <= max_size
        first = order.index(range_[0])
        assert list(order[first : first + len(range_)]) == range_


def test_a_run_request_names_the_ends_of_its_range(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, partitions={"by": "file"})
    requests = build_run_requests(spec, {"a", "c", "d"}, ["a", "b", "c", "d"], "@1")
    assert [tuple(request.tags[tag] for tag in RANGE_TAGS) for request in requests] == [
        ("a", "a"),
        ("c", "d"),
    ]
    assert len({request.run_key for request in requests}) == 2


# --- as Dagster sees it ------------------------------------------------------------------------


def evaluate(defs: dg.Definitions, instance: dg.DagsterInstance, cursor: str | None = None) -> Any:
    """One evaluation of the sensor; what it adds to the partitions is added."""
    sensor = defs.resolve_sensor_def("data_new_partitions")
    with dg.build_sensor_context(instance=instance, cursor=cursor, definitions=defs) as context:
        result = sensor.evaluate_tick(context)
    for request in result.dynamic_partitions_requests or []:
        instance.add_dynamic_partitions(request.partitions_def_name, request.partition_keys)
    return result


def ranges(requests: Any) -> list[tuple[str, str]]:
    return [tuple(request.tags[tag] for tag in RANGE_TAGS) for request in requests]


def test_the_sensor_asks_for_one_run_over_all_new_partitions(tmp_path: Path) -> None:
    for name in ("c", "a", "b"):
        write(tmp_path, name)
    defs = build_bulk_inference_defs(values(tmp_path))
    with dg.DagsterInstance.ephemeral() as instance:
        first = evaluate(defs, instance)
        assert ranges(first.run_requests) == [("a", "c")]
        second = evaluate(defs, instance, first.cursor)
        assert second.run_requests == []
        assert "nothing new" in second.skip_message
        write(tmp_path, "aa")  # sorts between the others, is last in Dagster's order
        third = evaluate(defs, instance, second.cursor)
        assert ranges(third.run_requests) == [("aa", "aa")]
        assert instance.get_dynamic_partitions("data_partitions") == ["a", "b", "c", "aa"]


def test_the_sensor_cuts_new_partitions_into_runs_where_runs_are_limited(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write(tmp_path, name)
    defs = build_bulk_inference_defs(values(tmp_path, partitions={"by": "file", "max_per_run": 2}))
    with dg.DagsterInstance.ephemeral() as instance:
        assert ranges(evaluate(defs, instance).run_requests) == [("a", "b"), ("c", "c")]


def test_the_sensor_says_what_is_stale_and_what_is_gone(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path, name)
    defs = build_bulk_inference_defs(values(tmp_path))
    watcher = Watcher(tmp_path)
    with dg.DagsterInstance.ephemeral() as instance:
        cursor = evaluate(defs, instance).cursor
        for key in ("a", "b"):
            watcher.finish(key)
        write(tmp_path, "a", "other")
        (tmp_path / "in/b.jsonl").unlink()
        result = evaluate(defs, instance, cursor)
        assert result.run_requests == []
        assert "a (source changed: a.jsonl)" in result.skip_message
        assert "results stay: b.jsonl" in result.skip_message
        (observation,) = result.asset_events
        assert (observation.asset_key.path, observation.partition) == (["data", RAW_DATASET], "a")


def test_the_sensor_waits_for_the_first_file(tmp_path: Path) -> None:
    defs = build_bulk_inference_defs(values(tmp_path))
    with dg.DagsterInstance.ephemeral() as instance:
        result = evaluate(defs, instance)
        assert "no files match" in result.skip_message


def test_the_only_partition_is_asked_for_once(tmp_path: Path) -> None:
    write(tmp_path, "a")
    defs = build_bulk_inference_defs(values(tmp_path, partitions={"by": "none"}))
    with dg.DagsterInstance.ephemeral() as instance:
        first = evaluate(defs, instance)
        assert [request.partition_key for request in first.run_requests] == ["all"]
        assert evaluate(defs, instance, first.cursor).run_requests == []


def due(defs: dg.Definitions, instance: dg.DagsterInstance) -> Any:
    schedule = defs.resolve_schedule_def("data_missing_or_stale")
    with dg.build_schedule_context(
        instance=instance,
        resources=defs.resources,
        scheduled_execution_time=datetime.now(),
    ) as context:
        return schedule.evaluate_tick(context)


def scheduled(root: Path, **changes: Any) -> dg.Definitions:
    return build_bulk_inference_defs(values(root, automation={"cron": "0 2 * * *"}, **changes))


def test_there_is_a_schedule_only_where_there_is_a_cron_line(tmp_path: Path) -> None:
    assert not list(build_bulk_inference_defs(values(tmp_path)).schedules or [])
    (schedule,) = scheduled(tmp_path).schedules or []
    assert schedule.default_status == dg.DefaultScheduleStatus.RUNNING


def test_the_schedule_registers_what_is_new_and_asks_in_the_order_of_registration(
    tmp_path: Path,
) -> None:
    for name in ("a", "b", "c", "d"):
        write(tmp_path, name)
    write(tmp_path, "e", age_seconds=NOW - time.time() + 1)  # may still be being written
    defs = scheduled(tmp_path)
    with dg.instance_for_test() as instance:
        instance.add_dynamic_partitions("data_partitions", ["d", "gone", "b", "a"])
        assert ranges(due(defs, instance).run_requests) == [("d", "d"), ("b", "c")]
        registered = ["d", "gone", "b", "a", "c"]
        assert instance.get_dynamic_partitions("data_partitions") == registered


def test_the_schedule_waits_for_a_run_of_the_dataset(tmp_path: Path) -> None:
    write(tmp_path, "a")
    defs = scheduled(tmp_path)
    with dg.instance_for_test() as instance:
        run = instance.create_run_for_job(defs.resolve_job_def("data_job"))
        result = due(defs, instance)
        assert not result.run_requests
        assert run.run_id in result.skip_message


def test_conditions_and_the_sensor_do_not_both_run_new_partitions(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path, name)
    defs = build_bulk_inference_defs(values(tmp_path, automation={"mode": "conditions"}))
    assert {sensor.name for sensor in defs.sensors or []} == {
        "data_new_partitions",
        "data_automation",
    }
    with dg.DagsterInstance.ephemeral() as instance:
        first = evaluate(defs, instance)
        assert first.run_requests == []
        assert instance.get_dynamic_partitions("data_partitions") == ["a", "b"]
        watcher = Watcher(tmp_path)
        for key in ("a", "b"):
            watcher.finish(key)
        write(tmp_path, "b", "other")
        (request,) = evaluate(defs, instance, first.cursor).run_requests
        assert request.asset_selection == [dg.AssetKey(["data", RAW_DATASET])]
        assert ranges([request]) == [("b", "b")]


def test_conditions_ask_for_all_tables_of_a_new_partition(tmp_path: Path) -> None:
    write(tmp_path, "a")
    defs = build_bulk_inference_defs(values(tmp_path, automation={"mode": "conditions"}))
    with dg.DagsterInstance.ephemeral() as instance:
        nothing = dg.evaluate_automation_conditions(defs, instance)
        evaluate(defs, instance)
        result = dg.evaluate_automation_conditions(defs, instance, cursor=nothing.cursor)
        for table in TABLES:
            asset = dg.AssetKey(["data", table])
            assert result.get_requested_partitions(asset) == {"a"}, table


def test_conditions_and_a_schedule_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="automation: set cron or mode: conditions, not both"):
        build_bulk_inference_defs(
            values(tmp_path, automation={"mode": "conditions", "cron": "@daily"})
        )


@pytest.mark.parametrize(
    "automation", [{"cron": "at night"}, {"cron": "@daily", "timezone": "Nowhere"}]
)
def test_a_wrong_cron_line_is_refused_in_one_line(tmp_path: Path, automation: Any) -> None:
    with pytest.raises(ValueError, match=r"^automation\.cron must be .*; correct it$") as error:
        build_bulk_inference_defs(values(tmp_path, automation=automation))
    assert automation["cron"] in str(error.value)


def test_status_prints_what_is_missing_stale_or_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        write(tmp_path, name)
    watcher = Watcher(tmp_path)
    for key in ("b", "c"):
        watcher.finish(key)
    write(tmp_path, "b", "other")
    (tmp_path / "in/c.jsonl").unlink()
    (tmp_path / "status_module.py").write_text(
        "from bulk_pipeline import build_bulk_inference_defs\n"
        f"defs = build_bulk_inference_defs({values(tmp_path)!r})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    command = ["partitions", "status", "-m", "status_module"]
    done = CliRunner().invoke(cli.main, command)
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-4:] == [
        "data: 2 partitions, 2 missing or stale",
        "  a: missing",
        "  b: source changed: b.jsonl",
        "  c: its source is gone, its results stay",
    ]
    as_json = json.loads(CliRunner().invoke(cli.main, [*command, "--json"]).stdout)["data"]
    assert as_json["reasons"] == {"a": "missing", "b": "source changed: b.jsonl"}
    assert (as_json["keys"], as_json["removed"]) == (["a", "b"], ["c"])
    unknown = CliRunner().invoke(cli.main, [*command, "other"])
    assert unknown.exit_code == 2
    assert "no dataset other in status_module; there are data" in unknown.output


def test_without_automation_there_is_no_sensor(tmp_path: Path) -> None:
    defs = build_bulk_inference_defs(values(tmp_path, automation={"mode": "none"}))
    assert not list(defs.sensors or [])
