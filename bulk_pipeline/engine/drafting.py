"""Requests in, completions out: exllamav2's DynamicGenerator, driven for bulk work.

Every request gives exactly one completion, in the order in which they finish. exllamav2 does the
queue, the pages and their reuse; sampling happens on the model's device for the whole batch, in
its forward pass, so that what exllamav2 takes for logits are the sampled ids. Text is decoded
once, from all token ids of a completion.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob
from exllamav2.generator.dynamic import _randomhash

from bulk_pipeline.engine.memory import is_out_of_memory, out_of_memory_message
from bulk_pipeline.engine.request import Completion, Request, SamplingParams, Status
from bulk_pipeline.engine.sampling import SamplingBatch, sample
from bulk_pipeline.spec import PAGE_TOKENS

QUEUED_BATCHES = 2  # requests held in exllamav2's queue, in batches; every step looks at them all
REPLACEMENT = "\ufffd"
NO_PROBABILITY = torch.ones((1, 1))
TAIL_SLACK_TOKENS = 8  # decoded before a possible stop string; the first may decode differently


class Model(Protocol):
    """What runs behind the generator: exllamav2's own model, or `CpuModel`."""

    config: Any

    def forward_chunk(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """Store keys and values; return {"logits": [rows, new tokens, vocabulary]}."""


class Decoder(Protocol):
    """The part of a transformers tokenizer that turns ids into text."""

    all_special_ids: list[int]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of `token_ids`."""


@dataclass(slots=True)
class Stats:
    """What a generator has done so far.

    Attributes
    ----------
    prefill_tokens
        Prompt tokens that went through the model.
    cached_tokens
        Prompt tokens whose keys and values were reused.
    completion_tokens
        Tokens of finished completions.
    steps
        Forward passes that generated tokens.
    rows
        Sum of the batch sizes of these passes.
    seconds
        Time inside the generator.
    """

    prefill_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    steps: int = 0
    rows: int = 0
    seconds: float = 0.0

    @property
    def mean_batch_size(self) -> float:
        """Rows of an average step; 0 before the first."""
        return self.rows / self.steps if self.steps else 0.0


class BulkGenerator:
    """Runs any number of requests through one model, a bounded number of them at once.

    Parameters
    ----------
    model, cache
        The model and its paged cache.
    decoder
        The model's transformers tokenizer.
    max_seq_len
        Most tokens of a prompt and its completion together.
    draft_model, draft_cache
        A smaller model for speculative decoding, and its cache of the same size. Tokens are the
        same with and without it.
    provenance
        What is recorded with every completion: model, versions, settings.

    Attributes
    ----------
    stats
        Counters since the generator was made.
    provenance
        As given.
    max_seq_len
        As given, or less where the cache holds less.
    """

    def __init__(
        self,
        model: Model,
        cache: Any,
        decoder: Decoder,
        *,
        max_batch_size: int,
        max_seq_len: int,
        max_chunk_size: int = 2048,
        draft_model: Model | None = None,
        draft_cache: Any = None,
        num_draft_tokens: int = 4,
        provenance: dict[str, Any] | None = None,
    ) -> None:
        self.stats = Stats()
        self.provenance = provenance or {}
        self._num_draft = num_draft_tokens if draft_model else 0
        self.max_seq_len = min(max_seq_len, cache.max_seq_len - self._num_draft)
        self._vocab_size = int(model.config.vocab_size)
        self._max_batch_size = max_batch_size
        self._models = [m for m in (model, draft_model) if m]
        self._decoder = decoder
        self._special_ids = _special_ids(decoder)
        self._finished: deque[Completion] = deque()
        self._running = False
        self._generator: _Generator | None = _Generator(
            _SamplingModel(model, max_batch_size, max_chunk_size, self.stats),
            cache,
            max_batch_size=max_batch_size,
            num_draft_tokens=self._num_draft,
            draft_model=draft_model,
            draft_cache=draft_cache,
        )

    def run(
        self, requests: Iterable[Request], on_step: Callable[[], None] | None = None
    ) -> Iterator[Completion]:
        """Complete `requests`, read as they are needed; yield completions as they finish.

        `on_step` is called after each step of the model, also where nothing finished.

        A request that cannot run (no ids, an id that the model does not know, too long) is a
        completion with that status. Closing the iterator drops the requests in generation. An
        error inside the model is raised after everything that finished before it was yielded;
        the generator can then be used again.
        """
        if self._generator is None:
            raise RuntimeError("the generator was closed; load it again")
        if self._running:
            raise RuntimeError("the generator runs already; finish or close that iterator first")
        self._running = True
        waiting = iter(requests)
        try:
            while self._feed(waiting) or self._finished:
                yield from self._take_finished()
                try:
                    self._step()
                except Exception:
                    yield from self._take_finished()
                    raise
                yield from self._take_finished()
                if on_step is not None:
                    on_step()
        finally:
            self._running = False
            self._finished.clear()
            if self._generator is not None and self._generator.num_remaining_jobs():
                self._generator.forget()

    def close(self) -> None:
        """Free the model and the cache; the generator cannot be used afterwards."""
        self._generator = None
        for model in self._models:
            close = getattr(model, "close", None) or getattr(model, "unload", None)
            if close is not None:
                close()
        self._models.clear()

    def _feed(self, waiting: Iterator[Request]) -> bool:
        """Fill the queue up to its bound; say whether there is anything to generate."""
        assert self._generator is not None
        room = QUEUED_BATCHES * self._max_batch_size - self._generator.num_remaining_jobs()
        for request in islice(waiting, max(room, 0)):
            refused = self._refuse(request)
            if refused is not None:
                self._finished.append(refused)
            else:
                self._generator.enqueue(self._job(request))
        return bool(self._generator.num_remaining_jobs())

    def _step(self) -> None:
        assert self._generator is not None
        started = time.perf_counter()
        try:
            if self._generator.num_remaining_jobs():
                self._generator.iterate()
        except BaseException as error:  # what the pages hold is uncertain now
            self._generator.forget()
            if isinstance(error, Exception) and is_out_of_memory(error):
                raise RuntimeError(out_of_memory_message("generating")) from None
            raise
        finally:
            self.stats.seconds += time.perf_counter() - started

    def _take_finished(self) -> Iterator[Completion]:
        while self._finished:
            yield self._finished.popleft()

    def _refuse(self, request: Request) -> Completion | None:
        """Return the completion of a request that cannot run, else None."""
        ids, limit = request.input_ids, request.sampling.max_new_tokens

        def refused(status: Status, error: str) -> Completion:
            return Completion(request.request_id, status, prompt_tokens=len(ids), error=error)

        if not len(ids):
            return refused(Status.EMPTY, "the prompt has no tokens; leave the row out")
        unknown = next((i for i in (min(ids), max(ids)) if not 0 <= i < self._vocab_size), None)
        if unknown is not None:
            return refused(
                Status.INVALID,
                f"token ids must be below {self._vocab_size}, got {unknown}; "
                "use the model's own tokenizer",
            )
        if limit < 1:
            return refused(Status.INVALID, f"max_new_tokens must be at least 1, got {limit}")
        if len(ids) + limit > self.max_seq_len:
            return refused(
                Status.TOO_LONG,
                f"prompt ({len(ids)} tokens) and max_new_tokens ({limit}) exceed "
                f"{self.max_seq_len} tokens; shorten the prompt, lower max_new_tokens or raise "
                "generator.max_seq_len and generator.cache_tokens",
            )
        return None

    def _job(self, request: Request) -> "_Job":
        stop = request.sampling.stop
        tail = _TextTail(stop, self._decoder, self._special_ids) if stop else None
        return _Job(request, self._num_draft, tail, self._finish)

    def _finish(self, job: "_Job") -> None:
        completion = _completion(job, self._decoder)
        self.stats.completion_tokens += len(completion.token_ids)
        self.stats.cached_tokens += completion.cached_tokens
        self._finished.append(completion)


class _TextTail:
    """Finds a stop string in a text that grows by tokens, also where it straddles several."""

    def __init__(self, stop: Sequence[str], decoder: Decoder, special_ids: frozenset[int]) -> None:
        self._stop = stop
        self._decoder = decoder
        self._special_ids = special_ids
        # a token that is no special one has at least one byte
        longest = max(len(text.encode("utf-8", "surrogatepass")) for text in stop)
        self._ids: deque[int] = deque(maxlen=longest + TAIL_SLACK_TOKENS)

    def ends_with_stop(self, token_id: int) -> bool:
        """Take the next token; say whether the text now contains a stop string."""
        if token_id in self._special_ids:
            return False
        self._ids.append(token_id)
        text = self._decoder.decode(list(self._ids), skip_special_tokens=True)
        return any(stop in text for stop in self._stop)


class _Job(ExLlamaV2DynamicJob):
    """A request in generation. Only its token ids are used, never exllamav2's text."""

    def __init__(
        self,
        request: Request,
        num_draft_tokens: int,
        tail: _TextTail | None,
        on_finish: Callable[["_Job"], None],
    ) -> None:
        params = request.sampling
        super().__init__(
            input_ids=torch.tensor([list(request.input_ids)], dtype=torch.long),
            # with a draft model exllamav2 stops that many tokens early
            max_new_tokens=params.max_new_tokens + num_draft_tokens,
            stop_conditions=[int(i) for i in params.stop_token_ids],
        )
        self.request = request
        self.token_ids: list[int] = []
        self.found_stop_string = False
        self._tail = tail
        self._on_finish = on_finish

    def receive_logits(self, logits: torch.Tensor) -> tuple[torch.Tensor, None, None, Any, bool]:
        """Hand on the id that was sampled in the forward pass."""
        return logits[:, 0, :], None, None, NO_PROBABILITY, False

    def receive_sample(self, *args: Any) -> tuple[bool, torch.Tensor]:
        """Take one token, and end the job where it completes a stop string."""
        if not self.token_ids:
            self._link_pages()
        ended, token = super().receive_sample(*args)
        self.token_ids.append(int(token))
        # exllamav2 looks for stop strings too, but not while a broken character is pending
        if self._tail is not None and self.token_ids[-1] not in self.stop_tokens:
            self.found_stop_string = self._tail.ends_with_stop(self.token_ids[-1])
        if ended or self.found_stop_string:
            self.time_last_token = time.time()
            self._on_finish(self)
        return ended or self.found_stop_string, token

    def deallocate_pages(self) -> None:
        """Give the pages back; drop what exllamav2 would mistake for the start of a prompt.

        A page that was reserved and not written gets its old content back. Where that content
        meanwhile stands in another page, exllamav2 forgets which tokens came before it.
        """
        unwritten = [
            page for seq in self.sequences for page in seq.allocated_pages or () if page.can_revert
        ]
        super().deallocate_pages()
        for page in unwritten:
            if page.ref_count == 0 and page.phash != page.phash_revert:
                page.clear()

    def _link_pages(self) -> None:
        """Say of the job's own pages which page comes before them.

        exllamav2 leaves it open where the whole prompt was cached or where drafted tokens run
        into the next page, and then offers such a page to other prompts as their first.
        """
        pages, first = self.sequences[0].allocated_pages, self._first_own_page
        if first > 0:
            pages[first].prev_hash = pages[first - 1].phash
        for page in pages[first + 1 :]:
            page.prev_hash = _randomhash()

    @property
    def _first_own_page(self) -> int:
        return (len(self.request.input_ids) - 1) // PAGE_TOKENS


class _SamplingModel:
    """A model whose "logits" are sampled ids: [rows, new tokens, 1]."""

    def __init__(
        self, model: Model, max_batch_size: int, max_chunk_size: int, stats: Stats
    ) -> None:
        self.model = model
        self._stats = stats
        self._serials: tuple[int, ...] = ()
        self._params: list[SamplingParams] = []
        self._batch: SamplingBatch | None = None
        self._positions = torch.zeros(0)
        # what exllamav2's generator reads; a vocabulary of one, for its buffers
        self.config = SimpleNamespace(
            vocab_size=1,
            max_seq_len=model.config.max_seq_len,
            max_input_len=max_chunk_size,
            max_batch_size=max_batch_size,
            no_flash_attn=False,
            arch=SimpleNamespace(lm=SimpleNamespace(mrope=False)),
        )

    def prepare(self, jobs: Sequence[_Job], num_new: int) -> None:
        """Note whose tokens the next pass samples, `num_new` of each job, in this order."""
        serials = tuple(int(job.serial_number) for job in jobs)
        if serials != self._serials:  # otherwise the settings are those of the last step
            self._serials, self._batch = serials, None
            self._params = [job.request.sampling for job in jobs for _ in range(num_new)]
        positions = [len(job.token_ids) + i for job in jobs for i in range(num_new)]
        self._positions = torch.tensor(positions)
        self._stats.steps += 1
        self._stats.rows += len(jobs)

    def forward_chunk(self, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, torch.Tensor]:
        """Run the model, and sample where logits are wanted."""
        output = self.model.forward_chunk(input_ids=input_ids, **kwargs)
        if kwargs.get("preprocess_only"):
            self._stats.prefill_tokens += input_ids.numel()
            return output
        vocab_size = self.model.config.vocab_size
        logits = output["logits"][..., :vocab_size].flatten(0, 1)  # exllamav2 pads the vocabulary
        if self._batch is None:
            self._batch = SamplingBatch.from_params(self._params, vocab_size, logits.device)
        ids = sample(logits, self._batch, self._positions.to(logits.device))
        return {"logits": ids.view(*input_ids.shape, 1)}


class _Generator(ExLlamaV2DynamicGenerator):
    """exllamav2's generator, given sampled ids in place of logits and no text to decode."""

    def __init__(
        self,
        model: _SamplingModel,
        cache: Any,
        *,
        max_batch_size: int,
        num_draft_tokens: int,
        draft_model: Model | None,
        draft_cache: Any,
    ) -> None:
        super().__init__(
            model=model,
            cache=cache,
            tokenizer=_NoText(model.model.config.vocab_size),
            max_batch_size=max_batch_size,
            max_chunk_size=model.config.max_input_len,
            max_q_size=num_draft_tokens + 1,
            draft_model=draft_model,
            draft_cache=draft_cache,
            num_draft_tokens=num_draft_tokens,
            max_sampling_threads=1,
            filter_background_eval=False,
        )
        # a queued job would otherwise reserve 256 rows of logits
        self.padded_vocab_size = 1
        self.logits_pinned = torch.zeros(
            (max_batch_size, num_draft_tokens + 1, 1), dtype=torch.long
        )

    def iterate_gen(self, results: list, draft_tokens: torch.Tensor | None = None) -> None:
        """Generate one step for all jobs whose prompt was read."""
        jobs = [job for job in self.active_jobs if job.is_prefill_done()]
        if jobs:
            self.model.prepare(jobs, self.num_draft_tokens + 1)
        super().iterate_gen(results, draft_tokens)

    def forget(self) -> None:
        """Drop all jobs and the content of all pages."""
        self.active_jobs.clear()
        self.pending_jobs.clear()
        self.reset_page_table()


class _NoText:
    """A tokenizer for a generator whose text nobody reads: every token is the empty text."""

    def __init__(self, vocab_size: int) -> None:
        self._pieces = [""] * vocab_size

    def get_id_to_piece_list(self, include_special_tokens: bool = False) -> list[str]:
        """Return the text of each token."""
        return self._pieces


def _completion(job: _Job, decoder: Decoder) -> Completion:
    ids, params = tuple(job.token_ids), job.request.sampling
    ended_by_token = ids[-1] in params.stop_token_ids
    text = decoder.decode(list(ids[:-1] if ended_by_token else ids), skip_special_tokens=True)
    status, reason, incomplete = Status.LENGTH, None, False
    if ended_by_token:
        status, reason = Status.STOP, str(ids[-1])
    elif job.found_stop_string:
        status = Status.STOP
        text, reason = _cut(text, params.stop)
    elif text.endswith(REPLACEMENT):
        text, incomplete = text.rstrip(REPLACEMENT), True
    return Completion(
        request_id=job.request.request_id,
        status=status,
        text=text,
        token_ids=ids,
        stop_reason=reason,
        incomplete_character=incomplete,
        prompt_tokens=len(job.request.input_ids),
        cached_tokens=job.cached_pages * PAGE_TOKENS + job.cached_tokens,
        queue_seconds=job.time_first_prefill - job.time_enqueue,
        prefill_seconds=job.time_first_token - job.time_first_prefill,
        generate_seconds=job.time_last_token - job.time_first_token,
    )


def _cut(text: str, stop: Sequence[str]) -> tuple[str, str]:
    """Cut `text` at the earliest stop string; of several at one place, the longest counts."""
    found = [(place, -len(s), s) for s in stop if (place := text.find(s)) >= 0]
    place, _, string = min(found)
    return text[:place], string


def _special_ids(decoder: Any) -> frozenset[int]:
    """Return the ids that `skip_special_tokens` skips."""
    added = getattr(decoder, "added_tokens_decoder", {})
    return frozenset(decoder.all_special_ids) | {i for i, token in added.items() if token.special}
