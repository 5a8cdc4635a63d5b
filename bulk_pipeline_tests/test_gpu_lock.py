"""The lock on a machine's GPUs: across processes, by UUID, and free when its holder is gone."""

import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import dagster as dg
import pytest
import torch

from bulk_pipeline import ExLlamaV2Resource, gpu_lock, resources
from bulk_pipeline.engine import loading
from bulk_pipeline.gpu_lock import hold_gpus, visible_gpus

# The module alone, by its path: importing the package takes seconds.
HOLD = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(gpu_lock.__file__).parent)!r})
from gpu_lock import hold_gpus
with hold_gpus(["one"], "run 7 of tickets", folder=Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def other_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the GPU ``one`` until its standard input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_another_process_waits_and_is_told_who_holds_the_gpu(tmp_path: Path) -> None:
    with other_process(tmp_path) as other:
        with (
            pytest.raises(TimeoutError, match="GPU one is held by run 7 of tickets") as error,
            hold_gpus(["one"], "me", 0, tmp_path),
        ):
            pytest.fail("two processes hold one GPU")
        assert re.search(rf"process {other.pid} on .*, since \d{{4}}-", str(error.value))
        assert "generator.gpu_wait_seconds" in str(error.value)
        with hold_gpus(["two"], "me", 0, tmp_path):
            pass


def test_it_waits_until_the_holder_lets_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with other_process(tmp_path) as other:
        waits = []

        def sleep(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 3:
                other.communicate("")

        monkeypatch.setattr(gpu_lock.time, "sleep", sleep)
        monkeypatch.setattr(gpu_lock, "REPORT_SECONDS", 0)
        with caplog.at_level(logging.WARNING), hold_gpus(["one"], "me", folder=tmp_path):
            pass
    assert len(waits) >= 3
    assert "waiting for GPU one, held by run 7 of tickets" in caplog.text


def test_the_gpu_is_free_when_its_holder_was_killed(tmp_path: Path) -> None:
    with other_process(tmp_path) as other:
        other.kill()
        other.wait()
        with hold_gpus(["one"], "me", 0, tmp_path):
            pass


def test_a_process_may_hold_its_gpu_twice(tmp_path: Path) -> None:
    code = HOLD.replace('"run 7 of tickets", ', '"other", 0, ').replace("sys.stdin.read()", "pass")
    command = [sys.executable, "-c", code, str(tmp_path)]
    with hold_gpus(["one"], "me", 0, tmp_path):
        with hold_gpus(["one"], "me too", 0, tmp_path):
            pass
        assert subprocess.run(command, capture_output=True).returncode != 0
    assert subprocess.run(command, capture_output=True).returncode == 0


def test_what_was_taken_is_let_go_if_another_gpu_is_held(tmp_path: Path) -> None:
    with other_process(tmp_path):
        with pytest.raises(TimeoutError), hold_gpus(["a", "one"], "me", 0, tmp_path):
            pass
        command = [sys.executable, "-c", HOLD.replace('"one"', '"a"'), str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, input="")
        assert done.stdout == "held\n"


def test_gpus_are_named_by_their_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"uuid-{index}")
    )
    assert visible_gpus() == ["uuid-0", "uuid-1"]


class _Engine:
    def close(self) -> None:
        pass


@pytest.mark.parametrize(("device", "is_held"), [("cuda", True), ("cpu", False)])
def test_the_model_holds_the_gpu_while_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, is_held: bool
) -> None:
    monkeypatch.setattr(gpu_lock.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(resources, "visible_gpus", lambda: ["one"])
    monkeypatch.setattr(loading, "resolve_device", lambda settings: device)
    monkeypatch.setattr(loading, "load_generator", lambda settings: _Engine())
    command = [sys.executable, "-c", HOLD.replace('tickets", ', 'tickets", 0, ')]
    command.append(str(tmp_path / "bulk_pipeline"))

    def others_can_hold_it() -> str:
        done = subprocess.run(command, capture_output=True, text=True, input="")
        return done.stderr if done.returncode else ""

    resource = ExLlamaV2Resource(model="m")
    with resource.yield_for_execution(dg.build_init_resource_context()):
        resource.generator("tickets")
        message = others_can_hold_it()
        assert ("GPU one is held by" in message) == is_held
        assert ("of tickets" in message) == is_held
    assert others_can_hold_it() == ""


def test_a_model_that_does_not_load_lets_go_of_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_lock.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(resources, "visible_gpus", lambda: ["one"])
    monkeypatch.setattr(loading, "resolve_device", lambda settings: "cuda")

    def load(settings: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(loading, "load_generator", load)
    with pytest.raises(RuntimeError, match="no memory"):
        ExLlamaV2Resource(model="m").generator()
    with other_process(tmp_path / "bulk_pipeline"):
        pass
