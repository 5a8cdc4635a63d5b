"""A forward pass over float16 weights kept resident, for the Llama family on one GPU.

exllamav2 dequantises every matrix at every step of a large batch. Here that is done once: the
weights of a loaded model are reconstructed and kept, its cache is used as it is. The rounding is
that of transformers' float16 Llama. Needs Triton.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import triton

from bulk_pipeline.engine import kernels
from bulk_pipeline.engine.adapters import LowRank
from bulk_pipeline.engine.kernels import PAGE, PROMPT_TUNING, PackedRows
from bulk_pipeline.engine.logprobs import log_probabilities
from bulk_pipeline.engine.sampling_slots import upload

HALF_BYTES = 2
SMALL_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
BUCKET_STEPS = ((256, 32), (1024, 64))  # up to so many rows, in steps of
LARGE_BUCKET_STEP = 128
PROGRAMS_WANTED = 528  # four a multiprocessor of the largest GPUs, before rows are split
MIN_SPLIT_TOKENS = 128  # a shorter piece of a row is not worth a program of its own
MAX_SPLIT_TOKENS = 4096  # a longer one holds the others up
MAX_SPLITS = 64
PIECE_ROWS = (1024, 2560)  # least and most rows of a product of many rows that are made at once
TILE = (128, 256)  # rows and columns of cuBLAS's tiles for large products on Hopper
HOPPER = (9, 0)
SCORED_TOKENS = 512  # whose logits are made at once
MERGED_ROWS = 2048  # of a weight, changed at once in float32
UPLOAD_ALIGNMENT = 4  # int32 elements: pieces of an upload start at multiples of 16 bytes
KINDS_WITH_RMS_HEAD_NORM = ("Qwen3ForCausalLM",)  # whatever exllamav2 does there


@dataclass(slots=True)
class DenseLayer:
    """One layer's weights, matrices as [out, in].

    Attributes
    ----------
    qkv, gate_up
        Queries, keys and values, and gate and up, one below the other.
    head_norms
        [2, head size]: the norms of query and key heads, where there are such.
    matrices
        The model's own matrices by name: parts of `qkv`, `o`, `gate_up` and `down`, not copies.
    """

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    head_norms: torch.Tensor | None = None
    matrices: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class DenseWeights:
    """A model's weights and shape.

    Attributes
    ----------
    head
        [vocabulary and its padding, hidden].
    rope
        Cosines and sines, float16 [positions, head size / 2].
    """

    embedding: torch.Tensor
    layers: list[DenseLayer]
    norm: torch.Tensor
    head: torch.Tensor
    rope: tuple[torch.Tensor, torch.Tensor]
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    eps: float
    scale: float


def dense_model_problem(model: Any, cache: Any) -> str | None:
    """Say in one line why a loaded exllamav2 model cannot run this way; None where it can."""
    from exllamav2 import ExLlamaV2Cache

    if model.tp_context is not None:
        return "its layers are split over devices (tensor_parallel)"
    devices = {module.device_idx for module in model.modules[1:]}
    if len(devices) != 1:
        return f"it is spread over {len(devices)} devices"
    if type(cache) is not ExLlamaV2Cache:
        return f"its cache is quantised ({type(cache).__name__})"
    if cache.batch_size != 1 or cache.max_seq_len % PAGE:
        return f"its cache is not made of pages of {PAGE} tokens"
    return _config_problem(model.config) or _module_problem(model)


def _config_problem(config: Any) -> str | None:
    from exllamav2.architecture import RopeStyle

    kind = config.arch.lm
    problems = {
        "it is a mixture of experts": kind.is_moe,
        "its layers are parallel blocks": kind.parallel_decoder_blocks,
        f"its norm is {kind.norm}": kind.norm != "rmsnorm",
        "it adds a constant to its norms": kind.norm_constant_bias != 0,
        f"its activation is {kind.mlp_act_func}": kind.mlp_act_func != "silu",
        "its MLP has no gate": not kind.mlp_gate,
        "its rope is not the rotate-half one": kind.rope_style != RopeStyle.NEOX,
        "its positions have three parts": kind.mrope,
        "its positions are learned": bool(kind.keys["learned_pos_emb"]),
        "its rope is partial": config.partial_rotary_factor != 1.0,
        "its rope has two bases": bool(config.rotary_embedding_base_alt),
        "its residual stream is float32": kind.residual_stream_fp32,
        "it clamps its hidden states": kind.clamp_hidden_states,
        "it normalises or scales its embeddings": (
            kind.normalize_embeddings or config.scale_emb != 1
        ),
        "it caps its logits": bool(config.attn_logit_softcapping or config.final_logit_softcapping),
        "it scales its logits": config.logit_scale != 1,
        "it scales its residuals": config.scale_depth != 1,
        "it normalises its output matrix": bool(config.norm_head),
        f"its head size is {config.head_dim}": config.head_dim % 16 != 0 or config.head_dim > 256,
        "its query and key heads have a LayerNorm": (
            config.use_qk_norm
            and kind.headnorm != "rmsnorm"
            and config.architecture not in KINDS_WITH_RMS_HEAD_NORM
        ),
    }
    return next((problem for problem, is_so in problems.items() if is_so), None)


def _module_problem(model: Any) -> str | None:
    for attention, mlp in _layers(model):
        if attention.sliding_window:
            return f"it has a sliding window of {attention.sliding_window} tokens"
        if attention.post_layernorm is not None or mlp.post_layernorm is not None:
            return "it has norms behind attention or MLP"
        if attention.pre_layernorm is None or mlp.pre_layernorm is None:
            return "it has no norm before attention or MLP"
    return None


def _layers(model: Any) -> list[tuple[Any, Any]]:
    """Attention and MLP of each layer; embedding, norm and head stand around them."""
    return list(zip(model.modules[1:-2:2], model.modules[2:-2:2], strict=True))


def dense_bytes(config: Any) -> int:
    """Bytes of the resident weights of a model, from exllamav2's configuration."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    layer = hidden * (2 * q_size + 2 * kv_size) + 3 * hidden * inner + 2 * hidden
    vocabulary = config.vocab_size * hidden * (1 if _is_tied(config) else 2)
    rope = config.max_seq_len * config.head_dim
    return (config.num_hidden_layers * layer + vocabulary + hidden + rope) * HALF_BYTES


def _is_tied(config: Any) -> bool:
    """Whether the output matrix is the embedding; a quantised one always stands for itself."""
    names = (f"lm_head.{part}" for part in ("weight", "qweight", "q_weight"))
    return not any(config.arch.lm_prefix + name in config.tensor_file_map for name in names)


def prefill_bytes(config: Any, num_tokens: int) -> int:
    """Bytes that a call of `prefill` with so many tokens takes at its peak, beside the weights."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    attention = 2 * q_size + 2 * kv_size + hidden
    token = 2 * hidden + max(2 * inner + hidden, attention)
    return num_tokens * token * HALF_BYTES


def decode_bytes(config: Any, num_rows: int) -> int:
    """Bytes that `decode` holds for batches of up to so many rows, logits included."""
    q_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    rows = bucket_of(num_rows)
    token = 4 * config.hidden_size + 2 * config.intermediate_size + 2 * q_size + 2 * kv_size
    splits = 4 * 2 * PROGRAMS_WANTED * config.num_key_value_groups * (config.head_dim + 1)
    logits = 2 * config.vocab_size
    return rows * (token + logits) * HALF_BYTES + splits + (64 << 20)  # cuBLAS's workspaces


def bucket_of(num_rows: int) -> int:
    """Rows that a step of `num_rows` is padded to."""
    for size in SMALL_BUCKETS:
        if num_rows <= size:
            return size
    step = next((step for limit, step in BUCKET_STEPS if num_rows <= limit), LARGE_BUCKET_STEP)
    return -(-num_rows // step) * step


def rows_at_once(num_columns: int, num_multiprocessors: int) -> int:
    """Rows of a large product that are best made at once, of so many output columns.

    Measured on an H200: a product of 8,192 rows and 28,672 columns takes 8% less time in pieces
    whose tiles fill whole waves of multiprocessors, and whose inputs stay in the L2 cache.
    """
    column_tiles = -(-num_columns // TILE[1])

    def filled(rows: int) -> float:
        waves = rows // TILE[0] * column_tiles / num_multiprocessors
        return waves / -(-waves // 1)

    least, most = PIECE_ROWS
    return max(range(least, most + 1, TILE[0]), key=lambda rows: (filled(rows), rows))


def splits_of(bucket: int, num_kv_heads: int, max_length: int) -> int:
    """Programs that share a row's keys: a power of two that hardly ever changes."""
    longest = triton.next_power_of_2(max_length)
    fill = triton.next_power_of_2(-(-PROGRAMS_WANTED // (bucket * num_kv_heads)))
    wanted = min(fill, longest // MIN_SPLIT_TOKENS)
    return max(1, min(max(wanted, longest // MAX_SPLIT_TOKENS), MAX_SPLITS))


class _Buffers:
    """What a decoding step reads and writes in fixed places, for its CUDA graph."""

    def __init__(self, rows: int, pages: int, hidden: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.ids = zeros(rows, dtype=torch.int64)
        self.positions, self.slots, self.num_keys = zeros(rows), zeros(rows), zeros(rows)
        self.table = zeros(rows, pages)
        self.hidden = zeros(rows, hidden, dtype=torch.float16)


class DenseModel:
    """Prefill and decoding over resident float16 weights and a paged cache: a `PagedModel`."""

    def __init__(
        self,
        weights: DenseWeights,
        key_states: Sequence[torch.Tensor],
        value_states: Sequence[torch.Tensor],
    ) -> None:
        self._weights = weights
        shape = (-1, weights.num_kv_heads, weights.head_size)
        self._keys = [states.view(shape) for states in key_states]
        self._values = [states.view(shape) for states in value_states]
        self.device = weights.embedding.device
        self.vocab_size = weights.vocab_size
        self._matrices = {
            name: matrix for layer in weights.layers for name, matrix in layer.matrices.items()
        }
        self._base: dict[str, torch.Tensor] = {}  # of matrices that adapters change, on the host
        self._changed: list[str] = []  # those that are not as in `_base` now
        self._buffers: _Buffers | None = None
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._rows_at_once: dict[int, int] = {}  # of the output columns, where it pays
        self._is_captured = self.device.type == "cuda"
        if self._is_captured:
            self._pool = torch.cuda.graph_pool_handle()  # one for all: one runs at a time
            self._capture_stream = torch.cuda.Stream(self.device)
            self._cut_products()

    @classmethod
    def from_exllamav2(cls, model: Any, cache: Any, keep_quantized: bool = False) -> "DenseModel":
        """Take over a loaded model's weights and its cache.

        Parameters
        ----------
        model, cache
            For which `dense_model_problem` returns None.
        keep_quantized
            False frees exllamav2's own modules one by one, so that at most one layer stands there
            twice; the model is of no use afterwards.
        """
        weights = dense_weights(model, keep_quantized)
        return cls(weights, cache.key_states, cache.value_states)

    @torch.inference_mode()
    def prefill(
        self,
        token_ids: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        block_table: np.ndarray,
    ) -> None:
        """Store keys and values of new tokens, rows packed one after the other; no logits."""
        if len(token_ids) == 0:
            return
        with self._on_device():
            self._prefill(token_ids, starts, counts, block_table)

    @torch.inference_mode()
    def score(
        self,
        token_ids: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        block_table: np.ndarray,
        targets: np.ndarray,
    ) -> torch.Tensor:
        """As `prefill`, and return the log-probability of each token's successor."""
        with self._on_device():
            hidden = self._prefill(token_ids, starts, counts, block_table, wants_hidden=True)
            assert hidden is not None
            wanted = upload(targets, self.device).split(SCORED_TOKENS)
            found = []
            for some, ids in zip(hidden.split(SCORED_TOKENS), wanted, strict=True):
                logits = F.linear(some, self._weights.head)[:, : self.vocab_size]
                found.append(log_probabilities(logits, ids))
            return torch.cat(found)

    def can_change(self, matrix: str) -> bool:
        """Whether an adapter may change this matrix."""
        return matrix in self._matrices

    @torch.inference_mode()
    def use_adapter(self, changes: Mapping[str, LowRank]) -> None:
        """Merge these changes into the weights from now on, in place of those of before.

        The weights stay where they are, as recorded graphs need it. Each matrix that is changed is
        kept on the host as it was, from which it is restored bit by bit.
        """
        with self._on_device():
            for name in self._changed:
                self._matrices[name].copy_(self._base[name], non_blocking=True)
            self._changed = []
            for name, change in changes.items():
                weight = self._matrices[name]
                if name not in self._base:
                    self._base[name] = _on_host(weight)
                self._changed.append(name)  # first, in case that merging fails midway
                _merge(weight, change)

    def _prefill(
        self,
        token_ids: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        block_table: np.ndarray,
        wants_hidden: bool = False,
    ) -> torch.Tensor | None:
        """Return the normed hidden states of the new tokens where they are wanted."""
        weights = self._weights
        ids, positions, slots, rows = self._plan(token_ids, starts, counts, block_table)
        residual = F.embedding(ids, weights.embedding)
        added = None
        for index, layer in enumerate(weights.layers):
            hidden = kernels.rms_norm(residual, added, layer.attention_norm, weights.eps)
            if index == len(weights.layers) - 1 and not wants_hidden:
                self._store_last(hidden, positions, slots)
                return None
            packed = self._heads(self._product(hidden, layer.qkv, layer.qkv_bias))
            self._rope(packed, index, positions, slots)
            keys, values = self._keys[index], self._values[index]
            attended = kernels.prompt_attention(packed, keys, values, rows, weights.scale)
            del packed
            added = self._product(attended.flatten(1), layer.o, layer.o_bias)
            added = self._mlp(layer, residual, added)
        return kernels.rms_norm(residual, added, weights.norm, weights.eps)

    def _store_last(
        self, hidden: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Of the last layer nothing but keys and values is needed."""
        weights = self._weights
        layer = weights.layers[-1]
        first = weights.num_heads * weights.head_size
        bias = None if layer.qkv_bias is None else layer.qkv_bias[first:]
        packed = self._heads(F.linear(hidden, layer.qkv[first:], bias))
        self._rope(packed, len(weights.layers) - 1, positions, slots)

    def _plan(
        self,
        token_ids: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        block_table: np.ndarray,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PackedRows]:
        """Work out all indices on the host and upload them in one piece."""
        counts = counts.astype(np.int64)
        ends = counts.cumsum()
        shifts = starts.astype(np.int64) - (ends - counts)
        row_of = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(len(token_ids)) + shifts[row_of]
        slots = block_table[row_of, positions // PAGE] * PAGE + positions % PAGE
        blocks = -(-counts // PROMPT_TUNING.queries)
        block_rows = np.repeat(np.arange(len(counts)), blocks)
        within = np.arange(len(block_rows)) - np.repeat(blocks.cumsum() - blocks, blocks)
        firsts = (ends - counts)[block_rows] + within * PROMPT_TUNING.queries
        arrays = [token_ids, positions, slots, block_rows, firsts, ends, shifts]
        there = _upload([*arrays, block_table.ravel()], self.device)
        table = there[7].view(block_table.shape)
        rows = PackedRows(there[3], there[4], there[5], there[6], table)
        return there[0], there[1], there[2], rows

    @torch.inference_mode()
    def decode(
        self,
        token_ids: torch.Tensor,
        lengths: torch.Tensor,
        block_table: torch.Tensor,
        max_length: int,
    ) -> torch.Tensor:
        """Run one new token of each row; returns logits in float16.

        A negative length stands for a padding row.
        """
        rows = token_ids.shape[0]
        bucket = bucket_of(rows)
        splits = splits_of(bucket, self._weights.num_kv_heads, max_length)
        with self._on_device():
            buffers = self._buffers_for(bucket, block_table.shape[1])
            kernels.stage_rows(
                token_ids.contiguous(),
                lengths.contiguous(),
                block_table.contiguous(),
                buffers.ids[:bucket],
                buffers.positions,
                buffers.slots,
                buffers.num_keys,
                buffers.table,
            )
            graph = self._graphs.get((bucket, splits))
            if graph is not None:
                graph.replay()
            else:
                self._decode_hidden(buffers, bucket, splits)
                if self._is_captured:
                    self._graphs[bucket, splits] = self._capture(buffers, bucket, splits)
            logits = F.linear(buffers.hidden[:bucket], self._weights.head)
        return logits[:rows, : self.vocab_size]

    def verify(
        self,
        token_ids: torch.Tensor,
        lengths: torch.Tensor,
        block_table: torch.Tensor,
        max_length: int,
        counts: np.ndarray,
    ) -> torch.Tensor:
        """Run several new tokens of each row; returns logits in float16.

        Each token is a row to `decode`: every layer writes the keys and values of all rows before
        any of them reads, and a row reads as far as its own length.
        """
        return self.decode(token_ids, lengths, block_table, max_length)

    def _buffers_for(self, bucket: int, pages: int) -> _Buffers:
        buffers = self._buffers
        if buffers is None or len(buffers.ids) < bucket or buffers.table.shape[1] != pages:
            if self._graphs:  # a pool ends with its graphs
                self._graphs.clear()
                self._pool = torch.cuda.graph_pool_handle()
            hidden = self._weights.embedding.shape[1]
            buffers = self._buffers = _Buffers(max(bucket, 1024), pages, hidden, self.device)
        return buffers

    def _capture(self, buffers: _Buffers, bucket: int, splits: int) -> torch.cuda.CUDAGraph:
        """Record what has just run once, so that every kernel is loaded."""
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self.device)
        self._capture_stream.wait_stream(current)
        with torch.cuda.stream(self._capture_stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self._decode_hidden(buffers, bucket, splits)
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the first error says more
                    graph.capture_end()
                raise
            graph.capture_end()
        current.wait_stream(self._capture_stream)
        return graph

    def _decode_hidden(self, buffers: _Buffers, bucket: int, splits: int) -> None:
        """All layers, from the buffers to the normed hidden states in them."""
        weights = self._weights
        positions, slots = buffers.positions[:bucket], buffers.slots[:bucket]
        table, num_keys = buffers.table[:bucket], buffers.num_keys[:bucket]
        residual = F.embedding(buffers.ids[:bucket], weights.embedding)
        added = None
        for index, layer in enumerate(weights.layers):
            hidden = kernels.rms_norm(residual, added, layer.attention_norm, weights.eps)
            packed = self._heads(F.linear(hidden, layer.qkv, layer.qkv_bias))
            self._rope(packed, index, positions, slots)
            attended = kernels.paged_attention(
                packed,
                self._keys[index],
                self._values[index],
                table,
                num_keys,
                weights.scale,
                splits,
                MIN_SPLIT_TOKENS,
            )
            added = F.linear(attended.flatten(1), layer.o, layer.o_bias)
            added = self._mlp(layer, residual, added)
        kernels.rms_norm(residual, added, weights.norm, weights.eps, out=buffers.hidden)

    def _mlp(self, layer: DenseLayer, residual: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        hidden = kernels.rms_norm(residual, added, layer.mlp_norm, self._weights.eps)
        gate_up = self._product(hidden, layer.gate_up, layer.gate_up_bias)
        return self._product(kernels.silu_mul(gate_up), layer.down, layer.down_bias)

    def _cut_products(self) -> None:
        """Decide which products of many rows are made in pieces."""
        if torch.cuda.get_device_capability(self.device) != HOPPER:
            return  # not measured there
        count = torch.cuda.get_device_properties(self.device).multi_processor_count
        layer = self._weights.layers[0]
        for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down):
            self._rows_at_once[matrix.shape[0]] = rows_at_once(matrix.shape[0], count)

    def _product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Multiply [rows, in] by [out, in], in pieces where that is faster."""
        rows, columns = x.shape[0], weight.shape[0]
        piece = self._rows_at_once.get(columns, rows)
        if rows <= piece:
            return F.linear(x, weight, bias)
        out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
        for some, target in zip(x.split(piece), out.split(piece), strict=True):
            if bias is None:
                torch.mm(some, weight.T, out=target)
            else:
                torch.addmm(bias, some, weight.T, out=target)
        return out

    def _heads(self, packed: torch.Tensor) -> torch.Tensor:
        return packed.view(packed.shape[0], -1, self._weights.head_size)

    def _rope(
        self,
        packed: torch.Tensor,
        index: int,
        positions: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        kernels.rope_and_store(
            packed,
            self._weights.rope,
            positions,
            slots,
            self._keys[index],
            self._values[index],
            head_norms=self._weights.layers[index].head_norms,
            eps=self._weights.eps,
        )

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        is_cuda = self.device.type == "cuda"
        return torch.cuda.device(self.device) if is_cuda else contextlib.nullcontext()


def _on_host(weight: torch.Tensor) -> torch.Tensor:
    """A copy from which the device can fetch it quickly."""
    is_cuda = weight.device.type == "cuda"
    return torch.empty(weight.shape, dtype=weight.dtype, pin_memory=is_cuda).copy_(weight)


def _merge(weight: torch.Tensor, change: LowRank) -> None:
    """Add a low-rank change to a weight in place, rounding once; a few rows at a time."""
    down = change.down.to(weight.device, torch.float32)
    ups = change.up.to(weight.device, torch.float32).split(MERGED_ROWS)
    for rows, up in zip(weight.split(MERGED_ROWS), ups, strict=True):
        rows.copy_(torch.addmm(rows.float(), up, down, alpha=change.scale))


def _upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Copy arrays to the device as int32, all at once and without waiting."""
    sizes = [-(-len(array) // UPLOAD_ALIGNMENT) * UPLOAD_ALIGNMENT for array in arrays]
    joined = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    places = np.cumsum([0, *sizes])
    view = joined.numpy()
    for place, array in zip(places, arrays, strict=False):
        view[place : place + len(array)] = array
    there = joined.to(device, non_blocking=True)
    return [
        there[place : place + len(array)]
        for place, array in zip(places.tolist(), arrays, strict=False)
    ]


@torch.inference_mode()
def dense_weights(model: Any, keep_quantized: bool = False) -> DenseWeights:
    """Dequantise a loaded model's weights, layer by layer; see `DenseModel.from_exllamav2`."""
    config, kept = model.config, keep_quantized
    embedding, norm, head = model.modules[0], model.modules[-2], model.modules[-1]
    device = norm.weight.device
    layers = []
    for attention, mlp in _layers(model):
        layers.append(_layer_of(attention, mlp))
        scale = attention.scaling
        if not kept:
            attention.unload()
            mlp.unload()
            torch.cuda.empty_cache()
    head_weight, _ = _joined([head], keep_padding=True)
    is_tied = _is_tied(config) and head.linear is not None
    tokens = head_weight[: config.vocab_size] if is_tied else embedding.embedding.weight.data
    weights = DenseWeights(
        embedding=tokens.to(device, torch.float16),
        layers=layers,
        norm=norm.weight.data,
        head=head_weight,
        rope=_rope_of(config, device),
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_size=config.head_dim,
        vocab_size=config.vocab_size,
        eps=config.norm_eps,
        scale=scale,
    )
    if not kept:
        for module in (embedding, norm, head):
            module.unload()
        for context in filter(None, model.device_context):
            context.free()
        torch.cuda.empty_cache()
    return weights


def _layer_of(attention: Any, mlp: Any) -> DenseLayer:
    qkv, qkv_bias = _joined([attention.q_proj, attention.k_proj, attention.v_proj])
    o, o_bias = _joined([attention.o_proj])
    gate_up, gate_up_bias = _joined([mlp.gate_proj, mlp.up_proj])
    down, down_bias = _joined([mlp.down_proj])
    head_norms = None
    if attention.q_norm is not None:  # exllamav2 repeats one weight for every head
        head_norms = torch.stack([attention.q_norm.weight[0], attention.k_norm.weight[0]])
    return DenseLayer(
        attention_norm=attention.pre_layernorm.weight.data,
        qkv=qkv,
        o=o,
        mlp_norm=mlp.pre_layernorm.weight.data,
        gate_up=gate_up,
        down=down,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        head_norms=head_norms,
        matrices={
            **_parts([attention.q_proj, attention.k_proj, attention.v_proj], qkv),
            **_parts([attention.o_proj], o),
            **_parts([mlp.gate_proj, mlp.up_proj], gate_up),
            **_parts([mlp.down_proj], down),
        },
    )


def _parts(linears: Sequence[Any], joined: torch.Tensor) -> dict[str, torch.Tensor]:
    """What of a joined weight belongs to each of exllamav2's matrices, by its name."""
    parts = joined.split([one.out_features - one.padding for one in linears])
    return {one.key: part for one, part in zip(linears, parts, strict=True)}


def _joined(
    linears: Sequence[Any], keep_padding: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the weights [out, in] of exllamav2's matrices, one below the other, and the biases."""
    sizes = [one.out_features - (0 if keep_padding else one.padding) for one in linears]
    bias = None
    if linears[0].has_bias:
        parts = zip(linears, sizes, strict=True)
        bias = torch.cat([one.get_bias_tensor()[:size] for one, size in parts])
    if len(linears) == 1 and linears[0].linear is not None and sizes[0] == linears[0].out_features:
        return linears[0].linear.weight.data.contiguous(), bias
    shape = (sum(sizes), linears[0].in_features)
    weight = torch.empty(shape, dtype=torch.float16, device=linears[0].device())
    place = 0
    for one, size in zip(linears, sizes, strict=True):
        weight[place : place + size] = one.get_weight_tensor_dq()[:, :size].T
        place += size
    return weight, bias


def _rope_of(config: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Make exllamav2's tables in the order of operations of transformers, so that all bits agree.

    transformers computes the frequencies on the CPU, scales them, and turns by them on the device.
    """
    from exllamav2 import rope

    frequencies, factor = rope.get_rope_params("cpu", config, config.rotary_embedding_base)
    frequencies = frequencies.float() / (config.scale_pos_emb or 1.0)
    places = torch.arange(config.max_seq_len, dtype=torch.float32, device=device)
    places += config.pos_id_index or 0
    angles = places[:, None] * frequencies.to(device)
    return (angles.cos() * factor).half(), (angles.sin() * factor).half()
