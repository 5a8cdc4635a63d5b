"""The lock on a machine's GPUs: across processes, by UUID, and free when its holder is gone."""

import logging
import os
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

from bulk_pipeline import ExLlamaV2Resource, gpu_lock
from bulk_pipeline.engine import loading
from bulk_pipeline.gpu_lock import check_taken, hold_gpus, list_gpus, take_gpus, visible_gpus
from bulk_pipeline.spec import GeneratorSettings

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
TAKE = f"""
import os, sys
from pathlib import Path
sys.path.insert(0, {str(Path(gpu_lock.__file__).parent)!r})
import gpu_lock
gpu_lock.POLL_SECONDS = 0.01
folder = Path(sys.argv[1])
for round in range(int(sys.argv[2])):
    with gpu_lock.take_gpus(1, "run 7 of tickets", folder=folder) as taken:
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ",".join(taken)
        mark = folder / f"used-{{taken[0]}}"
        mark.touch(exist_ok=False)  # fails if somebody else has it
        print(*taken, flush=True)
        if sys.argv[3:]:
            sys.stdin.read()
        mark.unlink()
"""
H200 = "GPU {index}: NVIDIA H200 (UUID: GPU-{index}aa-bb)"


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A driver that shows three GPUs; its file may be written anew."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpu_lock, "_uses_cuda", lambda: False)
    path = tmp_path / "bin" / "nvidia-smi"
    path.parent.mkdir()
    show(path, *(H200.format(index=index) for index in range(3)))
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
    return path


def show(nvidia_smi: Path, *lines: str) -> None:
    nvidia_smi.write_text("#!/bin/sh\ncat <<'END'\n" + "\n".join(lines) + "\nEND\n")
    nvidia_smi.chmod(0o755)


def start_taking(folder: Path, rounds: int, *stays: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", TAKE, str(folder), str(rounds), *stays]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


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
    monkeypatch.setattr(gpu_lock, "list_gpus", list)
    monkeypatch.setattr(gpu_lock, "visible_gpus", lambda: ["one"])
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
    monkeypatch.setattr(gpu_lock, "list_gpus", list)
    monkeypatch.setattr(gpu_lock, "visible_gpus", lambda: ["one"])
    monkeypatch.setattr(loading, "resolve_device", lambda settings: "cuda")

    def load(settings: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(loading, "load_generator", load)
    with pytest.raises(RuntimeError, match="no memory"):
        ExLlamaV2Resource(model="m").generator()
    with other_process(tmp_path / "bulk_pipeline"):
        pass


def test_processes_take_a_gpu_each_and_never_the_same(tmp_path: Path, nvidia_smi: Path) -> None:
    folder = tmp_path / "locks"
    processes = [start_taking(folder, 15) for _ in range(6)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * 6, outputs
    taken = [line for output, _ in outputs for line in output.split()]
    assert len(taken) == 90
    assert set(taken) == {"GPU-0aa-bb", "GPU-1aa-bb", "GPU-2aa-bb"}


def test_a_killed_process_gives_its_gpu_back(tmp_path: Path, nvidia_smi: Path) -> None:
    folder, others = tmp_path / "locks", []
    for _ in range(3):
        others.append(start_taking(folder, 1, "stays"))
        assert others[-1].stdout is not None
        assert others[-1].stdout.readline().startswith("GPU-")
    try:
        with (
            pytest.raises(TimeoutError, match="1 of 3 GPUs is held by run 7 of tickets") as error,
            take_gpus(1, "me", 0, folder),
        ):
            pytest.fail("four processes hold three GPUs")
        assert str(others[0].pid) in str(error.value)
        others[1].kill()
        others[1].wait()
        with take_gpus(1, "me", 0, folder) as taken:
            assert taken == ["GPU-1aa-bb"]
    finally:
        for other in others:
            other.kill()
            other.communicate()


def test_two_gpus_are_taken_at_once_or_none(tmp_path: Path, nvidia_smi: Path) -> None:
    with hold_gpus(["GPU-1aa-bb"], "me", 0, tmp_path), other_process(tmp_path):
        command = [sys.executable, "-c", TAKE.replace("take_gpus(1", "take_gpus(2")]
        done = subprocess.run([*command, str(tmp_path), "1"], capture_output=True, text=True)
        assert done.stdout == "GPU-0aa-bb GPU-2aa-bb\n", done.stderr


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        (None, [0, 1, 2]),
        ("1", [1]),
        ("2,0", [2, 0]),
        ("GPU-1aa", [1]),
        (" GPU-2aa-bb , 1", [2, 1]),
        ("", []),
        ("-1", []),
        ("0,7,1", [0]),
        ("GPU-", []),
    ],
)
def test_an_outer_choice_of_gpus_is_heeded(
    nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, gpus: list[int]
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert list_gpus() == [f"GPU-{index}aa-bb" for index in gpus]


def test_a_gpu_that_is_cut_up_is_its_instances(nvidia_smi: Path) -> None:
    show(
        nvidia_smi,
        H200.format(index=0),
        "  MIG 1g.18gb     Device  0: (UUID: MIG-11-22)",
        "  MIG 1g.18gb     Device  1: (UUID: MIG-33-44)",
    )
    assert list_gpus() == ["MIG-11-22", "MIG-33-44"]


@pytest.mark.parametrize("script", ["exit 9", "echo NVIDIA-SMI has failed"])
def test_without_the_drivers_answer_what_cuda_sees_is_held(
    tmp_path: Path, nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, script: str,
) -> None:  # fmt: skip
    nvidia_smi.write_text(f"#!/bin/sh\n{script}\n")
    monkeypatch.setattr(gpu_lock, "visible_gpus", lambda: ["one", "two"])
    with take_gpus(1, "me", 0, tmp_path) as taken:
        assert taken == ["one", "two"]
        assert "CUDA_VISIBLE_DEVICES" not in os.environ
    assert "1 to be taken, but this process keeps all 2 that it sees" in caplog.text
    assert "nvidia-smi does not name them" in caplog.text


def test_a_process_that_uses_cuda_keeps_what_it_sees(
    tmp_path: Path, nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_lock, "_uses_cuda", lambda: True)
    monkeypatch.setattr(gpu_lock, "visible_gpus", lambda: ["1aa-bb"])
    with take_gpus(1, "me", 0, tmp_path) as taken:
        assert taken == ["1aa-bb"]
        done = start_taking(tmp_path, 1).communicate()
        assert done[0] == "GPU-0aa-bb\n"
    with pytest.raises(ValueError, match="3 to be taken, and this process sees 1"):
        take_gpus(3, "me", 0, tmp_path).__enter__()


def test_more_gpus_than_there_are_is_an_error(
    tmp_path: Path, nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    expected = r"3 to be taken, and this process may use 2 \(CUDA_VISIBLE_DEVICES=0,2\); lower it"
    with pytest.raises(ValueError, match=expected), take_gpus(3, "me", 0, tmp_path):
        pass
    with take_gpus(None, "me", 0, tmp_path) as taken:
        assert taken == ["GPU-0aa-bb", "GPU-2aa-bb"]
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-0aa-bb,GPU-2aa-bb"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,2"


def test_a_choice_that_came_too_late_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_lock, "visible_gpus", lambda: ["0aa-bb"])
    check_taken(["GPU-0aa-bb"])
    with pytest.raises(ValueError, match="GPU-1aa-bb taken, but CUDA sees 0aa-bb, since this"):
        check_taken(["GPU-1aa-bb"])


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({}, 1),
        ({"gpus": 3}, 3),
        ({"gpu_split": [20, 24]}, 2),
        ({"tensor_parallel": True}, None),
        ({"tensor_parallel": True, "gpus": 2}, 2),
    ],
    ids=str,
)
def test_how_many_gpus_a_model_takes(settings: dict[str, object], count: int | None) -> None:
    assert GeneratorSettings.model_validate({"model": "m", **settings}).gpu_count == count


def test_a_split_names_the_gpus_that_are_taken() -> None:
    with pytest.raises(ValueError, match=r"gpu_split must name 2 GPUs, as gpus has it, got \[1.0"):
        GeneratorSettings(model="m", gpus=2, gpu_split=[1, 2, 3])


def test_to_ask_whether_there_is_a_gpu_does_not_start_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch goes by the driver, from the package's import on."""
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: 2)
    assert loading.resolve_device(GeneratorSettings(model="m")) == "cuda"
