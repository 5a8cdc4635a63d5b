"""What must not come, and what must: allowed tokens, bad words, banned strings, ends of thoughts.

What a row may never have is a mask of its own, made once. The rest depends on its tokens so far:
the last token of a bad word, the token that began a banned string, and the mark that ends thoughts
whose budget is spent. A banned string is seen when it is whole; the row then goes back to where it
began, and that token is banned in that place.
"""

from collections import OrderedDict, deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from bulk_pipeline.engine.request import SamplingParams, ThinkingBudget
from bulk_pipeline.engine.sampling_slots import upload
from bulk_pipeline.engine.structured import masked

BITS = 32
KEPT_LISTS = 1024  # different lists of tokens held at once, the longest unused dropped first
TAIL_SLACK_TOKENS = 8  # decoded before a possible string; the first may decode differently
MAX_ROUNDS = 256  # times that a row goes back without getting further than before
REPLACEMENT = "\ufffd"
NO_TOKEN_LEFT = (
    "sampling: no token is left that allowed_token_ids, banned_token_ids, bad_words and "
    "banned_strings let through; ban less"
)


@dataclass(frozen=True, slots=True)
class TokenBans:
    """Bans of one tokenizer's tokens.

    Attributes
    ----------
    mask
        uint32 words, a set bit lets the token come; None where all may.
    sequences
        By the last token before it: tokens before that one, and the token that must not follow.
    """

    mask: np.ndarray | None = None
    sequences: dict[int, list[tuple[tuple[int, ...], int]]] = field(default_factory=dict)


class Bans:
    """Reads what rows ask for, with one tokenizer.

    Parameters
    ----------
    tokenizer
        The model's transformers tokenizer.
    special_ids
        Ids that have no text.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, special_ids: frozenset[int]) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._special_ids = special_ids
        self._held: OrderedDict[tuple[Any, ...], TokenBans] = OrderedDict()

    def problem_with(self, params: SamplingParams) -> str | None:
        """Say in one line why a row cannot have its bans or its budget; None if it can."""
        for name in ("bad_words", "banned_strings"):
            if not all(getattr(params, name)):
                return f"sampling.{name} must not hold an empty string; remove it"
        unknown = next((i for i in params.allowed_token_ids if not 0 <= i < self._vocab_size), None)
        if unknown is not None:
            return (
                f"sampling.allowed_token_ids: token ids must be below {self._vocab_size}, got "
                f"{unknown}; remove it"
            )
        if params.structured is not None and params.banned_strings:
            return "set sampling.structured_output or sampling.banned_strings, not both"
        if params.allowed_token_ids or params.bad_words:
            mask = self._token_bans(params).mask
            held = params.stop_token_ids if params.min_new_tokens else ()
            if mask is not None and not (_bits(mask, held) if held else mask).any():
                return NO_TOKEN_LEFT
        return self._problem_with_budget(params)

    def _problem_with_budget(self, params: SamplingParams) -> str | None:
        budget = params.thinking
        if budget is None:
            return None
        setting = "sampling.thinking_token_budget"
        if params.structured is not None:
            return f"set sampling.structured_output or {setting}, not both"
        if budget.tokens < 0:
            return f"{setting} must be 0 or more, got {budget.tokens}"
        ids = self._encode(budget.end)
        if budget.end not in self._tokenizer.decode(ids, skip_special_tokens=True):
            return f"{setting}: {budget.end!r} is no text of the model; set output.reasoning.end"
        in_the_way = [text for text in params.banned_strings if text.lower() in budget.end.lower()]
        if in_the_way or not set(ids).isdisjoint(params.banned_token_ids):
            return f"{setting}: {budget.end!r} is banned; allow it, or set no budget"
        return None

    def start(self, params: SamplingParams) -> "RowBans | None":
        """Return a row's bans at its beginning; None where it has none."""
        if not params.has_bans:
            return None
        text = thoughts = None
        if params.banned_strings:
            text = BannedText(params, self._tokenizer, self._special_ids)
        if params.thinking is not None:
            end_ids = self._encode(params.thinking.end)
            thoughts = Thoughts(params.thinking, end_ids, self._tokenizer)
        held = (params.min_new_tokens, frozenset(params.stop_token_ids))
        return RowBans(self._token_bans(params), text, thoughts, held)

    def _token_bans(self, params: SamplingParams) -> TokenBans:
        """Return the bans of tokens; rows with the same lists share them."""
        key = (params.allowed_token_ids, params.bad_words, params.banned_token_ids)
        found = self._held.get(key)
        if found is None:
            found = self._held[key] = self._make(*key)
            if len(self._held) > KEPT_LISTS:
                self._held.popitem(last=False)
        self._held.move_to_end(key)
        return found

    def _make(
        self, allowed: Sequence[int], bad_words: Sequence[str], banned: Sequence[int]
    ) -> TokenBans:
        words = [ids for word in bad_words for ids in self._variants(word)]
        never = [*banned, *(ids[0] for ids in words if len(ids) == 1)]
        sequences: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        for ids in words:
            if len(ids) > 1:
                sequences.setdefault(ids[-2], []).append((tuple(ids[:-2]), ids[-1]))
        if not allowed and not never:
            return TokenBans(None, sequences)
        may_come = np.zeros(-(-self._vocab_size // BITS) * BITS, bool)
        may_come[list(allowed) if allowed else slice(self._vocab_size)] = True
        may_come[never] = False
        packed = np.packbits(may_come, bitorder="little").view(np.uint32)
        return TokenBans(packed, sequences)

    def _variants(self, word: str) -> list[list[int]]:
        """Return a word's tokens at the beginning of a text and after a space."""
        plain = word.lstrip() or word
        found: list[list[int]] = []
        for text in (plain, f" {plain}"):
            ids = self._encode(text)
            if ids and ids not in found:
                found.append(ids)
        return found

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


class RowBans:
    """What one row must not have next, and what it must.

    Attributes
    ----------
    ids
        The row's tokens so far.
    goes_back_to
        How many tokens stay, where the last one completed a banned string.
    gave_up
        Whether it goes back no more: it went round and round.
    error
        Why it cannot go on, in one line.
    """

    def __init__(
        self,
        tokens: TokenBans,
        text: "BannedText | None",
        thoughts: "Thoughts | None",
        held: tuple[int, frozenset[int]],
    ) -> None:
        self.tokens, self._text, self._thoughts = tokens, text, thoughts
        self._min_new_tokens, self._end_ids = held
        self.ids: list[int] = []
        self.goes_back_to: int | None = None
        self.gave_up = False
        self.error: str | None = None
        self._forced: set[int] = set()  # places whose tokens had to come

    @property
    def is_dynamic(self) -> bool:
        """Whether its tokens so far count."""
        return bool(self.tokens.sequences or self._text or self._thoughts)

    def needs_tokens(self, position: int) -> bool:
        """Whether the token in this place depends on all tokens before it."""
        if self.tokens.sequences:
            return True
        return self._thoughts is not None and self._thoughts.is_open_at(position)

    def banned_at(self, position: int) -> set[int]:
        """Return the tokens that must not come in this place, beside those of the mask."""
        banned: set[int] = set() if self._text is None else self._text.bans.get(position, set())
        if self.tokens.sequences and self.ids and position == len(self.ids):
            for before, last in self.tokens.sequences.get(self.ids[-1], ()):
                start = len(self.ids) - 1 - len(before)
                if start >= 0 and tuple(self.ids[start:-1]) == before:
                    banned = banned | {last}
        return banned

    def forced_at(self, position: int) -> int | None:
        """Return the token that must come in this place; None where it is free."""
        return None if self._thoughts is None else self._thoughts.forced_at(position)

    def take(self, token_id: int, is_end: bool) -> bool:
        """Take the next token; say whether the row stops or goes back."""
        if self.forced_at(len(self.ids)) is not None:
            self._forced.add(len(self.ids))
        elif self._is_banned(token_id):
            self.error = NO_TOKEN_LEFT
            return True
        self.ids.append(token_id)
        text = self._text
        if text is not None and not is_end:
            self.goes_back_to = text.take(self.ids, self._forced)
            self.gave_up = text.rounds >= MAX_ROUNDS
        if self._thoughts is not None and self.goes_back_to is None:
            self._thoughts.follow(self.ids)
        is_stopped = text is not None and text.has_stop and not text.is_partial()
        return self.goes_back_to is not None or is_stopped

    @property
    def has_stop(self) -> bool:
        """Whether a stop string stands in the text; it counts where nothing can take it back."""
        return self._text is not None and self._text.has_stop

    def go_back(self) -> None:
        """Forget the tokens from the banned string on."""
        assert self.goes_back_to is not None
        self._forced = {place for place in self._forced if place < self.goes_back_to}
        del self.ids[self.goes_back_to :]
        self.goes_back_to = None
        if self._text is not None:
            self._text.restart(self.ids)
        if self._thoughts is not None:
            self._thoughts.restart(self.ids)

    def _is_banned(self, token_id: int) -> bool:
        """Whether a token was sampled that must not come: none was left."""
        mask, position = self.tokens.mask, len(self.ids)
        if mask is not None and not mask[token_id // BITS] >> np.uint32(token_id % BITS) & 1:
            return True
        if position < self._min_new_tokens and token_id in self._end_ids:
            return True
        return token_id in self.banned_at(position)


class BannedText:
    """Follows a row's text: where a banned string begins, and whether a stop string is in it.

    Attributes
    ----------
    bans
        By place in the answer, the tokens that began a banned string there after what stands
        before it now.
    rounds
        How many times in a row it went back without having got further than ever.
    has_stop
        Whether a stop string was found.
    """

    def __init__(self, params: SamplingParams, decoder: Any, special_ids: frozenset[int]) -> None:
        self._banned = sorted({text.lower() for text in params.banned_strings})
        self._stop = params.stop
        self._decoder, self._special_ids = decoder, special_ids
        # a token that is no special one has at least one byte
        sizes = [max(_num_bytes(text), _num_bytes(text.upper())) for text in self._banned]
        stops = [_num_bytes(text) for text in self._stop]
        self._window = max(sizes) + max(stops, default=0) + TAIL_SLACK_TOKENS
        self._tail: deque[tuple[int, int]] = deque(maxlen=self._window)  # place, token
        self._shown = ""
        self.bans: dict[int, set[int]] = {}
        self.rounds, self._furthest = 0, 0
        self.has_stop = False

    def take(self, ids: Sequence[int], forced: Container[int] = ()) -> int | None:
        """Look at the last of `ids`; return where a banned string begins, None where none does.

        Of one that begins in places that are `forced`: the first place behind them.
        """
        place, token = len(ids) - 1, ids[-1]
        if token in self._special_ids:
            return None
        self._tail.append((place, token))
        self._shown = self._decode(len(self._tail))
        lower = self._shown.lower()
        starts = [start for text in self._banned if (start := lower.find(text)) >= 0]
        if not starts:
            self.has_stop = self.has_stop or self._holds_stop()
            return None
        index = self._place_of(min(starts))
        while self._tail[index][0] in forced and index + 1 < len(self._tail):
            index += 1
        return self._ban(index, len(ids))

    def _ban(self, index: int, length: int) -> int:
        """Ban the token where the string begins; return its place in the answer."""
        place, token = self._tail[index]
        self.rounds = 0 if length > self._furthest else self.rounds + 1
        self._furthest = max(length, self._furthest)
        # what was banned after it was banned after other tokens
        self.bans = {where: tokens for where, tokens in self.bans.items() if where <= place}
        self.bans[place] = self.bans.get(place, set()) | {token}
        return place

    def _place_of(self, start: int) -> int:
        """Return which token of the tail the character `start` of its text belongs to."""
        for count in range(1, len(self._tail)):
            if len(self._decode(count).lower()) > start:
                return count - 1
        return len(self._tail) - 1

    def is_partial(self) -> bool:
        """Whether the text ends as a banned string begins."""
        lower = self._shown.lower()
        return any(
            lower.endswith(text[:length]) for text in self._banned for length in range(1, len(text))
        )

    def restart(self, ids: Sequence[int]) -> None:
        """Look at a shorter answer again."""
        self._tail.clear()
        for place in range(len(ids) - 1, -1, -1):
            if ids[place] not in self._special_ids:
                self._tail.appendleft((place, ids[place]))
                if len(self._tail) == self._window:
                    break
        self._shown = self._decode(len(self._tail)) if self._tail else ""
        self.has_stop = self._holds_stop()

    def _holds_stop(self) -> bool:
        return any(text in self._shown for text in self._stop)

    def _decode(self, count: int) -> str:
        ids = [token for _, token in self._tail][:count]
        text: str = self._decoder.decode(ids, skip_special_tokens=True)
        return text


class Thoughts:
    """Counts the tokens of a row's thoughts, and ends them when there are enough."""

    def __init__(self, budget: ThinkingBudget, end_ids: Sequence[int], decoder: Any) -> None:
        self._budget, self._end_ids, self._decoder = budget, list(end_ids), decoder
        self._window = _num_bytes(budget.end) + TAIL_SLACK_TOKENS
        self.restart(())

    def restart(self, ids: Sequence[int]) -> None:
        """Read an answer from its beginning."""
        self._began: int | None = 0 if self._budget.is_open else None
        self._is_over = False
        for length in range(1, len(ids) + 1):
            if self._began is not None or self._is_over:
                break
            self._look_for_start(ids[:length])
        if self._began is not None and len(ids) > self._began:
            self._look_for_end(ids, ids[self._began :])

    def follow(self, ids: Sequence[int]) -> None:
        """Look at an answer that is a token longer than before."""
        if self._is_over:
            return
        if self._began is None:
            self._look_for_start(ids)
            return
        self._look_for_end(ids, ids[max(self._began, len(ids) - self._window) :])

    def _look_for_end(self, ids: Sequence[int], thoughts: Sequence[int]) -> None:
        assert self._began is not None
        is_forced = len(ids) >= self._began + self._budget.tokens + len(self._end_ids)
        self._is_over = is_forced or self._budget.end in self._decode(thoughts)

    def _look_for_start(self, ids: Sequence[int]) -> None:
        text = self._decode(ids).lstrip()
        if text.startswith(self._budget.start):
            self._began = len(ids)
        else:
            self._is_over = not self._budget.start.startswith(text.rstrip(REPLACEMENT))

    def is_open_at(self, position: int) -> bool:
        """Whether the thoughts, as far as is known, may be cut in this place."""
        if self._is_over:
            return False
        return self._began is None or position >= self._began + self._budget.tokens

    def forced_at(self, position: int) -> int | None:
        """Return the token that must come in this place; None where it is free."""
        if self._is_over or self._began is None:
            return None
        index = position - self._began - self._budget.tokens
        return self._end_ids[index] if 0 <= index < len(self._end_ids) else None

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._decoder.decode(list(ids), skip_special_tokens=True)
        return text


class BanSlots:
    """The bans of the rows in generation, by slot, and what they do to the logits."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._bans: list[RowBans | None] = [None] * num_slots
        self._is_used = np.zeros(num_slots, bool)
        self._has_mask = np.zeros(num_slots, bool)
        self._is_dynamic = np.zeros(num_slots, bool)
        self._num_words, self._device = -(-vocab_size // BITS), device
        self._masks = torch.zeros((0, self._num_words), dtype=torch.int32, device=device)

    def enter(self, slot: int, bans: RowBans | None) -> None:
        """Let a row enter a slot."""
        self._bans[slot] = bans
        mask = None if bans is None else bans.tokens.mask
        self._is_used[slot] = bans is not None
        self._is_dynamic[slot] = bans is not None and bans.is_dynamic
        self._has_mask[slot] = mask is not None
        if mask is not None:
            if not len(self._masks):
                shape = (len(self._bans), self._num_words)
                self._masks = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._masks[slot] = upload(mask.view(np.int32), self._device)

    def needs_tokens(self, slots: np.ndarray, positions: np.ndarray) -> bool:
        """Whether the next tokens of these rows depend on all that were started before."""
        [places] = np.nonzero(self._is_dynamic[slots])
        return any(self.of(slots[i]).needs_tokens(int(positions[i])) for i in places)

    def advance(self, slots: np.ndarray, ids: np.ndarray, is_end: np.ndarray) -> list[int]:
        """Take a token of each row; return the places of rows that stop or go back."""
        [places] = np.nonzero(self._is_used[slots])
        return [int(i) for i in places if self.of(slots[i]).take(int(ids[i]), bool(is_end[i]))]

    def of(self, slot: int) -> RowBans:
        """Return the bans of the row in this slot."""
        bans = self._bans[slot]
        assert bans is not None
        return bans

    @torch.inference_mode()  # as the model's logits were made
    def edit(self, logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """Give tokens that must not come a logit of -inf; other rows stay as they are.

        On a GPU `logits` are overwritten.
        """
        if not self._is_used[slots].any():
            return logits
        banned: list[tuple[int, int]] = []
        forced: list[tuple[int, int]] = []
        for place in np.nonzero(self._is_dynamic[slots])[0].tolist():
            bans, position = self.of(slots[place]), int(positions[place])
            token = bans.forced_at(position)
            if token is not None:
                forced.append((place, token))
            banned.extend((place, token) for token in bans.banned_at(position))
        [has_mask] = np.nonzero(self._has_mask[slots])
        if not (banned or forced or len(has_mask)):
            return logits
        if self._device.type != "cuda":
            logits = logits.clone()
        if forced:  # its logit, before a mask takes it away
            rows, tokens = self._on_device(forced)
            kept = logits[rows, tokens]
        if len(has_mask):
            self._mask(logits, has_mask, slots[has_mask])
        if banned:
            _fill(logits, *self._on_device(banned))
        if forced:
            logits.index_fill_(0, rows, float("-inf"))
            logits.index_put_((rows, tokens), kept)
        return logits

    def _mask(self, logits: torch.Tensor, places: np.ndarray, slots: np.ndarray) -> None:
        rows, masks = upload(places, self._device), self._masks[upload(slots, self._device)]
        if self._device.type == "cuda":
            from bulk_pipeline.engine.edit_kernels import mask_in_place

            mask_in_place(logits, rows, masks)
        else:
            logits.index_copy_(0, rows, masked(logits[rows], masks))

    def _on_device(self, pairs: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        rows, tokens = upload(np.array(pairs, np.int64).T.copy(), self._device)
        return rows, tokens


def _fill(logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> None:
    lowest = torch.full((), float("-inf"), dtype=logits.dtype, device=logits.device)
    logits.index_put_((rows, tokens), lowest)


def _bits(mask: np.ndarray, without: Sequence[int]) -> np.ndarray:
    """Return a mask without some tokens."""
    mask = mask.copy()
    for token in without:
        if 0 <= token < len(mask) * BITS:
            mask[token // BITS] &= ~np.uint32(1 << (token % BITS))
    return mask


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))
