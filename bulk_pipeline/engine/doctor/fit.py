"""What fits beside the weights: tokens of cache, and rows at once."""

import torch

from bulk_pipeline.engine.doctor.machine import Gpu
from bulk_pipeline.engine.doctor.report import Fit, Report
from bulk_pipeline.engine.folders import (
    CACHE_BYTES,
    DENSE_ARCHITECTURES,
    HALF_BYTES,
    QUANTIZATIONS,
    CacheShape,
    Weights,
)
from bulk_pipeline.engine.loading import (
    AUTO_MEMORY_SHARE,
    choose_drafts,
    cpu_batch_size,
    cpu_cache_tokens,
    gpu_batch_size,
    step_tokens,
)
from bulk_pipeline.engine.memory import DENSE_SHARE, GIB, cache_margin
from bulk_pipeline.spec import PAGE_TOKENS, GeneratorSettings

EXAMPLE_LENGTHS = (512, 2048, 8192)  # tokens of a prompt and its completion, for rows at once


def examine_fit(report: Report, settings: GeneratorSettings) -> None:
    """Fill in what fits, where the sizes are known."""
    model = report.model
    if model is None or model.max_seq_len is None:
        return
    on_gpu = report.device == "cuda"
    batch_size = (
        gpu_batch_size(settings, model.vocab_size, report.machine.gpus[0].total)
        if on_gpu
        else cpu_batch_size(settings)
    )
    settings = choose_drafts(settings, batch_size)
    found = [(model.weights, model.cache)]
    if settings.draft_model is not None:
        found.append((model.draft_weights, model.draft_cache))
    sizes = [(weights, cache) for weights, cache in found if weights and cache]
    if len(sizes) == len(found):
        fit = _fit_on_gpus if on_gpu else _fit_on_cpu
        fit(report, settings, sizes, model.max_seq_len)


def _fit_on_gpus(
    report: Report,
    settings: GeneratorSettings,
    sizes: list[tuple[Weights, CacheShape]],
    max_seq_len: int,
) -> None:
    assert report.model is not None
    gpus = _taken(report, settings)
    free = sum(gpu.free for gpu in gpus)
    report.weights_held, weights = _held_weights(report, settings, [part for part, _ in sizes])
    if weights >= free:
        report.note(
            f"generator.model: the weights take {weights / GIB:.2f} GiB, and {free / GIB:.2f} GiB "
            "of GPU memory are free; free some, raise generator.gpus, or use a model of fewer bits "
            "or parameters",
            stops=True,
        )
        return
    report.batch_size = gpu_batch_size(settings, report.model.vocab_size, gpus[0].total)
    rows = step_tokens(settings, report.batch_size)
    margin = sum(cache_margin(gpu.total, rows, report.model.vocab_size) for gpu in gpus)
    beside = free - weights
    for kind in CACHE_BYTES:
        a_token = sum(shape.gpu_bytes_per_token(kind, len(gpus)) for _, shape in sizes)
        report.fits.append(_fit(kind, a_token, beside - margin, max_seq_len))
        if kind != settings.cache_type:
            continue
        useful = rows * _whole_pages(max_seq_len)
        report.cache_tokens = min(report.fits[-1].tokens, useful)
        if settings.cache_tokens is not None:
            report.cache_tokens = settings.cache_tokens // PAGE_TOKENS * PAGE_TOKENS
        _check_cache(report, report.cache_tokens, a_token, beside, max_seq_len)


def _taken(report: Report, settings: GeneratorSettings) -> list[Gpu]:
    """The GPUs that a process takes, if those with the most free memory are left to it."""
    gpus = sorted(report.machine.gpus, key=lambda gpu: -gpu.free)
    return gpus[: settings.gpu_count]


def _held_weights(
    report: Report, settings: GeneratorSettings, parts: list[Weights]
) -> tuple[str, int]:
    """Say how the weights are held on the GPU, and what they take."""
    assert report.model is not None
    gpus = _taken(report, settings)
    is_quantized = report.model.quantization in QUANTIZATIONS
    as_stored = sum(part.gpu_bytes for part in parts)
    dense = sum(part.num_parameters for part in parts) * HALF_BYTES
    fits = settings.weights == "float16" or dense <= gpus[0].total * DENSE_SHARE
    can = (
        len(gpus) == len(parts) == 1
        and settings.cache_type == "fp16"
        and report.model.architecture in DENSE_ARCHITECTURES
    )
    if is_quantized and settings.weights != "quantized" and can and fits:
        return "float16", dense
    return ("quantized" if is_quantized else "float16"), as_stored


def _fit_on_cpu(
    report: Report,
    settings: GeneratorSettings,
    sizes: list[tuple[Weights, CacheShape]],
    max_seq_len: int,
) -> None:
    element = getattr(torch, settings.dtype).itemsize
    weights = sum(part.num_parameters for part, _ in sizes) * element
    beside = report.machine.memory - weights
    if beside <= 0:
        report.note(
            f"generator.model: the weights take {weights / GIB:.2f} GiB in {settings.dtype}, and "
            f"{report.machine.memory / GIB:.2f} GiB of memory are free; use a smaller model, or "
            "generator.dtype: bfloat16",
            stops=True,
        )
        return
    a_token = sum(shape.bytes_per_token(element) for _, shape in sizes)
    share = int(beside * AUTO_MEMORY_SHARE)
    report.batch_size = cpu_batch_size(settings)
    report.fits.append(_fit(settings.dtype, a_token, share, max_seq_len))
    report.cache_tokens = report.tried(cpu_cache_tokens, settings, max_seq_len, a_token, beside)
    if report.cache_tokens is not None:
        _check_cache(report, report.cache_tokens, a_token, beside, max_seq_len)


def _fit(kind: str, bytes_per_token: int, num_bytes: int, max_seq_len: int) -> Fit:
    tokens = max(0, num_bytes) // bytes_per_token // PAGE_TOKENS * PAGE_TOKENS
    lengths = sorted({*(n for n in EXAMPLE_LENGTHS if n < max_seq_len), max_seq_len})
    rows = {length: tokens // _whole_pages(length) for length in lengths}
    return Fit(kind, bytes_per_token, tokens, rows)


def _whole_pages(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS) * PAGE_TOKENS


def _check_cache(
    report: Report, tokens: int, bytes_per_token: int, beside: int, max_seq_len: int
) -> None:
    needed = max(tokens, PAGE_TOKENS) * bytes_per_token
    if tokens == 0 or needed > beside:
        report.note(
            f"generator.cache_tokens: {max(tokens, PAGE_TOKENS)} tokens take "
            f"{needed / GIB:.2f} GiB, and {beside / GIB:.2f} GiB are free beside the weights; "
            "lower it, or generator.max_batch_size, or use a smaller generator.cache_type",
            stops=True,
        )
    elif tokens < max_seq_len:
        report.note(
            f"generator.cache_tokens: the cache holds {tokens} tokens, less than the "
            f"{max_seq_len} that the model can read: longer requests end as too_long; raise it if "
            "there are any"
        )
