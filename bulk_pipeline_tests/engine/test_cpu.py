import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MistralConfig,
    OPTConfig,
    Qwen3Config,
)

from bulk_pipeline.engine.stand_in import install_stand_in
from bulk_pipeline_tests.toy import VOCAB_SIZE

install_stand_in()

from exllamav2.attn_params import PagedParams  # noqa: E402

from bulk_pipeline.engine.cpu import PagedCache, load_cpu_model  # noqa: E402

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def save_model(folder, config):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def forward(model, cache, pages, lengths, ids, **kwargs):
    params = PagedParams(
        len(ids),
        torch.tensor(pages, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        max(lengths),
        256,
        len(ids[0]),
    )
    return model.forward_chunk(torch.tensor(ids), params, cache, **kwargs)


@pytest.fixture(scope="module")
def toy_model_cpu(toy_float64):
    return load_cpu_model(toy_float64, "float64", None)


@pytest.fixture(scope="module")
def plain(toy_float64):
    return AutoModelForCausalLM.from_pretrained(toy_float64, dtype=torch.float64).eval()


def test_rows_on_scattered_pages_compute_what_the_plain_model_does(toy_model_cpu, plain):
    torch.manual_seed(1)
    rows = [torch.randint(5, VOCAB_SIZE, (n,)).tolist() for n in (400, 3, 257)]
    pages = [[5, 0], [3, 0], [1, 4]]
    cache = PagedCache(toy_model_cpu, 6 * 256)
    for row, table in zip(rows, pages, strict=True):
        for start in range(0, len(row) - 2, 256):
            chunk = row[start : min(start + 256, len(row) - 2)]
            assert (
                forward(toy_model_cpu, cache, [table], [start], [chunk], preprocess_only=True) == {}
            )
    lengths = [len(row) - 2 for row in rows]
    logits = forward(toy_model_cpu, cache, pages, lengths, [row[-2:] for row in rows])["logits"]
    for row, got in zip(rows, logits, strict=True):
        with torch.inference_mode():
            expected = plain(torch.tensor([row])).logits[0, -2:]
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_a_row_never_reads_what_others_left_behind(toy_model_cpu):
    clean, dirty = (PagedCache(toy_model_cpu, 4 * 256) for _ in range(2))
    for tensor in dirty.all_tensors():
        tensor.fill_(float("nan"))
    logits = [
        forward(toy_model_cpu, cache, [[2, 0], [1, 0]], [0, 0], [[7, 8], [9, 10]])["logits"]
        for cache in (clean, dirty)
    ]
    assert torch.equal(*logits)
    assert torch.isnan(dirty.key_states[0][0, :256]).all()  # page 0 belongs to nobody


def test_a_step_writes_no_slot_but_its_own(toy_model_cpu):
    cache = PagedCache(toy_model_cpu, 4 * 256)
    forward(toy_model_cpu, cache, [[3], [1]], [0, 0], [[7, 8, 9], [9, 10, 11]])
    for tensor in cache.all_tensors():
        written = tensor[0].flatten(1).any(dim=1).nonzero().flatten().tolist()
        assert written == [256, 257, 258, 768, 769, 770]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_cache_has_the_models_dtype(toy, dtype):
    model = load_cpu_model(toy, dtype, None)
    assert PagedCache(model, 256).key_states[0].dtype == getattr(torch, dtype)


@pytest.mark.parametrize(
    "config",
    [
        Qwen3Config(**SMALL, head_dim=16),
        MistralConfig(**SMALL, sliding_window=None),
        MistralConfig(**SMALL, sliding_window=512),
        GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=512),
        OPTConfig(
            vocab_size=64,
            hidden_size=32,
            ffn_dim=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            word_embed_proj_dim=32,
            max_position_embeddings=512,
        ),
    ],
    ids=["qwen3", "mistral", "mistral within its window", "gpt2", "opt"],
)
def test_other_architectures_run(tmp_path, config):
    model = load_cpu_model(save_model(tmp_path, config), "float32", None)
    assert model.config.max_seq_len == 512


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MistralConfig(**SMALL, sliding_window=64), "mistral .* sliding window of 64 tokens"),
        (Gemma2Config(**SMALL, head_dim=8, sliding_window=4096), "gemma2 .* softcap"),
        (MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2), "mamba"),
        (BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4), "bloom"),
    ],
    ids=["sliding window", "softcap", "no attention", "alibi"],
)
def test_architectures_with_other_attention_are_refused_by_name(tmp_path, config, reason):
    folder = save_model(tmp_path, config)
    with pytest.raises(ValueError, match=f"(?i)generator.model: .*{reason}") as error:
        load_cpu_model(folder, "float32", None)
    assert "\n" not in str(error.value)


def test_a_model_that_counts_positions_by_itself_is_refused(toy, monkeypatch):
    forward = LlamaForCausalLM.forward

    def own_positions(self, position_ids=None, **kwargs):
        return forward(self, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", own_positions)
    with pytest.raises(ValueError, match=r"llama models cannot run .* more than plain causal"):
        load_cpu_model(toy, "float32", None)


def test_rope_that_depends_on_the_longest_row_is_limited_to_where_it_does_not(tmp_path):
    rope = {
        "rope_type": "dynamic",
        "factor": 4.0,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 512,
    }
    config = LlamaConfig(**SMALL | {"max_position_embeddings": 2048}, rope_parameters=rope)
    folder = save_model(tmp_path, config)
    assert load_cpu_model(folder, "float32", None).config.max_seq_len == 512
    with pytest.raises(ValueError, match="at most 512"):
        load_cpu_model(folder, "float32", 513)


def test_missing_weights_are_an_error_and_not_random(tmp_path):
    folder = save_model(tmp_path, LlamaConfig(**SMALL))
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"no weights for model.layers.1.mlp.up_proj.weight"):
        load_cpu_model(folder, "float32", None)


def test_a_damaged_file_is_one_line(tmp_path):
    folder = save_model(tmp_path, LlamaConfig(**SMALL))
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match="generator.model: cannot load") as error:
        load_cpu_model(folder, "float32", None)
    assert "\n" not in str(error.value)


def test_a_quantised_model_needs_a_gpu(tmp_path):
    folder = save_model(tmp_path, LlamaConfig(**SMALL))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "exl2", "bits": 4.0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"quantised \(exl2\), which needs a GPU"):
        load_cpu_model(folder, "float32", None)


def test_a_pickle_is_never_loaded(tmp_path):
    folder = save_model(tmp_path, LlamaConfig(**SMALL))
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="generator.model: cannot load"):
        load_cpu_model(folder, "float32", None)


def test_a_longer_sequence_than_the_model_was_made_for_is_an_error(toy):
    with pytest.raises(ValueError, match=r"max_seq_len must be at most 2048, .*got 4096"):
        load_cpu_model(toy, "float32", 4096)
