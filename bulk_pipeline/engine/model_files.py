"""A model's files: where they are, and hashes of them. Imports no model library.

What only asks whether stored results still belong to a model needs no more than this.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bulk_pipeline.engine.model_download import (
    download_model,
    find_downloaded,
    is_archive,
    is_model_url,
)
from bulk_pipeline.spec import GeneratorSettings

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+|[\w-][\w.-]*")
TOKENIZER_FILES = ("*.json", "*.jinja")  # of what is downloaded; pickles (*.bin, *.pt) never
WEIGHT_FILES = ("*.safetensors",)
MODEL_FILES = (*TOKENIZER_FILES, *WEIGHT_FILES)

SAMPLE_BLOCKS, SAMPLE_BYTES = 64, 64 * 1024  # read of each shard for a fingerprint
QUANTISATION_FILES = ("quantization_config.json", "quantize_config.json", "hf_quant_config.json")
PROMPT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def resolve_model(model: str, revision: str | None = None, tokenizer_only: bool = False) -> Path:
    """Turn `generator.model` into a local folder that has a config and a tokenizer.

    Parameters
    ----------
    model
        Folder, hub id or URL; a model that this machine does not have is downloaded, by one
        process at a time.
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
    if is_model_url(model):
        folder = _from_url(model, revision, tokenizer_only)
    elif not folder.is_dir():
        if not HUB_ID.fullmatch(model):
            raise ValueError(
                f"generator.model: no folder {model}; download the model there, or correct the path"
            )
        patterns = TOKENIZER_FILES if tokenizer_only else MODEL_FILES
        folder = download_from_hub("generator.model", model, patterns, revision)
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ValueError(
                f"generator.model: no {name} in {model}; download it, or point generator.model "
                "at a complete model folder"
            )
    return folder


def _from_url(model: str, revision: str | None, tokenizer_only: bool) -> Path:
    if revision is not None:
        raise ValueError(
            f"generator.revision is for models of the hub, and {model} is a URL; remove it"
        )
    if tokenizer_only and not is_archive(model):
        return find_downloaded(model, MODEL_FILES) or download_model(model, TOKENIZER_FILES)
    return download_model(model, MODEL_FILES)


def download_from_hub(
    setting: str, name: str, patterns: Sequence[str], revision: str | None = None
) -> Path:
    """The folder of a hub model, or of an adapter, with those of its files that match.

    Raises
    ------
    ValueError
        One line, if the hub does not give it: the name may also be meant as a path.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except Exception as error:  # network, authentication, name: many unrelated types
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"{setting}: {name} is no folder here, and the hub did not give it "
            f"({type(error).__name__}: {reason}); if it is a path, correct it; if it is a hub id, "
            "check it, its revision, the network and HF_TOKEN"
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
    config = read_json(folder / "config.json")
    return config | config.get("text_config", {})


def find_model(settings: GeneratorSettings) -> Path | None:
    """The model's folder if it is on this machine, weights included; downloads nothing."""
    if is_model_url(settings.model):
        return find_downloaded(settings.model, MODEL_FILES)
    folder = Path(settings.model).expanduser()
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(
                snapshot_download(settings.model, revision=settings.revision, local_files_only=True)
            )
        except Exception:  # not a hub id, or not in the cache: many unrelated types
            return None
    has_weights = any(folder.glob("*.safetensors"))
    return folder if has_weights and (folder / "config.json").is_file() else None


def tokenizer_hash(folder: Path) -> str:
    """A hash of what decides the ids of a text and where a completion ends."""
    digest = hashlib.blake2b(digest_size=16)
    for name in PROMPT_FILES:
        path = folder / name
        digest.update(path.read_bytes() if path.is_file() else b"")
        digest.update(b"\0")
    return digest.hexdigest()


def device_extras(settings: GeneratorSettings, on_cpu: bool) -> dict[str, Any]:
    """What decides the answers besides the model's files: dtype, cache type, rope."""
    return {
        "dtype": settings.dtype if on_cpu else "float16",
        "cache_type": settings.dtype if on_cpu else settings.cache_type,
        "rope": [settings.rope_scale, settings.rope_alpha],
    }


def model_fingerprint(folder: Path, extra: dict[str, Any] | None = None) -> str:
    """A hash of the model: 32 hex digits, the same for a copy elsewhere, in seconds.

    Of each shard it reads the header and evenly spaced blocks, not every byte.

    Parameters
    ----------
    extra
        What else decides the answers: cache type, dtype, rope scaling, adapter.
    """
    digest = hashlib.blake2b(digest_size=16)
    config = read_json(folder / "config.json")
    for name in ("_name_or_path", "transformers_version"):  # where and by whom it was written
        config.pop(name, None)
    quantisation = {
        name: read_json(folder / name) for name in QUANTISATION_FILES if (folder / name).is_file()
    }
    digest.update(json.dumps([config, quantisation, extra or {}], sort_keys=True).encode())
    for shard in sorted(folder.glob("*.safetensors")):
        for block in sampled_blocks(shard):
            digest.update(block)
    return digest.hexdigest()


def sampled_blocks(shard: Path) -> Iterator[bytes]:
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


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of the model; a ValueError names one that is not."""
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError:
        raise ValueError(f"{path} is not JSON; download it again") from None
