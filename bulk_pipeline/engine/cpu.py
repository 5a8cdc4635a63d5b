"""A transformers model on the pages of exllamav2's generator, for machines without a GPU.

The model's attention is replaced by one that writes this step's keys and values into the paged
cache and attends over each row's own pages; the rest is transformers' own code. Rows never see
one another's pages. Models whose attention is more than plain causal attention are refused.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from exllamav2.attn_params import PagedParams
from exllamav2.cache import ExLlamaV2CacheBase
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import (
    disable_progress_bar,
    enable_progress_bar,
    is_progress_bar_enabled,
)

from bulk_pipeline.engine.adapters import LowRank
from bulk_pipeline.engine.folders import model_max_seq_len
from bulk_pipeline.spec import PAGE_TOKENS

ATTENTION = "bulk_pipeline_paged"
UNSUPPORTED = ("softcap", "s_aux", "position_bias")  # attention that is not plain causal attention
CHECK_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1}


@dataclass(frozen=True, slots=True)
class CpuModelConfig:
    """What exllamav2's generator and cache read from a model."""

    name: str
    vocab_size: int
    max_seq_len: int
    num_hidden_layers: int
    num_key_value_heads: int
    head_dim: int


class PagedCache(ExLlamaV2CacheBase):
    """Keys and values of all pages: [1, tokens, heads, head_dim] a layer, in the model's dtype."""

    def __init__(self, model: "CpuModel", num_tokens: int) -> None:
        super().__init__(model, 1, num_tokens, model.dtype, 1, 1, False)
        self.key_states = [_untouched_zeros(self.shape_wk, self.dtype) for _ in model.layers]
        self.value_states = [_untouched_zeros(self.shape_wv, self.dtype) for _ in model.layers]

    def all_tensors(self) -> list[torch.Tensor]:
        """Return every tensor that defragmentation has to move."""
        return self.key_states + self.value_states


@dataclass(frozen=True, slots=True)
class PagedStep:
    """Where one forward pass writes and reads, worked out once for all layers.

    Attributes
    ----------
    positions
        [rows, new tokens], from 0 at the start of each row.
    write
        [rows * new tokens], slots of the cache.
    read
        [rows * longest row], slots of the cache; places past a row's end repeat its first slot,
        so that no row reads another's page. None where the pass holds all there is to read.
    mask
        [rows, 1, new tokens, longest row], 0 or -inf. None with `read`.
    """

    cache: PagedCache
    positions: torch.Tensor
    write: torch.Tensor
    read: torch.Tensor | None
    mask: torch.Tensor | None
    max_seq_len: int

    @classmethod
    def plan(cls, params: PagedParams, num_new: int, cache: PagedCache, max_seq_len: int) -> Self:
        """Work out the slots of `num_new` new tokens a row."""
        pages, lengths = params.block_index.long(), params.cache_seqlens.long()
        positions = lengths[:, None] + torch.arange(num_new)
        write = _slots(pages, positions).flatten()
        if len(pages) == 1 and int(lengths[0]) == 0:
            return cls(cache, positions, write, None, None, max_seq_len)
        places = torch.arange(int(lengths.max()) + num_new).expand(len(pages), -1)
        read = _slots(pages, torch.where(places < lengths[:, None] + num_new, places, 0))
        allowed = places[:, None, :] <= positions[:, :, None]
        mask = torch.zeros(allowed.shape, dtype=cache.dtype).masked_fill(~allowed, float("-inf"))
        return cls(cache, positions, write, read.flatten(), mask[:, None], max_seq_len)

    def store_and_load(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's new keys and values, and return all that its rows attend over.

        In and out are [rows, heads, tokens, head_dim].
        """
        both = []
        states = (self.cache.key_states[layer], self.cache.value_states[layer])
        for new, stored in zip((key, value), states, strict=True):
            tokens = stored.view(-1, *stored.shape[2:])
            tokens.index_copy_(0, self.write, new.transpose(1, 2).flatten(0, 1))
            if self.read is not None:
                rows = tokens.index_select(0, self.read)
                new = rows.view(len(self.positions), -1, *rows.shape[1:]).transpose(1, 2)
            both.append(new)
        return both[0], both[1]


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    paged_step: PagedStep | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend over the pages of each row; transformers calls this in every layer."""
    if paged_step is None:
        raise ValueError("its attention does not take extra arguments")
    if sliding_window is not None and sliding_window < paged_step.max_seq_len:
        raise ValueError(
            f"it has a sliding window of {sliding_window} tokens, which is not supported; "
            "set generator.max_seq_len to at most that"
        )
    if unsupported := [name for name in UNSUPPORTED if kwargs.get(name) is not None]:
        raise ValueError(f"its attention needs {unsupported[0]}, which is not supported")
    key, value = paged_step.store_and_load(int(module.layer_idx), key, value)  # type: ignore[arg-type]
    output = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=paged_step.mask,
        is_causal=paged_step.mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, paged_attention)


class CpuModel:
    """A causal language model behind the calls that exllamav2's generator makes."""

    def __init__(self, model: PreTrainedModel, name: str, max_seq_len: int) -> None:
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        self.model: PreTrainedModel | None = model
        self.dtype: torch.dtype = model.dtype
        self._hooks: list[RemovableHandle] = []
        self.layers = range(config.num_hidden_layers)
        self.device = torch.device("cpu")
        self.config = CpuModelConfig(
            name=name,
            vocab_size=model.get_input_embeddings().weight.shape[0],
            max_seq_len=max_seq_len,
            num_hidden_layers=config.num_hidden_layers,
            num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        )

    @torch.inference_mode()
    def forward_chunk(
        self,
        input_ids: torch.Tensor,
        attn_params: PagedParams,
        cache: PagedCache,
        preprocess_only: bool = False,
        **kwargs: Any,
    ) -> dict[str, torch.Tensor]:
        """Run the new tokens of every row; return {"logits": [rows, new tokens, vocabulary]}.

        With `preprocess_only` the keys and values are stored and no logits are made.
        """
        if self.model is None:
            raise RuntimeError(f"{self.config.name}: the model was closed; load it again")
        step = PagedStep.plan(attn_params, input_ids.shape[1], cache, self.config.max_seq_len)
        part = self.model.base_model if preprocess_only else self.model
        output = part(
            input_ids=input_ids,
            # drafted tokens that will not be used can lie past the end
            position_ids=step.positions.clamp(max=self.config.max_seq_len - 1),
            use_cache=False,
            paged_step=step,
        )
        return {} if preprocess_only else {"logits": output.logits}

    def can_change(self, matrix: str) -> bool:
        """Whether an adapter may change this matrix."""
        assert self.model is not None
        try:
            return isinstance(self.model.get_submodule(matrix), torch.nn.Linear)
        except AttributeError:
            return False

    def use_adapter(self, changes: Mapping[str, LowRank]) -> None:
        """Run with these changes of matrices from now on, in place of those of before."""
        assert self.model is not None
        for handle in self._hooks:
            handle.remove()
        self._hooks = [
            self.model.get_submodule(matrix).register_forward_hook(_adding(change, self.dtype))
            for matrix, change in changes.items()
        ]

    def close(self) -> None:
        """Free the weights."""
        self.model = None
        self._hooks = []


def _adding(change: LowRank, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """A hook that adds a low-rank change to what a matrix gives, the weights untouched."""
    down, up = change.down.to(dtype), change.up.to(dtype)

    def hook(module: torch.nn.Module, inputs: tuple[torch.Tensor], output: Any) -> torch.Tensor:
        added: torch.Tensor = output + F.linear(F.linear(inputs[0], down), up) * change.scale
        return added

    return hook


def load_cpu_model(folder: Path, dtype: str, max_seq_len: int | None) -> CpuModel:
    """Load a model folder, and check that it computes the same on pages as without them.

    Raises
    ------
    ValueError
        One line, where the folder or the kind of model cannot be used.
    """
    limit = model_max_seq_len(folder, max_seq_len)
    shows_progress = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            attn_implementation=ATTENTION,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # of many unrelated types
        raise ValueError(f"generator.model: cannot load {folder}: {_first_line(error)}") from error
    finally:
        if shows_progress:
            enable_progress_bar()
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"generator.model: {folder} has no weights for {missing[0]} "
            f"({len(missing)} missing); download the model again"
        )
    loaded = CpuModel(model.eval(), folder.name, limit)
    _check_paged_attention(loaded)
    return loaded


def _check_paged_attention(model: CpuModel) -> None:
    """Compare a short sequence, in two parts on two pages, with the model's own attention."""
    assert model.model is not None
    ids = torch.arange(1, 13)[None] % model.config.vocab_size
    cache = PagedCache(model, 2 * PAGE_TOKENS)
    pages = torch.tensor([[1, 0]], dtype=torch.int32)
    kind = model.model.config.model_type
    try:
        logits = None
        for start, end in ((0, 8), (8, 12)):
            length = torch.tensor([start], dtype=torch.int32)
            params = PagedParams(1, pages, length, start, PAGE_TOKENS, end - start)
            logits = model.forward_chunk(ids[:, start:end], params, cache)["logits"]
        model.model.set_attn_implementation("eager")
        with torch.inference_mode():
            expected = model.model(input_ids=ids, use_cache=False).logits[:, 8:]
        model.model.set_attn_implementation(ATTENTION)
    except Exception as error:
        raise ValueError(
            f"generator.model: {kind} models cannot run on a CPU here: {_first_line(error)}"
        ) from error
    assert logits is not None
    unused = [layer for layer in model.layers if not cache.key_states[layer].any()]
    difference = (logits - expected).abs().max() / expected.abs().max()
    if unused or not difference <= CHECK_TOLERANCE[model.dtype]:
        raise ValueError(
            f"generator.model: {kind} models cannot run on a CPU here: they need more than plain "
            "causal attention in every layer"
        )


def _slots(pages: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the cache slot of each position of each row, both [rows, n]."""
    return pages.gather(1, positions // PAGE_TOKENS) * PAGE_TOKENS + positions % PAGE_TOKENS


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros whose memory is taken page by page, on first use (`torch.zeros` writes it)."""
    data = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(data).view(dtype).view(shape)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
