"""The leaders of a job → the engine → the sink.

The engine is asked for only once something has to run. Requests that were in generation in failed
runs come last and alone, so that the one at fault is found out and the others are answered. In the
end each leader has a completion in the sink, but for turns after one without an answer.
"""

import logging
from collections.abc import Callable

import numpy as np

from bulk_pipeline.engine.request import Completion, Status
from bulk_pipeline.stages.generator_protocol import AnswerIds, Generator, check_engine, no_ids
from bulk_pipeline.stages.in_flight import InFlight
from bulk_pipeline.stages.job import Job
from bulk_pipeline.stages.journal import GIVE_UP_AFTER, run_alone_note
from bulk_pipeline.stages.sink import PartSink
from bulk_pipeline.stages.unanswered import UnansweredRequests
from bulk_pipeline.stages.wanted import WantedRequest

log = logging.getLogger(__name__)


def run_requests(job: Job, sink: PartSink, get_generator: Callable[[], Generator]) -> None:
    """Put the leaders through the engine; what finished is stored even if the rest fails."""
    sink.report()
    if len(job.alone):
        log.warning("%s: %s", sink.progress.partition, run_alone_note(len(job.alone)))
    left = UnansweredRequests(job)
    generator: Generator | None = None
    try:
        while len(openers := left.openers()):
            openers = _give_up(job, left, sink, openers)
            if len(openers) and generator is None:
                generator = _begin(job, sink, get_generator)
            if generator is not None:
                _run_openers(job, left, sink, generator, openers)
            if len(left):  # turns that wait for an answer which another row asked for
                sink.flush()
        sink.progress.requests -= len(left)  # turns after one without an answer
    finally:
        sink.close()
    done = sink.progress.done + len(left)
    assert done == job.num_to_run, (sink.progress.done, len(left), job.num_to_run)


def _give_up(job: Job, left: UnansweredRequests, sink: PartSink, openers: np.ndarray) -> np.ndarray:
    """End those as errors that do not run any more; the others."""
    given_up = np.intersect1d(openers, job.given_up)
    for wanted in left.requests(given_up, no_ids):
        sink.add(wanted, _given_up(wanted), None, job.journal.failures[wanted.key])
    left.remove(given_up)
    return np.setdiff1d(openers, given_up)


def _begin(job: Job, sink: PartSink, get_generator: Callable[[], Generator]) -> Generator:
    """Get the engine: generation begins."""
    generator = get_generator()
    sink.progress.start(generator.provenance, getattr(generator, "stats", None))
    if used := job.wanted.adapter_fingerprints:
        sink.progress.settings["adapters"] = ", ".join(used)
    return generator


def _run_openers(
    job: Job, left: UnansweredRequests, sink: PartSink, generator: Generator, openers: np.ndarray
) -> None:
    """Run requests, and the turns after them; those that run alone come last."""
    answer_ids: AnswerIds = getattr(generator, "answer_ids", no_ids)
    in_flight = InFlight(job, left, sink, generator)
    in_flight.run_together(left.requests(np.setdiff1d(openers, job.alone), answer_ids))
    # Few enough to hold: what was in flight when runs failed.
    engine_works = False
    for wanted in list(left.requests(np.intersect1d(openers, job.alone), answer_ids)):
        if not engine_works:
            check_engine(generator, wanted.adapter)
        engine_works = in_flight.run_alone(wanted)


def _given_up(wanted: WantedRequest) -> Completion:
    error = (
        f"{GIVE_UP_AFTER} runs failed with this request in generation, the last ones with no "
        f"other, when their process died; look for the reason in the system's log (memory?), then "
        f"redo it"
    )
    return Completion(wanted.number, Status.ERROR, prompt_tokens=len(wanted.input_ids), error=error)
