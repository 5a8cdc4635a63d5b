"""Model folder and tokenizer: text in, token ids out, the same ids that exllamav2 gives.

Ids come from the folder's tokenizer.json itself, as in exllamav2; transformers renders the chat
template and says whether the model wants a BOS token. No weights are loaded here.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+|[\w-][\w.-]*")
TOKENIZER_FILES = ("*.json", "*.jinja")  # of a hub model; pickles (*.bin, *.pt) never
WEIGHT_FILES = ("*.safetensors",)

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

SAMPLE_BLOCKS, SAMPLE_BYTES = 64, 64 * 1024  # read of each shard for a fingerprint
QUANTISATION_FILES = ("quantization_config.json", "quantize_config.json", "hf_quant_config.json")
FIRST_MARK = 0x100000  # plane 16, private use: one character stands for each special token


def resolve_model(model: str, revision: str | None = None, tokenizer_only: bool = False) -> Path:
    """Turn `generator.model` into a local folder that has a config and a tokenizer.

    Parameters
    ----------
    model
        Folder, or hub id; a hub model is downloaded where it is not in the hub's cache.
    revision
        Branch, tag or commit of a hub model.
    tokenizer_only
        Leave the weights on the hub.

    Raises
    ------
    ValueError
        One line, if there is no such model or it is incomplete.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir():
        if not HUB_ID.fullmatch(model):
            raise ValueError(
                f"generator.model: no folder {model}; download the model there, or correct the path"
            )
        folder = _from_hub(model, revision, tokenizer_only)
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ValueError(
                f"generator.model: no {name} in {model}; download it, or point generator.model "
                "at a complete model folder"
            )
    return folder


def _from_hub(model: str, revision: str | None, tokenizer_only: bool) -> Path:
    from huggingface_hub import snapshot_download

    patterns = [*TOKENIZER_FILES, *(() if tokenizer_only else WEIGHT_FILES)]
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except Exception as error:  # network, authentication, name: many unrelated types
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"generator.model: {model} is no folder, and the hub did not give it "
            f"({type(error).__name__}: {reason}); check name, revision, network and HF_TOKEN, "
            "or download it and give its folder"
        ) from None


def check_weights(folder: Path) -> None:
    """Raise a ValueError unless `folder` holds safetensors."""
    if not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"generator.model: no weights in {folder}; download them or point it at a folder "
            "with *.safetensors"
        )


def read_config(folder: Path) -> dict[str, Any]:
    """The model's config.json; of a model with several parts, the language model's values count."""
    config = _read_json(folder / "config.json")
    return config | config.get("text_config", {})


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

    def _with_bos(self, ids: list[int]) -> list[int]:
        if self.bos_id is None or (ids and ids[0] == self.bos_id):
            return ids
        return [self.bos_id, *ids]

    @cached_property
    def _literal(self) -> Tokenizer:
        """The same tokenizer, its special tokens renamed to their marks.

        To it, text such as <|im_end|> is text like any other.
        """
        spec = _read_json(self.folder / "tokenizer.json")
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
        """A hash of what decides the ids of a text: tokenizer.json and its settings."""
        digest = hashlib.blake2b(digest_size=16)
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
            path = self.folder / name
            digest.update(path.read_bytes() if path.is_file() else b"")
            digest.update(b"\0")
        return digest.hexdigest()


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
        sources.append((path.name, _ids(_read_json(path).get("eos_token_id"))))
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


def model_fingerprint(folder: Path, extra: dict[str, Any] | None = None) -> str:
    """A hash of the model: 32 hex digits, the same for a copy elsewhere, in seconds.

    Of each shard it reads the header and evenly spaced blocks, not every byte.

    Parameters
    ----------
    extra
        What else decides the answers: cache type, dtype, rope scaling, adapter.
    """
    digest = hashlib.blake2b(digest_size=16)
    config = _read_json(folder / "config.json")
    for name in ("_name_or_path", "transformers_version"):  # where and by whom it was written
        config.pop(name, None)
    quantisation = {
        name: _read_json(folder / name) for name in QUANTISATION_FILES if (folder / name).is_file()
    }
    digest.update(json.dumps([config, quantisation, extra or {}], sort_keys=True).encode())
    for shard in sorted(folder.glob("*.safetensors")):
        for block in _sampled_blocks(shard):
            digest.update(block)
    return digest.hexdigest()


def _sampled_blocks(shard: Path) -> Iterator[bytes]:
    """Yield a shard's size, its header, and `SAMPLE_BLOCKS` blocks from its start to its end."""
    size = shard.stat().st_size
    yield size.to_bytes(8, "little")
    with open(shard, "rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        yield file.read(min(header_bytes, size))
        last = max(size - SAMPLE_BYTES, 0)
        for index in range(SAMPLE_BLOCKS):
            file.seek(last * index // (SAMPLE_BLOCKS - 1), os.SEEK_SET)
            yield file.read(SAMPLE_BYTES)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError:
        raise ValueError(f"{path} is not JSON; download it again") from None
