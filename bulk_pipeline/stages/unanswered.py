"""The leaders of a job that did not run yet: which of them can run now, with what is asked.

A later turn of a conversation is asked as soon as the answer before it is there. Where that answer
is this run's, the turn follows it at once (`goes_on`); where it is stored, or is that of another
row which asks the same, the turn is asked on its own (`openers`). A request leaves once it has a
completion, and each leaves once.
"""

from collections.abc import Iterator
from functools import cached_property

import numpy as np
import pyarrow as pa

from bulk_pipeline.stages.dealing import deal, in_order
from bulk_pipeline.stages.generator_protocol import AnswerIds
from bulk_pipeline.stages.job import Job
from bulk_pipeline.stages.stored import StoredAnswers
from bulk_pipeline.stages.wanted import WantedRequest, requests_at
from bulk_pipeline.storage.manifest import Part


class UnansweredRequests:
    """The leaders of a planned job, until each has run."""

    def __init__(self, job: Job):
        self._job, self._wanted = job, job.wanted
        self._is_left = np.zeros(job.num_requests, bool)
        self._is_left[job.leaders] = True
        # of conversations: what was stored, in which parts, when `openers` was called
        self._answers: StoredAnswers | None = None
        self._parts: list[Part] = []

    def __len__(self) -> int:
        return int(self._is_left.sum())

    def remove(self, numbers: int | np.ndarray) -> None:
        """These have a completion."""
        self._is_left[numbers] = False

    def openers(self) -> np.ndarray:
        """Numbers of those that can run now, rising: the turn before them is answered."""
        if self._wanted.num_turns == 1 or not self._is_left.any():
            return np.flatnonzero(self._is_left)
        self._answers, self._parts = self._job.answers(), self._job.writer.manifest.stored
        # an answer of before counts for a turn that is still to be made anew, until it is
        is_settled = self._answers.is_answered & ~self._is_left
        follows = np.concatenate([[False], is_settled[:-1]])
        return np.flatnonzero(self._is_left & (follows | (self._wanted.turn == 0)))

    def requests(self, numbers: np.ndarray, answer_ids: AnswerIds) -> Iterator[WantedRequest]:
        """The openers of the given numbers, which must rise, with the answers stored before them.

        They come adapter by adapter, since the use of another one empties the batch.
        `answer_ids` is the generator's.
        """
        for group in self._wanted.by_adapter(numbers):
            yield from self._requests(group, answer_ids)

    def goes_on(self, number: int) -> bool:
        """Whether the next turn of a request's conversation is to run right after it."""
        following = number + 1
        return (
            following < self._job.num_requests
            and self._wanted.turn[following] > 0
            and bool(self._is_left[following])
            and following not in self._apart
        )

    @cached_property
    def _apart(self) -> frozenset[int]:
        return frozenset([*self._job.alone.tolist(), *self._job.given_up.tolist()])

    def _requests(self, numbers: np.ndarray, answer_ids: AnswerIds) -> Iterator[WantedRequest]:
        job = self._job
        requests = requests_at(job.prompts, job.model_fingerprint, numbers, job.adapters)
        turns = self._wanted.turn[numbers].astype(np.int64)
        if not turns.any():
            yield from requests
            return
        with in_order(job.writer, self._stored_at(_all_before(numbers, turns))) as tables:
            answers = _ids_and_texts(tables)
            for number, request in zip(numbers.tolist(), requests, strict=True):
                while request.number < number:
                    ids, text = next(answers)
                    kept = answer_ids(ids, text, request.sampling.stop_token_ids)
                    request = request.next_turn(ids, kept)
                yield request

    def _stored_at(self, numbers: np.ndarray) -> Iterator[pa.Table]:
        """The stored answers of requests, in no order."""
        assert self._answers is not None
        partition = self._job.writer.partition
        return deal(partition, self._parts, self._wanted, self._answers, numbers)


def _ids_and_texts(tables: Iterator[pa.Table]) -> Iterator[tuple[list[int], str]]:
    for table in tables:
        for row in table.select(["completion_ids", "completion"]).to_pylist():
            yield row["completion_ids"], row["completion"]


def _all_before(numbers: np.ndarray, turns: np.ndarray) -> np.ndarray:
    """The numbers of all turns before requests of the given turns, in order."""
    within = np.arange(turns.sum()) - np.repeat(np.cumsum(turns) - turns, turns)
    return np.repeat(numbers - turns, turns) + within
