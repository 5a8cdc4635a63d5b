"""A forward pass over float16 weights kept resident, for the Llama family on one GPU.

exllamav2 dequantises every matrix at every step of a large batch. Here that is done once: the
weights of a loaded model are reconstructed and kept, its cache is used as it is. The rounding is
that of transformers' float16 Llama. Needs Triton.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import triton

from bulk_pipeline.engine import attention_kernels, kernels
from bulk_pipeline.engine.adapters import LowRank
from bulk_pipeline.engine.attention_kernels import PROMPT_TUNING, PackedRows
from bulk_pipeline.engine.dense_weights import HALF_BYTES, DenseLayer, DenseWeights, dense_weights
from bulk_pipeline.engine.logprobs import log_probabilities
from bulk_pipeline.engine.sampling_slots import upload
from bulk_pipeline.spec import PAGE_TOKENS

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
            attended = attention_kernels.prompt_attention(packed, keys, values, rows, weights.scale)
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
        slots = (
            block_table[row_of, positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
        )
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
            attended = attention_kernels.paged_attention(
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
