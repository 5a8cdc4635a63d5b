"""One partition's work: what its prompts ask for, what is stored of it, and what has to run.

Every request that can run is answered by what is stored (here, or copied from elsewhere), has
failed so often that it stays so, is one of the leaders, or shares the answer of a leader that asks
the same. A leader runs together with others, alone (`alone`) or not any more (`given_up`), as the
journal tells how often runs failed with it.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

import numpy as np

from bulk_pipeline.stages.journal import Journal, given_up, suspects
from bulk_pipeline.stages.sampling_changes import stored_changes
from bulk_pipeline.stages.stored import (
    Redo,
    Source,
    StoredAnswers,
    begin_redo,
    copy_answers,
    reasons,
    rows_with_answers,
    slices_of,
)
from bulk_pipeline.stages.wanted import WantedRequests
from bulk_pipeline.storage.manifest import Manifest
from bulk_pipeline.storage.partition import Partition
from bulk_pipeline.storage.partition_writer import PartitionWriter


class Job:
    """One partition's work, planned by `begin`, `take_from_slices` and `plan`, in this order.

    Attributes
    ----------
    wanted
        Every request of the prompts.
    inputs, made_with
        What the table is made from, as its manifest says it.
    leaders
        Numbers of the requests to run, rising: of those with no stored answer, the first of each
        key and limit.
    alone
        Those of them that run last, one at a time, since runs failed with them in flight.
    given_up
        Those that do not run any more, for the same reason.
    reasons
        Why the leaders run, with their counts.
    attempts
        How often each request was tried that failed.
    num_fan_out
        Requests that share a leader's answer.
    num_copied, num_sliced
        Answers that were copied from other partitions, and taken over from slices.
    """

    def __init__(
        self,
        prompts: Partition,
        prompts_manifest: Manifest,
        writer: PartitionWriter,
        journal: Journal,
        model_fingerprint: str,
        adapters: Mapping[str, str] | None = None,
    ):
        self.prompts, self.writer, self.journal = prompts, writer, journal
        self.model_fingerprint, self.adapters = model_fingerprint, adapters or {}
        self.changed_sampling = stored_changes(prompts_manifest)
        self.inputs: dict[str, Any] = {
            "prompts": [part.name for part in prompts_manifest.parts],
            "model_fingerprint": model_fingerprint,
        }
        self.made_with: dict[str, Any] = {
            "model": model_fingerprint,
            "sampling": prompts_manifest.inputs.get("sampling"),
        }
        self.wanted = WantedRequests(prompts, model_fingerprint, self.adapters)
        self._check_adapters()
        if used := self.wanted.adapter_fingerprints:
            self.inputs["adapters"] = self.made_with["adapters"] = used
        self.num_requests = len(self.wanted)
        self.num_not_ready = self.num_requests - int(self.wanted.ready.sum())
        self.leaders = self.alone = self.given_up = np.zeros(0, np.uint32)
        self.reasons: dict[str, int] = {}
        self.attempts = np.zeros(0, np.uint8)
        self.num_fan_out = self.num_copied = self.num_sliced = 0
        self._redo: Redo | None = None

    def _check_adapters(self) -> None:
        gone = {name for name in self.wanted.adapters if name and name not in self.adapters}
        if gone:
            raise ValueError(
                f"{self.prompts.label}: rows ask for the adapter {min(gone)!r}, which is none of "
                "generator.adapters any more; add it there, or make the prompts anew"
            )

    @property
    def num_to_run(self) -> int:
        """Requests that get a completion now, if each turn of their conversations has an answer."""
        return len(self.leaders)

    @property
    def num_reused(self) -> int:
        """Requests that what is stored answers."""
        return self.num_requests - self.num_not_ready - self.num_fan_out - self.num_to_run

    @property
    def is_redo(self) -> bool:
        """Whether stored answers are being made anew."""
        return self._redo is not None

    def begin(self, redo: Literal["none", "all"] | Collection[str]) -> None:
        """Begin a redo, or go on with one."""
        self._redo = begin_redo(self.writer, self.journal, redo)

    def take_from_slices(self) -> None:
        """Take over what the slices of the partition answered, and what failed in them."""
        slices = list(slices_of(self.prompts.store, self.prompts.key))
        if slices:
            self.num_sliced = copy_answers(
                slices, self.writer, self.wanted, self.answers(), with_errors=True
            )

    def plan(self, sources: Iterable[Source]) -> None:
        """Find out what has to run, and why; answers of `sources` are copied."""
        parts_before = self.writer.manifest.stored
        answers = self.answers()
        missing = answers.missing()
        if missing.any():
            self.num_copied = copy_answers(sources, self.writer, self.wanted, answers)
            if self.num_copied:
                answers = self.answers()
                missing = answers.missing()
        self.leaders = self.wanted.first_of_each(missing)
        self.num_fan_out = int(missing.sum()) - len(self.leaders)
        self.attempts = answers.attempts
        self.alone = self._leaders_of(suspects(self.journal.failures))
        self.given_up = self._leaders_of(given_up(self.journal.failures))
        made_with = self.writer.manifest.meta.get("made_with", {})

        def has_row(numbers: np.ndarray) -> np.ndarray:
            rows, turns = self.wanted.row_index[numbers], self.wanted.turn[numbers]
            partition = self.writer.partition
            return rows_with_answers(self.prompts, partition, parts_before, rows, turns)

        self.reasons = reasons(self.leaders, answers, has_row, made_with, self.made_with)

    def answers(self) -> StoredAnswers:
        """What is stored now for the requests."""
        answers = StoredAnswers(self.wanted)
        answers.look_into(self.writer.partition, self.writer.manifest.stored, self._redo)
        return answers

    def is_finished(self) -> bool:
        """Whether the table stands as it is."""
        manifest = self.writer.manifest
        return (
            manifest.complete
            and manifest.inputs == self.inputs
            and self._redo is None
            and not self.num_to_run
            and not self.num_copied
            and not self.num_sliced
        )

    def _leaders_of(self, keys: Iterable[str]) -> np.ndarray:
        """Those of the leaders that have one of these keys; rising."""
        return np.intersect1d(self.leaders, self.wanted.numbers_of(keys))
