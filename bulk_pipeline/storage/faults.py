"""Fault points: the steps of a write at which a test may end the process.

A step says its name to `fault_point`. The process ends there only if `fault` names the step and
counts to this time of it; nothing happens elsewhere.
"""

import os
import signal
from collections import Counter

fault = os.environ.get("BULK_PIPELINE_FAULT", "")  # <point>:<nth time>:<KILL or TERM>, for tests
points_passed: Counter[str] = Counter()


def fault_point(name: str) -> None:
    """Mark a step at which a test may end the process; nothing happens elsewhere."""
    points_passed[name] += 1
    if fault and fault.startswith(f"{name}:{points_passed[name]}:"):
        os.kill(os.getpid(), signal.Signals[f"SIG{fault.rpartition(':')[2]}"])
