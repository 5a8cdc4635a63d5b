"""What a stage reports of its work on one partition."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StageReport:
    """What a stage did to one partition, as `assets.py` shows it."""

    partition: str
    rows: int
    path: str
    metadata: dict[str, Any]
