"""Model folder and tokenizer: text in, token ids out, the same ids that exllamav2 gives.

Ids come from the folder's tokenizer.json itself, as in exllamav2; transformers renders the chat
template and says whether the model wants a BOS token. No weights are loaded here.
"""

import json
import re
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from bulk_pipeline.engine.model_files import (
    check_weights as check_weights,
)
from bulk_pipeline.engine.model_files import model_fingerprint as model_fingerprint
from bulk_pipeline.engine.model_files import read_config as read_config
from bulk_pipeline.engine.model_files import read_json, tokenizer_hash
from bulk_pipeline.engine.model_files import resolve_model as resolve_model

# Special tokens that end an assistant's turn in some chat template.
TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_turn|>",
    "<|end_of_text|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|return|>",
    "<end_of_turn>",
    "<turn|>",
    "</s>",
)

FIRST_MARK = 0x100000  # plane 16, private use: one character stands for each special token


class PromptTokenizer:
    """A model's tokenizer, for prompts.

    Parameters
    ----------
    folder
        Model folder, see `resolve_model`.

    Attributes
    ----------
    folder
        The model folder.
    special_tokens
        Text and id of each special token.
    bos_text, bos_id
        The token that every prompt starts with, exactly once; None where the model wants none.
    eos_id
        The tokenizer's end token, or None.
    max_length
        Most tokens the model was made for, or None where its config does not say.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            self._hf = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
            self._fast = _load_tokenizer((folder / "tokenizer.json").read_text("utf-8"))
        except Exception as error:  # transformers raises whatever it stumbles over
            reason = str(error).strip().split("\n")[0]
            raise ValueError(
                f"generator.model: cannot load the tokenizer in {folder} ({reason}); "
                "download its files again"
            ) from None
        self.special_tokens = {
            token.content: id_
            for id_, token in self._fast.get_added_tokens_decoder().items()
            if token.special and token.content
        }
        self.eos_id: int | None = self._hf.eos_token_id
        self.bos_id: int | None = None
        self.bos_text: str | None = None
        if self._hf("a")["input_ids"][0] == self._hf.bos_token_id:
            self.bos_id, self.bos_text = self._hf.bos_token_id, self._hf.bos_token
        self.max_length: int | None = read_config(folder).get("max_position_embeddings")
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        self.special_pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._mark_of = {text: chr(FIRST_MARK + i) for i, text in enumerate(longest_first)}
        self._text_of = {mark: text for text, mark in self._mark_of.items()}
        self._mark_pattern = re.compile(f"[{''.join(self._text_of)}]" if self._text_of else "(?!)")

    @property
    def chat_template(self) -> str | None:
        """The model's own chat template; the default one where it has several."""
        template = self._hf.chat_template
        return template.get("default") if isinstance(template, dict) else template

    def apply_chat_template(
        self, chats: Sequence[list[dict[str, str]]], chat_template: str, **variables: str
    ) -> list[str]:
        """Render chats up to where the assistant's answer begins."""
        return self._hf.apply_chat_template(
            list(chats),
            chat_template=chat_template,
            tokenize=False,
            add_generation_prompt=True,
            **variables,
        )

    def one_bos(self, text: str) -> str:
        """`text` with at most one BOS token at its start, where the model wants one."""
        if self.bos_text:
            while text.startswith(self.bos_text * 2):
                text = text[len(self.bos_text) :]
        return text

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of prompts; text of special tokens gives the special tokens."""
        encodings = self._fast.encode_batch_fast(list(texts), add_special_tokens=False)
        return [self._with_bos(encoding.ids) for encoding in encodings]

    def encode_after(self, stand_in: str, text: str, is_marked: bool = False) -> list[int]:
        """Token ids of a text that follows another one, for which `stand_in` stands.

        Parameters
        ----------
        is_marked
            Whether only marks (see `mark`) in `text` give special tokens.

        Raises
        ------
        ValueError
            If a token would reach from one into the other.
        """
        fast = self._literal if is_marked else self._fast
        before = fast.encode(stand_in, add_special_tokens=False).ids
        ids = fast.encode(stand_in + text, add_special_tokens=False).ids
        if ids[: len(before)] != before:
            raise ValueError("shares a token with the answer before it")
        return ids[len(before) :]

    def encode_marked(self, marked: str) -> list[int]:
        """Token ids of a prompt in which only marks (see `mark`) give special tokens."""
        return self._with_bos(self._literal.encode(marked, add_special_tokens=False).ids)

    def offsets(self, marked: str) -> list[tuple[int, int]]:
        """Where each token of a marked text begins and ends in it."""
        return self._literal.encode(marked, add_special_tokens=False).offsets

    def mark(self, text: str) -> str:
        """Replace each special token's text by its mark, a single private-use character.

        Raises
        ------
        ValueError
            If `text` holds such characters already.
        """
        if self._mark_pattern.search(text):
            raise ValueError("holds private-use characters of Unicode's plane 16")
        return self.special_pattern.sub(lambda match: self._mark_of[match[0]], text)

    def unmark(self, marked: str) -> str:
        """Replace marks by the special tokens' texts."""
        return self._mark_pattern.sub(lambda match: self._text_of[match[0]], marked)

    def token_bytes(self, ids: Sequence[int]) -> list[bytes]:
        """Each token's own part of the text; a special token's is its name."""
        return [self._pieces.decode_bytes([id_]) for id_ in ids]

    @cached_property
    def _pieces(self) -> Any:
        from llguidance.hf import from_tokenizer

        return from_tokenizer(self._hf)

    def _with_bos(self, ids: list[int]) -> list[int]:
        if self.bos_id is None or (ids and ids[0] == self.bos_id):
            return ids
        return [self.bos_id, *ids]

    @cached_property
    def _literal(self) -> Tokenizer:
        """The same tokenizer, its special tokens renamed to their marks.

        To it, text such as <|im_end|> is text like any other.
        """
        spec = read_json(self.folder / "tokenizer.json")
        spec["post_processor"] = None  # refers to tokens by their old names
        for token in spec["added_tokens"]:
            token["content"] = self._mark_of.get(token["content"], token["content"])
        model = spec["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {self._mark_of.get(k, k): id_ for k, id_ in model["vocab"].items()}
        else:
            model["vocab"] = [[self._mark_of.get(k, k), score] for k, score in model["vocab"]]
        if "unk_token" in model:
            model["unk_token"] = self._mark_of.get(model["unk_token"], model["unk_token"])
        return _load_tokenizer(json.dumps(spec))

    def files_hash(self) -> str:
        """See `tokenizer_hash`."""
        return tokenizer_hash(self.folder)


def load_tokenizer(folder: Path) -> PromptTokenizer:
    """`PromptTokenizer`, kept for the next partition as long as its files do not change."""
    changed = [path.stat().st_mtime_ns for path in sorted(folder.glob("*.json"))]
    return _cached_tokenizer(folder, tuple(changed))


@lru_cache(maxsize=2)
def _cached_tokenizer(folder: Path, changed: tuple[int, ...]) -> PromptTokenizer:
    return PromptTokenizer(folder)


def _load_tokenizer(text: str) -> Tokenizer:
    tokenizer = Tokenizer.from_str(text)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def end_token_ids(folder: Path, chat_template: str, tokenizer: PromptTokenizer) -> dict[int, str]:
    """All ids that end a completion, with where each is named.

    The tokenizer's end token, those of config.json and generation_config.json (a number or a
    list), and the special tokens that end a turn in the chat template.
    """
    sources: list[tuple[str, Sequence[int]]] = [("tokenizer", _ids(tokenizer.eos_id))]
    sources.append(("config.json", _ids(read_config(folder).get("eos_token_id"))))
    if (path := folder / "generation_config.json").is_file():
        sources.append((path.name, _ids(read_json(path).get("eos_token_id"))))
    turn_ends = [text for text in TURN_ENDS if text in chat_template]
    specials = tokenizer.special_tokens
    sources.append(("chat template", [specials[text] for text in turn_ends if text in specials]))
    origins: dict[int, str] = {}
    for source, ids in sources:
        for id_ in ids:
            origins[id_] = f"{origins[id_]}, {source}" if id_ in origins else source
    return origins


def _ids(value: int | list[int] | None) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [id_ for id_ in values if isinstance(id_, int)]
