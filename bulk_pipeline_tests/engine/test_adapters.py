"""LoRA adapters in the engine: against PEFT, mixed in one run, and what is refused."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from bulk_pipeline.engine.adapter_files import adapter_fingerprint, resolve_adapter
from bulk_pipeline.engine.adapters import base_matrices
from bulk_pipeline.engine.loading import load_generator
from bulk_pipeline.engine.request import Request, SamplingParams, Status, request_key
from bulk_pipeline.spec import GeneratorSettings
from bulk_pipeline_tests.adapters import change_config, change_tensors, make_adapter
from bulk_pipeline_tests.engine.test_generator import make_generator, make_ids

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=16)
SAMPLED = SamplingParams(temperature=1.0, max_new_tokens=16, seed=7)
KINDS = {  # changes of a plain adapter's configuration
    "plain": {},
    "rslora": {"use_rslora": True},
    "patterns": {"alpha_pattern": {"q_proj": 1, r"layers\.1\.mlp\.up_proj": 16, "o_proj": 2}},
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory, toy_float64) -> dict[str, str]:
    """Three adapters; c changes queries and values only."""
    root = tmp_path_factory.mktemp("adapters")
    make_adapter(root / "a", toy_float64, seed=1)
    make_adapter(root / "b", toy_float64, seed=2, rank=8)
    make_adapter(root / "c", toy_float64, seed=3, targets=("q_proj", "v_proj"), strength=2)
    return {name: str(root / name) for name in "abc"}


@pytest.fixture(scope="module")
def generator(toy_float64, adapters):
    return make_generator(toy_float64, adapters=adapters)


def run(generator, requests):
    return {c.request_id: c for c in generator.run(requests)}


def greedy_of_peft(model: Path, adapter: Path | str, ids: list[int], count: int) -> list[int]:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    changed = PeftModel.from_pretrained(base, str(adapter), autocast_adapter_dtype=False).double()
    tokens = torch.tensor([ids])
    with torch.inference_mode():
        for _ in range(count):
            best = changed(input_ids=tokens).logits[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, best], 1)
    return tokens[0, len(ids) :].tolist()


class TestAnswers:
    @pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
    def test_are_those_of_peft(self, tmp_path, toy_float64, config):
        folder = make_adapter(tmp_path / "adapter", toy_float64, seed=5, **config)
        generator = make_generator(toy_float64, adapters={"mine": str(folder)})
        ids = make_ids(40)
        requests = [Request("plain", ids, GREEDY), Request("mine", ids, GREEDY, adapter="mine")]
        found = run(generator, requests)
        expected = greedy_of_peft(toy_float64, folder, ids, 16)
        assert list(found["mine"].token_ids) == expected
        assert found["plain"].token_ids != found["mine"].token_ids

    def test_with_ranks_of_their_own(self, tmp_path, toy_float64):
        folder = make_adapter(tmp_path / "adapter", toy_float64, rank_pattern={"k_proj": 2})
        change_tensors(
            folder,
            lambda tensors: {
                name: (value[:2] if "lora_A" in name else value[:, :2]).contiguous()
                if "k_proj" in name
                else value
                for name, value in tensors.items()
            },
        )
        generator = make_generator(toy_float64, adapters={"mine": str(folder)})
        found = run(generator, [Request(0, make_ids(20), GREEDY, adapter="mine")])
        assert list(found[0].token_ids) == greedy_of_peft(toy_float64, folder, make_ids(20), 16)

    def test_of_mixed_rows_are_those_of_each_adapter_alone(self, generator, toy_float64, adapters):
        names = [None, "a", "b", "c"]
        rows = [
            Request(i, make_ids(300 + i % 3, i % 5), (GREEDY, SAMPLED)[i % 2], adapter=names[i % 4])
            for i in range(24)
        ]
        mixed = run(generator, rows)
        assert {c.status for c in mixed.values()} <= {Status.LENGTH, Status.STOP}
        for name in names:
            alone = make_generator(toy_float64, adapters=adapters)
            expected = run(alone, [row for row in rows if row.adapter == name])
            assert {i: mixed[i].token_ids for i in expected} == {
                i: c.token_ids for i, c in expected.items()
            }
        assert len({c.token_ids for c in mixed.values()}) > 10

    def test_do_not_come_from_pages_of_another_adapter(self, generator):
        ids = make_ids(600, 9)
        alone = {}
        for name in (None, "a", "b"):
            [alone[name]] = run(generator, [Request(0, ids, GREEDY, adapter=name)]).values()
            assert alone[name].cached_tokens == 0
            [again] = run(generator, [Request(0, ids, GREEDY, adapter=name)]).values()
            assert again.cached_tokens >= 512
            assert again.token_ids == alone[name].token_ids
        assert len({c.token_ids for c in alone.values()}) == 3

    def test_switch_as_seldom_as_the_requests_that_are_seen_allow(self, generator, monkeypatch):
        used = []
        loop = generator._loop
        monkeypatch.setattr(
            loop,
            "use_adapter",
            lambda changes, use=loop.use_adapter: used.append(1) or use(changes),
        )
        rows = [Request(i, make_ids(5, i), GREEDY, adapter="ab"[i % 2]) for i in range(8)]
        assert len(run(generator, rows)) == 8
        assert len(used) <= 2

    def test_of_the_model_itself_are_as_before(self, generator, toy_float64):
        rows = [Request(i, make_ids(50, i), GREEDY) for i in range(4)]
        run(generator, [Request("x", make_ids(5), GREEDY, adapter="b")])
        found, expected = run(generator, rows), run(make_generator(toy_float64), rows)
        assert {i: c.token_ids for i, c in found.items()} == {
            i: c.token_ids for i, c in expected.items()
        }

    def test_after_one_could_not_be_read(self, toy_float64, tmp_path):
        folder = make_adapter(tmp_path / "adapter", toy_float64)
        generator = make_generator(toy_float64, adapters={"mine": str(folder)})
        (folder / "adapter_model.safetensors").unlink()
        with pytest.raises(FileNotFoundError):
            run(generator, [Request(0, [5, 6], GREEDY, adapter="mine")])
        rows = [Request(0, [5, 6], GREEDY)]
        assert (
            run(generator, rows)[0].token_ids == run(make_generator(toy_float64), rows)[0].token_ids
        )


def test_an_unknown_name_is_an_answer_of_its_own(generator, toy_float64):
    found = run(generator, [Request(0, [5], GREEDY, adapter="z"), Request(1, [5], GREEDY)])
    assert (found[0].status, found[1].status) == (Status.INVALID, Status.LENGTH)
    assert found[0].error == ("there is no adapter 'z'; add it to generator.adapters (now a, b, c)")
    [none] = run(make_generator(toy_float64), [Request(0, [5], GREEDY, adapter="z")]).values()
    assert none.error.endswith("(now none)")


def test_the_provenance_names_them(generator, adapters):
    assert generator.provenance["adapters"] == {
        name: adapter_fingerprint(Path(folder)) for name, folder in adapters.items()
    }


def test_the_shapes_of_quantised_matrices(tmp_path):
    """The middle is 64 wide, the outside 32."""
    tensors = {
        "exl2.q_weight": (12, 32),
        "exl2.q_invperm": (64,),
        "gptq.qweight": (8, 32),
        "gptq.scales": (1, 32),
        "plain.weight": (32, 64),
        "norm.weight": (64,),
    }
    save_file({name: torch.zeros(s) for name, s in tensors.items()}, tmp_path / "m.safetensors")
    assert base_matrices(tmp_path) == dict.fromkeys(("exl2", "gptq", "plain"), (32, 64))


class TestKeys:
    def test_differ_by_adapter(self):
        keys = {
            request_key([1], GREEDY, "m", adapter_fingerprint=name) for name in (None, "a", "b")
        }
        assert len(keys) == 3

    def test_of_a_copy_are_the_same_and_of_other_weights_or_scale_are_not(
        self, tmp_path, adapters, toy_float64
    ):
        first = adapter_fingerprint(Path(adapters["a"]))
        shutil.copytree(adapters["a"], tmp_path / "copy")
        change_config(tmp_path / "copy", base_model_name_or_path="/elsewhere", inference_mode=True)
        assert adapter_fingerprint(tmp_path / "copy") == first
        change_config(tmp_path / "copy", lora_alpha=9)
        assert adapter_fingerprint(tmp_path / "copy") != first
        other = make_adapter(tmp_path / "other", toy_float64, seed=11)
        assert adapter_fingerprint(other) != first


BAD_CONFIGS = {
    "DoRA": ({"use_dora": True}, "uses DoRA, which is not supported; merge it"),
    "modules": ({"modules_to_save": ["lm_head"]}, "uses modules_to_save, which replace"),
    "fan in": ({"fan_in_fan_out": True}, "uses fan_in_fan_out"),
    "activated": ({"alora_invocation_tokens": [1]}, "uses activated LoRA"),
    "biases": ({"bias": "all"}, "has biases (bias: all)"),
    "PiSSA": ({"init_lora_weights": "pissa"}, "began with init_lora_weights='pissa'"),
    "another kind": ({"peft_type": "IA3"}, "peft_type is IA3, only LORA is supported"),
    "no rank": ({"r": None}, "r and lora_alpha in adapter_config.json must be numbers above 0"),
    "pattern": ({"rank_pattern": {"q_proj": "x"}}, "rank_pattern in adapter_config.json must map"),
    "expression": ({"alpha_pattern": {"(": 1}}, "alpha_pattern in adapter_config.json has '('"),
    "rank": ({"r": 8}, "but its rank is 8 in adapter_config.json"),
}


class TestRefused:
    @pytest.fixture
    def adapter(self, tmp_path, toy) -> Path:
        return make_adapter(tmp_path / "adapter", toy)

    def load(self, toy, adapter):
        settings = {"model": str(toy), "device": "cpu", "adapters": {"mine": str(adapter)}}
        with pytest.raises(ValueError, match=r"^generator\.adapters") as error:
            load_generator(GeneratorSettings(**settings))
        assert "\n" not in str(error.value)
        return str(error.value)

    @pytest.mark.parametrize(("change", "message"), BAD_CONFIGS.values(), ids=BAD_CONFIGS)
    def test_configurations(self, toy, adapter, change, message):
        change_config(adapter, **change)
        assert message in self.load(toy, adapter)

    def test_a_folder_that_is_not_there(self, toy):
        error = self.load(toy, "/nowhere/adapter")
        assert error == "generator.adapters.mine: no folder /nowhere/adapter; correct the path"

    def test_what_may_be_a_path_or_a_hub_id(self, toy, tmp_path, monkeypatch):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        error = self.load(toy, "adapters/tickets")
        assert error.startswith(
            "generator.adapters.mine: adapters/tickets is no folder here, and the hub did not give"
        )
        assert "if it is a path, correct it; if it is a hub id, check it" in error

    @pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
    def test_a_missing_file(self, toy, adapter, name):
        (adapter / name).unlink()
        assert f"generator.adapters.mine: no {name} in {adapter}" in self.load(toy, adapter)

    def test_a_pickle(self, toy, adapter):
        os.rename(adapter / "adapter_model.safetensors", adapter / "adapter_model.bin")
        assert "only adapter_model.bin, which is not read; save" in self.load(toy, adapter)

    def test_a_pickle_beside_safetensors_is_not_read(self, toy, adapter):
        (adapter / "adapter_model.bin").write_bytes(b"no pickle")
        assert resolve_adapter("mine", str(adapter)).weights.name == "adapter_model.safetensors"
        load_generator(
            GeneratorSettings(model=str(toy), device="cpu", adapters={"mine": str(adapter)})
        ).close()

    def test_a_file_cut_short(self, toy, adapter):
        path = adapter / "adapter_model.safetensors"
        path.write_bytes(path.read_bytes()[:-10])
        assert "generator.adapters.mine: " in (error := self.load(toy, adapter))
        assert "is cut short or damaged" in error

    def test_an_adapter_of_another_shape(self, toy, adapter):
        change_tensors(
            adapter,
            lambda tensors: {
                name: value.repeat(1, 2) if "lora_A" in name else value
                for name, value in tensors.items()
            },
        )
        assert "it was made for another model: " in self.load(toy, adapter)

    @pytest.mark.parametrize(
        ("before", "after", "message"),
        [
            ("layers.1.", "layers.7.", "changes model.layers.7."),
            ("q_proj.lora_A", "q_proj.lora_magnitude_vector", "is no LoRA of a matrix"),
            ("q_proj.lora_A", "q_proj.lora_embedding_A", "is no LoRA of a matrix"),
            ("layers.0.self_attn.q_proj.lora_A", "layers.0.self_attn.x.lora_A", "without"),
            ("model.layers.0.mlp.up_proj", "lm_head", "changes lm_head"),
        ],
    )
    def test_weights_of_other_names(self, toy, adapter, before, after, message):
        change_tensors(
            adapter,
            lambda tensors: {name.replace(before, after): t for name, t in tensors.items()},
        )
        assert message in self.load(toy, adapter)

    def test_weights_of_whole_numbers(self, toy, adapter):
        change_tensors(
            adapter, lambda tensors: {name: t.to(torch.int8) for name, t in tensors.items()}
        )
        assert "is I8, not one of F64" in self.load(toy, adapter)

    def test_no_weights(self, toy, adapter):
        change_tensors(adapter, lambda tensors: {})
        assert "holds no weights" in self.load(toy, adapter)
