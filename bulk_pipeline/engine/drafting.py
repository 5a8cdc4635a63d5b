"""Speculative decoding: exllamav2's own DynamicGenerator, with a draft model.

exllamav2 does the queue, the pages and the drafting; sampling happens on the model's device for the
whole batch, in its forward pass, so that what exllamav2 takes for logits are the sampled ids.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob
from exllamav2.generator.dynamic import _randomhash

from bulk_pipeline.engine.adapters import LowRank
from bulk_pipeline.engine.errors import reason_of
from bulk_pipeline.engine.request import SamplingParams
from bulk_pipeline.engine.rows import NO_TOKEN, NOT_NUMBERS, Row, Stats
from bulk_pipeline.engine.sampling import SamplingBatch, sample
from bulk_pipeline.spec import PAGE_TOKENS

NO_PROBABILITY = torch.ones((1, 1))


class ChunkModel(Protocol):
    """exllamav2's own model, or the CPU's behind the same call."""

    config: Any

    def forward_chunk(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """Store keys and values; return {"logits": [rows, new tokens, vocabulary]}."""


class DraftingLoop:
    """Runs rows through DynamicGenerator: the same calls as `Scheduler`."""

    def __init__(
        self,
        model: ChunkModel,
        cache: Any,
        *,
        draft_model: ChunkModel,
        draft_cache: Any,
        num_draft_tokens: int,
        max_batch_size: int,
        max_chunk_size: int,
        stats: Stats,
        on_finish: Callable[[Row], None],
    ) -> None:
        self._stats = stats
        self._num_draft = num_draft_tokens
        self._on_finish = on_finish
        self.generator = _Generator(
            _SamplingModel(model, max_batch_size, max_chunk_size, stats),
            cache,
            max_batch_size=max_batch_size,
            num_draft_tokens=num_draft_tokens,
            draft_model=draft_model,
            draft_cache=draft_cache,
        )

    @property
    def num_rows(self) -> int:
        """Rows that have not ended, waiting ones included."""
        return int(self.generator.num_remaining_jobs())

    def enqueue(self, rows: Iterable[Row], first: bool = False) -> None:
        """Let rows wait for their turn; with `first`, before all that wait already."""
        waiting = self.generator.pending_jobs
        num_before = len(waiting)
        for row in rows:
            try:
                self.generator.enqueue(_Job(row, self._num_draft, self._on_finish, self._stats))
            except Exception as error:  # exllamav2 refuses a job by an assertion
                row.error = f"the request cannot be prepared: {reason_of(error)}"
                self._on_finish(row)
        if first:
            waiting[:] = [*waiting[num_before:], *waiting[:num_before]]

    def step(self) -> None:
        """Read some prompts, draft and generate for every running row, and end what has ended."""
        if self.generator.num_remaining_jobs():
            self.generator.iterate()
            pages = self.generator
            self._stats.cache_use = len(pages.referenced_pages) / pages.max_pages

    def use_adapter(self, changes: Mapping[str, LowRank]) -> None:
        """Refuse: the draft model would not know of the adapter; the settings do so before."""
        raise NotImplementedError("adapters do not work with a draft model")

    def forget(self) -> None:
        """Drop all rows and the content of all pages."""
        self.generator.forget()


class _Job(ExLlamaV2DynamicJob):
    """A request in generation. Only its token ids are used, never exllamav2's text."""

    def __init__(
        self,
        row: Row,
        num_draft_tokens: int,
        on_finish: Callable[[Row], None],
        stats: Stats,
    ) -> None:
        self.request = row.request
        params = self.request.sampling
        super().__init__(
            input_ids=torch.tensor([list(self.request.input_ids)], dtype=torch.long),
            # with a draft model exllamav2 stops that many tokens early
            max_new_tokens=params.max_new_tokens + num_draft_tokens,
            stop_conditions=[int(i) for i in params.stop_token_ids],
        )
        self.token_ids: list[int] = []
        self._row = row
        self._on_finish = on_finish
        self._stats = stats

    def receive_logits(self, logits: torch.Tensor) -> tuple[torch.Tensor, None, None, Any, bool]:
        """Hand on the id that was sampled in the forward pass."""
        return logits[:, 0, :], None, None, NO_PROBABILITY, False

    def receive_sample(self, *args: Any) -> tuple[bool, torch.Tensor]:
        """Take one token, and end the job where it completes a stop string."""
        if not self.token_ids:
            self._link_pages()
        ended, token = super().receive_sample(*args)
        if int(token) == NO_TOKEN:
            self._row.error = NOT_NUMBERS
            self._report()
            return True, token
        self.token_ids.append(int(token))
        # exllamav2 looks for stop strings too, but not while a broken character is pending
        finder = self._row.stop_finder
        if finder is not None and self.token_ids[-1] not in self.stop_tokens:
            self._row.found_stop_string = finder.ends_with_stop(self.token_ids[-1])
        if ended or self._row.found_stop_string:
            self._report()
        return ended or self._row.found_stop_string, token

    def _report(self) -> None:
        row, offset = self._row, time.monotonic() - time.time()
        row.token_ids = np.array(self.token_ids, np.int64)
        row.cached_tokens = self.cached_pages * PAGE_TOKENS + self.cached_tokens
        row.started = self.time_first_prefill + offset
        row.first_token = self.time_first_token + offset
        self._on_finish(row)

    def deallocate_pages(self) -> None:
        """Give the pages back; drop what exllamav2 would mistake for the start of a prompt.

        A page that was reserved and not written gets its old content back. Where that content
        meanwhile stands in another page, exllamav2 forgets which tokens came before it.
        """
        unwritten = [
            page for seq in self.sequences for page in seq.allocated_pages or () if page.can_revert
        ]
        super().deallocate_pages()
        self._stats.accepted_tokens += self.accepted_draft_tokens
        self._stats.drafted_tokens += self.accepted_draft_tokens + self.rejected_draft_tokens
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
        self, model: ChunkModel, max_batch_size: int, max_chunk_size: int, stats: Stats
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
        ids = ids.masked_fill(logits[:, 0].isnan(), NO_TOKEN)
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
        draft_model: ChunkModel,
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
