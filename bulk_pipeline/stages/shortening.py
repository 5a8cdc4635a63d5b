"""Rows whose prompt and answer do not fit together: cut to fit, set aside, or an error.

A cut row is rendered and tokenised anew, so that it is what the chat template makes of its shorter
message.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bulk_pipeline.engine.request import READY, Status
from bulk_pipeline.stages.prompt_rows import PromptRow
from bulk_pipeline.stages.rendering import Renderer
from bulk_pipeline.stages.turns import Chat, TurnReader

if TYPE_CHECKING:  # transformers takes seconds to import
    from bulk_pipeline.engine.tokenizer import PromptTokenizer

MAX_CUTS = 8  # tries to cut a message so that it fits; two or three are usual


class Shortener:
    """Does with rows that are too long as `prompt.too_long` says.

    Parameters
    ----------
    limit
        Most tokens of a prompt and its completion together.
    """

    def __init__(
        self,
        too_long: str,
        limit: int,
        tokenizer: "PromptTokenizer",
        reader: TurnReader,
        renderer: Renderer,
    ):
        self._too_long, self._limit = too_long, limit
        self._tokenizer, self._reader, self._renderer = tokenizer, reader, renderer

    def fit(self, row: PromptRow) -> None:
        """Leave a row that fits as it is; cut another one, or set it aside.

        Raises
        ------
        ValueError
            If it does not fit and `prompt.too_long` is ``fail``.
        """
        if not self._is_too_long(row):
            return
        assert row.ids is not None
        new_tokens = row.sampling.max_new_tokens
        reason = f"{len(row.ids)} prompt tokens and {new_tokens} new ones exceed {self._limit}"
        if self._too_long == "fail":
            raise ValueError(
                f"row {row.row_id}: {reason}; shorten it, or set prompt.too_long to another value"
            )
        if self._too_long == "error_row":
            row.set_aside(Status.TOO_LONG, reason)
        elif not self._truncate(row):
            row.set_aside(Status.TOO_LONG, f"{reason}, and cutting its message does not help")

    def _is_too_long(self, row: PromptRow) -> bool:
        """Whether the first answer does not fit; how long it is decides about the next ones."""
        assert row.ids is not None
        return len(row.ids) + row.sampling.max_new_tokens > self._limit

    def _truncate(self, row: PromptRow) -> bool:
        """Cut the row's last message until it fits; False if no cut does.

        Tokens at a cut can join with their new neighbours, so each cut is rendered and counted.
        """
        assert row.chat is not None
        assert row.ids is not None
        tokenizer, guard = self._tokenizer, row.chat.guard
        try:
            message = tokenizer.mark(row.chat.turns[-1]["content"])
        except ValueError:
            return False
        message = message.replace(guard, "") if guard else message
        offsets = tokenizer.offsets(message)
        num_kept = len(offsets)
        num_tokens = len(row.ids)
        for _ in range(MAX_CUTS):
            num_kept -= num_tokens + row.sampling.max_new_tokens - self._limit
            if num_kept <= 0:
                return False
            cut = self._with_message(row, _cut(message, offsets, num_kept, self._too_long))
            if cut is None:
                return False
            if not self._is_too_long(cut):
                row.chat, row.prompt, row.ids = cut.chat, cut.prompt, cut.ids
                row.truncated = True
                return True
            assert cut.ids is not None
            num_tokens = len(cut.ids)
        return False

    def _with_message(self, row: PromptRow, message: str) -> PromptRow | None:
        """The row with another last message, rendered and tokenised; None if that fails."""
        assert row.chat is not None
        if not message.strip():
            return None
        *turns, last = row.chat.turns
        # Its own special tokens are still marked, so that only the row's text is guarded.
        guarded = self._reader.guard([*turns, {**last, "content": message}], row.chat.guard)
        last = guarded.turns[-1]
        last = {**last, "content": self._tokenizer.unmark(last["content"])}
        changed = PromptRow(
            row.row_id, row.sampling, Chat([*guarded.turns[:-1], last], guarded.guard)
        )
        self._renderer.render_one(changed)
        return changed if changed.status == READY and changed.ids is not None else None


def _cut(message: str, offsets: Sequence[tuple[int, int]], num_kept: int, how: str) -> str:
    """Keep `num_kept` tokens of a message: its end, its start, or both."""
    num_head = {"truncate_left": 0, "truncate_right": num_kept}.get(how, (num_kept + 1) // 2)
    num_tail = num_kept - num_head
    head = message[: offsets[num_head - 1][1]] if num_head else ""
    tail = message[offsets[len(offsets) - num_tail][0] :] if num_tail else ""
    return head + tail
