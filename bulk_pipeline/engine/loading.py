"""From settings to a running generator: device, model, cache size and tokenizer.

Errors are one line each and name the setting; what was worked out is logged. The model classes are
imported only once the device is known, because exllamav2's compiled module depends on it.
"""

import gc
import importlib
import logging
from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil  # type: ignore[import-untyped]
import torch
from transformers import AutoTokenizer

from bulk_pipeline.engine.adapter_files import resolve_adapters
from bulk_pipeline.engine.adapters import Adapters
from bulk_pipeline.engine.folders import read_cache_shape, read_weights
from bulk_pipeline.engine.memory import auto_batch_size
from bulk_pipeline.engine.model_files import device_extras
from bulk_pipeline.engine.ngram import NgramSettings
from bulk_pipeline.engine.stand_in import EXTENSION, install_stand_in, is_stand_in_installed
from bulk_pipeline.engine.tokenizer import (
    check_weights,
    model_fingerprint,
    read_config,
    resolve_model,
)
from bulk_pipeline.spec import PAGE_TOKENS, GeneratorSettings

if TYPE_CHECKING:
    from bulk_pipeline.engine.cpu import CpuModel
    from bulk_pipeline.engine.generator import BulkGenerator
    from bulk_pipeline.engine.paged_model import PagedModel

AUTO_TOKENS_PER_REQUEST = 1024  # of cache, for each request of a full batch
CPU_BATCH_SIZE = 16  # more rows at once keep two to sixteen cores no busier
AUTO_MEMORY_SHARE = 0.25  # of the memory that is free, at most, for an automatic cache
VERSIONS = ("torch", "exllamav2", "transformers", "llguidance")  # recorded with each answer

logger = logging.getLogger(__name__)


def load_generator(settings: GeneratorSettings) -> "BulkGenerator":
    """Load the model and everything around it.

    Raises
    ------
    ValueError
        One line that names the setting, the rule and the remedy.
    RuntimeError
        If the GPU's memory does not suffice, or exllamav2's compiled module cannot be had.
    """
    on_cpu = resolve_device(settings) == "cpu"
    return _load_on_cpu(settings) if on_cpu else _load_on_cuda(settings)


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
    return device_extras(settings, on_cpu=resolve_device(settings) == "cpu")


def settings_fingerprint(settings: GeneratorSettings) -> str:
    """Return the model's fingerprint under these settings, without loading it."""
    folder = resolve_model(settings.model, settings.revision)
    return model_fingerprint(folder, fingerprint_extras(settings))


def load_adapters(settings: GeneratorSettings, folder: Path) -> Adapters:
    """Find the adapters, and check them against the files of the model in `folder`.

    Raises
    ------
    ValueError
        One line, where one is missing, is not supported or does not fit.
    """
    return Adapters(resolve_adapters(settings), folder)


def _load_on_cuda(settings: GeneratorSettings) -> "BulkGenerator":
    _check_compiled_module()
    from bulk_pipeline.engine.cuda import Beside, load_cuda_model, paged_model

    folder = _model_folder(settings.model, settings.revision)
    adapters = load_adapters(settings, folder)
    batch_size = gpu_batch_size(
        settings,
        int(read_config(folder)["vocab_size"]),
        torch.cuda.get_device_properties(0).total_memory,
    )
    settings = choose_drafts(settings, batch_size)
    num_draft = settings.num_draft_tokens if settings.draft_model else 0
    rows = step_tokens(settings, batch_size)
    tokens = settings.cache_tokens and settings.cache_tokens // PAGE_TOKENS * PAGE_TOKENS
    if tokens is not None:
        _check_cache_holds(settings, tokens - num_draft)
    beside = draft_folder = None
    if settings.draft_model is not None:
        draft_folder = _model_folder(settings.draft_model, None)
        page = read_cache_shape(draft_folder).gpu_bytes_per_token(settings.cache_type) * PAGE_TOKENS
        beside = Beside(read_weights(draft_folder).gpu_bytes, page)
    model, cache, report = load_cuda_model(
        settings,
        folder,
        rows=rows,
        cache_tokens=tokens and tokens + _scratch_tokens(settings),
        beside=beside,
    )
    models, caches = [model], [cache]
    if draft_folder is not None:
        draft, draft_cache, draft_report = load_cuda_model(
            settings,
            draft_folder,
            rows=rows,
            cache_tokens=cache.max_seq_len,
            setting="generator.draft_model",
        )
        check_draft_length(draft.max_seq_len, model.max_seq_len, draft_folder.name)
        check_draft(draft.config.vocab_size, model.config.vocab_size, draft_folder.name)
        logger.info("draft model %s: %s", draft_folder.name, draft_report)
        models.append(draft)
        caches.append(draft_cache)
    generator = _make_generator(
        settings,
        folder,
        models,
        caches,
        None if settings.draft_model else paged_model(model, cache),
        batch_size,
        model.max_seq_len,
        adapters,
        device=torch.cuda.get_device_name(),
        quantization=model.quantization,
        attention=model.attention,
        weights=model.weights,
    )
    logger.info(
        "loaded %s (%s, weights held %s, attention by %s): batches of %d, %s", folder.name,
        model.quantization, model.weights, model.attention, batch_size, report,
    )  # fmt: skip
    return generator


def gpu_batch_size(settings: GeneratorSettings, vocab_size: int, total_bytes: int) -> int:
    """Return the batch size on a GPU of so much memory: as set, or what `auto` makes of it."""
    return settings.max_batch_size or auto_batch_size(total_bytes, vocab_size)


def cpu_batch_size(settings: GeneratorSettings) -> int:
    """Return the batch size on a CPU."""
    return settings.max_batch_size or CPU_BATCH_SIZE


def choose_drafts(settings: GeneratorSettings, batch_size: int) -> GeneratorSettings:
    """Return the settings with one way to draft at most: what `speculative: auto` comes to."""
    if settings.speculative != "auto" or settings.draft_model is None:
        return settings
    values = {name: getattr(settings, name) for name in GeneratorSettings.model_fields}
    if batch_size <= settings.speculative_max_rows:
        return GeneratorSettings(**values | {"speculative": "off"})
    logger.warning(
        f"generator.draft_model is not loaded: a batch of {batch_size} is more than "
        f"generator.speculative_max_rows ({settings.speculative_max_rows}); lower "
        "generator.max_batch_size to draft with it"
    )
    return GeneratorSettings(**values | {"draft_model": None})


def ngram_settings(settings: GeneratorSettings) -> NgramSettings | None:
    """Return how n-grams are drafted; None where they are not."""
    if settings.speculative == "off":
        return None
    return NgramSettings(
        settings.num_speculative_tokens,
        settings.prompt_lookup_max,
        settings.prompt_lookup_min,
        settings.speculative_max_rows if settings.speculative == "auto" else None,
    )


def step_tokens(settings: GeneratorSettings, batch_size: int) -> int:
    """Return the most tokens of a generating step, drafted ones included."""
    ngrams = ngram_settings(settings)
    if ngrams is not None:
        return ngrams.step_tokens(batch_size)
    return batch_size * (settings.num_draft_tokens + 1 if settings.draft_model else 1)


def _make_generator(
    settings: GeneratorSettings,
    folder: Path,
    models: Sequence[Any],
    caches: Sequence[Any],
    forward: "PagedModel | None",
    batch_size: int,
    max_seq_len: int,
    adapters: Adapters,
    **found: str,
) -> "BulkGenerator":
    """Put a generator together: one scheduler, or exllamav2's where there is a draft model."""
    from bulk_pipeline.engine.drafting import DraftingLoop
    from bulk_pipeline.engine.generator import BulkGenerator
    from bulk_pipeline.engine.rows import Row, Stats
    from bulk_pipeline.engine.scheduler import Scheduler

    if forward is not None:
        adapters.check(forward.can_change)
    usable = caches[0].max_seq_len - _scratch_tokens(settings)
    num_draft = settings.num_draft_tokens if settings.draft_model else 0
    max_seq_len = min(max_seq_len, usable - num_draft)

    def make_loop(stats: Stats, on_finish: Callable[[Row], None]) -> DraftingLoop | Scheduler:
        if forward is None:
            return DraftingLoop(
                models[0],
                caches[0],
                draft_model=models[1],
                draft_cache=caches[1],
                num_draft_tokens=num_draft,
                max_batch_size=batch_size,
                max_chunk_size=settings.max_chunk_size,
                stats=stats,
                on_finish=on_finish,
            )
        return Scheduler(
            forward,
            caches[0].all_tensors(),
            caches[0].max_seq_len // PAGE_TOKENS,
            max_batch_size=batch_size,
            max_seq_len=max_seq_len,
            max_chunk_size=settings.max_chunk_size,
            stats=stats,
            on_finish=on_finish,
            drafts=ngram_settings(settings),
        )

    return BulkGenerator(
        make_loop,
        models,
        AutoTokenizer.from_pretrained(folder, trust_remote_code=False),
        vocab_size=int(models[0].config.vocab_size),
        max_batch_size=batch_size,
        max_seq_len=max_seq_len,
        provenance=_provenance(settings, folder, usable, batch_size, **found)
        | ({"adapters": adapters.fingerprints} if adapters.fingerprints else {}),
        adapters=adapters,
    )


def _scratch_tokens(settings: GeneratorSettings) -> int:
    """Tokens of the cache that no row gets: the scheduler's scratch page."""
    return 0 if settings.draft_model else PAGE_TOKENS


def _provenance(
    settings: GeneratorSettings, folder: Path, cache_tokens: int, batch_size: int, **found: str
) -> dict[str, Any]:
    """What produced a completion, as far as it is no part of the request."""
    versions = {name: version(name) for name in VERSIONS}
    return {
        "model": folder.name,
        "fingerprint": model_fingerprint(folder, fingerprint_extras(settings)),
        **found,
        "cache_type": settings.cache_type if found["device"] != "cpu" else settings.dtype,
        "cache_tokens": cache_tokens,
        "max_batch_size": batch_size,
        "max_chunk_size": settings.max_chunk_size,
        "draft_model": settings.draft_model and Path(settings.draft_model).name,
        "speculative": settings.speculative,
        **versions,
    }


def _check_compiled_module() -> None:
    """Make exllamav2's compiled module importable, or say why it is not.

    exllamav2 compiles it on import where it is not installed, which needs CUDA's compiler.
    """
    if is_stand_in_installed():
        raise RuntimeError(
            "generator.device: cuda cannot be used in a process that has loaded a model on the CPU "
            "without exllamav2's compiled module; start a new process, or set "
            "generator.device: cpu"
        )
    check_extension()
    try:
        importlib.import_module("exllamav2")
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise RuntimeError(
            f"generator.device: cuda needs exllamav2's compiled module, which cannot be loaded or "
            f"built here ({reason}); install an exllamav2 wheel built for PyTorch "
            f"{torch.__version__}, or set generator.device: cpu"
        ) from error


def check_extension() -> str:
    """Return where exllamav2's compiled module is, or the folder of CUDA to build it with.

    Raises
    ------
    RuntimeError
        If it is not installed and cannot be built.
    """
    from torch.utils.cpp_extension import CUDA_HOME

    spec = PathFinder.find_spec(EXTENSION)  # whatever this process has in its place
    if spec is None and CUDA_HOME is None:
        raise RuntimeError(
            "generator.device: cuda needs exllamav2's compiled module, and neither it nor CUDA's "
            "compiler (nvcc) is installed; install an exllamav2 wheel built for this PyTorch and "
            "CUDA, or nvcc, or set generator.device: cpu"
        )
    return str(spec.origin if spec else CUDA_HOME)


def _load_on_cpu(settings: GeneratorSettings) -> "BulkGenerator":
    settings = choose_drafts(settings, cpu_batch_size(settings))
    install_stand_in()
    from bulk_pipeline.engine.cpu import PagedCache, load_cpu_model
    from bulk_pipeline.engine.forward import ChunkForward

    folder = _model_folder(settings.model, settings.revision)
    adapters = load_adapters(settings, folder)
    model = load_cpu_model(folder, settings.dtype, settings.max_seq_len)
    draft = _load_draft(settings, model) if settings.draft_model else None
    tokens = _cache_tokens(settings, model, draft)
    models = [model, draft] if draft else [model]
    caches = [PagedCache(m, tokens + _scratch_tokens(settings)) for m in models]
    forward = (
        None
        if draft
        else ChunkForward(
            model,
            caches[0],
            model.device,
            max_tokens=settings.max_chunk_size,
            max_positions=model.config.max_seq_len,
            max_rows=1,  # a CPU is busy with one; padding would only add to it
            ids_device=model.device,
        )
    )
    generator = _make_generator(
        settings, folder, models, caches, forward, cpu_batch_size(settings),
        model.config.max_seq_len, adapters, device="cpu", quantization=settings.dtype,
        attention="torch", weights=settings.dtype,
    )  # fmt: skip
    logger.info(
        "loaded %s on cpu in %s: cache of %d tokens, sequences of at most %d, batches of %d",
        folder.name,
        settings.dtype,
        tokens,
        generator.max_seq_len,
        generator.max_batch_size,
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
    check_draft(draft.config.vocab_size, model.config.vocab_size, folder.name)
    check_draft_length(draft.config.max_seq_len, model.config.max_seq_len, folder.name)
    return draft


def check_draft_length(draft_length: int, length: int, name: str) -> None:
    """Raise a ValueError where a draft model reads fewer tokens than the model may."""
    if draft_length < length:
        raise ValueError(
            f"generator.draft_model: {name} reads at most {draft_length} tokens; set "
            f"generator.max_seq_len to at most that, got {length}"
        )


def _check_cache_holds(settings: GeneratorSettings, tokens: int) -> None:
    """Raise a ValueError where a cache of so many tokens does not hold the longest sequence."""
    if tokens < (settings.max_seq_len or 0):
        raise ValueError(
            f"generator.cache_tokens must hold one sequence of {settings.max_seq_len} tokens, got "
            f"{tokens}; raise it or lower generator.max_seq_len"
        )


def check_draft(draft_size: int, size: int, name: str) -> None:
    """Raise a ValueError where a draft model has another vocabulary than the model."""
    if draft_size != size:
        raise ValueError(
            f"generator.draft_model must have the vocabulary of the model ({size} tokens), got "
            f"{draft_size} in {name}"
        )


def _cache_tokens(settings: GeneratorSettings, model: "CpuModel", draft: "CpuModel | None") -> int:
    """Return the size of the cache in tokens, a whole number of pages."""
    a_token = sum(_bytes_per_token(m) for m in (model, draft) if m)
    available = psutil.virtual_memory().available
    return cpu_cache_tokens(settings, model.config.max_seq_len, a_token, available)


def cpu_cache_tokens(
    settings: GeneratorSettings, max_seq_len: int, bytes_per_token: int, available: int
) -> int:
    """Return the size of the cache in tokens, of a model that reads `max_seq_len`.

    Parameters
    ----------
    available
        Bytes of memory that are free beside the weights.

    Raises
    ------
    ValueError
        If it does not hold one sequence.
    """
    longest = max_seq_len + (settings.num_draft_tokens if settings.draft_model else 0)
    if settings.cache_tokens is not None:
        tokens = settings.cache_tokens // PAGE_TOKENS * PAGE_TOKENS
        remedy = "raise it or lower generator.max_seq_len"
        name = "generator.cache_tokens"
    else:
        wanted = max(longest, cpu_batch_size(settings) * AUTO_TOKENS_PER_REQUEST)
        affordable = int(available * AUTO_MEMORY_SHARE) // bytes_per_token
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
