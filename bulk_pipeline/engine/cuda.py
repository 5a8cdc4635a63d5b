"""exllamav2's own model and caches on GPUs: EXL2, GPTQ and float16 folders, split over devices.

What goes where is measured and reported; what cannot work is refused by name before or instead of
exllamav2's assertions.
"""

import gc
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from exllamav2 import (
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Cache_Q6,
    ExLlamaV2Cache_Q8,
    ExLlamaV2Cache_TP,
    ExLlamaV2Config,
)
from exllamav2 import attn as exllamav2_attn
from exllamav2.attn import ExLlamaV2Attention
from exllamav2.mlp import ExLlamaV2MLP

from bulk_pipeline.engine.adapters import LowRank
from bulk_pipeline.engine.dense import DenseModel, decode_bytes, prefill_bytes
from bulk_pipeline.engine.dense_weights import (
    DenseWeights,
    dense_bytes,
    dense_model_problem,
    dense_weights,
)
from bulk_pipeline.engine.folders import (
    OWN_ATTENTION,
    check_architecture,
    check_max_seq_len,
    check_quantization,
    readable_by_exllamav2,
)
from bulk_pipeline.engine.forward import ChunkForward
from bulk_pipeline.engine.memory import (
    DENSE_SHARE,
    GIB,
    cache_margin,
    is_out_of_memory,
    out_of_memory_message,
)
from bulk_pipeline.spec import PAGE_TOKENS, GeneratorSettings

CACHES = {
    "fp16": ExLlamaV2Cache,
    "q8": ExLlamaV2Cache_Q8,
    "q6": ExLlamaV2Cache_Q6,
    "q4": ExLlamaV2Cache_Q4,
}
PROGRESS_SECONDS = 5.0

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class MemoryReport:
    """What went where, in bytes by device index."""

    weights: dict[int, int] = field(default_factory=dict)
    cache: dict[int, int] = field(default_factory=dict)
    free: dict[int, int] = field(default_factory=dict)
    cache_tokens: int = 0

    def __str__(self) -> str:
        devices = (
            f"cuda:{i} weights {self.weights[i] / GIB:.2f}, "
            f"cache {self.cache.get(i, 0) / GIB:.2f}, free {self.free[i] / GIB:.2f} GiB"
            for i in sorted(self.weights)
        )
        return f"cache of {self.cache_tokens} tokens; {'; '.join(devices)}"


@dataclass(frozen=True, slots=True)
class Beside:
    """What a draft model will need beside a model and its cache, in bytes."""

    num_bytes: int
    bytes_per_page: int


class _Lora:
    """What exllamav2 knows an adapter by, as its own `ExLlamaV2Lora`, which reads other files."""

    embed_tokens = lm_head = None  # never changed


def _half_on(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float16).contiguous().to(device)


class CudaModel:
    """exllamav2's model with its cache, behind the calls that the generator makes.

    Attributes
    ----------
    attention
        ``flash-attn``, or ``bulk_pipeline`` for the project's own.
    quantization
        ``exl2``, ``gptq`` or ``float16``.
    max_seq_len
        What the model was made for, or what the rope settings extend it to.
    dense
        The weights in float16, where they are held so; exllamav2's own are freed then.
    """

    def __init__(
        self,
        model: ExLlamaV2,
        name: str,
        quantization: str,
        attention: str,
        max_seq_len: int,
        dense: DenseWeights | None,
    ) -> None:
        self._model: ExLlamaV2 | None = model
        self.name, self.quantization, self.attention = name, quantization, attention
        self.max_seq_len = max_seq_len
        self.dense = dense
        self.config = model.config
        self._adapter: _Lora | None = None

    @property
    def exllamav2(self) -> ExLlamaV2:
        """The model itself."""
        if self._model is None:
            raise RuntimeError(f"{self.name}: the model was closed; load it again")
        return self._model

    @property
    def weights(self) -> str:
        """``float16`` or ``quantized``, as they are held."""
        return "float16" if self.dense or self.quantization == "float16" else "quantized"

    def forward_chunk(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """Run exllamav2's forward pass."""
        kwargs["loras"] = None if self._adapter is None else [self._adapter]  # not the generator's
        return self.exllamav2.forward_chunk(*args, **kwargs)

    def can_change(self, matrix: str) -> bool:
        """Whether an adapter may change this matrix."""
        return matrix in self._linears()

    def _linears(self) -> dict[str, Any]:
        """The matrices that exllamav2 takes adapters for: no experts, no parallel blocks."""
        found: list[Any] = []
        for module in self.exllamav2.modules:
            if isinstance(module, ExLlamaV2Attention):
                found += [module.q_proj, module.k_proj, module.v_proj, module.o_proj]
            elif isinstance(module, ExLlamaV2MLP):
                found += [module.gate_proj, module.up_proj, module.down_proj]
        return {linear.key: linear for linear in found if linear is not None}

    @torch.inference_mode()
    def use_adapter(self, changes: Mapping[str, LowRank]) -> None:
        """Run with these changes of matrices from now on, in place of those of before."""
        linears = self._linears()
        for linear in linears.values():
            linear.lora_a_tensors.clear()
            linear.lora_b_tensors.clear()
        self._adapter = _Lora() if changes else None
        for matrix, change in changes.items():
            linear = linears[matrix]
            up = change.up.T.float() * change.scale
            up = F.pad(up, (0, linear.out_features - up.shape[1]))
            linear.lora_a_tensors[self._adapter] = _half_on(linear.device(), change.down.T)
            linear.lora_b_tensors[self._adapter] = _half_on(linear.device(), up)
        self.exllamav2.update_loras()

    def close(self) -> None:
        """Free the weights."""
        if self._model is not None:
            if self.dense is None:
                self._model.unload()
            self._model = self.dense = None
        gc.collect()
        torch.cuda.empty_cache()


def load_cuda_model(
    settings: GeneratorSettings,
    folder: Path,
    *,
    rows: int,
    cache_tokens: int | None,
    setting: str = "generator.model",
    beside: Beside | None = None,
) -> tuple[CudaModel, Any, MemoryReport]:
    """Load a model folder and allocate its cache.

    Parameters
    ----------
    rows
        Most tokens in one generating step: the batch size, times the drafted tokens and one.
    cache_tokens
        A whole number of pages; None measures what is left after the weights.
    setting
        The setting that names the folder, for messages.
    beside
        What else an automatic cache must leave room for.

    Raises
    ------
    ValueError
        One line, where the folder, the kind of model or a setting cannot be used.
    RuntimeError
        If the memory does not suffice; one line with the numbers and the settings to lower.
    """
    attention_name = use_attention()
    # Sums in float16 would cost digits.
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    quantization = check_quantization(folder)
    check_architecture(folder, attention_name)
    if settings.tensor_parallel and quantization != "exl2":
        raise ValueError(
            f"generator.tensor_parallel: exllamav2 splits EXL2 models only, and {folder.name} is "
            f"{quantization}; set it to false"
        )
    report = MemoryReport()
    with readable_by_exllamav2(folder) as readable:
        config = _read_config(readable, settings, f"{setting}: exllamav2 cannot read {folder.name}")
        max_seq_len = check_max_seq_len(config.max_seq_len, settings, folder.name)
        _size_buffers(config, settings, rows, max_seq_len)
        if settings.tensor_parallel and (config.sliding_window or config.use_qk_norm):
            kind = "a sliding window" if config.sliding_window else "norms of queries and keys"
            raise ValueError(
                f"generator.tensor_parallel: {folder.name} has {kind}, which exllamav2 does not "
                "split; set it to false"
            )
        before = _allocated()
        try:
            model, cache, dense = _load(
                config, settings, folder.name, cache_tokens, rows, report, before, beside
            )
        except (torch.cuda.OutOfMemoryError, RuntimeError, AssertionError) as error:
            if not is_out_of_memory(error):
                if isinstance(error, AssertionError):  # exllamav2's way of refusing
                    reason = str(error) or "it gives no reason"
                    raise ValueError(
                        f"{setting}: exllamav2 cannot load {folder.name}: {reason}; change "
                        "generator.gpu_split or tensor_parallel, or use another model"
                    ) from error
                raise
            message = out_of_memory_message(f"loading {folder.name}")
            raise RuntimeError(message) from None
        finally:
            gc.collect()
            torch.cuda.empty_cache()
    report.cache_tokens = cache.max_seq_len
    report.free = {i: torch.cuda.mem_get_info(i)[0] for i in report.weights}
    made = CudaModel(model, folder.name, quantization, attention_name, max_seq_len, dense)
    return made, cache, report


def paged_model(model: CudaModel, cache: Any) -> "ChunkForward | DenseModel":
    """Bind a loaded model to its cache, for the scheduler."""
    exllamav2 = model.exllamav2
    if model.dense is not None:
        return DenseModel(model.dense, cache.key_states, cache.value_states)
    is_split = bool(exllamav2.tp_context)
    index = exllamav2.tp_context.device if is_split else exllamav2.modules[-1].device_idx
    if not is_split:
        _put_embedding_on_gpu(exllamav2)
    return ChunkForward(
        model,
        cache,
        torch.device("cuda", index),
        max_tokens=model.config.max_input_len,
        max_positions=model.config.max_seq_len,
        max_rows=model.config.max_input_len,
        ids_device=exllamav2.modules[0].embedding.weight.device,
        stream=exllamav2.get_device_context(index).stream,
    )


def _put_embedding_on_gpu(model: ExLlamaV2) -> None:
    """Move it to the first layer's GPU: on the host it would need each step's ids there."""
    weight = model.modules[0].embedding.weight
    device = torch.device("cuda", model.modules[1].device_idx)
    on_gpu = torch.nn.Parameter(weight.to(device), requires_grad=False)
    model.modules[0].embedding.weight = on_gpu


def use_attention() -> str:
    """Make paged attention available to exllamav2; return whose it is."""
    # The flag alone says little: running on the CPU sets it too, without the function.
    if not hasattr(exllamav2_attn, "flash_attn_with_kvcache"):
        from bulk_pipeline.engine import attention  # needs Triton

        attention.install()
    is_own = exllamav2_attn.flash_attn_with_kvcache.__module__.startswith("bulk_pipeline.")
    return OWN_ATTENTION if is_own else "flash-attn"


def _read_config(folder: Path, settings: GeneratorSettings, problem: str) -> ExLlamaV2Config:
    try:
        config = ExLlamaV2Config(str(folder))
    except (AssertionError, ValueError, KeyError, TypeError) as error:
        reason = next(iter(str(error).strip().splitlines()), repr(error))
        raise ValueError(f"{problem}: {reason}") from error
    if settings.rope_scale is not None:
        config.scale_pos_emb = settings.rope_scale
    if settings.rope_alpha is not None:
        config.scale_alpha_value = settings.rope_alpha
    return config


def _size_buffers(
    config: ExLlamaV2Config, settings: GeneratorSettings, rows: int, max_seq_len: int
) -> None:
    """Make exllamav2's buffers hold a chunk of a prompt, or one step of the whole batch."""
    config.max_input_len = max(settings.max_chunk_size, -(-rows // PAGE_TOKENS) * PAGE_TOKENS)
    # load_autosplit would shrink the buffers to max_seq_len, and a larger batch overrun them.
    config.max_seq_len = max(max_seq_len, config.max_input_len)
    config.max_output_len = max(PAGE_TOKENS, rows)


def _load(
    config: ExLlamaV2Config,
    settings: GeneratorSettings,
    name: str,
    cache_tokens: int | None,
    rows: int,
    report: MemoryReport,
    before: dict[int, int],
    beside: Beside | None,
) -> tuple[ExLlamaV2, Any, DenseWeights | None]:
    model = ExLlamaV2(config)
    kind: Callable[..., Any] = CACHES[settings.cache_type]
    progress = _LoadProgress(name)
    if settings.tensor_parallel:
        model.load_tp(
            settings.gpu_split,
            callback=progress,
            expect_cache_tokens=cache_tokens or rows * PAGE_TOKENS,
            expect_cache_base=kind,
        )
        kind = partial(ExLlamaV2Cache_TP, base=kind)
        tokens = cache_tokens or _auto_cache_tokens(model, kind, settings, rows, beside)
        return model, _measured(kind(model, max_seq_len=tokens), report, before), None
    # load_autosplit runs a full input through the cache, which must hold it.
    is_split = settings.gpu_split is None and torch.cuda.device_count() > 1
    if is_split and (cache_tokens or 0) >= config.max_input_len:
        cache = kind(model, max_seq_len=cache_tokens, lazy=True)
        model.load_autosplit(cache, callback=progress)
        return model, _measured(cache, report, before), None
    model.load(settings.gpu_split or _even_split(config), callback=progress)
    dense = _dequantized(model, kind, settings)
    tokens = cache_tokens or _auto_cache_tokens(
        model, kind, settings, rows, beside, is_dense=dense is not None
    )
    return model, _measured(kind(model, max_seq_len=tokens), report, before), dense


def _dequantized(
    model: ExLlamaV2, kind: Callable[..., Any], settings: GeneratorSettings
) -> DenseWeights | None:
    """Take the weights over in float16 where that is wanted and possible."""
    if settings.weights == "quantized" or settings.draft_model is not None:
        return None
    problem = dense_model_problem(model, kind(model, max_seq_len=PAGE_TOKENS))
    if problem is None and settings.weights == "auto" and model.is_quant():
        total = torch.cuda.get_device_properties(model.modules[-1].device_idx).total_memory
        size = dense_bytes(model.config)
        if size > total * DENSE_SHARE:
            problem = f"its weights would take {size / GIB:.1f} GiB in float16"
    if problem is None:
        return dense_weights(model)
    if settings.weights == "float16":
        raise ValueError(
            f"generator.weights: float16 is not possible for {Path(settings.model).name}: "
            f"{problem}; set it to auto"
        )
    logger.info("%s runs as exllamav2 holds it: %s", Path(settings.model).name, problem)
    return None


def _measured(cache: Any, report: MemoryReport, before: dict[int, int]) -> Any:
    """Note what the cache and the weights take; returns the cache."""
    report.cache = _bytes_by_device(cache)
    report.weights = {i: used - report.cache.get(i, 0) for i, used in _since(before).items()}
    return cache


def _even_split(config: ExLlamaV2Config) -> list[float] | None:
    """GiB of weights for each GPU, in proportion to its free memory; None for a single GPU."""
    count = torch.cuda.device_count()
    if count == 1:
        return None
    free = [torch.cuda.mem_get_info(i)[0] for i in range(count)]
    size = sum(path.stat().st_size for path in Path(config.model_dir).glob("*.safetensors"))
    # Layers are placed whole: a tenth more, and the last GPU takes what is left.
    shares = [size * share / sum(free) * 1.1 / GIB for share in free]
    return [*shares[:-1], free[-1] / GIB]


def _auto_cache_tokens(
    model: ExLlamaV2,
    kind: Callable[..., Any],
    settings: GeneratorSettings,
    rows: int,
    beside: Beside | None = None,
    *,
    is_dense: bool = False,
) -> int:
    """As many pages as fit beside the weights, and no more than the batch can use."""
    probe = kind(model, max_seq_len=PAGE_TOKENS)
    per_page = _bytes_by_device(probe)
    del probe
    torch.cuda.empty_cache()
    pages = []
    for device, size in per_page.items():
        free, total = torch.cuda.mem_get_info(device)
        margin = cache_margin(total, rows, model.config.vocab_size)
        if is_dense:
            margin += decode_bytes(model.config, rows)
            margin += prefill_bytes(model.config, settings.max_chunk_size)
        if beside is not None:
            margin += beside.num_bytes // len(per_page)
            size += beside.bytes_per_page // len(per_page)
        pages.append(max(0, free - margin) // size)
    longest = settings.max_seq_len or model.config.max_seq_len
    useful = rows * -(-longest // PAGE_TOKENS) + 1
    tokens = min(*pages, useful) * PAGE_TOKENS
    if tokens == 0:
        raise RuntimeError(out_of_memory_message("sizing the cache beside the weights"))
    return tokens


def _bytes_by_device(cache: Any) -> dict[int, int]:
    tensors = list(cache.all_tensors())
    for one in getattr(cache, "caches", [cache]):
        for pair in getattr(one, "temp_tensors", {}).values():
            tensors += pair
    found: dict[int, int] = {}
    for tensor in tensors:
        found[tensor.device.index] = found.get(tensor.device.index, 0) + tensor.nbytes
    return found


def _allocated() -> dict[int, int]:
    return {i: torch.cuda.memory_allocated(i) for i in range(torch.cuda.device_count())}


def _since(before: dict[int, int]) -> dict[int, int]:
    used = {i: torch.cuda.memory_allocated(i) - size for i, size in before.items()}
    return {i: size for i, size in used.items() if size > 0}


class _LoadProgress:
    """exllamav2's callback while loading: a line every few seconds."""

    def __init__(self, name: str) -> None:
        self._name, self._last = name, time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._last >= PROGRESS_SECONDS:
            self._last = time.monotonic()
            logger.info("loading %s: %d of %d modules", self._name, done, total)
