"""What a finished partition holds and what it took: the numbers of its report.

One pass over the completions, a batch at a time, and the records of the runs that made them.
"""

import heapq
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bulk_pipeline.lengths import Lengths
from bulk_pipeline.spec import BulkInferenceSpec
from bulk_pipeline.stages.progress import merge_runs
from bulk_pipeline.storage.schemas import COMPLETIONS, PROMPTS
from bulk_pipeline.storage.store import Store

READ_ROWS = 4096
NUM_SLOWEST = 10
NUM_SAMPLES = 3  # of each status
MAX_CHARACTERS = 600  # of a sample's prompt, answer or error
COLUMNS = [
    "row_id",
    "row_index",
    "sample_index",
    "turn",
    "status",
    "completion",
    "prompt_tokens",
    "completion_tokens",
    "request_key",
    "error",
    "queue_seconds",
    "prefill_seconds",
    "generate_seconds",
]


@dataclass(slots=True)
class PartitionReport:
    """A partition's numbers, and some of its rows.

    Attributes
    ----------
    prompts, completions
        Lengths in tokens: of each row's prompt (one a turn), and of each answer.
    totals
        What the runs took and made, added up: see `stages.progress`.
    runs
        Their records, oldest first.
    slowest
        The requests that were in generation longest.
    samples
        A few rows of each status, texts cut; empty with `output.preview` off.
    price_per_hour
        Of the machine; None where it is not set.
    """

    dataset: str
    partition: str
    requests: int = 0
    statuses: dict[str, int] = field(default_factory=dict)
    prompts: Lengths = field(default_factory=Lengths)
    completions: Lengths = field(default_factory=Lengths)
    totals: dict[str, float] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)
    slowest: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    price_per_hour: float | None = None

    def numbers(self) -> dict[str, int | float]:
        """The report under the names that the UI plots; what is not known is left out."""
        totals, made = self.totals, self.totals["completion_tokens"]
        values: dict[str, int | float] = {
            "prompt_tokens_mean": self.prompts.numbers()["mean"],
            "completion_tokens_mean": self.completions.numbers()["mean"],
            "completion_tokens_p95": self.completions.numbers()["p95"],
        }
        if totals["seconds"]:
            values |= {
                "generation_seconds": totals["seconds"],
                "tokens_per_second": made / totals["seconds"],
                "cached_token_share": totals["cached_tokens"] / max(totals["prompt_tokens"], 1),
                "mean_batch": self.mean_batch(),
            }
        if drafted := totals["drafted_tokens"]:
            values["draft_acceptance"] = totals["accepted_tokens"] / drafted
        if gpu_seconds := self.gpu_seconds():
            values["gpu_seconds"] = gpu_seconds
        if self.price_per_hour is not None and made:
            values |= {"cost": self.cost(), "cost_per_million_tokens": self.cost() / made * 1e6}
        return values

    def mean_batch(self) -> float:
        """How many requests were in generation at once, on average over the runs."""
        weighted = sum(run.get("mean_batch", 0) * run["seconds"] for run in self.runs)
        return weighted / max(self.totals["seconds"], 1e-9)

    def machine_seconds(self) -> float:
        """Seconds that the machine was held: generation, and loading before it."""
        return self.totals["seconds"] + self.totals["load_seconds"]

    def gpu_seconds(self) -> float:
        """The same for each GPU, added up; 0 for runs on a CPU."""
        return sum(
            (run["seconds"] + run["load_seconds"]) * run["settings"].get("num_gpus", 1)
            for run in self.runs
            if run["settings"].get("device", "cpu") != "cpu"
        )

    def cost(self) -> float:
        """What the runs cost at the price set."""
        assert self.price_per_hour is not None
        return self.machine_seconds() / 3600 * self.price_per_hour

    def longest_run(self) -> dict[str, Any] | None:
        """The run that made most tokens: its curve says most."""
        return max(self.runs, key=lambda run: run["completion_tokens"], default=None)


def report_partition(
    spec: BulkInferenceSpec, store: Store, key: str, price_per_hour: float | None = None
) -> PartitionReport:
    """Look through a finished partition.

    Parameters
    ----------
    price_per_hour
        Of the machine, in any currency; `output.price_per_hour` by default.

    Raises
    ------
    ValueError
        If its completions are missing or unfinished.
    """
    partition = store.partition(COMPLETIONS, key)
    manifest = partition.complete_manifest()
    runs = manifest.meta.get("runs", [])
    report = PartitionReport(
        dataset=spec.name,
        partition=key,
        requests=manifest.num_rows,
        totals=merge_runs(runs),
        runs=runs,
        price_per_hour=spec.output.price_per_hour if price_per_hour is None else price_per_hour,
    )
    slowest = _Slowest()
    for batch in partition.read(COLUMNS, READ_ROWS):
        _count(report, batch)
        slowest.look_at(batch)
        if spec.output.preview:
            _take_samples(report, batch)
    report.statuses = dict(Counter(report.statuses).most_common())
    report.slowest = slowest.rows(show_ids=spec.output.preview)
    _add_prompts(report, store)
    return report


def _count(report: PartitionReport, batch: pa.RecordBatch) -> None:
    for count in pc.value_counts(batch.column("status")).to_pylist():
        status = count["values"]
        report.statuses[status] = report.statuses.get(status, 0) + count["counts"]
    has_run = batch.column("request_key").is_valid().to_numpy(zero_copy_only=False)
    is_first = batch.column("sample_index").to_numpy() == 0
    report.prompts.add(batch.column("prompt_tokens").to_numpy()[has_run & is_first])
    report.completions.add(batch.column("completion_tokens").to_numpy()[has_run])


class _Slowest:
    """The requests that took longest, equal ones once."""

    def __init__(self) -> None:
        self._found: list[tuple[float, tuple[int, ...], dict[str, Any]]] = []
        self._keys: set[str] = set()

    def look_at(self, batch: pa.RecordBatch) -> None:
        seconds = np.nan_to_num(
            batch.column("prefill_seconds").to_numpy(zero_copy_only=False)
            + batch.column("generate_seconds").to_numpy(zero_copy_only=False)
        )
        least = self._found[0][0] if len(self._found) == NUM_SLOWEST else 0.0
        for place in np.flatnonzero(seconds > least).tolist():
            self._add(float(seconds[place]), batch.slice(place, 1))

    def _add(self, seconds: float, one: pa.RecordBatch) -> None:
        if len(self._found) == NUM_SLOWEST and seconds <= self._found[0][0]:
            return
        row = one.to_pylist()[0]
        if row["request_key"] in self._keys:
            return
        self._keys.add(row["request_key"])
        place = (row["row_index"], row["sample_index"], row["turn"])  # of this request alone
        heapq.heappush(self._found, (seconds, place, row))
        if len(self._found) > NUM_SLOWEST:
            self._keys.discard(heapq.heappop(self._found)[2]["request_key"])

    def rows(self, show_ids: bool) -> list[dict[str, Any]]:
        """Slowest first; without ids, which may say who a row is about, where asked."""
        has_turns = any(row["turn"] for _, _, row in self._found)
        names = ["row_index", "sample_index", *(["turn"] if has_turns else []), "status"]
        names += ["prompt_tokens", "completion_tokens"]
        names += ["queue_seconds", "prefill_seconds", "generate_seconds"]
        ordered = sorted(self._found, key=lambda found: (-found[0], found[1]))
        return [
            {"seconds": seconds}
            | {name: row[name] for name in (["row_id"] if show_ids else []) + names}
            for seconds, _, row in ordered
        ]


def _take_samples(report: PartitionReport, batch: pa.RecordBatch) -> None:
    """The first rows of each status."""
    taken = Counter(sample["status"] for sample in report.samples)
    for status in pc.unique(batch.column("status")).to_pylist():
        wanted = NUM_SAMPLES - taken[status]
        if wanted <= 0:
            continue
        rows = batch.filter(pc.equal(batch.column("status"), status)).slice(0, wanted)
        names = ["row_id", "row_index", "sample_index", "turn", "status", "completion", "error"]
        report.samples += [
            row | {name: _cut(row[name]) for name in ("completion", "error")}
            for row in rows.select(names).to_pylist()
        ]


def _add_prompts(report: PartitionReport, store: Store) -> None:
    """Put the prompts' texts beside the samples, where the prompts are still there.

    Of a later turn, what follows the answer before it.
    """
    wanted = {sample["row_index"] for sample in report.samples}
    texts: dict[int, list[str | None]] = {}
    try:
        for batch in store.partition(PROMPTS, report.partition).read(
            ["row_index", "row_id", "prompt", "later_turns"], READ_ROWS
        ):
            if not wanted - texts.keys():
                break
            index = batch.column("row_index").to_numpy()
            for place in np.flatnonzero(np.isin(index, list(wanted))).tolist():
                later = batch.column("later_turns")[place].as_py() or []
                first = batch.column("prompt")[place].as_py()
                texts[int(index[place])] = [first, *(turn["text"] for turn in later)]
    except ValueError:  # unfinished: they are being made anew
        texts = {}
    for sample in report.samples:
        found = texts.get(sample["row_index"], [])[sample["turn"] :]
        sample["prompt"] = _cut(found[0] if found else None)


def _cut(text: str | None) -> str | None:
    """A text's start and end, where it is long."""
    if text is None or len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]} … {text[-half:]}"
