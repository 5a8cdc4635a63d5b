"""Answers that follow a grammar: a JSON schema, a regular expression, a choice, a Lark grammar.

llguidance compiles a grammar against the model's tokenizer and says, for each row and step, which
tokens may come next. The bits are filled on the host while the device runs the forward pass, and
only they travel.
"""

import contextlib
import itertools
import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from llguidance.hf import from_tokenizer
from llguidance.numpy import fill_next_token_bitmask_par

from bulk_pipeline.engine.errors import is_failure, reason_of
from bulk_pipeline.engine.request import SamplingParams, StructuredOutput
from bulk_pipeline.engine.sampling_slots import upload

BITS = 32
KEPT_COPIES = 1024  # compiled grammars, those that were unused for longest dropped first
MAX_THREADS = 8  # that compile grammars
MAX_EXECUTOR_THREADS = 32  # that make masks
CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds, in so many
COPIES_PER_THREAD = 4  # of a compiled grammar: few rows share one, which threads wait for
# No white space but a space after a colon or comma, as most JSON is written: where there may be
# any, a model can go on with it for ever. A schema's own "x-guidance" takes precedence.
JSON_OPTIONS: Any = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
NO_TOKEN_LEFT = (
    "sampling.structured_output: no token is left that the grammar allows ({}); ban fewer tokens, "
    "or make the grammar simpler"
)
MAX_REASON = 200


class RowGrammar:
    """Where one row stands in its grammar.

    Attributes
    ----------
    structured
        What the answer must be.
    matcher
        Follows the row's tokens; there after `begin`, as all below.
    copy
        Number of the compiled grammar that this one shares its lexer with: one thread at a time
        works on it.
    end_ids
        Tokens that may end the answer where the grammar allows an end.
    """

    matcher: LLMatcher
    copy: int
    eos_id: int
    num_words: int
    end_ids: np.ndarray

    def __init__(self, grammars: "Grammars", structured: StructuredOutput, ends: list[int]) -> None:
        self._grammars, self.structured, self._ends = grammars, structured, ends
        self._compiled: _Copy | None = None
        self._has_begun = False

    def prepare(self) -> None:
        """Let the grammar be compiled while the row waits."""
        if self._compiled is None:
            self._compiled = self._grammars.compile(self)

    def begin(self) -> str | None:
        """Go to the beginning of the grammar, unless done before; wait until it is compiled.

        Returns
        -------
        Why no answer can follow it, in one line; None where one can.
        """
        if self._has_begun:
            return None
        self.prepare()
        assert self._compiled is not None
        compiled, self.copy = self._compiled.matcher.result(), self._compiled.number
        if isinstance(compiled, str):
            return compiled
        tokenizer = self._grammars.tokenizer
        self.matcher = compiled.deep_copy()
        self.eos_id = tokenizer.eos_token
        self.num_words = -(-tokenizer.vocab_size // BITS)
        self.end_ids = np.array(self._ends or [self.eos_id], np.int64)
        self._has_begun = True
        return None

    @property
    def error(self) -> str | None:
        """Why it cannot go on, in one line; None where it can."""
        if not self.matcher.is_error():
            return None
        return NO_TOKEN_LEFT.format(one_line(self.matcher.get_error()))


@dataclass(eq=False, slots=True)
class _Copy:
    """A grammar compiled once, or on its way: what rows start from, or what is wrong with it.

    Attributes
    ----------
    rows
        Those that wait or run with it.
    """

    matcher: "Future[LLMatcher | str]"
    number: int
    rows: WeakSet[RowGrammar] = field(default_factory=WeakSet)


class Grammars:
    """Compiles grammars for one tokenizer, each a few times for every thread that makes masks.

    It does so in threads of its own, while rows wait for their turn and the device is busy.

    Parameters
    ----------
    tokenizer
        The model's transformers tokenizer.
    vocab_size
        Of the model.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._hf_tokenizer, self._vocab_size = tokenizer, vocab_size
        self._tokenizer: LLTokenizer | None = None
        self._making_tokenizer = Lock()
        self._limits = LLParserLimits(verbose_errors=False)
        self._compiled: OrderedDict[StructuredOutput, list[_Copy]] = OrderedDict()
        self._num_kept = 0
        threads = num_threads()
        self._max_copies = COPIES_PER_THREAD * threads if threads > 1 else 1
        self._numbers = itertools.count()
        self._threads: ThreadPoolExecutor | None = None

    def start(self, params: SamplingParams) -> RowGrammar | None:
        """Return a row's grammar, for it to begin when its turn comes; None where it has none."""
        if params.structured is None:
            return None
        ends = [i for i in params.stop_token_ids if 0 <= i < self._vocab_size]
        return RowGrammar(self, params.structured, ends)

    def compile(self, row: RowGrammar) -> _Copy:
        """Return what a row starts from; it may be on its way still."""
        structured = row.structured
        copies = self._compiled.setdefault(structured, [])
        self._compiled.move_to_end(structured)
        copy = min(copies, key=lambda one: len(one.rows), default=None)
        if copy is None or (copy.rows and len(copies) < self._max_copies):
            if self._threads is None:
                most = min(num_threads(), MAX_THREADS)
                self._threads = ThreadPoolExecutor(most, "compile-grammar")
            matcher = self._threads.submit(self._compile, structured)
            copy = _Copy(matcher, next(self._numbers))
            copies.append(copy)
            self._num_kept += 1
            while self._num_kept > KEPT_COPIES:
                self._drop(next(iter(self._compiled)))
        copy.rows.add(row)
        return copy

    def stop(self) -> None:
        """End the threads after what they are at; what is compiled stays for other rows."""
        if self._threads is None:
            return
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._threads = None
        for structured, copies in list(self._compiled.items()):
            if any(one.matcher.cancelled() or not one.matcher.done() for one in copies):
                self._drop(structured)

    @property
    def tokenizer(self) -> LLTokenizer:
        """As llguidance has it; that takes a moment, and few need it."""
        with self._making_tokenizer:
            if self._tokenizer is None:
                size = max(self._vocab_size, len(self._hf_tokenizer))
                self._tokenizer = from_tokenizer(self._hf_tokenizer, n_vocab=size)
            return self._tokenizer

    def _drop(self, structured: StructuredOutput) -> None:
        self._num_kept -= len(self._compiled.pop(structured))

    def _compile(self, structured: StructuredOutput) -> LLMatcher | str:
        """Return what rows start from, or the problem in one line."""
        try:
            grammar = grammar_of(structured)
            matcher = LLMatcher(self.tokenizer, grammar, log_level=0, limits=self._limits)
            matcher.compute_bitmask()  # rows that start from it have their first one at once
            reason = matcher.get_error()
        except BaseException as error:
            reason = fault_of_grammar(error)
        if reason:
            return (
                f"sampling.structured_output.{structured.kind}: cannot be used "
                f"({one_line(reason)}); correct it"
            )
        return matcher


class GrammarSlots:
    """The grammars of the rows in generation, by slot, and the masks made from them."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._grammars: list[RowGrammar | None] = [None] * num_slots
        self._is_used = np.zeros(num_slots, bool)
        self._device = device
        self._executor: LLExecutor | None = None
        self._pinned = torch.zeros((0, 0), dtype=torch.int32)
        self._masks = self._pinned.numpy()

    def enter(self, slot: int, grammar: RowGrammar | None) -> None:
        """Let a row enter a slot."""
        self._grammars[slot] = grammar
        self._is_used[slot] = grammar is not None
        if grammar is not None and self._executor is None:
            self._executor = LLExecutor(num_threads())
            shape = (len(self._grammars), grammar.num_words)
            self._pinned = torch.zeros(
                shape, dtype=torch.int32, pin_memory=self._device.type == "cuda"
            )
            self._masks = self._pinned.numpy()

    def is_any(self, slots: np.ndarray) -> bool:
        """Whether a row in one of these slots has a grammar."""
        return bool(self._is_used[slots].any())

    def advance(self, slots: np.ndarray, ids: np.ndarray, ended: np.ndarray) -> np.ndarray:
        """Take a token of each row but those that have `ended`; say which their grammar ends.

        It ends what is complete, and what cannot go on, the latter also where it has ended.
        """
        ends = np.zeros(len(slots), bool)
        [places] = np.nonzero(self._is_used[slots])
        if len(places):
            grammars = [self.of(slot) for slot in slots[places].tolist()]
            tokens = ids[places].tolist()
            going_on = zip(grammars, tokens, ended[places], strict=True)
            taken = [(grammar, token) for grammar, token, is_over in going_on if not is_over]
            if taken:
                assert self._executor is not None
                taken.sort(key=lambda pair: pair[0].copy)  # as in _fill
                self._executor.consume_token_par([(one.matcher, token) for one, token in taken])
            # what is in error is stopped, too
            ends[places] = [grammar.matcher.is_stopped() for grammar in grammars]
        return ends

    def of(self, slot: int) -> RowGrammar:
        """Return the grammar of the row in this slot."""
        grammar = self._grammars[slot]
        assert grammar is not None
        return grammar

    def mask(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        """Give tokens that must not come next a logit of -inf; other rows stay as they are.

        All tokens that were sampled so far must have been taken by `advance`. On a GPU `logits`
        are overwritten.
        """
        [places] = np.nonzero(self._is_used[slots])
        masks = self._fill([self.of(slot) for slot in slots[places].tolist()])
        rows = upload(places, self._device)
        if self._device.type == "cuda":
            from bulk_pipeline.engine.edit_kernels import mask_in_place

            mask_in_place(logits, rows, masks.to(self._device, non_blocking=True))
            return logits
        return logits.index_copy(0, rows, masked(logits[rows], masks))

    def _fill(self, grammars: Sequence[RowGrammar]) -> torch.Tensor:
        """Return the bits of the tokens that may come next, int32 [grammars, words]."""
        assert self._executor is not None
        # the last step's upload is done: its tokens have been read
        masks = self._masks[: len(grammars)]
        # those that share a lexer side by side, for one thread: else threads wait for each other
        order = sorted(range(len(grammars)), key=lambda place: grammars[place].copy)
        matchers = [(grammars[place].matcher, place) for place in order]
        fill_next_token_bitmask_par(self._executor, matchers, masks)
        word, bit = divmod(grammars[0].eos_id, BITS)
        bits = masks.view(np.uint32)
        [may_end] = np.nonzero((bits[:, word] >> np.uint32(bit)) & 1)
        if len(may_end):
            bits[may_end, word] &= ~np.uint32(1 << bit)
            ends = [grammars[place].end_ids for place in may_end.tolist()]
            rows, ids = np.repeat(may_end, [len(each) for each in ends]), np.concatenate(ends)
            np.bitwise_or.at(bits, (rows, ids // BITS), (1 << (ids % BITS)).astype(np.uint32))
        return self._pinned[: len(grammars)]


def num_threads() -> int:
    """Return how many threads make masks: as many as there are processors for this process."""
    count = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # no limit
        quota, period = map(int, CPU_LIMIT.read_text().split())
        count = min(count, max(1, quota // period))
    return min(count, MAX_EXECUTOR_THREADS)


def grammar_of(structured: StructuredOutput) -> str:
    """Return llguidance's notation of a grammar.

    Raises
    ------
    ValueError
        If `value` is not JSON where it should be, or no GBNF grammar.
    """
    kind, value = structured.kind, structured.value
    if kind == "json_schema":
        if not isinstance(json.loads(value), dict | bool):
            raise ValueError(f"a schema must be a JSON object, got {value[:40]}")
        return LLMatcher.grammar_from_json_schema(value, defaults=JSON_OPTIONS)
    if kind == "choice":
        choices = json.loads(value)
        is_list = isinstance(choices, list) and len(choices) > 0
        if not is_list or not all(isinstance(text, str) and text for text in choices):
            raise ValueError(f"must be a list of texts that are not empty, got {value[:40]}")
    return grammar_from(kind, value)


def fault_of_grammar(error: BaseException) -> str:
    """Return why a grammar cannot be used, after an error; raise what is no fault of its own.

    A panic in llguidance is the grammar's alone.
    """
    if isinstance(error, ValueError):
        return str(error)
    if not is_failure(error):
        raise error
    return reason_of(error)


def masked(logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """Return logits [rows, vocabulary] that are -inf where the bit in `masks` is not set.

    Both on the host; the words of `masks` hold 32 tokens each, the first in the lowest bit.
    """
    bits = np.unpackbits(masks.numpy().view(np.uint8), axis=1, bitorder="little")
    forbidden = torch.from_numpy(bits[:, : logits.shape[1]] == 0)
    return logits.masked_fill(forbidden, float("-inf"))


def one_line(text: str) -> str:
    """Return llguidance's reason without the picture of the place, not too long."""
    lines = [line.strip() for line in text.splitlines()]
    said = [line for line in lines if line.strip("^ ") and not line[:1].isdigit()]
    return " ".join(said)[:MAX_REASON]
