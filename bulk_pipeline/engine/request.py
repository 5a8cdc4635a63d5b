"""What goes into the engine and what comes out: plain values, no torch, no Dagster.

A ``Request`` carries everything that decides its answer; a ``Completion`` carries the answer
and how it was reached. One request in is one completion out, whatever happens to it.
"""

import hashlib
import json
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

REQUEST_KEY_VERSION = 1
GREEDY_BELOW = 1e-5  # a smaller temperature is greedy: logits divided by it would overflow float32
MASK_64 = (1 << 64) - 1
MAX_LOGPROBS = 20  # alternatives a token, as vLLM's default limit


class Status(StrEnum):
    """How a request ended; every row of a completions table has one of these."""

    STOP = "stop"  # an end token or a stop string
    LENGTH = "length"  # cut off at max_new_tokens
    LOOP = "loop"  # repetition cut off
    TOO_LONG = "too_long"  # prompt and completion would not fit
    EMPTY = "empty"  # nothing to ask
    INVALID = "invalid"  # not usable as a prompt
    ERROR = "error"  # failed while running; unfinished work


READY = "ready"  # a prompt that can run; its completion gets a Status
NOT_RUN = frozenset({Status.TOO_LONG, Status.EMPTY, Status.INVALID})


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A grammar that the text of the answer follows.

    Attributes
    ----------
    kind
        What `value` is.
    value
        The JSON text of a schema, a regular expression, a JSON list of strings of which the answer
        is one, or a grammar in Lark's or GBNF's notation.
    """

    kind: Literal["json_schema", "regex", "choice", "grammar"]
    value: str

    @property
    def canonical(self) -> list[str]:
        """Equal for equal grammars: without the white space of JSON, and the order of choices."""
        if self.kind not in ("json_schema", "choice"):
            return [self.kind, self.value]
        try:
            value = json.loads(self.value)
        except ValueError:  # an answer of its own: the request is invalid
            return [self.kind, self.value]
        if self.kind == "choice" and isinstance(value, list):
            value = sorted({str(text) for text in value})
        # the order of a schema's properties is that of the answer's
        return [self.kind, json.dumps(value, separators=(",", ":"))]


@dataclass(frozen=True, slots=True)
class LoopGuard:
    """Ends an answer as `Status.LOOP` when it repeats itself.

    Attributes
    ----------
    ngram
        Length in tokens of what is repeated.
    repeats
        How many times in a row the last `ngram` tokens stand at the end, the last included.
    """

    ngram: int
    repeats: int


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """Ends a reasoning model's thoughts that are too long; the answer goes on after them.

    Attributes
    ----------
    tokens
        Most tokens of the thoughts, between their marks.
    start, end
        The marks. The tokens of `end` are put in where the budget is spent.
    is_open
        Whether the answer begins within thoughts; else they count from `start` at its beginning.
    """

    tokens: int
    start: str = "<think>"
    end: str = "</think>"
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled and when it ends. Names and off values follow vLLM's.

    Attributes
    ----------
    temperature
        Divides the logits; 0 is greedy.
    top_p
        Keep the most probable tokens up to this sum, in (0, 1]; 1 is off.
    top_k
        Keep this many most probable tokens; 0 is off.
    min_p
        Drop tokens less probable than this share of the best one, in [0, 1]; 0 is off.
    repetition_penalty
        Divides the positive logits of tokens in the prompt or the output, multiplies the negative
        ones; 1 is off.
    frequency_penalty
        Taken off a token's logit for each time that it is in the output; 0 is off.
    presence_penalty
        Taken off the logit of every token in the output; 0 is off.
    logit_bias
        (token id, number added to its logit); empty is off.
    banned_token_ids
        Tokens that never come; empty is off.
    max_new_tokens
        Generate at most this many tokens.
    min_new_tokens
        Suppress end tokens until this many tokens are generated.
    seed
        The request's own 64-bit seed (see `request_seed`); unused when greedy.
    stop
        Strings that end the completion; they are not part of its text.
    stop_token_ids
        Token ids that end the completion.
    logprobs
        Return the log-probability of each generated token, and those of this many best tokens at
        its place, at most `MAX_LOGPROBS`; None is off. They are the model's own, before biases,
        penalties, grammar, temperature and filters (vLLM's ``raw_logprobs``).
    structured
        The grammar that the answer follows; None is off.
    loop_guard
        When to end an answer that repeats itself; None is off.
    allowed_token_ids
        The only tokens that may come; empty is off.
    bad_words
        Texts whose last token never comes after those before it, at the beginning of a text and
        after a space; empty is off.
    banned_strings
        Texts that never come, in upper or lower case: an answer that holds one goes back to the
        token where it began, and takes another one; empty is off.
    thinking
        The budget for thoughts; None is off.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_new_tokens: int = 256
    min_new_tokens: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    structured: StructuredOutput | None = None
    loop_guard: LoopGuard | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    banned_strings: tuple[str, ...] = ()
    thinking: ThinkingBudget | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the answer does not depend on the seed."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change the logits of the next."""
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        return penalties != (1.0, 0.0, 0.0)

    @property
    def has_bans(self) -> bool:
        """Whether some tokens may not come, or must, by more than a bias."""
        lists = (self.allowed_token_ids, self.bad_words, self.banned_strings)
        return any(lists) or self.thinking is not None

    @property
    def token_biases(self) -> tuple[tuple[int, float], ...]:
        """What is added to which token's logit: -inf if it is banned; rising, without zeros."""
        biases = dict(self.logit_bias) | dict.fromkeys(self.banned_token_ids, -math.inf)
        return tuple(sorted((token, float(bias)) for token, bias in biases.items() if bias))


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to complete: its token ids (not empty) and how to sample.

    With `prompt_logprobs` the prompt is scored: the completion says how probable each of its
    tokens is after those before it. `max_new_tokens` may be 0 then, and nothing is generated.
    `adapter` names the LoRA adapter that the model runs with.
    """

    request_id: Hashable
    input_ids: Sequence[int]
    sampling: SamplingParams
    prompt_logprobs: bool = False
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one request.

    Attributes
    ----------
    text
        Decoded from `token_ids`, without the end token or stop string that ended it.
    token_ids
        All tokens generated, the end token (or the stop string's tokens) included.
    stop_reason
        The stop string, the end token's id as text, or ``grammar`` where the grammar allows
        nothing more, where `status` is ``stop``; ``banned_strings`` where it is ``loop`` because
        the answer went back to banned strings again and again.
    incomplete_character
        Whether bytes of an unfinished character were removed from the end of `text`.
    cached_tokens
        Prompt tokens whose keys and values were reused from the cache.
    logprobs
        The natural logarithm of the probability of each of `token_ids`, where asked for.
    top_logprobs
        For each of `token_ids` the best tokens at its place, (id, log-probability), best first;
        empty tuples where `SamplingParams.logprobs` is 0.
    prompt_logprobs
        The log-probability of each prompt token but the first, which has nothing before it.
    """

    request_id: Hashable
    status: Status
    text: str = ""
    token_ids: tuple[int, ...] = ()
    stop_reason: str | None = None
    incomplete_character: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    generate_seconds: float = 0.0
    error: str | None = None
    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    prompt_logprobs: tuple[float, ...] | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of `logprobs`: the log-probability of the whole answer."""
        return None if self.logprobs is None else math.fsum(self.logprobs)


def request_seed(run_seed: int, row_id: str, sample_index: int, turn: int = 0) -> int:
    """The 64-bit seed of one sample of one row; it does not depend on where the row stands."""
    parts = [run_seed, row_id, sample_index, *([turn] if turn else [])]
    text = json.dumps(parts, ensure_ascii=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class KeyHasher:
    """Computes `request_key` of many requests whose sampling differs at most in the seed."""

    def __init__(
        self,
        sampling: SamplingParams,
        model_fingerprint: str,
        *,
        prompt_logprobs: bool = False,
        adapter_fingerprint: str | None = None,
    ):
        effective: dict[str, object] = {
            "version": REQUEST_KEY_VERSION,
            "model": model_fingerprint,
            "min_new_tokens": sampling.min_new_tokens,
            "stop": sorted(set(sampling.stop)),
            "stop_token_ids": sorted(set(sampling.stop_token_ids)),
        }
        if not sampling.is_greedy:
            effective |= {
                "temperature": float(sampling.temperature),
                "top_p": float(sampling.top_p),
                "top_k": sampling.top_k,
                "min_p": float(sampling.min_p),
                "seed": 0,
            }
        effective |= _edits(sampling) | _extras(sampling)
        if prompt_logprobs:
            effective["prompt_logprobs"] = True
        if adapter_fingerprint is not None:
            effective["adapter"] = adapter_fingerprint
        # Quotes inside values are escaped, so that the seed's place is found once or never.
        start, self._has_seed, self._end = json.dumps(effective, sort_keys=True).partition(
            '"seed": 0'
        )
        self._start = hashlib.blake2b(start.encode(), digest_size=16)

    def digest(self, ids: bytes | memoryview, seed: int = 0, before: bytes | None = None) -> bytes:
        """The key as 16 bytes; `ids` are the token ids, each as 4 bytes, least first.

        Of a later turn of a conversation, `before` is the key of the turn before, and `ids` are
        those that come after its answer: the key is known before that answer is.
        """
        digest = self._start.copy()
        if self._has_seed:
            digest.update(f'"seed": {seed & MASK_64}{self._end}'.encode())
        if before is not None:  # of no whole number of ids, so that no first turn has such a key
            digest.update(b"turn:" + before)
        digest.update(ids)
        return digest.digest()


def _edits(sampling: SamplingParams) -> dict[str, object]:
    """What changes the logits themselves, without what is off: keys of old requests stay."""
    edits: dict[str, object] = {}
    if sampling.has_penalties:
        edits["repetition_penalty"] = float(sampling.repetition_penalty)
        edits["frequency_penalty"] = float(sampling.frequency_penalty)
        edits["presence_penalty"] = float(sampling.presence_penalty)
    if sampling.token_biases:
        edits["token_biases"] = sampling.token_biases
    return edits


def _extras(sampling: SamplingParams) -> dict[str, object]:
    """What else the answer holds or obeys, without what is off."""
    extras: dict[str, object] = {}
    if sampling.logprobs is not None:
        extras["logprobs"] = sampling.logprobs
    if sampling.structured is not None:
        extras["structured"] = sampling.structured.canonical
    if sampling.loop_guard is not None:
        extras["loop_guard"] = [sampling.loop_guard.ngram, sampling.loop_guard.repeats]
    if sampling.allowed_token_ids:
        extras["allowed_token_ids"] = sorted(set(sampling.allowed_token_ids))
    if sampling.bad_words:
        extras["bad_words"] = sorted(set(sampling.bad_words))
    if sampling.banned_strings:
        extras["banned_strings"] = sorted({text.lower() for text in sampling.banned_strings})
    if sampling.thinking is not None:
        budget = sampling.thinking
        extras["thinking"] = [budget.tokens, budget.start, budget.end, budget.is_open]
    return extras


def request_key(
    input_ids: Sequence[int],
    sampling: SamplingParams,
    model_fingerprint: str,
    *,
    prompt_logprobs: bool = False,
    adapter_fingerprint: str | None = None,
) -> str:
    """A versioned hash of what decides the answer: 32 hex digits.

    ``max_new_tokens`` is not part of it, so that an answer that stopped by itself serves a
    request with another limit (see `serves`). Settings without effect do not count: a greedy
    request has no seed and no top_p, and a top_p of 1 equals none.
    """
    ids = b"".join(int(i).to_bytes(4, "little") for i in input_ids)
    hasher = KeyHasher(
        sampling,
        model_fingerprint,
        prompt_logprobs=prompt_logprobs,
        adapter_fingerprint=adapter_fingerprint,
    )
    return hasher.digest(ids, sampling.seed).hex()


def serves(status: str, completion_tokens: int, stored_limit: int, limit: int) -> bool:
    """Whether a stored completion answers a request of equal key with the limit `limit`.

    It does if it stopped by itself within the limit, or was cut off at the same limit.
    """
    if status == Status.LENGTH:
        return stored_limit == limit
    return status in (Status.STOP, Status.LOOP) and completion_tokens <= limit
