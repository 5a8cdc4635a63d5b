"""From settings to a running generator: device, model, cache size and tokenizer.

Errors are one line each and name the setting; what was worked out is logged. The model classes are
imported only once the device is known, because exllamav2's compiled module depends on it.
"""

import gc
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil  # type: ignore[import-untyped]
import torch
from transformers import AutoTokenizer

from bulk_pipeline.engine.stand_in import install_stand_in
from bulk_pipeline.engine.tokenizer import check_weights, model_fingerprint, resolve_model
from bulk_pipeline.spec import PAGE_TOKENS, GeneratorSettings

if TYPE_CHECKING:
    from bulk_pipeline.engine.cpu import CpuModel
    from bulk_pipeline.engine.generator import BulkGenerator

AUTO_TOKENS_PER_REQUEST = 1024  # of cache, for each request of a full batch
AUTO_MEMORY_SHARE = 0.25  # of the memory that is free, at most, for an automatic cache

logger = logging.getLogger(__name__)


def load_generator(settings: GeneratorSettings) -> "BulkGenerator":
    """Load the model and everything around it.

    Raises
    ------
    ValueError
        One line that names the setting, the rule and the remedy.
    RuntimeError
        If the settings ask for a GPU, which this version cannot use.
    """
    if resolve_device(settings) == "cuda":
        raise RuntimeError(
            f"generator.device: {settings.device} gives cuda, which this version cannot use yet; "
            "set generator.device: cpu"
        )
    return _load_on_cpu(settings)


def resolve_device(settings: GeneratorSettings) -> Literal["cpu", "cuda"]:
    """Return where the model runs: `auto` is cuda wherever a GPU is visible."""
    has_gpu = torch.cuda.is_available()
    if settings.device == "cuda" and not has_gpu:
        raise ValueError(
            "generator.device: cuda needs a GPU that PyTorch can use, and there is none; "
            "set generator.device: cpu"
        )
    return "cuda" if has_gpu and settings.device != "cpu" else "cpu"


def fingerprint_extras(settings: GeneratorSettings) -> dict[str, Any]:
    """Return what decides the answers besides the model's files: dtype, cache type, rope."""
    on_cpu = resolve_device(settings) == "cpu"
    return {
        "dtype": settings.dtype if on_cpu else "float16",
        "cache_type": settings.dtype if on_cpu else settings.cache_type,
        "rope": "model",  # rope scaling is the model's own; there is no setting yet
    }


def settings_fingerprint(settings: GeneratorSettings) -> str:
    """Return the model's fingerprint under these settings, without loading it."""
    folder = resolve_model(settings.model, settings.revision)
    return model_fingerprint(folder, fingerprint_extras(settings))


def _load_on_cpu(settings: GeneratorSettings) -> "BulkGenerator":
    install_stand_in()
    from bulk_pipeline.engine.cpu import PagedCache, load_cpu_model
    from bulk_pipeline.engine.generator import BulkGenerator

    folder = _model_folder(settings.model, settings.revision)
    model = load_cpu_model(folder, settings.dtype, settings.max_seq_len)
    draft = _load_draft(settings, model) if settings.draft_model else None
    tokens = _cache_tokens(settings, model, draft)
    generator = BulkGenerator(
        model,
        PagedCache(model, tokens),
        AutoTokenizer.from_pretrained(folder, trust_remote_code=False),
        max_batch_size=settings.max_batch_size,
        max_seq_len=model.config.max_seq_len,
        max_chunk_size=settings.max_chunk_size,
        draft_model=draft,
        draft_cache=PagedCache(draft, tokens) if draft else None,
        num_draft_tokens=settings.num_draft_tokens,
    )
    logger.info(
        "loaded %s on cpu in %s: cache of %d tokens, sequences of at most %d, batches of %d",
        folder.name,
        settings.dtype,
        tokens,
        generator.max_seq_len,
        settings.max_batch_size,
    )
    gc.collect()
    return generator


def _model_folder(model: str, revision: str | None) -> Path:
    folder = resolve_model(model, revision)
    check_weights(folder)
    return folder


def _load_draft(settings: GeneratorSettings, model: "CpuModel") -> "CpuModel":
    from bulk_pipeline.engine.cpu import load_cpu_model

    assert settings.draft_model is not None
    folder = _model_folder(settings.draft_model, None)
    draft = load_cpu_model(folder, settings.dtype, None)
    if draft.config.vocab_size != model.config.vocab_size:
        raise ValueError(
            f"generator.draft_model must have the vocabulary of the model "
            f"({model.config.vocab_size} tokens), got {draft.config.vocab_size} in {folder.name}"
        )
    if draft.config.max_seq_len < model.config.max_seq_len:
        raise ValueError(
            f"generator.draft_model: {folder.name} reads at most {draft.config.max_seq_len} "
            f"tokens; set generator.max_seq_len to at most that, got {model.config.max_seq_len}"
        )
    return draft


def _cache_tokens(settings: GeneratorSettings, model: "CpuModel", draft: "CpuModel | None") -> int:
    """Return the size of the cache in tokens, a whole number of pages."""
    longest = model.config.max_seq_len + (settings.num_draft_tokens if draft else 0)
    if settings.cache_tokens is not None:
        tokens = settings.cache_tokens // PAGE_TOKENS * PAGE_TOKENS
        remedy = "raise it or lower generator.max_seq_len"
        name = "generator.cache_tokens"
    else:
        wanted = max(longest, settings.max_batch_size * AUTO_TOKENS_PER_REQUEST)
        a_token = sum(_bytes_per_token(m) for m in (model, draft) if m)
        affordable = int(psutil.virtual_memory().available * AUTO_MEMORY_SHARE) // a_token
        tokens = min(_whole_pages(wanted), affordable // PAGE_TOKENS * PAGE_TOKENS)
        remedy = "set generator.cache_tokens, or lower generator.max_seq_len"
        name = "generator.cache_tokens: auto"
    if tokens < PAGE_TOKENS or (settings.max_seq_len is not None and tokens < longest):
        raise ValueError(
            f"{name} must hold one sequence of {longest} tokens, got {tokens}; {remedy}"
        )
    if tokens < longest:
        logger.warning(
            "%s gives a cache of %d tokens, less than the %d that the model can read: longer "
            "requests end as too_long",
            name,
            tokens,
            longest,
        )
    return tokens


def _whole_pages(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS) * PAGE_TOKENS


def _bytes_per_token(model: "CpuModel") -> int:
    config = model.config
    return (
        2
        * config.num_hidden_layers
        * config.num_key_value_heads
        * config.head_dim
        * model.dtype.itemsize
    )
