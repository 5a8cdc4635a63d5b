"""Where the time of a run goes: the phases of a step by clock and by CUDA events, and the kernels.

A phase is a call from the loop into the model or the sampler. Its host seconds are those until the
call returns, its GPU seconds those between two events on its stream around the call. Whatever is
left of the run's seconds passed outside of all phases, in the loop itself.
"""

import functools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Self

import torch

PREFILL, MODEL, SAMPLING = "prefill", "model", "sampling"
# What the loops call, where it exists: a class of the module or the module itself, and the phase.
CALLS = (
    ("exllamav2.model", "ExLlamaV2", "forward_chunk", MODEL),
    ("bulk_pipeline.engine.cpu", "CpuModel", "forward_chunk", MODEL),
    ("bulk_pipeline.engine.generator", None, "sample", SAMPLING),
    ("bulk_pipeline.engine.sampling", "Sampler", "sample", SAMPLING),
)


class Phases:
    """Times the calls into models and samplers while it is entered; the outermost call counts."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._is_inside = False
        self._thread = threading.get_ident()
        self._undo: list[tuple[Any, str, Any]] = []
        self._host: dict[str, list[float]] = {}
        self._events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}

    def __enter__(self) -> Self:
        for owner, name, phase in _calls():
            self._undo.append((owner, name, getattr(owner, name)))
            setattr(owner, name, self._timed(getattr(owner, name), phase))
        return self

    def __exit__(self, *error: object) -> None:
        for owner, name, function in reversed(self._undo):
            setattr(owner, name, function)

    def table(self, seconds: float, steps: int) -> str:
        """Return the phases of a run as Markdown."""
        lines = [
            "| phase | calls | host s | GPU s | share of the run | ms a step |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        rest = seconds
        share = "| {} | {} | {:.2f} | {} | {:.1%} | {:.2f} |".format
        for phase, durations in self._host.items():
            host, gpu = sum(durations), self._gpu_seconds(phase)
            taken = gpu if self._on_gpu else host
            rest -= taken
            on_gpu = f"{gpu:.2f}" if self._on_gpu else ""
            per_step = 1000 * taken / steps
            lines.append(share(phase, len(durations), host, on_gpu, taken / seconds, per_step))
        host = seconds - sum(map(sum, self._host.values()))
        on_gpu = f"{rest:.2f}" if self._on_gpu else ""
        per_step = 1000 * rest / steps
        lines.append(share("outside of these", "", host, on_gpu, rest / seconds, per_step))
        all_steps = f"{steps} steps"
        lines.append(share("all", all_steps, seconds, "", 1, 1000 * seconds / steps))
        return "\n".join(lines)

    def _gpu_seconds(self, phase: str) -> float:
        if self._on_gpu:
            torch.cuda.synchronize()
        return sum(a.elapsed_time(b) for a, b in self._events.get(phase, [])) / 1000

    def _timed(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside or threading.get_ident() != self._thread:
                return function(*args, **kwargs)
            self._is_inside = True
            first = self._event()
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._is_inside = False
                name = PREFILL if kwargs.get("preprocess_only") else phase
                self._host.setdefault(name, []).append(time.perf_counter() - started)
                if first is not None:
                    self._events.setdefault(name, []).append((first, self._event()))

        return timed

    def _event(self) -> Any:
        if not self._on_gpu:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def kernel_table(run: Callable[[], Any], most: int) -> str:
    """Run something under the profiler; return the kernels that took most of the GPU's time."""
    from torch.profiler import ProfilerActivity, profile

    started = time.perf_counter()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    found = [event for event in profiler.key_averages() if event.self_device_time_total]
    found.sort(key=lambda event: -event.self_device_time_total)
    busy = sum(event.self_device_time_total for event in found) / 1e6
    lines = [
        f"A shorter run under the profiler: {seconds:.2f} s, the GPU busy for {busy:.2f} s.",
        "",
        "| kernel | calls | s | share of the busy time |",
        "| --- | --- | --- | --- |",
    ]
    for event in found[:most]:
        took = event.self_device_time_total / 1e6
        name = event.key.replace("|", " ")[:80]
        lines.append(f"| {name} | {event.count} | {took:.3f} | {took / busy:.1%} |")
    return "\n".join(lines)


def _calls() -> list[tuple[Any, str, str]]:
    """Return what to time among the modules that are loaded: owner, name, phase."""
    calls: list[tuple[Any, str, str]] = []
    for module_name, class_name, name, phase in CALLS:
        owner = sys.modules.get(module_name)
        if class_name is not None:
            owner = getattr(owner, class_name, None)
        if hasattr(owner, name):
            calls.append((owner, name, phase))
    engine = [m for n, m in sys.modules.items() if n.startswith("bulk_pipeline.engine.")]
    classes = {c for module in engine for c in vars(module).values() if isinstance(c, type)}
    for paged_model in classes:  # the models of the project's own loop
        if {"prefill", "decode"} <= vars(paged_model).keys():
            calls += [(paged_model, "prefill", PREFILL), (paged_model, "decode", MODEL)]
    return calls
