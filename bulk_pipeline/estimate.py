"""Time and cost of a run, from a rate that an earlier run measured or that is given."""

from dataclasses import dataclass
from typing import Any

from bulk_pipeline.storage.partition import Partition
from bulk_pipeline.storage.schemas import COMPLETIONS
from bulk_pipeline.storage.store import Store

SHORT_RUN_TOKENS = 1000  # a run that made fewer says little of the rate


@dataclass(frozen=True, slots=True)
class Rate:
    """Completion tokens a second, and how it is known."""

    tokens_per_second: float
    source: str
    tokens_per_request: float | None = None


@dataclass(frozen=True, slots=True)
class LastRun:
    """The record of the last run that says something of the rate."""

    record: dict[str, Any]
    is_same_model: bool

    def rate(self) -> Rate:
        """What it measured."""
        run = self.record
        device = run["settings"].get("device", "an unknown device")
        source = f"measured over {run['completion_tokens']} tokens on {device}"
        return Rate(
            run["completion_tokens"] / max(run["seconds"], 1e-9),
            source if self.is_same_model else f"{source}, with another model",
            run["completion_tokens"] / max(run["done"], 1),
        )


@dataclass(frozen=True, slots=True)
class Estimate:
    """Time and cost: expected, and at most (every answer as long as it may be)."""

    requests: int
    expected_tokens: float
    most_tokens: int
    seconds: float | None
    most_seconds: float | None
    cost: float | None
    most_cost: float | None


def find_last_run(store: Store, fingerprint: str | None) -> LastRun | None:
    """The last run of the dataset that says something of the rate; of this model, if any was."""
    partitions = (store.partition(COMPLETIONS, key) for key in store.partition_keys(COMPLETIONS))
    runs = [
        LastRun(record, manifest.meta.get("made_with", {}).get("model") == fingerprint)
        for manifest in store.read_many(Partition.sound_manifest, partitions)
        if manifest
        for record in manifest.meta.get("runs", [])
        if record["completion_tokens"]
    ]

    def worth(run: LastRun) -> tuple[bool, bool, float]:
        is_long = run.record["completion_tokens"] >= SHORT_RUN_TOKENS
        return run.is_same_model, is_long, run.record["began"]

    return max(runs, key=worth, default=None)


def estimate(requests: int, most: int, rate: Rate | None, price_per_hour: float | None) -> Estimate:
    """Time and cost of some requests.

    Parameters
    ----------
    most
        Their limits of new tokens, added up.
    """
    each = rate.tokens_per_request if rate else None
    expected = float(most) if each is None else min(float(most), requests * each)

    def seconds(tokens: float) -> float | None:
        return tokens / rate.tokens_per_second if rate and rate.tokens_per_second else None

    def cost(tokens: float) -> float | None:
        took = seconds(tokens)
        return None if took is None or price_per_hour is None else took / 3600 * price_per_hour

    return Estimate(
        requests, expected, most, seconds(expected), seconds(most), cost(expected), cost(most)
    )
