"""Chats in, their text and token ids out.

Which text counts as a special token: what the chat template, the assistant prefix and (with the
family raw) the user's template write; the same text inside a row does not, unless
`prompt.allow_special_tokens` is set. A row that cannot be rendered or tokenised is set aside.
"""

from collections.abc import Sequence
from datetime import date as Date
from itertools import islice, pairwise
from typing import TYPE_CHECKING

from bulk_pipeline.engine.request import Status
from bulk_pipeline.spec import PromptSpec
from bulk_pipeline.stages.chat_template import fix_date
from bulk_pipeline.stages.prompt_rows import PromptRow
from bulk_pipeline.stages.turns import MAX_TEMPLATE_CHARS, Chat

if TYPE_CHECKING:  # transformers takes seconds to import
    from bulk_pipeline.engine.tokenizer import PromptTokenizer


class Renderer:
    """Renders and tokenises rows that have a chat.

    Parameters
    ----------
    chat_template
        The template's source.
    date
        The day that the template shows, as YYYY-MM-DD.
    show_text
        Whether reasons may quote rows.
    """

    def __init__(
        self,
        prompt: PromptSpec,
        tokenizer: "PromptTokenizer",
        chat_template: str,
        date: str,
        show_text: bool,
    ):
        self._prompt, self._tokenizer, self._show_text = prompt, tokenizer, show_text
        self._template = fix_date(chat_template, date)
        # Llama 3's templates show this variable, and a default where it is not given.
        self._variables: dict[str, str] = (
            {"date_string": Date.fromisoformat(date).strftime("%d %b %Y")}
            if "date_string" in chat_template
            else {}
        )

    def render(self, rows: Sequence[PromptRow]) -> None:
        """Give rows that have a chat their text and token ids, or set them aside."""
        self._render(rows)
        self._encode(rows)

    def render_one(self, row: PromptRow) -> None:
        """The same for one row that has a chat, of as many turns as the chat has."""
        self._render_one(row)
        self._encode([row])

    def texts(self, chats: Sequence[Chat]) -> list[str]:
        """The text up to each answer: one for a chat, several for a conversation."""
        prefix, one_bos = self._prompt.assistant_prefix, self._tokenizer.one_bos
        stages = [turns for chat in chats for turns in chat.up_to_each(prefix)]
        texts = self._tokenizer.apply_chat_template(stages, self._template, **self._variables)
        return [one_bos(text + prefix) for text in texts]

    def _render(self, rows: Sequence[PromptRow]) -> None:
        """Render all rows at once, or one by one where one of them is refused."""
        waiting = [row for row in rows if row.chat is not None]
        if not waiting:
            return
        try:
            texts = iter(self.texts([row.chat for row in waiting if row.chat is not None]))
        except Exception:  # whatever a template raises
            for row in waiting:
                self._render_one(row)
            return
        for row in waiting:
            self._split(row, list(islice(texts, row.num_turns)))

    def _render_one(self, row: PromptRow) -> None:
        assert row.chat is not None
        try:
            texts = self.texts([row.chat])
        except Exception as error:  # whatever a template raises
            shown = f": {error}" if self._show_text else ""
            row.set_aside(Status.INVALID, f"the chat template refuses the row{shown}")
            return
        self._split(row, texts)

    def _split(self, row: PromptRow, texts: Sequence[str]) -> None:
        """Take a conversation's texts apart: the prompt, and what follows each answer.

        Some templates put a blank before an answer, which the model then generates itself.
        """
        assert row.chat is not None
        row.prompt, slot = texts[0], row.chat.slot
        for before, text in pairwise(texts):
            blank, found, following = text.removeprefix(before).partition(slot)
            if not text.startswith(before) or not found or blank.strip() or slot in following:
                row.prompt = None
                row.set_aside(
                    Status.INVALID,
                    f"the chat template {self._prompt.chat_template} does not keep the text before "
                    "an answer as it was when that was generated",
                )
                return
            row.later.append(following)

    def _encode(self, rows: Sequence[PromptRow]) -> None:
        """Tokenise rendered rows; those without guarded text all at once."""
        plain: list[PromptRow] = []
        for row in rows:
            if row.chat is None or row.prompt is None:
                continue
            num_chars = len(row.prompt) + sum(map(len, row.later))
            if num_chars > MAX_TEMPLATE_CHARS + _num_chars(row.chat):
                row.prompt = None
                row.set_aside(
                    Status.INVALID,
                    f"the chat template adds more than {MAX_TEMPLATE_CHARS} characters",
                )
            elif row.chat.guard:
                self._encode_guarded(row, row.chat.guard)
            else:
                plain.append(row)
        ids = self._tokenizer.encode_batch([row.prompt for row in plain if row.prompt is not None])
        for row, row_ids in zip(plain, ids, strict=True):
            row.ids = row_ids
            self._encode_later(row, row.later)

    def _encode_guarded(self, row: PromptRow, guard: str) -> None:
        assert row.prompt is not None
        texts = [row.prompt, *row.later]
        row.prompt, *row.later = (text.replace(guard, "") for text in texts)
        try:
            marked = [self._tokenizer.mark(text).replace(guard, "") for text in texts]
        except ValueError as error:
            row.set_aside(Status.INVALID, f"the row {error} beside the text of special tokens")
            return
        row.ids = self._tokenizer.encode_marked(marked[0])
        self._encode_later(row, marked[1:], is_marked=True)

    def _encode_later(self, row: PromptRow, texts: Sequence[str], is_marked: bool = False) -> None:
        """Tokenise what follows the answers, each as it stands behind one."""
        assert row.chat is not None
        encode_after = self._tokenizer.encode_after
        try:
            row.later_ids = [encode_after(row.chat.slot, text, is_marked) for text in texts]
        except ValueError as error:
            row.set_aside(Status.INVALID, f"the text behind an answer {error}")


def _num_chars(chat: Chat) -> int:
    return sum(len(turn["content"]) for turn in chat.turns)
