"""From the columns of a row to chat turns, the last one from the user.

A row that gives none raises `BadRow`, which carries the status it gets.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import orjson
from jinja2 import StrictUndefined, TemplateSyntaxError, meta
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from bulk_pipeline.engine.request import Status
from bulk_pipeline.spec import PromptSpec
from bulk_pipeline.storage.schemas import ROW_ERROR_FIELD, ROW_FIELDS

MAX_TEMPLATE_CHARS = 1_000_000  # of what a template adds or gives; more is a mistake or an attack
MAX_EXPONENT = 1000
MAX_TURNS = 1000  # that are answered in one row

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "tool": "tool",
}

Turn = dict[str, str]


@dataclass(frozen=True, slots=True)
class RawColumns:
    """The columns of a raw table.

    Attributes
    ----------
    stored
        Their names there; None where they are not known (no rows at all).
    renamed
        Source columns that have another name there.
    json_text
        Those (by the name there) that hold JSON text because their types are mixed.
    """

    stored: Sequence[str] | None
    renamed: Mapping[str, str] = field(default_factory=dict)
    json_text: Sequence[str] = ()

    def find(self, setting: str, name: str) -> str:
        """The name there of the source column `name`.

        Raises
        ------
        ValueError
            If there is no such column; `setting` is where the user named it.
        """
        column = self.renamed.get(name, name)
        if self.stored is not None and column not in self.stored:
            source_name = {stored: source for source, stored in self.renamed.items()}
            ours = {member.name for member in (*ROW_FIELDS, ROW_ERROR_FIELD)}
            known = [
                source_name.get(stored, stored) for stored in self.stored if stored not in ours
            ]
            raise ValueError(
                f"{setting}: no column {name!r} in the dataset; it has {', '.join(known)}"
            )
        return column

    def value(self, row: Mapping[str, Any], column: str) -> Any:
        """The row's value in a column, by the name there; JSON text of mixed types is parsed."""
        value = row[column]
        return json.loads(value) if column in self.json_text and isinstance(value, str) else value


class BadRow(Exception):
    """A row that cannot be a prompt: its status, why, and how many turns were to be answered."""

    def __init__(self, status: Status, reason: str, num_turns: int = 1):
        super().__init__(reason)
        self.status, self.reason, self.num_turns = status, reason, num_turns


@dataclass(frozen=True, slots=True)
class Chat:
    """A row's turns, the last one from the user.

    Where a turn holds the text of a special token, `guard` is a character that no turn held,
    put behind each of that text's characters, so that it is not taken for the token; else "".

    Of a conversation, `answered` are the places of the user's turns before the last that are
    answered too, and `slot` is a character that no turn holds, which stands for an answer.
    """

    turns: list[Turn]
    guard: str = ""
    answered: tuple[int, ...] = ()
    slot: str = ""

    @property
    def num_turns(self) -> int:
        """How many answers there are to be."""
        return len(self.answered) + 1

    def up_to_each(self, prefix: str) -> list[list[Turn]]:
        """The turns up to each that is answered; `prefix` begins the answers between them."""
        if not self.answered:
            return [self.turns]
        so_far: list[Turn] = []
        stages = []
        for place, turn in enumerate(self.turns):
            so_far.append(turn)
            if place in self.answered:
                stages.append(list(so_far))
                so_far.append({"role": "assistant", "content": prefix + self.slot})
        return [*stages, so_far]


class TurnReader:
    """Reads rows of one dataset as `prompt` says.

    Parameters
    ----------
    columns
        What the raw table has.
    special_pattern
        Matches the special tokens' text.
    show_text
        Whether reasons may quote rows.

    Attributes
    ----------
    names
        Each column that is read: the name as the user wrote it, and the raw table's.

    Raises
    ------
    ValueError
        If a column is missing, or the template is not one.
    """

    def __init__(
        self,
        prompt: PromptSpec,
        columns: RawColumns,
        special_pattern: re.Pattern[str],
        show_text: bool = True,
    ):
        self._prompt, self._special_pattern = prompt, special_pattern
        self._show_text, self._columns = show_text, columns
        self.names: dict[str, str] = {}
        self._add_names("prompt.column", [prompt.column])
        self._add_names("prompt.messages_column", [prompt.messages_column])
        self._add_names("prompt.turns_column", [prompt.turns_column])
        self._add_names("prompt.system_column", [prompt.system_column])
        if prompt.template is not None:
            self._environment = _Sandbox(
                undefined=StrictUndefined, finalize=_not_null, keep_trailing_newline=True
            )
            self._environment.filters["tojson"] = _to_json
            variables = self._template_variables(prompt.template)
            self._add_names("prompt.template", variables)
            self._template = self._environment.from_string(prompt.template)

    def read(self, row: Mapping[str, Any]) -> Chat:
        """Make a row's chat; the row's keys are the raw table's column names."""
        values = {name: self._columns.value(row, column) for name, column in self.names.items()}
        prompt = self._prompt
        if prompt.turns_column:
            return self._conversation(values, prompt.turns_column)
        if prompt.messages_column:
            turns = self._messages(prompt.messages_column, values[prompt.messages_column])
        elif prompt.template is not None and prompt.chat_template == "raw":
            # The template is the whole prompt: its own special tokens count, its columns' do not.
            guard = self._guard_for(_texts(values))
            message = self._render(_map_texts(values, guard, self._guarded) if guard else values)
            _check_not_empty(message)
            return Chat([{"role": "user", "content": message}], guard)
        elif prompt.template is not None:
            turns = [{"role": "user", "content": self._render(values)}]
        else:
            assert prompt.column is not None
            turns = [{"role": "user", "content": self._text(prompt.column, values[prompt.column])}]
        _check_not_empty(turns[-1]["content"])
        return self.guard([*self._system(values, turns), *turns])

    def _conversation(self, values: Mapping[str, Any], name: str) -> Chat:
        """The chat of a row whose user's turns are answered where no answer follows them."""
        value = _parsed(name, values[name])
        num_texts = len(value) if isinstance(value, list) and not _has_mapping(value) else 1
        try:
            turns = self._messages(name, value)
        except BadRow as bad:
            raise BadRow(bad.status, bad.reason, max(num_texts, 1)) from None
        roles = [turn["role"] for turn in turns]
        asked = [
            place
            for place, (role, following) in enumerate(pairwise([*roles, "user"]))
            if role == "user" and following != "assistant"
        ]
        if len(asked) > MAX_TURNS:
            raise BadRow(Status.INVALID, f"{name} has {len(asked)} turns, more than {MAX_TURNS}")
        try:
            for place in asked:
                _check_not_empty(turns[place]["content"])
            system = self._system(values, turns)
        except BadRow as bad:
            raise BadRow(bad.status, bad.reason, len(asked)) from None
        chat = self.guard([*system, *turns])
        answered = tuple(place + len(system) for place in asked[:-1])
        slot = _unused_character([*(turn["content"] for turn in turns), chat.guard])
        return replace(chat, answered=answered, slot=slot if answered else "")

    def guard(self, turns: list[Turn], guard: str = "") -> Chat:
        """Guard the special tokens' text in turns, with `guard` if it is used in some already."""
        guard = guard or self._guard_for(turn["content"] for turn in turns)
        if guard:
            turns = [{**turn, "content": self._guarded(turn["content"], guard)} for turn in turns]
        return Chat(turns, guard)

    def _guard_for(self, texts: Iterable[str]) -> str:
        """A private-use character that no text holds; "" where no guard is needed."""
        if self._prompt.allow_special_tokens:
            return ""
        texts = list(texts)
        if not any(map(self._special_pattern.search, texts)):
            return ""
        return _unused_character(texts)

    def _guarded(self, text: str, guard: str) -> str:
        return self._special_pattern.sub(lambda match: guard.join(match[0]) + guard, text)

    def _system(self, values: Mapping[str, Any], turns: list[Turn]) -> list[Turn]:
        """The system turn to put in front, if any; a row's own one wins."""
        prompt = self._prompt
        system = prompt.system
        if prompt.system_column and values[prompt.system_column] is not None:
            system = self._text(prompt.system_column, values[prompt.system_column])
        if system is None or turns[0]["role"] == "system":
            return []
        return [{"role": "system", "content": system}]

    def _text(self, name: str, value: Any) -> str:
        if value is None:
            raise BadRow(Status.INVALID, f"{name} is null, must be text")
        if not isinstance(value, str):
            shown = f" {value!r:.80}" if self._show_text else ""
            raise BadRow(Status.INVALID, f"{name} must be text, got {type(value).__name__}{shown}")
        return value

    def _messages(self, name: str, value: Any) -> list[Turn]:
        value = _parsed(name, value)
        if value is None:
            raise BadRow(Status.INVALID, f"{name} is null, must be a list of turns")
        if not isinstance(value, list):
            raise BadRow(
                Status.INVALID, f"{name} must be a list of turns, got {type(value).__name__}"
            )
        if not value:
            raise BadRow(Status.EMPTY, f"{name} has no turns")
        takes_texts = self._prompt.turns_column is not None
        turns = [
            self._turn(f"{name}[{i}]", turn if takes_texts else _parsed(name, turn))
            for i, turn in enumerate(value)
        ]
        if turns[-1]["role"] != "user":
            raise BadRow(
                Status.INVALID, f"{name} must end with a user's turn, got {turns[-1]['role']}"
            )
        return turns

    def _turn(self, name: str, turn: Any) -> Turn:
        if self._prompt.turns_column and not isinstance(turn, dict):
            return {"role": "user", "content": self._text(name, turn)}
        if not isinstance(turn, dict):
            raise BadRow(
                Status.INVALID,
                f"{name} must have role and content or from and value, got {type(turn).__name__}",
            )
        role = turn["role"] if turn.get("role") is not None else turn.get("from")
        content = turn["content"] if turn.get("content") is not None else turn.get("value")
        if not isinstance(role, str) or role.lower() not in ROLES:
            shown = f", got {role!r:.40}" if self._show_text else ""
            raise BadRow(Status.INVALID, f"{name}: role must be one of {', '.join(ROLES)}{shown}")
        if isinstance(content, list):
            content = "\n".join(self._part(name, part) for part in content)
        return {"role": ROLES[role.lower()], "content": self._text(f"{name}: content", content)}

    def _part(self, name: str, part: Any) -> str:
        if isinstance(part, dict) and part.get("type", "text") == "text":
            part = part.get("text")
        if not isinstance(part, str):
            raise BadRow(Status.INVALID, f"{name}: content must be text, not images or the like")
        return part

    def _render(self, values: Mapping[str, Any]) -> str:
        """Render the user's template, up to `MAX_TEMPLATE_CHARS`."""
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(values):
                num_chars += len(piece)
                if num_chars > MAX_TEMPLATE_CHARS:
                    raise SecurityError(f"gives more than {MAX_TEMPLATE_CHARS} characters")
                pieces.append(piece)
        except Exception as error:  # whatever an expression does with a row's values
            shown = f": {error}" if self._show_text or isinstance(error, SecurityError) else ""
            raise BadRow(
                Status.INVALID, f"prompt.template: {type(error).__name__}{shown}"
            ) from None
        return "".join(pieces)

    def _template_variables(self, template: str) -> list[str]:
        try:
            tree = self._environment.parse(template)
        except TemplateSyntaxError as error:
            raise ValueError(
                f"prompt.template, line {error.lineno}: {error.message}; correct the template"
            ) from None
        return sorted(meta.find_undeclared_variables(tree) - set(self._environment.globals))

    def _add_names(self, setting: str, names: Iterable[str | None]) -> None:
        for name in names:
            if name is not None:
                self.names[name] = self._columns.find(setting, name)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, which also refuses to make huge values in one expression."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute `left` * `right` or `left` ** `right`, unless the result would be huge."""
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                is_repetition = isinstance(sequence, str | list | tuple) and isinstance(times, int)
                if is_repetition and len(sequence) * times > MAX_TEMPLATE_CHARS:
                    raise SecurityError(f"repeats to more than {MAX_TEMPLATE_CHARS}")
        elif isinstance(right, int) and abs(right) > MAX_EXPONENT:
            raise SecurityError(f"has an exponent of more than {MAX_EXPONENT}")
        return super().call_binop(context, operator, left, right)


def _parsed(name: str, value: Any) -> Any:
    """Parse JSON text; other values are returned as they are."""
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except ValueError:
        raise BadRow(Status.INVALID, f"{name} must be turns or JSON text of turns") from None


def _has_mapping(values: Iterable[Any]) -> bool:
    return any(isinstance(value, dict) for value in values)


def _unused_character(texts: Iterable[str]) -> str:
    """A private-use character that no text holds."""
    held: set[str] = set().union(*texts)
    return next(chr(code) for code in range(0xE000, 0xF900) if chr(code) not in held)


def _check_not_empty(message: str) -> None:
    if not message or message.isspace():
        raise BadRow(Status.EMPTY, "the user's message is empty")


def _not_null(value: Any) -> Any:
    if value is None:
        raise TypeError("a value is null; write {{ column or '' }} if it may be")
    return value


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, default=str)


def _texts(value: Any) -> Iterable[str]:
    """All strings in a nested value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _map_texts(value: Any, guard: str, change: Any) -> Any:
    """Change all strings in a nested value."""
    if isinstance(value, str):
        return change(value, guard)
    if isinstance(value, Mapping):
        return {key: _map_texts(item, guard, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_texts(item, guard, change) for item in value]
    return value
