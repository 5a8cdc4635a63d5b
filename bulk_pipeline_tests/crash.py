"""Runs the four stages in processes that die where a test says.

`python -m bulk_pipeline_tests.crash` imports everything once and then forks a child for each
order it reads, a JSON line: what the child does, and where it ends. It answers with how the child
ended. Children share nothing but what is on the disk.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from bulk_pipeline.engine.loading import load_generator
from bulk_pipeline.engine.request import Completion, Request, Status
from bulk_pipeline.spec import BulkInferenceSpec, load_spec
from bulk_pipeline.stages.complete import complete_partition
from bulk_pipeline.stages.format import format_partition
from bulk_pipeline.stages.generator_protocol import CHECK_ID, Generator
from bulk_pipeline.stages.ingest import ingest_partition
from bulk_pipeline.stages.join import join_partition
from bulk_pipeline.storage import faults
from bulk_pipeline.storage.store import Store

KEY = "all"


class Crashes:
    """The process that forks; use as a context manager."""

    def __enter__(self) -> "Crashes":
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bulk_pipeline_tests.crash"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *exception: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def run(self, spec: dict[str, Any], **order: Any) -> dict[str, Any]:
        """Run the stages in a new process.

        Parameters
        ----------
        fault
            As `faults.fault`; none by default.
        kill_after
            Seconds until a KILL from outside.
        generator
            ``toy`` (the real one over the model), or ``answer`` (a trivial one).
        poison
            Last word of the prompt at which the trivial one kills the process.
        redo, seconds
            As they say; seconds is what a step of the trivial one takes.
        folder
            Where the processes note what they did; by default beside the tables.

        Returns
        -------
        dict
            ``signal`` or ``exit`` of the process and its ``max_rss``; unless it was stopped, the
            ``error``, the ``metadata`` of the reports and the ``points`` passed.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"spec": spec, **order}), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())


class AnswerGenerator:
    """Answers with the number of prompt tokens; dies at prompts that end with the poison's id."""

    provenance: ClassVar[dict[str, Any]] = {"generator": "answer"}

    def __init__(self, poison: int | None = None, batch: int = 4, seconds: float = 0.0):
        self._poison, self._batch, self._seconds = poison, batch, seconds

    def run(
        self, requests: Iterable[Request], on_step: Callable[[], None] | None = None
    ) -> Iterator[Completion]:
        waiting: list[Request] = []
        for request in requests:
            waiting.append(request)
            if len(waiting) >= self._batch:
                yield from self._step(waiting)
                waiting = []
        yield from self._step(waiting)

    def _step(self, requests: list[Request]) -> Iterator[Completion]:
        time.sleep(self._seconds)
        for request in requests:
            if self._poison is not None and self._poison in request.input_ids:
                os.kill(os.getpid(), signal.SIGKILL)
        for request in requests:
            length = len(request.input_ids)
            yield Completion(
                request.request_id,
                Status.STOP,
                text=f"{length} tokens, {request.input_ids[-4:]}",
                token_ids=(length,),
                prompt_tokens=length,
            )


class _Counted:
    """A generator that notes each completion it hands out, in a file."""

    def __init__(self, generator: Generator, log: Path):
        self.provenance, self._generator, self._log = generator.provenance, generator, log

        if hasattr(generator, "answer_ids"):
            self.answer_ids = generator.answer_ids

    def run(
        self,
        requests: Iterable[Request],
        on_step: Callable[[], None] | None = None,
        **go_on: Any,
    ) -> Iterator[Completion]:
        with self._log.open("a", buffering=1) as log:
            for completion in self._generator.run(requests, on_step, **go_on):
                if completion.request_id != CHECK_ID:
                    log.write(f"{completion.request_id}\n")
                yield completion


def run_stages(
    spec: BulkInferenceSpec,
    generator: Callable[[], Generator],
    redo: Any = "none",
    fingerprint: str = "model",
) -> list[dict[str, Any]]:
    """All four stages of the only partition; their metadata."""
    store = Store(spec.output.root, spec.name)
    assert spec.generator is not None
    reports = [
        ingest_partition(spec, store, KEY),
        format_partition(spec, store, KEY, spec.generator),
        complete_partition(spec, store, KEY, generator, fingerprint, redo=redo),
        join_partition(spec, store, KEY),
    ]
    return [report.metadata for report in reports]


def _child(order: dict[str, Any], generators: dict[str, Generator], answer: Path) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Dagster does: an exception
    faults.fault = order.get("fault", "")
    faults.points_passed.clear()
    spec = load_spec(order["spec"])
    finished = answer.parent / "finished"
    result: dict[str, Any] = {"error": None}
    inner: Generator = (
        generators["toy"]
        if order.get("generator", "toy") == "toy"
        else AnswerGenerator(order.get("poison"), seconds=order.get("seconds", 0.0))
    )
    try:
        result["metadata"] = run_stages(
            spec, lambda: _Counted(inner, finished), order.get("redo", "none")
        )
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"
    result["points"] = dict(faults.points_passed)
    answer.write_text(json.dumps(result, default=str))


def _serve() -> None:
    """Fork a child for each line of the input; whatever it loads first, they all share."""
    import torch

    torch.set_num_threads(1)  # no threads before a fork
    generators: dict[str, Generator] = {}
    for line in sys.stdin:
        order = json.loads(line)
        spec = load_spec(order["spec"])
        folder = Path(order.get("folder") or Path(spec.output.root).parent)
        folder.mkdir(parents=True, exist_ok=True)
        if order.get("generator", "toy") == "toy" and not generators:
            assert spec.generator is not None
            generators["toy"] = load_generator(spec.generator)
        answer = folder / "answer.json"
        answer.unlink(missing_ok=True)
        child = os.fork()
        if not child:
            code = 1
            try:
                _child(order, generators, answer)
                code = 0
            except SystemExit as stop:
                code = int(stop.code or 0)
            finally:
                os._exit(code)
        if (seconds := order.get("kill_after")) is not None:
            time.sleep(seconds)
            os.kill(child, signal.SIGKILL)
        _, status, usage = os.wait4(child, 0)
        result = json.loads(answer.read_text()) if answer.exists() else {}
        result["signal"] = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        result["exit"] = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        result["max_rss"] = usage.ru_maxrss
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    _serve()
