"""The loop that keeps a batch full: prompts in packed passes, then a token a step for all rows.

A row keeps its slot, a place in the batch's arrays, until it ends; what the next step needs stands
in these arrays on the model's device. On a GPU the host runs a step ahead: it starts step n + 1,
whose inputs are on the device already, before it reads what step n sampled. A row that ended
is noticed a step late, and the token made meanwhile is dropped.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from exllamav2.device import set_device_streams

from bulk_pipeline.engine.adapters import LowRank
from bulk_pipeline.engine.bans import BanSlots, RowBans
from bulk_pipeline.engine.logprobs import LogprobSlots, StepLogprobs
from bulk_pipeline.engine.loops import LoopSlots
from bulk_pipeline.engine.ngram import NgramDrafter, NgramSettings, count_accepted
from bulk_pipeline.engine.pages import PageTable, Prefix
from bulk_pipeline.engine.request import Request
from bulk_pipeline.engine.sampling import Sampler
from bulk_pipeline.engine.sampling_slots import download, upload
from bulk_pipeline.engine.structured import GrammarSlots, RowGrammar
from bulk_pipeline.spec import PAGE_TOKENS

NOT_NUMBERS = (
    "the model's logits are not numbers (NaN): its values overflow in this precision; use another "
    "quantisation of the model, or another model"
)
DEFER_TOKENS = 64  # of a prompt, worth waiting for the pass that computes them for another row
REFILL_SHARE = 1 / 16  # of the batch, empty before prompts are read again
NO_TOKEN = -1
FREE_SHARE = 0.1  # pages kept free for each running row, before another one starts


class PagedModel(Protocol):
    """A model bound to its paged cache.

    Attributes
    ----------
    device
        Where logits are, and where inputs are expected.
    vocab_size
        Tokens that can be sampled.
    """

    device: torch.device
    vocab_size: int

    def prefill(
        self,
        token_ids: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        block_table: np.ndarray,
    ) -> None:
        """Store the keys and values of prompt tokens.

        Parameters
        ----------
        token_ids
            int64 [sum of `counts`], the rows one after the other.
        starts, counts
            int32 [rows]: tokens of the row in its pages already, and new ones.
        block_table
            int32 [rows, pages]. A row may share pages that another row of the same call writes.
        """

    def score(
        self,
        token_ids: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        block_table: np.ndarray,
        targets: np.ndarray,
    ) -> torch.Tensor:
        """Store the keys and values of prompt tokens, and say how probable their successors are.

        Parameters
        ----------
        token_ids, starts, counts, block_table
            As for `prefill`.
        targets
            int64 [sum of `counts`]: the token that follows each of `token_ids`.

        Returns
        -------
        The log-probabilities of `targets`, on the device.
        """

    def decode(
        self,
        token_ids: torch.Tensor,
        lengths: torch.Tensor,
        block_table: torch.Tensor,
        max_length: int,
    ) -> torch.Tensor:
        """Run one new token of each row.

        Parameters
        ----------
        token_ids
            int64 [rows], on the device as all here.
        lengths
            int32 [rows], tokens in the pages before this one.
        block_table
            int32 [rows, pages of the longest row]; 0 past a row's end.
        max_length
            At least the largest of `lengths`, plus 1.

        Returns
        -------
        Logits [rows, vocab_size]; the next call may overwrite them.
        """

    def verify(
        self,
        token_ids: torch.Tensor,
        lengths: torch.Tensor,
        block_table: torch.Tensor,
        max_length: int,
        counts: np.ndarray,
    ) -> torch.Tensor:
        """Run several new tokens of each row, all tokens of a row one after the other.

        Parameters
        ----------
        token_ids, lengths, block_table, max_length
            As for `decode`, a place for each token: `lengths` are the tokens before it.
        counts
            On the host: tokens of each row.

        Returns
        -------
        Logits [tokens, vocab_size]; the next call may overwrite them.
        """

    def can_change(self, matrix: str) -> bool:
        """Whether an adapter may change this matrix."""

    def use_adapter(self, changes: Mapping[str, LowRank]) -> None:
        """Run with these changes of matrices from now on, in place of those of before."""


class StopFinder(Protocol):
    """Looks for a row's stop strings."""

    def ends_with_stop(self, token_id: int) -> bool:
        """Take the next token; say whether the text now contains a stop string."""


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
    preemptions
        Rows that gave their pages to others for a while.
    drafted_tokens, accepted_tokens
        Guesses that were checked, and those of them that were right.
    cache_use
        Share of the cache's pages that running rows hold, as of the last step.
    seconds
        Time inside the generator.
    """

    prefill_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    steps: int = 0
    rows: int = 0
    preemptions: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    cache_use: float = 0.0
    seconds: float = 0.0

    @property
    def mean_batch_size(self) -> float:
        """Rows of an average step; 0 before the first."""
        return self.rows / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Share of drafted tokens that were right; None where none were drafted."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None


@dataclass(slots=True)
class Row:
    """A request on its way; times are `time.monotonic` seconds."""

    request: Request
    stop_finder: StopFinder | None = None
    grammar: RowGrammar | None = None
    bans: RowBans | None = None
    token_ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    found_stop_string: bool = False
    completed_grammar: bool = False
    found_loop: bool = False
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    prompt_logprobs: np.ndarray | None = None
    error: str | None = None
    cached_tokens: int = 0
    queued: float = field(default_factory=time.monotonic)
    started: float | None = None
    first_token: float | None = None
    # while it runs
    context: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    pages: list[int] = field(default_factory=list)
    slot: int = -1
    stored: int = 0  # tokens of `context` in pages, or on their way there
    described: int = 0  # of those, tokens that the page table knows of
    to_score: bool = False  # the log-probabilities of its prompt's tokens are still wanted


@dataclass(slots=True)
class _Step:
    """A step that was started and whose tokens the host has not read."""

    slots: np.ndarray
    serials: np.ndarray
    ids: torch.Tensor
    logprobs: StepLogprobs | None
    event: torch.cuda.Event | None


@dataclass(slots=True)
class _Scores:
    """A pass over prompts whose log-probabilities the host has not read.

    Attributes
    ----------
    parts
        Row, first token and number of tokens.
    done
        Rows that end with this pass: nothing is to be generated.
    """

    parts: list[tuple[Row, int, int]]
    done: list[Row]
    values: torch.Tensor
    event: torch.cuda.Event | None


class Scheduler:
    """Runs rows through one model, a bounded number at once.

    Parameters
    ----------
    cache_tensors
        All tensors of the cache, [1, tokens, ...] each.
    num_pages
        Pages of the cache, the scratch page included.
    max_chunk_size
        Most prompt tokens in one pass.
    on_finish
        Called with each row that ended; `token_ids` are what it generated.
    steps_ahead
        Steps that are started before their tokens are read; default 1 on a GPU, else 0. None are
        while rows draft: what to look for is not known before.
    drafts
        How to draft by n-grams; None: not at all.

    Attributes
    ----------
    drafter
        What drafts; None where nothing does. May be replaced while no row runs.
    """

    def __init__(
        self,
        model: PagedModel,
        cache_tensors: Sequence[torch.Tensor],
        num_pages: int,
        *,
        max_batch_size: int,
        max_seq_len: int,
        max_chunk_size: int,
        stats: Stats,
        on_finish: Callable[[Row], None],
        steps_ahead: int | None = None,
        drafts: NgramSettings | None = None,
    ) -> None:
        self.model = model
        self.pages = PageTable(num_pages)
        self._cache_tensors = list(cache_tensors)
        self._batch = max_batch_size
        self._chunk = max_chunk_size
        self._stats = stats
        self._on_finish = on_finish
        on_gpu = model.device.type == "cuda"
        self._ahead = (1 if on_gpu else 0) if steps_ahead is None else steps_ahead
        self._sampler = Sampler(max_batch_size, model.vocab_size, model.device)
        self._logprobs = LogprobSlots(max_batch_size)
        self._grammars = GrammarSlots(max_batch_size, model.device)
        self._loops = LoopSlots(max_batch_size)
        self._bans = BanSlots(max_batch_size, model.vocab_size, model.device)
        self.drafter = NgramDrafter(drafts, max_batch_size) if drafts is not None else None
        self._table_width = -(-max_seq_len // PAGE_TOKENS)
        self._waiting: deque[Row] = deque()
        # by slot
        self._rows: list[Row | None] = [None] * max_batch_size
        self._serials = np.full(max_batch_size, -1, np.int64)  # which row has the slot
        self._lengths = np.zeros(max_batch_size, np.int64)  # tokens in pages
        self._room = np.zeros(max_batch_size, np.int64)  # tokens that the row's pages hold
        self._scheduled = np.zeros(max_batch_size, np.int64)  # tokens asked of the model
        self._generated = np.zeros(max_batch_size, np.int64)  # tokens read from it
        self._limits = np.zeros(max_batch_size, np.int64)
        self._tokens = np.zeros((max_batch_size, 256), np.int64)
        self._ends = np.full((max_batch_size, 1), -1, np.int64)
        self._looks_for_text = np.zeros(max_batch_size, bool)
        with self._on_stream():
            self._device_ids = self._zeros(torch.int64)
            self._device_lengths = self._zeros(torch.int32)
            self._device_positions = self._zeros(torch.int64)
            self._device_table = self._zeros(torch.int32, self._table_width)
        self._reset()

    @property
    def num_rows(self) -> int:
        """Rows that have not ended, waiting ones included."""
        return len(self._waiting) + self._batch - len(self._free_slots)

    def enqueue(self, rows: Iterable[Row], first: bool = False) -> None:
        """Let rows wait for their turn, those with equal beginnings together, long ones first.

        With `first` they come before all that wait already.
        """
        groups: dict[bytes, list[Row]] = {}
        for row in rows:
            row.context = np.asarray(row.request.input_ids, np.int64)
            if row.request.prompt_logprobs:
                row.prompt_logprobs = np.zeros(len(row.context) - 1)
                row.to_score = True
            groups.setdefault(row.context[:PAGE_TOKENS].tobytes(), []).append(row)
        for group in groups.values():
            group.sort(key=lambda row: -len(row.context))
        ordered = sorted(groups.values(), key=lambda group: -len(group[0].context))
        ready = [row for group in ordered for row in group]
        for row in ready:
            if row.grammar is not None:
                row.grammar.prepare()
        if first:
            self._waiting.extendleft(reversed(ready))
        else:
            self._waiting.extend(ready)

    def step(self) -> None:
        """Read some prompts, generate a token for every running row, and end what has ended."""
        with self._on_stream():
            scored = self._read_prompts()
            started = self._start_step()
            while len(self._in_flight) > (self._ahead if started else 0):
                self._finish_step()
            while len(self._scores) > (self._ahead if scored else 0):
                self._finish_scores()

    def forget(self) -> None:
        """Drop all rows and the content of all pages."""
        if self.model.device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # of what failed before, told already
                torch.cuda.synchronize(self.model.device)
        self._waiting.clear()
        self.pages.clear()
        self._reset()

    def use_adapter(self, changes: Mapping[str, LowRank]) -> None:
        """Go on with another adapter, after all rows have ended."""
        assert not self.num_rows, "rows of one adapter must end before the next"
        self.forget()  # what pages hold was computed with the adapter of before
        with self._on_stream():
            self.model.use_adapter(changes)

    def _reset(self) -> None:
        self._rows = [None] * self._batch
        self._serials[:] = -1
        self._next_serial = 0
        self._free_slots = list(range(self._batch - 1, -1, -1))
        self._active = np.empty(0, np.int64)
        self._active_on_device: torch.Tensor | None = None
        self._reading: list[Row] = []
        self._in_flight: deque[_Step] = deque()
        self._scores: deque[_Scores] = deque()
        self._going_back: set[int] = set()  # slots whose rows lost their last tokens
        self._pages_wanted = 0

    # -- prompts

    def _read_prompts(self) -> bool:
        """Run one pass over prompts, where it is worth it; say whether it scored any."""
        if not self._reading and not self._should_admit():
            return False
        self.pages.round += 1
        parts: list[tuple[Row, int, int]] = []
        copies: list[tuple[int, int]] = []
        budget = self._chunk
        for row in self._reading:
            budget -= self._schedule(row, budget, parts)
        while budget > 0 and self._waiting and self._free_slots:
            row = self._waiting[0]
            if row.grammar is not None and (problem := row.grammar.begin()):
                row.error = problem
                self._on_finish(self._waiting.popleft())
                continue
            if not self._admit(row, copies, has_parts=bool(parts)):
                break
            self._waiting.popleft()
            self._reading.append(row)
            budget -= self._schedule(row, budget, parts)
        self._copy_pages(copies)
        ready = [row for row in self._reading if row.stored == len(row.context) - 1]
        self._reading = [row for row in self._reading if row.stored < len(row.context) - 1]
        done = [row for row in ready if not row.request.sampling.max_new_tokens]
        # first, because others may share the pages of rows that are scored, which share none
        scored = self._score([part for part in parts if part[0].to_score], done)
        plain = [part for part in parts if not part[0].to_score]
        if plain:
            self.model.prefill(*_packed(plain))
        self._stats.prefill_tokens += sum(count for _, _, count in parts)
        for row in ready:
            row.to_score = False
        self._activate([row for row in ready if row.request.sampling.max_new_tokens])
        return scored

    def _score(self, parts: list[tuple[Row, int, int]], done: list[Row]) -> bool:
        """Run a pass that says how probable the prompts' tokens are; say whether it is needed."""
        if not parts and not done:
            return False
        values = torch.empty(0)
        if parts:
            targets = [row.context[start + 1 : start + count + 1] for row, start, count in parts]
            values = download(self.model.score(*_packed(parts), np.concatenate(targets)))
        self._scores.append(_Scores(parts, done, values, self._event()))
        return True

    def _finish_scores(self) -> None:
        """Read the oldest log-probabilities of prompts, and end the rows that wait for no more."""
        scores = self._scores.popleft()
        if scores.event is not None:
            scores.event.synchronize()
        values, first = scores.values.double().numpy(), 0
        for row, start, count in scores.parts:
            assert row.prompt_logprobs is not None
            row.prompt_logprobs[start : start + count] = values[first : first + count]
            first += count
            if np.isnan(row.prompt_logprobs[start : start + count]).any():
                row.error = NOT_NUMBERS
        now = time.monotonic()
        for row in scores.done:
            row.first_token = now
        self._end(np.array([row.slot for row in scores.done], np.int64))

    def _should_admit(self) -> bool:
        if not self._waiting or not self._free_slots:
            return False
        if not len(self._active):
            return not self._in_flight or self.pages.num_free >= self._pages_wanted
        wanted = max(1, int(self._batch * REFILL_SHARE))
        enough = len(self._free_slots) >= min(wanted, len(self._waiting))
        return enough and self.pages.num_free >= self._pages_wanted

    def _admit(self, row: Row, copies: list[tuple[int, int]], has_parts: bool) -> bool:
        """Give a row a slot and pages; say whether there was room, and it need not wait."""
        ids = row.context[:-1]
        # what is scored must go through the model
        prefix = Prefix() if row.to_score else self.pages.match(ids)
        if has_parts and not row.to_score and self._is_worth_waiting(ids, prefix):
            return False
        num_new = len(ids) // PAGE_TOKENS + 1 - len(prefix.pages)
        running = self._batch - len(self._free_slots)
        reserve = int(np.ceil(running * FREE_SHARE))
        if running and self.pages.num_free < num_new + reserve:
            # several rows' worth, so that prompts are not read one by one
            several = min(num_new * (running // 16), self.pages.num_pages // 16)
            self._pages_wanted = max(num_new, several) + reserve
            return False
        pages = self.pages.take(prefix, num_new)
        if pages is None:
            self._pages_wanted = self.pages.num_free + num_new
            return False
        self._pages_wanted = 0
        if prefix.source is not None:
            copies.append((prefix.source, pages[len(prefix.pages)]))
        row.pages, row.stored = pages, prefix.num_tokens
        row.described = len(prefix.pages) * PAGE_TOKENS
        row.slot = self._free_slots.pop()
        if row.started is None:
            row.started = time.monotonic()
            row.cached_tokens = prefix.num_tokens
        self._enter(row)
        return True

    def _enter(self, row: Row) -> None:
        """Write what the host keeps of a row into its slot."""
        slot, params, done = row.slot, row.request.sampling, len(row.token_ids)
        self._rows[slot] = row
        self._serials[slot] = self._next_serial
        self._next_serial += 1
        self._lengths[slot] = len(row.context) - 1
        self._room[slot] = len(row.pages) * PAGE_TOKENS
        self._scheduled[slot] = self._generated[slot] = done
        self._limits[slot] = params.max_new_tokens
        self._widen(params.max_new_tokens, len(params.stop_token_ids))
        self._tokens[slot, :done] = row.token_ids
        self._ends[slot] = -1
        self._ends[slot, : len(params.stop_token_ids)] = params.stop_token_ids
        self._looks_for_text[slot] = row.stop_finder is not None
        generated = row.token_ids.tolist()
        self._sampler.add(slot, params, row.request.input_ids, generated)
        self._logprobs.enter(slot, params.logprobs)
        self._grammars.enter(slot, row.grammar)
        self._loops.enter(slot, params.loop_guard, generated)
        self._bans.enter(slot, row.bans)
        if self.drafter is not None:
            self.drafter.enter(slot, params)

    def _is_worth_waiting(self, ids: np.ndarray, prefix: Prefix) -> bool:
        """Whether the pass being put together computes much that the row could copy afterwards."""
        later = self.pages.match(ids, pending=True)
        return later.num_tokens >= prefix.num_tokens + DEFER_TOKENS

    def _schedule(self, row: Row, budget: int, parts: list[tuple[Row, int, int]]) -> int:
        """Add the next tokens of a row's prompt to the pass; return how many."""
        count = min(len(row.context) - 1 - row.stored, max(budget, 0))
        if count:
            parts.append((row, row.stored, count))
            row.stored += count
        if row.stored > row.described:
            self.pages.describe(row.pages, row.context[: row.stored], row.described)
            row.described = row.stored // PAGE_TOKENS * PAGE_TOKENS
        return count

    def _copy_pages(self, copies: list[tuple[int, int]]) -> None:
        if not copies:
            return
        index = torch.tensor(copies).T
        on_devices = {t.device: index.to(t.device) for t in self._cache_tensors}
        for tensor in self._cache_tensors:
            pages = tensor.view(-1, PAGE_TOKENS * tensor[0, 0].numel())
            sources, targets = on_devices[tensor.device]
            pages.index_copy_(0, targets, pages.index_select(0, sources))

    def _activate(self, rows: list[Row]) -> None:
        """Let rows generate from the next step on."""
        if not rows:
            return
        slots = np.array([row.slot for row in rows])
        index = upload(slots, self.model.device)
        table = np.zeros((len(rows), self._table_width), np.int32)
        table[:, : max(len(row.pages) for row in rows)] = _table([row.pages for row in rows])
        self._device_table[index] = upload(table, self.model.device)
        self._write_ends(slots, np.array([row.context[-1] for row in rows]))
        self._set_active(np.concatenate([self._active, slots]))

    def _widen(self, max_new_tokens: int, num_ends: int) -> None:
        """Make the arrays of tokens and end tokens hold that many."""
        if max_new_tokens > self._tokens.shape[1]:
            width = max(max_new_tokens, 2 * self._tokens.shape[1]) - self._tokens.shape[1]
            self._tokens = np.pad(self._tokens, ((0, 0), (0, width)))
        if num_ends > self._ends.shape[1]:
            width = num_ends - self._ends.shape[1]
            self._ends = np.pad(self._ends, ((0, 0), (0, width)), constant_values=-1)

    # -- tokens

    def _start_step(self) -> bool:
        """Start a step for all running rows; say whether there were any."""
        self._go_back()
        self._get_pages()
        self._go_back()  # to get pages, tokens may have been read
        tokens = self._draft()
        slots = self._active
        if not len(slots):
            return False
        if any(len(ids) > 1 for ids in tokens):
            self._verify(slots, tokens)
            return True
        serials = self._serials[slots]
        if self._active_on_device is None:
            self._active_on_device = upload(slots, self.model.device)
        index = self._active_on_device
        lengths, positions = self._device_lengths[index], self._device_positions[index]
        logits = self.model.decode(
            self._device_ids[index],
            lengths,
            self._device_table[index],
            int(self._lengths[slots].max()) + 1,
        )
        places = self._scheduled[slots]
        ids, found, logprobs = self._sample(logits, slots, index, places, positions)
        self._device_ids[index] = ids
        self._device_lengths[index] = lengths + 1
        self._device_positions[index] = positions + 1
        self._in_flight.append(_Step(slots, serials, found, logprobs, self._event()))
        self._lengths[slots] += 1
        self._scheduled[slots] += 1
        self._count_step(len(slots))
        at_limit = slots[self._scheduled[slots] >= self._limits[slots]]
        if len(at_limit):
            self._set_active(self._active[~np.isin(self._active, at_limit)])
        return True

    def _sample(
        self,
        logits: torch.Tensor,
        slots: np.ndarray,
        index: torch.Tensor,
        places: np.ndarray,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, StepLogprobs | None]:
        """Draw a token for each line of logits, which belong to these slots.

        Parameters
        ----------
        index, positions
            `slots` and `places`, the tokens' places in the answers, on the device.

        Returns
        -------
        The tokens, the same on their way to the host with NO_TOKEN where logits are not numbers,
        and what log-probabilities are asked for.
        """
        # one column is enough: what is not a number spreads to all logits of a row
        is_broken = logits[:, 0].isnan()
        logprobs = self._logprobs.begin(logits, slots)
        if self._grammars.is_any(slots) or self._bans.needs_tokens(slots, places):
            # a mask needs the tokens before it; the device is busy with the pass meanwhile
            while self._in_flight:
                self._finish_step()
        if self._grammars.is_any(slots):
            logits = self._grammars.mask(logits, slots)
        logits = self._bans.edit(logits, slots, places)
        ids = self._sampler.sample(logits, slots, index, positions)
        if logprobs is not None:
            logprobs.choose(logits, ids)
        return ids, download(ids.masked_fill(is_broken, NO_TOKEN)), logprobs

    def _finish_step(self) -> None:
        """Read the tokens of the oldest step that was started, and end the rows that ended."""
        while self._scores:  # of rows that may end now
            self._finish_scores()
        step = self._in_flight.popleft()
        if step.event is not None:
            step.event.synchronize()
        alive = self._serials[step.slots] == step.serials
        if step.logprobs is not None:
            self._keep_logprobs(step.logprobs, np.where(alive, step.slots, -1))
        self._take(step.slots[alive], step.ids.numpy()[alive])

    def _take(self, slots: np.ndarray, ids: np.ndarray) -> None:
        """Add a token to each of these rows, and end those that ended."""
        if (ids == NO_TOKEN).any():
            broken = slots[ids == NO_TOKEN]
            slots, ids = slots[ids != NO_TOKEN], ids[ids != NO_TOKEN]
            for slot in broken:
                self._row(slot).error = NOT_NUMBERS
            self._end(broken)
        places = self._generated[slots]
        self._tokens[slots, places] = ids
        self._generated[slots] = places + 1
        if not places.all():
            now = time.monotonic()
            for slot in slots[places == 0]:
                self._row(slot).first_token = now
        ended = (self._ends[slots] == ids[:, None]).any(axis=1)
        stays = self._heed_bans(slots, ids, ended)
        slots, ids, places, ended = slots[stays], ids[stays], places[stays], ended[stays]
        looking = self._looks_for_text[slots] & ~ended
        for place in np.nonzero(looking)[0]:
            row = self._row(slots[place])
            assert row.stop_finder is not None
            if row.stop_finder.ends_with_stop(int(ids[place])):
                row.found_stop_string = ended[place] = True
        for place in np.nonzero(self._grammars.advance(slots, ids, ended))[0]:
            row = self._row(slots[place])
            assert row.grammar is not None
            row.error = row.error or row.grammar.error
            row.completed_grammar = ended[place] = True
        looping = self._loops.loops(slots, self._tokens, places) & ~ended
        for slot in slots[looping]:
            self._row(slot).found_loop = True
        ended |= looping
        ended |= self._generated[slots] >= self._limits[slots]
        if ended.any():
            self._end(slots[ended])

    def _draft(self) -> list[np.ndarray]:
        """Return the last token of each running row and guesses of those that follow it.

        Nothing at all where no row drafts now.
        """
        drafter = self.drafter
        if drafter is None or not self._who_drafts(drafter).any():
            return []
        while self._in_flight:  # the last tokens are what to look for
            self._finish_step()
        self._go_back()
        found = list(self._last_ids(self._active)[:, None])
        for place in np.nonzero(self._who_drafts(drafter))[0].tolist():
            slot = int(self._active[place])
            # no more than the row may have; a page is not taken for what may be wrong
            left = self._limits[slot] - self._generated[slot]
            room = self._room[slot] - self._lengths[slot]
            guesses = drafter.draft(self._context(slot), int(min(left, room)) - 1)
            found[place] = np.concatenate([found[place], guesses])
            if not len(guesses):
                drafter.learn(slot, int(self._generated[slot]), 0)
        return found

    def _who_drafts(self, drafter: NgramDrafter) -> np.ndarray:
        return drafter.drafting(self._active, self._generated[self._active])

    def _last_ids(self, slots: np.ndarray) -> np.ndarray:
        """Return the last token that each row has so far, of its answer or its prompt."""
        generated = self._generated[slots]
        last = self._tokens[slots, generated - 1]
        for place in np.nonzero(generated == 0)[0]:
            last[place] = self._row(slots[place]).request.input_ids[-1]
        return last

    def _context(self, slot: int) -> np.ndarray:
        """Return a row's prompt and all that it generated."""
        row = self._row(slot)
        prompt = row.context[: len(row.request.input_ids)]
        return np.concatenate([prompt, self._tokens[slot, : self._generated[slot]]])

    def _verify(self, slots: np.ndarray, tokens: list[np.ndarray]) -> None:
        """Sample behind each token of the rows; keep guesses that agree, and one token more.

        Keys and values of tokens that were wrong stay in the row's own pages until others are
        written over them; no row reads past its length.
        """
        serials, generated = self._serials[slots], self._generated[slots]
        counts = np.array([len(ids) for ids in tokens])
        firsts = counts.cumsum() - counts
        owners = np.repeat(slots, counts)
        offsets = np.arange(len(owners)) - np.repeat(firsts, counts)
        lengths = self._lengths[owners] + offsets
        positions = self._generated[owners] + offsets
        places = np.stack([owners, np.concatenate(tokens), lengths, positions])
        index, ids, lengths_there, positions_there = upload(places, self.model.device)
        logits = self.model.verify(
            ids,
            lengths_there.int(),
            self._device_table[index],
            int(lengths.max()) + 1,
            counts,
        )
        _, found, logprobs = self._sample(logits, owners, index, positions, positions_there)
        event = self._event()
        if event is not None:
            event.synchronize()
        sampled = found.numpy()
        while self._scores:  # of rows that may end now
            self._finish_scores()
        if logprobs is not None:  # rows that ask for them have one token
            self._keep_logprobs(logprobs, owners)
        accepted = np.zeros(len(slots), np.int64)
        drafting = np.nonzero(counts > 1)[0].tolist()
        for place in drafting:
            accepted[place] = count_accepted(tokens[place][1:], sampled[firsts[place] :])
        self._advance(slots, accepted + 1, sampled[firsts + accepted])
        self._stats.drafted_tokens += int(counts.sum()) - len(slots)
        self._stats.accepted_tokens += int(accepted.sum())
        self._count_step(len(slots))
        assert self.drafter is not None
        for place in drafting:
            right = int(accepted[place])
            self.drafter.learn(slots[place], int(generated[place]) + right + 1, right)
        for place in range(int(accepted.max()) + 1):
            going_on = (accepted >= place) & (self._serials[slots] == serials)
            self._take(slots[going_on], sampled[firsts[going_on] + place])

    def _advance(self, slots: np.ndarray, counts: np.ndarray, last_ids: np.ndarray) -> None:
        """Let rows go on after so many more tokens, of which these are the last."""
        self._lengths[slots] += counts
        self._scheduled[slots] += counts
        self._write_ends(slots, last_ids)

    def _write_ends(self, slots: np.ndarray, last_ids: np.ndarray) -> None:
        """Write to the device where rows go on: after which token, and how many."""
        places = [slots, last_ids, self._lengths[slots], self._scheduled[slots]]
        index, ids, lengths, positions = upload(np.stack(places), self.model.device)
        self._device_ids[index] = ids
        self._device_lengths[index] = lengths.int()
        self._device_positions[index] = positions

    def _heed_bans(self, slots: np.ndarray, ids: np.ndarray, ended: np.ndarray) -> np.ndarray:
        """Let rows with bans take their tokens; say which rows keep theirs, and set `ended`."""
        stays = np.ones(len(slots), bool)
        for place in self._bans.advance(slots, ids, ended):
            row = self._row(slots[place])
            assert row.bans is not None
            row.error = row.error or row.bans.error
            if row.bans.goes_back_to is None:
                ended[place] = True
            else:
                stays[place] = False
                self._drop_tokens(row, row.bans)
        return stays

    def _drop_tokens(self, row: Row, bans: RowBans) -> None:
        """Take a row's last tokens away, and those on their way; `_go_back` does the rest."""
        bans.go_back()
        kept = len(bans.ids)
        self._generated[row.slot] = kept
        del row.logprobs[kept:], row.top_logprobs[kept:]
        self._serials[row.slot] = self._next_serial
        self._next_serial += 1
        if bans.gave_up:
            self._end(np.array([row.slot]))
        else:
            self._going_back.add(row.slot)

    def _go_back(self) -> None:
        """Let rows that lost their last tokens go on from those that they have."""
        rows = [self._row(slot) for slot in sorted(self._going_back)]
        self._going_back.clear()
        here: list[Row] = []
        for row in rows:
            kept = int(self._generated[row.slot])
            if len(row.request.input_ids) + kept < len(row.context):
                self._put_back(row)  # its pages may be shared up to there
                continue
            here.append(row)
            self._lengths[row.slot] = len(row.request.input_ids) + kept - 1
            self._scheduled[row.slot] = kept
            generated, params = self._tokens[row.slot, :kept].tolist(), row.request.sampling
            self._sampler.add(row.slot, params, row.request.input_ids, generated)
            self._loops.enter(row.slot, params.loop_guard, generated)
        if here:
            slots = np.array([row.slot for row in here])
            self._write_ends(slots, self._last_ids(slots))
            self._set_active(np.concatenate([self._active, np.setdiff1d(slots, self._active)]))

    def _keep_logprobs(self, logprobs: StepLogprobs, slots: np.ndarray) -> None:
        """Give the log-probabilities of a step to its rows; a slot of -1 has none."""
        for place, chosen, best in logprobs.read():
            if slots[place] >= 0:
                row = self._row(slots[place])
                row.logprobs.append(chosen)
                row.top_logprobs.append(best)

    def _end(self, slots: np.ndarray) -> None:
        gone = np.isin(self._active, slots)
        if gone.any():
            self._set_active(self._active[~gone])
        for slot in slots:
            row = self._row(slot)
            self._leave(row)
            self._on_finish(row)

    def _leave(self, row: Row) -> None:
        """Take a row out of its slot and pages; its tokens so far stay with it."""
        was_read = row.stored == len(row.context) - 1
        row.token_ids = self._tokens[row.slot, : self._generated[row.slot]].copy()
        prompt = np.asarray(row.request.input_ids, np.int64)
        row.context = np.concatenate([prompt, row.token_ids])
        if was_read and row.error is None:
            self.pages.describe(row.pages, row.context[:-1], row.described)
        self.pages.release(row.pages)
        self._rows[row.slot] = None
        self._serials[row.slot] = -1
        self._free_slots.append(row.slot)
        self._going_back.discard(row.slot)
        row.pages, row.slot, row.stored, row.described = [], -1, 0, 0

    def _count_step(self, num_rows: int) -> None:
        self._stats.steps += 1
        self._stats.rows += num_rows
        self._stats.cache_use = 1 - self.pages.num_free / (self.pages.num_pages - 1)

    # -- pages

    def _get_pages(self) -> None:
        """Give a page to each running row whose next token begins one."""
        slots = self._active
        growing = slots[self._lengths[slots] == self._room[slots]]
        if not len(growing):
            return
        grown: list[tuple[int, int, int]] = []
        for slot in growing:
            row = self._rows[slot]
            if row is None or slot not in self._active:
                continue  # it ended, or gave its pages away, a moment ago
            page = self._take_page(row)
            if page is not None:
                grown.append((int(slot), len(row.pages), page))
                row.pages.append(page)
                self._room[slot] += PAGE_TOKENS
        grown = [(slot, place, page) for slot, place, page in grown if self._rows[slot] is not None]
        if grown:
            on_device = upload(np.array(grown).T.copy(), self.model.device)
            self._device_table[on_device[0], on_device[1]] = on_device[2].int()

    def _take_page(self, row: Row) -> int | None:
        """Take a page, from the rows that came last where none is free; None if `row` is gone."""
        page = self.pages.take_one()
        while page is None:
            while self._in_flight:  # rows may have ended, and tokens must not be lost
                self._finish_step()
            while self._scores:
                self._finish_scores()
            page = self.pages.take_one()
            if page is None and self._rows[row.slot] is row:
                self._preempt(int(np.argmax(self._serials)))
            if row.slot < 0:
                if page is not None:
                    self.pages.release([page])
                return None
        return page

    def _preempt(self, slot: int) -> None:
        """Make a row wait again, first in line, with the tokens it has."""
        self._put_back(self._row(slot))
        self._stats.preemptions += 1

    def _put_back(self, row: Row) -> None:
        self._reading = [other for other in self._reading if other is not row]
        self._set_active(self._active[self._active != row.slot])
        self._leave(row)
        self._waiting.appendleft(row)

    # -- small things

    def _row(self, slot: int) -> Row:
        row = self._rows[slot]
        assert row is not None
        return row

    def _event(self) -> torch.cuda.Event | None:
        """Mark this place in the device's work; None where the host does the work itself."""
        if self.model.device.type == "cpu":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.model.device))
        return event

    def _set_active(self, slots: np.ndarray) -> None:
        self._active, self._active_on_device = slots, None

    def _on_stream(self) -> Any:
        """exllamav2 runs everything on streams of its own, for each thread anew."""
        stream = getattr(self.model, "stream", None)
        if stream is not None:
            set_device_streams()
        elif self.model.device.type == "cuda":  # it need not be the current device
            stream = torch.cuda.current_stream(self.model.device)
        return torch.cuda.stream(stream)

    def _zeros(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.zeros((self._batch, *shape), dtype=dtype, device=self.model.device)


def _packed(
    parts: list[tuple[Row, int, int]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the arguments of a pass over parts of prompts: row, first token, number of tokens."""
    return (
        np.concatenate([row.context[start : start + count] for row, start, count in parts]),
        np.array([start for _, start, _ in parts], np.int32),
        np.array([count for _, _, count in parts], np.int32),
        _table([row.pages for row, _, _ in parts]),
    )


def _table(pages: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the pages of rows as int32 [rows, most pages], 0 past a row's end."""
    table = np.zeros((len(pages), max(map(len, pages))), np.int32)
    for line, numbers in zip(table, pages, strict=True):
        line[: len(numbers)] = numbers
    return table
