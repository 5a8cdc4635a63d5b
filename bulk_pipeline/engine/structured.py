"""Answers that follow a grammar: a JSON schema, a regular expression, a choice, a Lark grammar.

llguidance compiles a grammar against the model's tokenizer and says, for each row and step, which
tokens may come next. The bits are filled on the host while the device runs the forward pass, and
only they travel.
"""

import itertools
import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from llguidance.hf import from_tokenizer
from llguidance.numpy import fill_next_token_bitmask_par

from bulk_pipeline.engine.request import SamplingParams, StructuredOutput
from bulk_pipeline.engine.sampling_slots import upload

BITS = 32
KEPT_GRAMMARS = 1024  # compiled ones, the longest unused dropped first
MAX_COPIES = 32  # of a compiled grammar; as many threads llguidance's executor has at most
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
    copy
        Number of the compiled grammar that this one shares its lexer with: one thread at a time
        works on it.
    end_ids
        Tokens that may end the answer where the grammar allows an end.
    """

    def __init__(
        self, matcher: LLMatcher, copy: int, tokenizer: LLTokenizer, end_ids: Sequence[int]
    ) -> None:
        self.matcher = matcher
        self.copy = copy
        self.eos_id = tokenizer.eos_token
        self.num_words = -(-tokenizer.vocab_size // BITS)
        self.end_ids = np.array(end_ids or [self.eos_id], np.int64)

    @property
    def error(self) -> str | None:
        """Why it cannot go on, in one line; None where it can."""
        if not self.matcher.is_error():
            return None
        return NO_TOKEN_LEFT.format(one_line(self.matcher.get_error()))


@dataclass(slots=True)
class _Compiled:
    """A grammar, compiled once for each thread that may work on it, as far as rows came.

    Attributes
    ----------
    copies
        Matchers that rows start from, each with its number.
    num_rows
        Rows that started so far.
    """

    copies: list[tuple[LLMatcher, int]]
    num_rows: int = 0


class Grammars:
    """Compiles grammars for one tokenizer, each at most once for every processor.

    Parameters
    ----------
    tokenizer
        The model's transformers tokenizer.
    vocab_size
        Of the model.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._hf_tokenizer, self._vocab_size = tokenizer, vocab_size
        self._tokenizer: LLTokenizer | None = None  # takes a moment, and few need it
        self._limits = LLParserLimits(verbose_errors=False)
        self._compiled: OrderedDict[StructuredOutput, _Compiled | str] = OrderedDict()
        self._max_copies = min(len(os.sched_getaffinity(0)), MAX_COPIES)
        self._num_copies = itertools.count()

    def problem_with(self, structured: StructuredOutput) -> str | None:
        """Say in one line why answers cannot follow this grammar; None if they can."""
        compiled = self._compile(structured)
        return compiled if isinstance(compiled, str) else None

    def start(self, params: SamplingParams) -> RowGrammar | None:
        """Return the beginning of the row's grammar; None where it has none."""
        if params.structured is None:
            return None
        compiled = self._compile(params.structured)
        assert not isinstance(compiled, str)
        assert self._tokenizer is not None
        place = compiled.num_rows % self._max_copies
        if place == len(compiled.copies):
            compiled.copies.append(self._compile_once(params.structured))
        compiled.num_rows += 1
        matcher, copy = compiled.copies[place]
        ends = [i for i in params.stop_token_ids if 0 <= i < self._vocab_size]
        return RowGrammar(matcher.deep_copy(), copy, self._tokenizer, ends)

    def _compile(self, structured: StructuredOutput) -> _Compiled | str:
        """Return what rows start from, or the problem in one line."""
        found = self._compiled.get(structured)
        if found is None:
            try:
                first = self._compile_once(structured)
                reason = first[0].get_error()
                found = _Compiled([first])
            except ValueError as error:
                reason = str(error)
            if reason:
                found = (
                    f"sampling.structured_output.{structured.kind}: cannot be used "
                    f"({one_line(reason)}); correct it"
                )
            assert found is not None
            self._compiled[structured] = found
            if len(self._compiled) > KEPT_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(structured)
        return found

    def _compile_once(self, structured: StructuredOutput) -> tuple[LLMatcher, int]:
        grammar = grammar_of(structured)
        matcher = LLMatcher(self._ll_tokenizer(), grammar, log_level=0, limits=self._limits)
        return matcher, next(self._num_copies)

    def _ll_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None:
            size = max(self._vocab_size, len(self._hf_tokenizer))
            self._tokenizer = from_tokenizer(self._hf_tokenizer, n_vocab=size)
        return self._tokenizer


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
            self._executor = LLExecutor()
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
            grammars = [self.of(slot) for slot in slots[places]]
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
        masks = self._fill([self.of(slot) for slot in slots[places]])
        rows = upload(places, self._device)
        if self._device.type == "cuda":
            from bulk_pipeline.engine.sampling_kernel import mask_in_place

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
        may_end = (bits[:, word] >> np.uint32(bit)) & 1
        for place in np.nonzero(may_end)[0]:
            ends = grammars[int(place)].end_ids
            bits[place, word] &= ~np.uint32(1 << bit)
            np.bitwise_or.at(bits[place], ends // BITS, (1 << (ends % BITS)).astype(np.uint32))
        return self._pinned[: len(grammars)]


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
