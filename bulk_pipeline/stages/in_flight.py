"""Requests that the engine has: wanted ones go in, finished completions go on to the sink.

The journal knows of each request before the engine does, and until it is finished. Where the model
fails, that counts against what is in flight then; a request that is so alone ends as an error.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from typing import Any, cast

from bulk_pipeline.engine.errors import GenerationError
from bulk_pipeline.engine.request import Completion, Request, Status
from bulk_pipeline.stages.generator_protocol import ChatGenerator, Generator
from bulk_pipeline.stages.job import Job
from bulk_pipeline.stages.sink import PartSink
from bulk_pipeline.stages.stored import ANSWERS
from bulk_pipeline.stages.unanswered import UnansweredRequests
from bulk_pipeline.stages.wanted import WantedRequest

log = logging.getLogger(__name__)


class InFlight:
    """Puts unanswered requests through the engine, and the turns after them."""

    def __init__(self, job: Job, left: UnansweredRequests, sink: PartSink, generator: Generator):
        self._job, self._journal, self._left, self._sink = job, job.journal, left, sink
        self._generator = generator
        self._produced_by = {
            name: json.dumps(_provenance_of(generator.provenance, name), sort_keys=True)
            for name in job.wanted.adapters
        }
        self._requests: dict[int, WantedRequest] = {}
        self._noted: set[str] = set()  # keys of turns that are to come

    def run_together(self, wanted: Iterator[WantedRequest]) -> None:
        """Run requests; a failure of the model counts against all that are in flight."""
        try:
            self._run(wanted, self._journal.ahead)
        except GenerationError:
            self._blame()
            raise

    def run_alone(self, wanted: WantedRequest) -> bool:
        """Run a request with which runs failed; whether the model did not fail on it."""
        try:
            self._run(iter([wanted]), 1)
        except GenerationError as error:
            if len(self._requests) != 1:
                self._blame()
                raise
            [request] = self._requests.values()
            log.warning("row %d failed alone: %s", request.row_index, error, exc_info=error)
            self._finish(_failed_alone(request, error))
            return False
        return True

    def _run(self, wanted: Iterator[WantedRequest], ahead: int) -> None:
        def requests() -> Iterator[Request]:
            while some := list(islice(wanted, ahead)):
                yield from self._start(some)

        if self._job.wanted.num_turns == 1:
            completions = self._generator.run(requests(), on_step=self._sink.tick)
        else:
            chats = cast(ChatGenerator, self._generator)
            completions = chats.run(requests(), on_step=self._sink.tick, go_on=self._go_on)
        with closing(completions):  # whatever holds the error, the engine is free afterwards
            for completion in completions:
                self._finish(completion)

    def _start(self, some: list[WantedRequest]) -> Iterator[Request]:
        if new := [request for request in some if request.key not in self._noted]:
            later = [key for request in new for key in self._keys_noted_with(request)]
            self._journal.start([*(request.key for request in new), *later])
            self._noted.update(later)
        for request in some:
            self._noted.discard(request.key)
            self._requests[request.number] = request
            yield Request(
                request.number,
                request.input_ids,
                request.sampling,
                request.prompt_logprobs,
                request.adapter,
            )

    def _go_on(self, completion: Completion) -> Iterator[Request]:
        """The turn after one that was answered."""
        request = self._requests[cast(int, completion.request_id)]
        if completion.status in ANSWERS and self._left.goes_on(request.number):
            ids, text = completion.token_ids, completion.text
            chats = cast(ChatGenerator, self._generator)
            kept = chats.answer_ids(ids, text, request.sampling.stop_token_ids)
            yield from self._start([request.next_turn(ids, kept)])

    def _finish(self, completion: Completion) -> None:
        request = self._requests.pop(cast(int, completion.request_id))
        self._left.remove(request.number)
        self._journal.finish(request.key)
        attempts = int(self._job.attempts[request.number]) + 1
        attempts += self._journal.failures[request.key]
        if completion.status in ANSWERS:
            self._journal.forget([request.key])  # even if the answer gets lost: it can be answered
        else:
            for key in self._keys_noted_with(request):
                self._noted.discard(key)
                self._journal.finish(key)
        self._sink.add(request, completion, self._produced_by[request.adapter], attempts)

    def _keys_noted_with(self, request: WantedRequest) -> list[str]:
        """Keys to note with a request that starts, beside its own: those of the turns after it.

        Only where a note takes long, so that the model need not wait for one at every turn.
        """
        keys: list[str] = []
        while self._journal.ahead > 1 and self._left.goes_on(request.number + len(keys)):
            keys.append(request.later_turns[request.turn + len(keys)].key)
        return keys

    def _blame(self) -> None:
        self._journal.blame(request.key for request in self._requests.values())


def _failed_alone(wanted: WantedRequest, error: GenerationError) -> Completion:
    reason = f"{error}; no other request was in it: redo this one once the reason is gone"
    return Completion(
        wanted.number, Status.ERROR, prompt_tokens=len(wanted.input_ids), error=reason
    )


def _provenance_of(provenance: dict[str, Any], adapter: str | None) -> dict[str, Any]:
    """What is recorded with a completion: of all adapters the one that it used."""
    adapters = provenance.get("adapters", {})
    rest = {name: value for name, value in provenance.items() if name != "adapters"}
    if adapter is None:
        return rest
    return rest | {"adapter": {"name": adapter, "fingerprint": adapters.get(adapter)}}
