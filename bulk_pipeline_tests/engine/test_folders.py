"""What model folders say: translated for exllamav2, refused by name, and measured."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from bulk_pipeline.engine.folders import (
    CACHE_BYTES,
    MROPE_ARCHITECTURES,
    OWN_ATTENTION,
    CacheShape,
    check_architecture,
    check_quantization,
    is_known_to_exllamav2,
    read_cache_shape,
    read_weights,
    readable_by_exllamav2,
    translated_config,
)
from bulk_pipeline.engine.stand_in import install_stand_in

FOLDER = Path("models/m")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
PER_LAYER_TYPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


@pytest.fixture(scope="module")
def exllamav2() -> Any:
    install_stand_in()
    import exllamav2

    return exllamav2


@pytest.fixture
def folder(toy: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(toy, tmp_path / "copy"))


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


class TestTransformers5:
    """Trap: exllamav2 reads neither `rope_parameters` nor a config without `architectures`."""

    @pytest.fixture(scope="class")
    def saved(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """As transformers itself saves it."""
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            rope_parameters=LLAMA3,
        )
        folder = tmp_path_factory.mktemp("saved")
        LlamaForCausalLM(config).half().save_pretrained(folder)
        path = folder / "config.json"
        values = json.loads(path.read_text())
        assert "rope_theta" not in values  # or there is nothing to translate any more
        values.pop("architectures", None)
        path.write_text(json.dumps(values))
        return folder

    def test_folder_is_read_by_exllamav2_as_transformers_means_it(self, saved, exllamav2):
        before = (saved / "config.json").read_bytes()
        with readable_by_exllamav2(saved) as readable:
            config = exllamav2.ExLlamaV2Config(str(readable))
        assert config.rotary_embedding_base == 500000.0
        assert config.alt_rope_method == "llama3"
        assert config.l3_rope_factor == 8.0
        assert config.architecture == "LlamaForCausalLM"
        assert (saved / "config.json").read_bytes() == before

    def test_without_translation_exllamav2_takes_another_base(self, saved, tmp_path, exllamav2):
        folder = Path(shutil.copytree(saved, tmp_path / "copy"))
        change_config(folder, architectures=["LlamaForCausalLM"])
        assert exllamav2.ExLlamaV2Config(str(folder)).rotary_embedding_base == 10000.0

    def test_folder_that_needs_no_translation_is_used_itself(self, toy):
        with readable_by_exllamav2(toy) as readable:
            assert readable == toy

    @pytest.mark.parametrize(
        ("config", "expected"),
        [
            ({"rope_parameters": {"rope_theta": 7.0}}, {"rope_theta": 7.0}),
            (
                {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
                {"rope_theta": 7.0},
            ),
            (
                {"rope_parameters": {"rope_type": "linear", "rope_theta": 7.0, "factor": 2.0}},
                {"rope_theta": 7.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            ),
            (
                {
                    "rope_theta": 5.0,
                    "rope_parameters": {"rope_type": "linear", "rope_theta": 5.0, "factor": 2.0},
                },
                {"rope_theta": 5.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            ),
            (
                {"rope_parameters": {"rope_theta": 7.0, "partial_rotary_factor": 0.5}},
                {"rope_theta": 7.0, "partial_rotary_factor": 0.5},
            ),
            ({"text_config": {"rope_parameters": {"rope_theta": 7.0}}}, {"rope_theta": 7.0}),
            (
                {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 5.0}},
                {"rope_theta": 5.0},
            ),
            (
                {"rope_theta": 5.0, "rope_parameters": PER_LAYER_TYPE},
                {"rope_theta": 5.0},
            ),
            ({"rope_theta": 5.0, "rope_scaling": None}, {"rope_theta": 5.0, "rope_scaling": None}),
        ],
        ids=[
            "theta", "default", "scaled", "scaling left out", "partial", "in a part", "both",
            "own per layer type", "old",
        ],
    )  # fmt: skip
    def test_rope_is_translated(self, config, expected):
        named = {"architectures": ["A"]}
        assert translated_config(named | config, FOLDER) == named | config | expected

    @pytest.mark.parametrize(
        ("rope", "kind"),
        [
            ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "dynamic"),
            ({"rope_type": "longrope", "rope_theta": 1e4}, "longrope"),
            (PER_LAYER_TYPE, "one set a layer type"),
        ],
        ids=["dynamic", "longrope", "per layer type"],
    )
    def test_rope_that_exllamav2_does_not_know_is_refused_by_name(self, rope, kind):
        config = {"architectures": ["LlamaForCausalLM"], "rope_parameters": rope}
        with pytest.raises(ValueError, match=rf"models/m/config.json .* \({kind}\); use a folder"):
            translated_config(config, FOLDER)

    @pytest.mark.parametrize("missing", [{}, {"architectures": None}, {"architectures": []}])
    def test_architecture_follows_from_the_model_type(self, missing):
        config = translated_config({"model_type": "qwen2"} | missing, FOLDER)
        assert config["architectures"] == ["Qwen2ForCausalLM"]

    def test_unknown_model_type_without_an_architecture_is_refused(self):
        with pytest.raises(ValueError, match=r"unknown model_type \(mine\); add architectures"):
            translated_config({"model_type": "mine"}, FOLDER)


class TestRefused:
    @pytest.mark.parametrize(
        ("quantization", "expected"),
        [(None, "float16"), ({"quant_method": "exl2"}, "exl2"), ({"quant_method": "GPTQ"}, "gptq")],
    )
    def test_quantisations_that_exllamav2_reads_are_not(self, folder, quantization, expected):
        change_config(folder, quantization_config=quantization)
        assert check_quantization(folder) == expected

    @pytest.mark.parametrize("method", ["awq", "bitsandbytes", None])
    def test_other_quantisations_are_by_name(self, folder, method):
        change_config(folder, quantization_config={"quant_method": method} if method else {"x": 1})
        match = f"quantised with {method or 'unknown'}; exllamav2 reads exl2, gptq"
        with pytest.raises(ValueError, match=match):
            check_quantization(folder)

    def test_soft_cap_is_without_flash_attn_only(self, folder):
        change_config(folder, attn_logit_softcapping=50.0)
        check_architecture(folder, "flash-attn")
        with pytest.raises(ValueError, match=r"copy \(LlamaForCausalLM\) caps its attention"):
            check_architecture(folder, OWN_ATTENTION)

    def test_an_architecture_that_would_be_taken_for_llama(self, folder):
        change_config(folder, architectures=["FalconForCausalLM"])
        with pytest.raises(ValueError, match="exllamav2 does not know FalconForCausalLM"):
            check_architecture(folder, "flash-attn")

    def test_positions_of_three_parts_are_where_exllamav2_uses_them(self, folder, exllamav2):
        source = Path(exllamav2.__file__).with_name("architecture.py").read_text()
        names = set(re.findall(r'"(\w+For(?:CausalLM|ConditionalGeneration))"', source))
        three_parts = {
            name
            for name in names
            if exllamav2.architecture.ExLlamaV2ArchParams(name, {"vision_config": {}}).lm.mrope
        }
        assert set(MROPE_ARCHITECTURES) == three_parts
        for name in three_parts:
            change_config(folder, architectures=[name])
            with pytest.raises(ValueError, match=f"{name}.* is a vision model"):
                check_architecture(folder, "flash-attn")


@pytest.mark.parametrize(
    ("architecture", "is_known"),
    [("LlamaForCausalLM", True), ("Qwen2ForCausalLM", True), ("FalconForCausalLM", False)],
)
def test_architectures_that_exllamav2_would_take_for_llama(architecture, is_known):
    assert is_known_to_exllamav2(architecture) == is_known


class TestWeights:
    def test_are_counted_from_the_headers(self, toy):
        tensors = load_file(toy / "model.safetensors")
        weights = read_weights(toy)
        assert weights.num_parameters == sum(t.numel() for t in tensors.values())
        assert weights.num_bytes == 4 * weights.num_parameters
        assert weights.gpu_bytes == 2 * weights.num_parameters
        assert weights.bits_per_weight == 32

    @pytest.mark.parametrize("kind", ["exl2", "gptq"])
    def test_of_quantised_matrices_are_the_elements_before(self, tmp_path, kind):
        rows, columns = 64, 32
        packed = torch.zeros(rows * 4 // 32, columns, dtype=torch.int32)  # 4 bits
        matrix = {
            "exl2": {
                "q_weight": packed,
                "q_invperm": torch.zeros(rows, dtype=torch.int32),
                "q_scale": torch.zeros(2, 4, dtype=torch.int32),
                "bias": torch.zeros(columns, dtype=torch.float16),
            },
            "gptq": {
                "qweight": packed,
                "g_idx": torch.zeros(rows, dtype=torch.int32),
                "scales": torch.zeros(2, columns, dtype=torch.float16),
                "bias": torch.zeros(columns, dtype=torch.float16),
            },
        }[kind]
        tensors = {f"model.layers.0.up.{name}": tensor for name, tensor in matrix.items()}
        tensors["lm_head.weight"] = torch.zeros(5, 3, dtype=torch.float16)
        save_file(tensors, tmp_path / "output.safetensors")
        weights = read_weights(tmp_path)
        assert weights.num_parameters == rows * columns + columns + 5 * 3
        assert weights.gpu_bytes == sum(t.nbytes for t in tensors.values()) == weights.num_bytes

    def test_a_shard_cut_short_is_named(self, folder):
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(ValueError, match=r"model.safetensors is cut short or damaged; downl"):
            read_weights(folder)

    @pytest.mark.parametrize("content", [b"", b"1234", b"\xff" * 30], ids=["empty", "4", "noise"])
    def test_a_shard_without_a_header_is_named(self, folder, content):
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match="cut short or damaged"):
            read_weights(folder)

    def test_a_missing_shard_is_named(self, folder):
        index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ValueError, match=r"has no model-2.safetensors; download it"):
            read_weights(folder)


class TestCacheShape:
    @pytest.mark.parametrize("cache_type", CACHE_BYTES)
    @pytest.mark.parametrize("shape", [CacheShape(3, 2, 64), CacheShape(2, 3, 96)])
    def test_bytes_are_those_that_exllamav2_allocates(self, exllamav2, shape, cache_type):
        tokens = 512
        model = SimpleNamespace(
            config=SimpleNamespace(
                max_seq_len=tokens,
                num_hidden_layers=shape.num_layers,
                num_key_value_heads=shape.num_heads,
                head_dim=shape.head_size,
            ),
            cache_map=dict.fromkeys(range(shape.num_layers), "cpu"),
            get_cache_devices=lambda: ["cpu"],
        )
        name = "" if cache_type == "fp16" else f"_{cache_type.upper()}"
        cache = getattr(exllamav2, f"ExLlamaV2Cache{name}")(model)
        tensors = [*cache.all_tensors(), *getattr(cache, "temp_tensors", {}).get("cpu", ())]
        allocated = sum(tensor.nbytes for tensor in tensors)
        assert shape.gpu_bytes_per_token(cache_type) * tokens == allocated

    def test_a_cache_in_one_dtype(self):
        assert CacheShape(30, 3, 64).bytes_per_token(4) == 2 * 30 * 3 * 64 * 4

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({}, CacheShape(2, 2, 16)),
            ({"num_key_value_heads": None}, CacheShape(2, 4, 16)),
            ({"head_dim": 24}, CacheShape(2, 2, 24)),
            ({"head_dim": None}, CacheShape(2, 2, 16)),
        ],
        ids=["as saved", "no groups", "own head size", "no head size"],
    )
    def test_is_read_from_the_config(self, folder, changes, expected):
        change_config(folder, **changes)
        assert read_cache_shape(folder) == expected

    def test_of_an_unknown_config_is_an_error(self, folder):
        change_config(folder, num_hidden_layers=None)
        with pytest.raises(ValueError, match="does not say how many layers"):
            read_cache_shape(folder)
