"""On which CUDA stream a model's work runs, and marks in it; nothing of either on a CPU."""

from typing import Any

import torch
from exllamav2.device import set_device_streams

from bulk_pipeline.engine.paged_model import PagedModel


def stream_of(model: PagedModel) -> Any:
    """Return a context in which the model's work runs.

    exllamav2 runs everything on streams of its own, for each thread anew.
    """
    stream = getattr(model, "stream", None)
    if stream is not None:
        set_device_streams()
    elif model.device.type == "cuda":  # it need not be the current device
        stream = torch.cuda.current_stream(model.device)
    return torch.cuda.stream(stream)


def mark(device: torch.device) -> torch.cuda.Event | None:
    """Mark this place in the device's work; None where the host does the work itself."""
    if device.type == "cpu":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
