"""Requests in, completions out.

Every request gives exactly one completion, in the order in which they finish. Text is decoded
once, from all token ids of a completion.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Protocol

from bulk_pipeline.engine.adapters import Adapters, LowRank
from bulk_pipeline.engine.bans import TAIL_SLACK_TOKENS, Bans
from bulk_pipeline.engine.errors import GenerationError, is_failure, reason_of
from bulk_pipeline.engine.memory import is_gpu_lost, is_out_of_memory, out_of_memory_message
from bulk_pipeline.engine.request import Completion, Request, Status
from bulk_pipeline.engine.rows import Row, Stats
from bulk_pipeline.engine.sampling import problem_with
from bulk_pipeline.engine.structured import Grammars

QUEUED_BATCHES = 2  # requests held at once, in batches: what runs, and what is put in order
UNCERTAIN = "\0"  # no adapter's name: using one failed midway
REPLACEMENT = "\ufffd"
GRAMMAR = "grammar"  # the reason of an answer that ended because its grammar allows nothing more
BANNED_STRINGS = "banned_strings"  # of one that went back to them again and again


class Loop(Protocol):
    """What runs rows: `Scheduler`, or `DraftingLoop` where there is a draft model."""

    @property
    def num_rows(self) -> int:
        """Rows that have not ended, waiting ones included."""

    def enqueue(self, rows: Iterable[Row], first: bool = False) -> None:
        """Let rows wait for their turn; with `first`, before all that wait already."""

    def step(self) -> None:
        """Go one step on with all rows that run."""

    def use_adapter(self, changes: Mapping[str, LowRank]) -> None:
        """Go on with another adapter, after all rows have ended."""

    def forget(self) -> None:
        """Drop all rows and the content of all pages."""


class Decoder(Protocol):
    """The part of a transformers tokenizer that turns ids into text, and text into ids."""

    all_special_ids: list[int]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of `token_ids`."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of `text`."""


class BulkGenerator:
    """Runs any number of requests through one model, a bounded number of them at once.

    Parameters
    ----------
    make_loop
        Makes what runs the rows, given the counters and what to call with a row that ended.
    models
        The model, and the draft model if there is one; closed with the generator.
    decoder
        The model's transformers tokenizer.
    vocab_size
        Token ids are below this.
    max_batch_size
        Most requests in generation at once.
    max_seq_len
        Most tokens of a prompt and its completion together.
    provenance
        What is recorded with every completion: model, versions, settings.
    adapters
        The LoRA adapters that requests may name.

    Attributes
    ----------
    stats
        Counters since the generator was made.
    max_batch_size, max_seq_len, provenance
        As given.
    """

    def __init__(
        self,
        make_loop: Callable[[Stats, Callable[[Row], None]], Loop],
        models: Sequence[Any],
        decoder: Decoder,
        *,
        vocab_size: int,
        max_batch_size: int,
        max_seq_len: int,
        provenance: dict[str, Any] | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self.stats = Stats()
        self.provenance = provenance or {}
        self.max_batch_size = max_batch_size
        self.max_seq_len = max_seq_len
        self._vocab_size = vocab_size
        self._models = list(models)
        self._decoder = decoder
        self._special_ids = _special_ids(decoder)
        self._grammars = Grammars(decoder, vocab_size)
        self._bans = Bans(decoder, vocab_size, self._special_ids)
        self._adapters = adapters or Adapters()
        self._adapter: str | None = None  # in use
        self._held: dict[str | None, list[Row]] = {}  # wait until their adapter is
        self._finished: deque[Completion] = deque()
        self._running = False
        self._gpu_is_lost = False
        self._loop: Loop | None = make_loop(self.stats, self._finish)

    def run(
        self,
        requests: Iterable[Request],
        on_step: Callable[[], None] | None = None,
        go_on: Callable[[Completion], Iterable[Request]] | None = None,
    ) -> Generator[Completion, None, None]:
        """Complete `requests`, read as they are needed; yield completions as they finish.

        `on_step` is called after each step of the model, also where nothing finished. `go_on` is
        called with each completion before that is yielded, and gives requests that follow from
        it, such as a conversation's next turn; they come before all that wait, so that what they
        share with it still stands in the cache.

        A request that cannot run (no ids, an id that the model does not know, too long) is a
        completion with that status, and so is one whose own preparation fails. Closing the
        iterator drops the requests in generation. An error inside the model is raised after
        everything that finished before it was yielded; the generator can then be used again,
        unless the GPU was lost by it.

        Raises
        ------
        GenerationError
            If the model failed on the requests in generation, one of which may be the reason.
        RuntimeError
            If a GPU's memory is full, or this process cannot use the GPU any more.
        """
        if self._loop is None:
            raise RuntimeError("the generator was closed; load it again")
        if self._gpu_is_lost:
            raise RuntimeError(
                "the GPU failed earlier in this process, which cannot use it any more; run again"
            )
        if self._running:
            raise RuntimeError("the generator runs already; finish or close that iterator first")
        self._running = True
        waiting = iter(requests)
        try:
            while self._feed(waiting) or self._finished:
                yield from self._take_finished(go_on)
                try:
                    self._step()
                except Exception:
                    yield from self._take_finished()
                    raise
                yield from self._take_finished(go_on)
                if on_step is not None:
                    on_step()
        finally:
            self._running = False
            self._finished.clear()
            self._held.clear()
            self._grammars.stop()
            if self._loop is not None and self._loop.num_rows:
                self._loop.forget()

    def answer_ids(
        self, token_ids: Sequence[int], text: str, stop_token_ids: Collection[int]
    ) -> list[int]:
        """Return the tokens of an answer as a chat goes on from it: those of its `text`.

        The generated ones, without the end token. Where the text was cut (at a stop string, or
        within a character), those that lie in it whole, and new ones for what is left.
        """
        ids = list(token_ids)
        if ids and ids[-1] in stop_token_ids:
            ids.pop()
        for num_kept in range(len(ids), -1, -1):
            kept = self._decoder.decode(ids[:num_kept], skip_special_tokens=True)
            if text.startswith(kept):
                rest = text[len(kept) :]
                new = self._decoder.encode(rest, add_special_tokens=False) if rest else []
                return [*ids[:num_kept], *new]
        raise AssertionError("no text starts a text")

    def close(self) -> None:
        """Free the model and the cache; the generator cannot be used afterwards."""
        self._loop = None
        self._grammars.stop()
        for model in self._models:
            close = getattr(model, "close", None) or getattr(model, "unload", None)
            if close is not None:
                with suppress(*[RuntimeError] * self._gpu_is_lost):  # it ends with the process
                    close()
        self._models.clear()

    def _feed(self, waiting: Iterator[Request]) -> bool:
        """Fill the queue up to its bound; say whether there is anything to generate."""
        assert self._loop is not None
        num_held = sum(map(len, self._held.values()))
        room = QUEUED_BATCHES * self.max_batch_size - self._loop.num_rows - num_held
        if room > self.max_batch_size // 2:  # so many that putting them in order is of use
            self._enqueue(islice(waiting, room))
        if self._held and not self._loop.num_rows:
            self._use_adapter(max(self._held, key=lambda name: len(self._held[name])))
        return bool(self._loop.num_rows)

    def _enqueue(self, requests: Iterable[Request], first: bool = False) -> None:
        """Let requests wait, others until their adapter is in use; finish those that cannot run."""
        assert self._loop is not None
        rows = []
        for request in requests:
            row = self._row_or_refusal(request)
            if isinstance(row, Completion):
                self._finished.append(row)
            elif request.adapter == self._adapter:
                rows.append(row)
            else:
                self._held.setdefault(request.adapter, []).append(row)
        self._loop.enqueue(rows, first)

    def _use_adapter(self, name: str | None) -> None:
        """Go on with another adapter and the rows that wait for it, now that nothing runs."""
        assert self._loop is not None
        changes = self._adapters.read(name)
        self._adapter = UNCERTAIN
        self._loop.use_adapter(changes)
        self._adapter = name
        self._loop.enqueue(self._held.pop(name))

    def _step(self) -> None:
        assert self._loop is not None
        started = time.perf_counter()
        try:
            if self._loop.num_rows:
                self._loop.step()
        except BaseException as error:  # what the pages hold is uncertain now
            self._loop.forget()
            if isinstance(error, Exception) and is_out_of_memory(error):
                raise RuntimeError(out_of_memory_message("generating")) from None
            if not is_failure(error):
                raise
            self._gpu_is_lost = is_gpu_lost()
            raise GenerationError(f"the model failed in generation: {reason_of(error)}") from error
        finally:
            self.stats.seconds += time.perf_counter() - started

    def _take_finished(
        self, go_on: Callable[[Completion], Iterable[Request]] | None = None
    ) -> Iterator[Completion]:
        while self._finished:
            completion = self._finished.popleft()
            if go_on is not None:
                self._enqueue(go_on(completion), first=True)
            yield completion

    def _row_or_refusal(self, request: Request) -> Row | Completion:
        """Return what runs, or the completion of a request that cannot; an error is its own."""
        try:
            return self._refuse(request) or self._row(request)
        except BaseException as error:
            if not is_failure(error):
                raise
            return Completion(
                request.request_id,
                Status.ERROR,
                prompt_tokens=len(request.input_ids),
                error=f"the request cannot be prepared: {reason_of(error)}",
            )

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
        if problem := self._problem_with(request):
            return refused(Status.INVALID, problem)
        if limit < 1 and not (limit == 0 and request.prompt_logprobs):
            return refused(Status.INVALID, f"max_new_tokens must be at least 1, got {limit}")
        if len(ids) + limit > self.max_seq_len:
            return refused(
                Status.TOO_LONG,
                f"prompt ({len(ids)} tokens) and max_new_tokens ({limit}) exceed "
                f"{self.max_seq_len} tokens; shorten the prompt, lower max_new_tokens or raise "
                "generator.max_seq_len and generator.cache_tokens",
            )
        return None

    def _problem_with(self, request: Request) -> str | None:
        params = request.sampling
        if len(self._models) > 1 and (unknown := _unknown_to_drafting(request)):
            return f"{unknown} not work with a draft model; set generator.draft_model to null"
        if problem := problem_with(params, self._vocab_size):
            return problem
        if problem := self._adapters.problem_with(request.adapter):
            return problem
        return self._bans.problem_with(params) if params.has_bans else None

    def _row(self, request: Request) -> Row:
        params = request.sampling
        tail = None
        if params.stop and not params.banned_strings:  # which look for stop strings, too
            tail = _TextTail(params.stop, self._decoder, self._special_ids)
        return Row(request, tail, self._grammars.start(params), self._bans.start(params))

    def _finish(self, row: Row) -> None:
        try:
            completion = _completion(row, self._decoder)
        except BaseException as error:
            if not is_failure(error):
                raise
            row.error = f"the answer cannot be decoded: {reason_of(error)}"
            completion = _completion(row, self._decoder)
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


def _completion(row: Row, decoder: Decoder) -> Completion:
    ids, params = tuple(row.token_ids.tolist()), row.request.sampling
    if row.error is not None:
        return Completion(
            row.request.request_id,
            Status.ERROR if row.started is not None else Status.INVALID,
            prompt_tokens=len(row.request.input_ids),
            error=row.error,
        )
    ended_by_token = bool(ids) and ids[-1] in params.stop_token_ids
    text = decoder.decode(list(ids[:-1] if ended_by_token else ids), skip_special_tokens=True)
    status, reason, incomplete = Status.LENGTH, None, False
    if row.found_stop_string or (row.bans is not None and row.bans.has_stop):
        status = Status.STOP
        text, reason = _cut(text, params.stop)
    elif ended_by_token:
        status, reason = Status.STOP, str(ids[-1])
    elif row.completed_grammar:
        status, reason = Status.STOP, GRAMMAR
    else:
        if row.found_loop:
            status = Status.LOOP
        if row.bans is not None and row.bans.gave_up:
            status, reason = Status.LOOP, BANNED_STRINGS
        if text.endswith(REPLACEMENT):
            text, incomplete = text.rstrip(REPLACEMENT), True
    assert row.started is not None
    assert row.first_token is not None
    started, first_token = row.started, row.first_token
    return Completion(
        request_id=row.request.request_id,
        status=status,
        text=text,
        token_ids=ids,
        stop_reason=reason,
        incomplete_character=incomplete,
        prompt_tokens=len(row.request.input_ids),
        cached_tokens=row.cached_tokens,
        queue_seconds=started - row.queued,
        prefill_seconds=first_token - started,
        generate_seconds=time.monotonic() - first_token,
        logprobs=None if params.logprobs is None else tuple(row.logprobs),
        top_logprobs=None if params.logprobs is None else tuple(row.top_logprobs),
        prompt_logprobs=(
            None if row.prompt_logprobs is None else tuple(row.prompt_logprobs.tolist())
        ),
    )


def _unknown_to_drafting(request: Request) -> str | None:
    """Name what a request asks for that needs the scheduler; None where it is nothing."""
    params = request.sampling
    asked = {
        "repetition, frequency and presence penalties do": params.has_penalties,
        "sampling.structured_output does": params.structured is not None,
        "sampling.loop_guard does": params.loop_guard is not None,
        "sampling.allowed_token_ids does": bool(params.allowed_token_ids),
        "sampling.bad_words does": bool(params.bad_words),
        "sampling.banned_strings does": bool(params.banned_strings),
        "sampling.thinking_token_budget does": params.thinking is not None,
        "sampling.logprobs does": params.logprobs is not None,
        "log-probabilities of the prompt do": request.prompt_logprobs,
    }
    return next((name for name, is_asked in asked.items() if is_asked), None)


def _cut(text: str, stop: Sequence[str]) -> tuple[str, str]:
    """Cut `text` at the earliest stop string; of several at one place, the longest counts."""
    found = [(place, -len(s), s) for s in stop if (place := text.find(s)) >= 0]
    place, _, string = min(found)
    return text[:place], string


def _special_ids(decoder: Any) -> frozenset[int]:
    """Return the ids that `skip_special_tokens` skips."""
    added = getattr(decoder, "added_tokens_decoder", {})
    return frozenset(decoder.all_special_ids) | {i for i, token in added.items() if token.special}
