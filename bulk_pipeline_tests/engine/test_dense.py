"""The dense forward pass: each kernel against plain torch, and the whole against transformers.

Without a GPU the kernels run in Triton's interpreter: install Triton and set TRITON_INTERPRET=1.
"""

import copy
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

HAS_GPU = torch.cuda.is_available()
pytest.importorskip("triton")
if not HAS_GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from safetensors.torch import load_file  # noqa: E402
from transformers import (  # noqa: E402
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from bulk_pipeline.engine import attention_kernels, dense, dense_weights, kernels  # noqa: E402
from bulk_pipeline.engine.adapter_files import resolve_adapter  # noqa: E402
from bulk_pipeline.engine.adapters import LowRank, read_adapter  # noqa: E402
from bulk_pipeline.engine.dense import (  # noqa: E402
    DenseModel,
    bucket_of,
    rows_at_once,
    splits_of,
)
from bulk_pipeline.engine.dense_weights import DenseLayer, DenseWeights  # noqa: E402
from bulk_pipeline_tests.adapters import make_adapter  # noqa: E402

if not HAS_GPU:
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_for_numpy(tensor, scope) -> None:
        """Triton 3.6 takes int() of arrays of one element, which NumPy 2.4 refuses."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_for_numpy

pytestmark = [pytest.mark.gpu] if HAS_GPU else []
DEVICE = torch.device("cuda", 0) if HAS_GPU else torch.device("cpu")
PAGE = 256
HEADS = {  # heads, key heads, head size
    "9/3 x 64": (9, 3, 64),
    "8/2 x 128": (8, 2, 128),
    "4/4 x 96": (4, 4, 96),
}
LENGTHS = {  # tokens in the pages before the new one; -1 is a padding row
    "short": [0, 1, 2],
    "page ends": [-1, 254, 255, 256],
    "mixed": [700, -1, 3, -1, 511],
    "long": [2500],
}
PACKED = {  # tokens of each row in its pages before, and new ones
    "one": [(0, 1)],
    "short": [(0, 3), (0, 64), (0, 65)],
    "behind a prefix": [(256, 5), (255, 130), (1, 1)],
    "mixed": [(0, 300), (700, 2), (31, 1), (0, 17)],
}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).half().to(DEVICE)


def random_table(rows: int, width: int) -> torch.Tensor:
    order = torch.randperm(rows * width + 3, generator=torch.Generator().manual_seed(1))
    return order[: rows * width].view(rows, width).int().to(DEVICE)


def torch_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As LlamaRMSNorm."""
    hidden = x.float()
    hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps)
    return weight * hidden.half()


def torch_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As apply_rotary_pos_emb; x [tokens, heads, size], cos and sin [tokens, size / 2]."""
    cos, sin = (torch.cat([t, t], -1)[:, None] for t in (cos, sin))
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


def torch_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:
    """In float64, causal over the last of the keys; [tokens, heads, size]."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    seen = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device)
    seen = seen.tril(k.shape[0] - q.shape[0])
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def nearly_equal(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """All within a unit in the last place of about one, and nearly all the same."""
    close = torch.allclose(found.float(), wanted.float(), rtol=2e-3, atol=4e-3)
    return close and bool((found != wanted).float().mean() <= 0.01)


class TestKernels:
    @pytest.mark.parametrize("size", [64, 576, 2048, 4096])
    def test_norm(self, size):
        x, weight = random(3, size), random(size, seed=1)
        assert nearly_equal(
            kernels.rms_norm(x, None, weight, 1e-5), torch_rms_norm(x, weight, 1e-5)
        )

    def test_norm_after_adding(self):
        residual, added, weight = (random(5, 576, seed=i) for i in range(3))
        wanted = residual + added
        found = kernels.rms_norm(residual, added, weight[0], 1e-5)
        assert torch.equal(residual, wanted)
        assert nearly_equal(found, torch_rms_norm(wanted, weight[0], 1e-5))

    def test_sums_beyond_float16_are_held_at_its_ends(self):
        residual = torch.tensor([[6e4, -6e4, 1.0, 1.0]]).half().to(DEVICE)
        added = torch.tensor([[6e4, -6e4, float("inf"), float("nan")]]).half().to(DEVICE)
        found = kernels.rms_norm(residual[:, :3].contiguous(), added[:, :3].contiguous(),
                                 torch.ones(3).half().to(DEVICE), 1e-5)  # fmt: skip
        assert found.tolist() == [[1.0, -1.0, 1.0]]
        kernels.rms_norm(residual, added, torch.ones(4).half().to(DEVICE), 1e-5)
        assert residual[0, :3].tolist() == [65504.0, -65504.0, 65504.0]
        assert residual[0, 3].isnan()

    @pytest.mark.parametrize("size", [96, 1024, 1536])
    def test_silu(self, size):
        gate_up = 3 * random(4, 2 * size)
        gate, up = gate_up.clone().chunk(2, -1)
        found = kernels.silu_mul(gate_up)
        assert found.data_ptr() == gate_up.data_ptr()
        assert nearly_equal(found, torch.nn.functional.silu(gate) * up)

    @pytest.mark.parametrize("norm", [True, False], ids=["norm", "plain"])
    @pytest.mark.parametrize("shape", HEADS.values(), ids=HEADS)
    def test_rope_and_store(self, shape, norm):
        heads, kv_heads, size = shape
        slots = torch.tensor([7, -1, 0, 300, 255], dtype=torch.int32, device=DEVICE)
        positions = torch.tensor([5, 0, 99, 3, 31], dtype=torch.int32, device=DEVICE)
        rope = (random(100, size // 2, seed=2), random(100, size // 2, seed=3))
        norms = random(2, size, seed=4) if norm else None
        packed = random(5, heads + 2 * kv_heads, size)
        before = packed.clone()
        keys, values = (torch.full((512, kv_heads, size), 9.0).half().to(DEVICE) for _ in "kv")
        kernels.rope_and_store(
            packed, rope, positions, slots, keys, values,
            head_norms=norms, eps=1e-6,
        )  # fmt: skip
        q, k, v = before.split([heads, kv_heads, kv_heads], 1)
        if norms is not None:
            q, k = (torch_rms_norm(x, w, 1e-6) for x, w in ((q, norms[0]), (k, norms[1])))
        cos, sin = (table[positions.long()] for table in rope)
        wanted_q, wanted_k = torch_rope(q, cos, sin), torch_rope(k, cos, sin)
        same = nearly_equal if norm else torch.equal
        assert same(packed[:, :heads], wanted_q)
        assert torch.equal(packed[:, heads:], before[:, heads:])
        written = slots >= 0
        at = slots[written].long()
        assert same(keys[at], wanted_k[written])
        assert torch.equal(values[at], v[written])
        rest = torch.ones(512, dtype=torch.bool)
        rest[at.cpu()] = False
        assert bool((keys[rest.to(DEVICE)] == 9).all() & (values[rest.to(DEVICE)] == 9).all())

    def test_rope_of_keys_alone(self):
        """As for the last layer of a prompt."""
        packed, rope = random(3, 4, 64), (random(9, 32, seed=1), random(9, 32, seed=2))
        places = torch.tensor([2, 0, 1], dtype=torch.int32, device=DEVICE)
        keys, values = (torch.zeros(4, 2, 64).half().to(DEVICE) for _ in "kv")
        kernels.rope_and_store(packed, rope, places, places, keys, values)
        cos, sin = (table[places.long()] for table in rope)
        assert torch.equal(keys[places.long()], torch_rope(packed[:, :2], cos, sin))
        assert torch.equal(values[places.long()], packed[:, 2:])

    @pytest.mark.parametrize("splits", [1, 4, 16])
    @pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
    @pytest.mark.parametrize("shape", HEADS.values(), ids=HEADS)
    def test_attention(self, shape, lengths, splits):
        heads, kv_heads, size = shape
        rows, width = len(lengths), max(lengths) // PAGE + 2
        table = random_table(rows, width)
        slots = (rows * width + 3) * PAGE
        keys, values = (random(slots, kv_heads, size, seed=i) for i in (1, 2))
        packed = random(rows, heads + 2 * kv_heads, size)
        num_keys = torch.tensor(lengths, dtype=torch.int32, device=DEVICE) + 1
        found = attention_kernels.paged_attention(
            packed, keys, values, table, num_keys, size**-0.5, splits, 128
        )
        for row, length in enumerate(lengths):
            if length < 0:
                assert not found[row].any()
                continue
            k, v = (
                states.view(-1, PAGE, kv_heads, size)[table[row].long()].flatten(0, 1)[: length + 1]
                for states in (keys, values)
            )
            wanted = torch_attention(packed[row : row + 1, :heads], k, v, size**-0.5)
            assert (found[row].double() - wanted[0]).abs().max() < 2e-3

    @pytest.mark.parametrize("rows", PACKED.values(), ids=PACKED)
    @pytest.mark.parametrize("shape", HEADS.values(), ids=HEADS)
    def test_prompt_attention(self, shape, rows):
        heads, kv_heads, size = shape
        queries = attention_kernels.PROMPT_TUNING.queries
        starts, counts = zip(*rows, strict=True)
        width = max(start + count for start, count in rows) // PAGE + 2
        table = random_table(len(rows), width)
        slots = (len(rows) * width + 3) * PAGE
        keys, values = (random(slots, kv_heads, size, seed=i) for i in (1, 2))
        packed = random(sum(counts), heads + 2 * kv_heads, size)
        ends = list(itertools.accumulate(counts))
        firsts = [end - count for end, count in zip(ends, counts, strict=True)]
        blocks = [
            (row, first)
            for row, (start, end) in enumerate(zip(firsts, ends, strict=True))
            for first in range(start, end, queries)
        ]
        shifts = [start - first for start, first in zip(starts, firsts, strict=True)]
        arrays = ([row for row, _ in blocks], [first for _, first in blocks], ends, shifts)
        there = (torch.tensor(array, dtype=torch.int32, device=DEVICE) for array in arrays)
        found = attention_kernels.prompt_attention(
            packed, keys, values, attention_kernels.PackedRows(*there, table), size**-0.5
        )
        for row, (start, count) in enumerate(rows):
            k, v = (
                states.view(-1, PAGE, kv_heads, size)[table[row].long()].flatten(0, 1)
                for states in (keys, values)
            )
            mine = slice(firsts[row], ends[row])
            seen = start + count
            wanted = torch_attention(packed[mine, :heads], k[:seen], v[:seen], size**-0.5)
            assert (found[mine].double() - wanted).abs().max() < 2e-3

    def test_a_prompt_does_not_read_behind_its_end(self):
        keys, values = (random(PAGE, 2, 64, seed=i) for i in (1, 2))
        keys[40:], values[40:] = torch.nan, torch.nan
        numbers = (torch.tensor([n], dtype=torch.int32, device=DEVICE) for n in (0, 0, 10, 30))
        table = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
        rows = attention_kernels.PackedRows(*numbers, table)
        found = attention_kernels.prompt_attention(random(10, 12, 64), keys, values, rows, 0.125)
        assert found.isfinite().all()

    def test_what_lies_behind_a_row_does_not_matter(self):
        """Trap: 0 * nan is nan."""
        keys, values = (random(PAGE, 2, 64, seed=i) for i in (1, 2))
        keys[40:], values[40:] = torch.nan, torch.nan
        table = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
        num_keys = torch.tensor([40], dtype=torch.int32, device=DEVICE)
        for splits in (1, 4):
            found = attention_kernels.paged_attention(
                random(1, 8, 64), keys, values, table, num_keys, 0.125, splits, 128
            )
            assert found.isfinite().all()

    def test_stage(self):
        lengths = torch.tensor([0, 255, -1, 256], dtype=torch.int32, device=DEVICE)
        table = random_table(4, 70)
        ids = torch.tensor([5, 6, 7, 8], device=DEVICE)

        def buffer(*shape, dtype=torch.int32):
            return torch.full(shape, 77, dtype=dtype, device=DEVICE)

        out = [buffer(6, dtype=torch.int64), buffer(8), buffer(8), buffer(8), buffer(8, 70)]
        kernels.stage_rows(ids, lengths, table, *out)
        assert out[0].tolist()[:4] == [5, 6, 7, 8]
        assert all(0 <= token < 10 for token in out[0].tolist())
        assert out[1].tolist() == [0, 255, 0, 256, 0, 0, 77, 77]
        pages = table.tolist()
        assert out[2].tolist()[:6] == [pages[0][0] * PAGE, pages[1][0] * PAGE + 255, -1,
                                       pages[3][1] * PAGE, -1, -1]  # fmt: skip
        assert out[3].tolist()[:6] == [1, 256, 0, 257, 0, 0]
        for row in (0, 1, 3):
            assert out[4][row].tolist() == pages[row]


class TestRowsAtOnce:
    def test_fills_the_multiprocessors(self):
        assert rows_at_once(28672, 132) == 2560  # 2,240 tiles in 17 waves of 132
        assert rows_at_once(6144, 132) == 1408  # 264 tiles in two

    @given(st.integers(1, 200_000), st.integers(1, 200))
    def test_is_a_number_of_whole_tiles(self, columns, multiprocessors):
        assert rows_at_once(columns, multiprocessors) in range(1024, 2561, 128)


class TestBuckets:
    @given(st.integers(1, 5000))
    def test_holds_the_rows_and_wastes_little(self, rows):
        bucket = bucket_of(rows)
        assert rows <= bucket == bucket_of(bucket)
        assert bucket - rows < min(max(rows, 8), 128)

    def test_are_few(self):
        assert len({bucket_of(rows) for rows in range(1, 1025)}) == 27

    @given(st.integers(1, 2048), st.sampled_from([1, 2, 3, 8, 32]), st.integers(1, 131072))
    def test_splits_are_a_power_of_two_and_few(self, rows, kv_heads, length):
        splits = splits_of(bucket_of(rows), kv_heads, length)
        assert splits & (splits - 1) == 0
        assert 1 <= splits <= 64

    def test_rows_are_not_split_where_there_are_many(self):
        assert splits_of(256, 8, 700) == 1
        assert splits_of(1, 8, 700) == 8
        assert splits_of(1, 8, 100) == 1


MODELS = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "one group a head": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 4}),
    "groups of 4, biases": (
        LlamaConfig,
        LlamaForCausalLM,
        {"num_key_value_heads": 1, "head_dim": 32, "attention_bias": True, "mlp_bias": True},
    ),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32}),
    "llama3 rope": (
        LlamaConfig,
        LlamaForCausalLM,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
}
VOCAB = 101
MODEL_PAGE = 64  # small pages, so that short rows have several


def make_reference(kind: str) -> torch.nn.Module:
    config_class, model_class, changes = MODELS[kind]
    config = config_class(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "initializer_range": 0.1,
            "tie_word_embeddings": False,
            "attn_implementation": "eager",
        }
        | changes
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config).eval()
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.data.add_(0.2 * torch.randn_like(parameter))
    model = model.half()
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config)  # half() rounded its frequencies
    return model.to(DEVICE)


def weights_of(model: torch.nn.Module) -> DenseWeights:
    """The weights of a model of transformers, whose tables of cosines are taken as they are."""
    config, inner = model.config, model.model
    head_size = getattr(config, "head_dim", None) or config.hidden_size // 4
    positions = torch.arange(config.max_position_embeddings, device=DEVICE)[None]
    rope = inner.rotary_emb(torch.zeros(1, dtype=torch.half, device=DEVICE), positions)
    rope = tuple(table[0, :, : head_size // 2].contiguous() for table in rope)

    def joined(*linears):
        biases = [one.bias.data for one in linears if one.bias is not None]
        bias = torch.cat(biases) if biases else None
        return torch.cat([one.weight.data for one in linears]), bias

    layers = []
    for layer in inner.layers:
        attention, mlp = layer.self_attn, layer.mlp
        qkv, qkv_bias = joined(attention.q_proj, attention.k_proj, attention.v_proj)
        o, o_bias = joined(attention.o_proj)
        gate_up, gate_up_bias = joined(mlp.gate_proj, mlp.up_proj)
        down, down_bias = joined(mlp.down_proj)
        norms = None
        if hasattr(attention, "q_norm"):
            norms = torch.stack([attention.q_norm.weight.data, attention.k_norm.weight.data])
        layers.append(
            DenseLayer(
                layer.input_layernorm.weight.data,
                qkv,
                o,
                layer.post_attention_layernorm.weight.data,
                gate_up,
                down,
                qkv_bias,
                o_bias,
                gate_up_bias,
                down_bias,
                norms,
            )
        )
    head = torch.nn.functional.pad(model.lm_head.weight.data, (0, 0, 0, -VOCAB % 32))
    return DenseWeights(
        inner.embed_tokens.weight.data, layers, inner.norm.weight.data, head, rope,
        4, config.num_key_value_heads, head_size, VOCAB, config.rms_norm_eps, head_size**-0.5,
    )  # fmt: skip


def make_dense(model: torch.nn.Module, pages: int) -> DenseModel:
    weights = weights_of(model)
    shape = (1, pages * MODEL_PAGE, weights.num_kv_heads, weights.head_size)
    caches = [
        [torch.zeros(shape, dtype=torch.half, device=DEVICE) for _ in weights.layers] for _ in "kv"
    ]
    return DenseModel(weights, *caches)


@pytest.fixture
def small(monkeypatch):
    for module in (attention_kernels, kernels, dense, dense_weights):
        monkeypatch.setattr(module, "PAGE_TOKENS", MODEL_PAGE)


def prompts(counts: Sequence[int]) -> list[np.ndarray]:
    generator = np.random.default_rng(len(counts))
    return [generator.integers(0, VOCAB, count) for count in counts]


def prefill(model: DenseModel, rows, starts, table: torch.Tensor) -> None:
    model.prefill(
        np.concatenate([row[start:] for row, start in zip(rows, starts, strict=True)]),
        np.array(starts, np.int32),
        np.array([len(row) - start for row, start in zip(rows, starts, strict=True)], np.int32),
        table.cpu().numpy(),
    )


def step(model: DenseModel, tokens, lengths, table: torch.Tensor) -> torch.Tensor:
    return model.decode(
        torch.tensor(tokens, device=DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        table,
        max(lengths) + 1,
    ).clone()


def reference_logits(model: torch.nn.Module, row: np.ndarray) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor(row, device=DEVICE)[None]).logits[0]


def agree(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Within what float16 loses in a few layers."""
    return bool((found.float() - wanted.float()).abs().max() < 0.01 * wanted.float().std() + 0.01)


@pytest.mark.usefixtures("small")
class TestDenseModel:
    @pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "tied"])
    def test_logits_are_those_of_transformers(self, kind):
        reference = make_reference(kind)
        rows = prompts([100, 5, 66])
        model, table = make_dense(reference, 9), random_table(3, 2)
        starts = [len(row) - 4 for row in rows]
        prefill(model, [row[:-4] for row in rows], [0, 0, 0], table)
        wanted = [reference_logits(reference, row) for row in rows]
        for i in range(4):
            lengths = [start + i for start in starts]
            tokens = [row[length] for row, length in zip(rows, lengths, strict=True)]
            found = step(model, tokens, lengths, table)
            assert found.shape == (3, VOCAB)
            for row, length in enumerate(lengths):
                assert agree(found[row], wanted[row][length])

    def test_prompts_in_chunks_and_with_shared_pages(self):
        """Rows with and without a prefix in one call; one reads a page that another writes."""
        reference = make_reference("llama")
        first, other, last = prompts([150, 20, 30])
        shared = np.concatenate([first[:MODEL_PAGE], last])
        table = random_table(3, 3)
        table[2, 0] = table[0, 0]
        model = make_dense(reference, 12)
        prefill(model, [first[:40]], [0], table[:1])
        prefill(model, [first[:-1], other[:-1], shared[:-1]], [40, 0, MODEL_PAGE], table)
        rows = [first, other, shared]
        lengths = [len(row) - 1 for row in rows]
        found = step(model, [row[-1] for row in rows], lengths, table)
        for row, tokens in enumerate(rows):
            assert agree(found[row], reference_logits(reference, tokens)[-1])

    @pytest.mark.parametrize("slice_tokens", [7, 512])
    def test_scores_are_those_of_transformers(self, slice_tokens, monkeypatch):
        """Of rows with and without a prefix, and what they store is of use afterwards."""
        monkeypatch.setattr(dense, "SCORED_TOKENS", slice_tokens)
        reference = make_reference("llama")
        rows, table = prompts([100, 2, 66]), random_table(3, 2)
        model = make_dense(reference, 9)
        starts = [70, 0, 0]
        prefill(model, [rows[0][:70]], [0], table[:1])
        found = model.score(
            np.concatenate([row[a:-1] for a, row in zip(starts, rows, strict=True)]),
            np.array(starts, np.int32),
            np.array([29, 1, 65], np.int32),
            table.cpu().numpy(),
            np.concatenate([row[a + 1 :] for a, row in zip(starts, rows, strict=True)]),
        )
        assert (found.shape, found.dtype) == ((29 + 1 + 65,), torch.float32)
        wanted = []
        for row, start in zip(rows, starts, strict=True):
            table_of_row = reference_logits(reference, row).float().log_softmax(-1)
            wanted.append(table_of_row[torch.arange(start, len(row) - 1), row[start + 1 :]])
        assert (found - torch.cat(wanted)).abs().max() < 0.02
        logits = step(model, [row[-1] for row in rows], [len(row) - 1 for row in rows], table)
        for line, row in zip(logits, rows, strict=True):
            assert agree(line, reference_logits(reference, row)[-1])

    @pytest.mark.parametrize("kind", ["llama", "groups of 4, biases"])
    def test_products_in_pieces(self, kind):
        reference = make_reference(kind)
        rows, table = prompts([70, 65, 15]), random_table(3, 2)
        model = make_dense(reference, 9)
        layer = model._weights.layers[0]
        for matrix, piece in ((layer.qkv, 64), (layer.gate_up, 40), (layer.down, 149)):
            model._rows_at_once[matrix.shape[0]] = piece
        prefill(model, [row[:-1] for row in rows], [0] * 3, table)
        found = step(model, [r[-1] for r in rows], [len(r) - 1 for r in rows], table)
        for row, tokens in enumerate(rows):
            assert agree(found[row], reference_logits(reference, tokens)[-1])

    def test_padding_rows_change_nothing(self):
        reference = make_reference("llama")
        rows = prompts([20, 30])
        table, model = random_table(3, 2), make_dense(reference, 9)
        prefill(model, [row[:-1] for row in rows], [0, 0], table)
        before = [states.clone() for states in model._keys + model._values]
        found = step(model, [rows[0][-1], 3, rows[1][-1]], [19, -1, 29], table[[0, 2, 1]])
        for place, tokens in ((0, rows[0]), (2, rows[1])):
            assert agree(found[place], reference_logits(reference, tokens)[-1])
        changed = [(a != b).flatten(1).any(1).sum().item() for a, b in zip(
            before, model._keys + model._values, strict=True)]  # fmt: skip
        assert changed == [2] * 4  # a token of each row, and nothing else

    def test_several_tokens_of_a_row_at_once(self):
        """Across the end of a page, over what wrong tokens left there."""
        reference = make_reference("llama")
        rows, counts = prompts([MODEL_PAGE + 3, 40]), np.array([6, 2])
        table, model = random_table(2, 2), make_dense(reference, 9)
        firsts = [len(row) - count for row, count in zip(rows, counts, strict=True)]
        prefill(
            model, [row[:first] for row, first in zip(rows, firsts, strict=True)], [0, 0], table
        )
        owners = np.repeat([0, 1], counts)
        lengths = [*range(firsts[0], len(rows[0])), *range(firsts[1], len(rows[1]))]
        right = [row[first:] for row, first in zip(rows, firsts, strict=True)]
        for tokens in (np.zeros(8, np.int64), np.concatenate(right)):
            found = model.verify(
                torch.tensor(tokens, device=DEVICE),
                torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
                table[owners],
                max(lengths) + 1,
                counts,
            )
        logits = [reference_logits(reference, row) for row in rows]
        wanted = torch.cat([logits[0][-6:], logits[1][-2:]])
        assert found.shape == wanted.shape
        for place in range(8):
            assert agree(found[place], wanted[place])

    def test_a_wider_table_or_a_larger_batch_follows_a_smaller(self):
        reference = make_reference("llama")
        row = prompts([12])[0]
        table, model = random_table(9, 2), make_dense(reference, 21)
        prefill(model, [row[:-1]] * 9, [0] * 9, table)
        wanted = reference_logits(reference, row)[-1]
        for rows, wide in ((1, False), (3, False), (9, False), (3, True), (1, True)):
            used = torch.cat([table, table], 1) if wide else table
            for _ in range(2):  # the second time from a graph
                found = step(model, [row[-1]] * rows, [11] * rows, used[:rows])
                assert all(agree(one, wanted) for one in found)

    def test_nothing_to_prefill(self):
        model = make_dense(make_reference("llama"), 1)
        none = np.zeros(0, np.int32)
        model.prefill(none, none, none, np.zeros((0, 1), np.int32))

    @settings(max_examples=4 if not HAS_GPU else 30, deadline=None)
    @given(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 20)), min_size=1, max_size=5))
    def test_any_mixture_of_prefixes(self, shapes):
        reference = make_reference("llama")
        rows = prompts([start + count + 1 for start, count in shapes])
        table, model = random_table(len(rows), 2), make_dense(reference, 2 * len(rows) + 3)
        with_prefix = [i for i, (start, _) in enumerate(shapes) if start]
        if with_prefix:
            heads = [rows[i][: shapes[i][0]] for i in with_prefix]
            prefill(model, heads, [0] * len(heads), table[with_prefix])
        prefill(model, [row[:-1] for row in rows], [start for start, _ in shapes], table)
        found = step(model, [r[-1] for r in rows], [len(r) - 1 for r in rows], table)
        for row, tokens in enumerate(rows):
            assert agree(found[row], reference_logits(reference, tokens)[-1])


def changes_of(model: Path, seed: int) -> dict[str, LowRank]:
    folder = make_adapter(model / f"adapter-{seed}", model, seed=seed, rank=3)
    return read_adapter(resolve_adapter("a", str(folder)))


def merged(model: torch.nn.Module, changes: dict[str, LowRank]) -> torch.nn.Module:
    """A copy of a transformers model with these changes in its weights."""
    model = copy.deepcopy(model)
    for name, change in changes.items():
        weight = model.get_submodule(name).weight.data
        weight += (change.scale * change.up.float() @ change.down.float()).to(weight)
    return model


def check_logits(model: DenseModel, reference: torch.nn.Module) -> None:
    row, table = prompts([70])[0], random_table(1, 2)
    prefill(model, [row[:-1]], [0], table)
    found = step(model, [row[-1]], [69], table)
    assert agree(found[0], reference_logits(reference, row)[-1])


def load_on_cpu(folder: Path, monkeypatch, quantized: bool):
    """Load exllamav2's modules on the CPU, which its own loader does not do."""
    from bulk_pipeline.engine.folders import readable_by_exllamav2
    from bulk_pipeline.engine.stand_in import install_stand_in

    install_stand_in()
    import exllamav2
    from exllamav2 import linear, stloader

    def read(self, key, device, out_dtype=None):
        return load_file(self.filename)[key].to(device)

    monkeypatch.setattr(stloader.STFile, "get_tensor", read)
    with readable_by_exllamav2(folder) as readable:
        model = exllamav2.ExLlamaV2(exllamav2.ExLlamaV2Config(str(readable)))
        for module in model.modules:
            module.set_device_idx(-1)
            module.load()
    model.set_cache_map()
    if quantized:  # a handle is the matrix itself, as reconstruct gives it
        functions = {
            "reconstruct": lambda handle, out: out.copy_(handle),
            "free_q_matrix": lambda handle: None,
        }
        for name, function in functions.items():
            monkeypatch.setattr(linear.ext_c, name, function, raising=False)
        for module in model.modules_dict.values():
            if isinstance(module, linear.ExLlamaV2Linear):
                module.q_handle = module.linear.weight.data.T.contiguous()
                module.q_tensors = {}
                if module.has_bias:
                    module.q_tensors["bias"] = module.linear.bias.data
                module.linear = None
    return model, exllamav2.ExLlamaV2Cache(model, max_seq_len=6 * MODEL_PAGE)


@pytest.mark.skipif(HAS_GPU, reason="TestExllamav2 does it on the GPU")
@pytest.mark.usefixtures("small")
class TestTakingOver:
    """exllamav2's modules, loaded on the CPU."""

    @pytest.mark.parametrize("quantized", [False, True], ids=["float16", "quantised"])
    @pytest.mark.parametrize(
        "kind", ["tied", "qwen2", "qwen3", "llama3 rope", "groups of 4, biases"]
    )
    def test_logits_are_those_of_transformers(self, kind, quantized, tmp_path, monkeypatch):
        reference = make_reference(kind)
        reference.save_pretrained(tmp_path)
        model, cache = load_on_cpu(tmp_path, monkeypatch, quantized)
        assert dense_weights.dense_model_problem(model, cache) is None
        found_model = DenseModel.from_exllamav2(model, cache)
        assert model.modules[1].q_proj.linear is None  # freed
        row = prompts([70])[0]
        table = random_table(1, 2)
        prefill(found_model, [row[:-1]], [0], table)
        found = step(found_model, [row[-1]], [69], table)
        assert agree(found[0], reference_logits(reference, row)[-1])

    @pytest.mark.parametrize("kind", ["llama", "qwen2", "groups of 4, biases"])
    def test_adapters_are_merged_and_the_weights_restored(self, kind, tmp_path, monkeypatch):
        monkeypatch.setattr(dense, "MERGED_ROWS", 40)  # several pieces of a matrix
        reference = make_reference(kind)
        reference.save_pretrained(tmp_path)
        changes = [changes_of(tmp_path, seed) for seed in (1, 2)]
        model = DenseModel.from_exllamav2(*load_on_cpu(tmp_path, monkeypatch, True))
        before = {name: matrix.clone() for name, matrix in model._matrices.items()}
        places = {name: matrix.data_ptr() for name, matrix in model._matrices.items()}
        del changes[1]["model.layers.0.self_attn.k_proj"]  # which only the first one changes
        for change in changes:
            model.use_adapter(change)
            check_logits(model, merged(reference, change))
        model.use_adapter({})
        for name, matrix in model._matrices.items():
            assert torch.equal(matrix, before[name])
            assert matrix.data_ptr() == places[name]
        check_logits(model, reference)

    def test_a_merge_that_fails_midway_is_undone(self, tmp_path, monkeypatch):
        make_reference("llama").save_pretrained(tmp_path)
        change = changes_of(tmp_path, 1)
        model = DenseModel.from_exllamav2(*load_on_cpu(tmp_path, monkeypatch, True))
        before = {name: matrix.clone() for name, matrix in model._matrices.items()}
        merge, merged_so_far = dense._merge, []

        def fail(weight, one) -> None:
            merge(weight, one)
            merged_so_far.append(weight)
            if len(merged_so_far) == 3:
                raise RuntimeError("out of memory")

        monkeypatch.setattr(dense, "_merge", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            model.use_adapter(change)
        model.use_adapter({})
        assert all(torch.equal(m, before[name]) for name, m in model._matrices.items())

    def test_exllamav2_adds_adapters_to_its_own_matrices(self, tmp_path, monkeypatch):
        make_reference("llama").save_pretrained(tmp_path)
        exllamav2, _ = load_on_cpu(tmp_path, monkeypatch, False)
        from bulk_pipeline.engine.cuda import CudaModel

        changes = changes_of(tmp_path, 1)
        model = CudaModel(exllamav2, "model", "float16", "own", 100, None)
        assert all(map(model.can_change, changes))
        assert not any(map(model.can_change, ("lm_head", "model.embed_tokens", "model.norm", "x")))
        linear = exllamav2.modules_dict["model.layers.1.mlp.up_proj"]
        change = changes["model.layers.1.mlp.up_proj"]
        hidden = random(3, 64).half()
        before = linear.forward(hidden)
        added = hidden.float() @ (change.scale * change.up.float() @ change.down.float()).T
        for _ in range(2):
            model.use_adapter(changes)
            found = linear.forward(hidden, loras=[model._adapter])
            assert (found - before - added).abs().max() < 0.01 * added.abs().max()
            assert len(linear.lora_a_tensors) == len(linear.lora_b_tensors) == 1
        model.use_adapter({})
        assert model._adapter is None
        assert not linear.lora_a_tensors
        assert not linear.lora_b_tensors

    def test_the_modules_can_be_kept(self, tmp_path, monkeypatch):
        reference = make_reference("llama")
        reference.save_pretrained(tmp_path)
        model, cache = load_on_cpu(tmp_path, monkeypatch, True)
        DenseModel.from_exllamav2(model, cache, keep_quantized=True)
        assert model.modules[1].q_proj.q_handle is not None
        assert model.modules[0].embedding is not None

    @pytest.mark.parametrize("kind", ["llama", "tied", "qwen2"])
    def test_dense_bytes(self, kind, tmp_path, monkeypatch):
        make_reference(kind).save_pretrained(tmp_path)
        model, cache = load_on_cpu(tmp_path, monkeypatch, False)
        expected = dense_weights.dense_bytes(model.config)
        used = resident_bytes(DenseModel.from_exllamav2(model, cache))
        assert abs(used - expected) < 0.05 * expected

    def test_rope_is_that_of_transformers_bit_for_bit(self, tmp_path, monkeypatch):
        reference = make_reference("llama3 rope")
        reference.save_pretrained(tmp_path)
        model, _ = load_on_cpu(tmp_path, monkeypatch, False)
        for table, wanted in zip(
            dense_weights._rope_of(model.config, DEVICE), weights_of(reference).rope, strict=True
        ):
            assert torch.equal(table, wanted)

    @pytest.mark.parametrize(
        ("change", "problem"),
        [
            ({"logit_scale": 0.5}, "scales its logits"),
            ({"sliding_window": 128}, "sliding window of 128"),
            ({"final_logit_softcapping": 30.0}, "caps its logits"),
            ({"partial_rotary_factor": 0.5}, "rope is partial"),
            ({"scale_depth": 0.2}, "scales its residuals"),
            ({"head_dim": 40}, "head size is 40"),
            ({"post_layernorm": "a norm"}, "norms behind attention"),
            ({"device_idx": 1}, "2 devices"),
        ],
        ids=str,
    )
    def test_other_models_are_a_problem(self, change, problem, tmp_path, monkeypatch):
        make_reference("llama").save_pretrained(tmp_path)
        model, cache = load_on_cpu(tmp_path, monkeypatch, False)
        for name, value in change.items():
            for owner in (model.config, model.modules[2 if name == "device_idx" else 1]):
                if hasattr(owner, name):
                    setattr(owner, name, value)
        found = dense_weights.dense_model_problem(model, cache)
        assert problem in found
        assert "\n" not in found


def resident_bytes(model: DenseModel) -> int:
    weights = model._weights
    tensors = [weights.embedding, weights.norm, weights.head, *weights.rope]
    for layer in weights.layers:
        tensors += [getattr(layer, name) for name in layer.__slots__ if name != "matrices"]
    storages = {t.untyped_storage().data_ptr(): t for t in tensors if t is not None}
    return sum(t.untyped_storage().nbytes() for t in storages.values())


@pytest.mark.gpu
class TestExllamav2:
    """A loaded model's weights and cache, taken over."""

    @pytest.fixture
    def exl2(self, exl2):
        return str(exl2)

    def load(self, folder, cache_kind: str = "ExLlamaV2Cache"):
        import exllamav2

        from bulk_pipeline.engine.cuda import use_attention

        use_attention()
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        config = exllamav2.ExLlamaV2Config(str(folder))
        config.max_output_len = 512
        model = exllamav2.ExLlamaV2(config)
        cache = getattr(exllamav2, cache_kind)(model, max_seq_len=40 * PAGE, lazy=True)
        model.load_autosplit(cache)
        return model, cache

    def check(self, folder, tolerance: float = 0.05) -> None:
        from exllamav2.attn import ExLlamaV2Attention

        model, cache = self.load(folder)
        assert dense_weights.dense_model_problem(model, cache) is None
        vocab, rows = model.config.vocab_size, [7, 300, 256, 255, 40]
        generator = np.random.default_rng(0)
        ids = [generator.integers(5, vocab, count + 1) for count in rows]
        table = random_table(len(rows), 2)
        wanted = []
        for row, tokens in enumerate(ids):
            params = ExLlamaV2Attention.PagedParams(
                batch_size=1,
                block_index=table[row : row + 1].cpu(),
                cache_seqlens=torch.zeros(1, dtype=torch.int32),
                max_cache_seqlen=0,
                page_size=PAGE,
                q_len=len(tokens),
            )
            logits = model.forward_chunk(
                input_ids=torch.tensor(tokens)[None], attn_params=params, cache=cache
            )["logits"]
            wanted.append(logits[0, -1, :vocab].float().clone())
        for states in cache.all_tensors():
            with torch.inference_mode():
                states.zero_()
        expected = dense_weights.dense_bytes(model.config)
        found_model = DenseModel.from_exllamav2(model, cache)
        used = resident_bytes(found_model)
        assert abs(used - expected) < 0.01 * expected
        prefill(found_model, [row[:-1] for row in ids], [0] * len(ids), table)
        for _ in range(2):
            found = step(found_model, [row[-1] for row in ids], rows, table).float()
            for row, one, other in zip(rows, found, wanted, strict=True):
                difference = (one - other).abs() / other.std()
                assert difference.max() < 0.3, (row, float(difference.max()))
                assert difference.mean() < tolerance, (row, float(difference.mean()))
        same = sum(int(a.argmax() == b.argmax()) for a, b in zip(found, wanted, strict=True))
        assert same >= len(rows) - 1

    def test_exl2(self, exl2):
        # exllamav2's quantised product adds up in float16: its own answers differ with the batch
        self.check(exl2, tolerance=0.15)

    def test_float16_folder(self, tmp_path):
        from bulk_pipeline_tests.toy import toy_model

        self.check(toy_model(tmp_path / "toy", "float16"))

    def test_rope_is_that_of_transformers_bit_for_bit(self, exl2):
        from transformers import AutoConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        model, _ = self.load(exl2)
        cos, sin = dense_weights._rope_of(model.config, DEVICE)
        positions = torch.arange(len(cos), device=DEVICE)[None]
        rotary = LlamaRotaryEmbedding(AutoConfig.from_pretrained(exl2)).to(DEVICE)
        wanted = rotary(torch.zeros(1, dtype=torch.half, device=DEVICE), positions)
        for table, other in zip((cos, sin), wanted, strict=True):
            assert torch.equal(table, other[0, :, : table.shape[1]])

    @pytest.mark.parametrize("kind", ["ExLlamaV2Cache_Q8", "ExLlamaV2Cache_Q4"])
    def test_a_quantised_cache_is_a_problem(self, exl2, kind):
        model, cache = self.load(exl2, kind)
        assert "cache is quantised" in dense_weights.dense_model_problem(model, cache)
