import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulk_pipeline.engine.tokenizer import (
    PromptTokenizer,
    check_weights,
    end_token_ids,
    load_tokenizer,
    model_fingerprint,
    resolve_model,
)
from bulk_pipeline_tests.toy import BOS_ID, EOS_ID, TURN_END_ID, TURN_START_ID, toy_model

CHATML = "{{ messages[0].content }}<|im_end|>"

TEXTS = {
    "english": "What is the capital of France?",
    "german": "Größe, Übung, Straße – „Zitat“",
    "chinese": "请用一句话解释光合作用。",
    "japanese": "これはテストです。カタカナと漢字。",
    "arabic": "ما هي عاصمة فرنسا؟",
    "hindi": "फ्रांस की राजधानी क्या है?",
    "russian": "Какая столица Франции?",
    "thai": "เมืองหลวงของฝรั่งเศสคืออะไร",
    "emoji": "👩‍👩‍👧‍👦 family 🇫🇷 flag 🤖 1️⃣",
    "beyond the BMP": "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 𝒳",
    "combining": "e\u0301 n\u0303 \u200d \u202e",
    "code": "def f(x):\n    return {k: v**2 for k, v in x.items()}  # ok\n\n\tif a != b: pass",
    "html": "<div class='a'>&amp;<br/></div>",
    "spaces": "   two   three    ",
    "tabs and lines": "\t\tindented\r\n\r\n\n\nfar below\n",
    "numbers": "3.14159 1,000,000 0x1F 12:30 2024-02-29",
    "only a newline": "\n",
    "one letter": "a",
    "chat": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "empty system": "<|im_start|>system\n<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n",
    "specials side by side": "<|im_start|><|im_end|><|endoftext|><|im_end|>",
    "specials and spaces": " <|im_end|> x <|im_start|>  y",
    "special cut short": "<|im_end| <|im_start <|endoftext",
    "long": "lorem ipsum dolor sit amet " * 400,
}


@pytest.fixture(scope="module")
def toy_tokenizer(toy: Path) -> PromptTokenizer:
    return PromptTokenizer(toy)


@pytest.fixture(scope="module")
def real_tokenizer(smollm2: Path) -> PromptTokenizer:
    return PromptTokenizer(smollm2)


@pytest.fixture(scope="module")
def exllama(smollm2: Path) -> Any:
    """exllamav2's own tokenizer; its compiled module is not needed for it."""
    from bulk_pipeline.engine.stand_in import install_stand_in

    if "exllamav2" not in sys.modules:
        install_stand_in()
    from exllamav2 import ExLlamaV2Tokenizer

    config = SimpleNamespace(model_dir=str(smollm2), eos_token_id=2, bos_token_id=1, pad_token_id=2)
    return ExLlamaV2Tokenizer(config)


class TestEncode:
    @pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
    def test_ids_are_exllamas(self, real_tokenizer: PromptTokenizer, exllama: Any, text: str):
        ids = exllama.encode(text, encode_special_tokens=True, add_bos=False)[0].tolist()
        assert real_tokenizer.encode_batch([text]) == [ids]
        assert ids

    @given(st.text(st.characters(exclude_categories=["Cs"])))
    def test_ids_are_exllamas_for_any_text(
        self, real_tokenizer: PromptTokenizer, exllama: Any, text: str
    ):
        ids = exllama.encode(text, encode_special_tokens=True, add_bos=False)[0].tolist()
        assert real_tokenizer.encode_batch([text]) == [ids]

    def test_model_without_bos_gets_none(self, real_tokenizer: PromptTokenizer):
        assert real_tokenizer.bos_id is None
        assert real_tokenizer.encode_batch(["<|im_start|>user"])[0][0] == 1
        assert real_tokenizer.encode_batch(["user"])[0][0] != 1

    @pytest.mark.parametrize("text", ["Hi", "<s>Hi", "<s><s>Hi", "<s><s><s>Hi"])
    def test_exactly_one_bos(self, toy_tokenizer: PromptTokenizer, text: str):
        ids = toy_tokenizer.encode_batch([toy_tokenizer.one_bos(text)])[0]
        assert ids[0] == BOS_ID
        assert ids.count(BOS_ID) == 1

    def test_tokenizer_that_adds_no_bos_wants_none(self, tmp_path: Path):
        tokenizer = PromptTokenizer(toy_model(tmp_path, add_bos=False))
        assert tokenizer.bos_id is None
        assert BOS_ID not in tokenizer.encode_batch(["Hi"])[0]

    def test_padding_and_truncation_of_the_file_do_not_count(self, toy: Path, tmp_path: Path):
        folder = Path(shutil.copytree(toy, tmp_path / "copy"))
        spec = json.loads((folder / "tokenizer.json").read_text())
        spec["truncation"] = {
            "direction": "Right",
            "max_length": 4,
            "strategy": "LongestFirst",
            "stride": 0,
        }
        (folder / "tokenizer.json").write_text(json.dumps(spec))
        assert len(PromptTokenizer(folder).encode_batch(["The quick brown fox jumps"])[0]) > 4


class TestMarks:
    @given(st.text(st.sampled_from("ab <|>_imendstar\n")))
    def test_text_without_specials_gives_the_same_ids(
        self, real_tokenizer: PromptTokenizer, text: str
    ):
        marked = real_tokenizer.mark(text)
        assert real_tokenizer.unmark(marked) == text
        assert real_tokenizer.encode_marked(marked) == real_tokenizer.encode_batch([text])[0]

    @pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
    def test_marks_are_the_special_tokens(self, real_tokenizer: PromptTokenizer, text: str):
        marked = real_tokenizer.mark(text)
        assert real_tokenizer.encode_marked(marked) == real_tokenizer.encode_batch([text])[0]

    def test_unmarked_text_of_a_special_token_is_text(self, real_tokenizer: PromptTokenizer):
        for text, id_ in real_tokenizer.special_tokens.items():
            ids = real_tokenizer.encode_marked(f"a{text}b")
            assert id_ not in ids
            assert len(ids) > 3

    def test_text_with_marks_is_refused(self, toy_tokenizer: PromptTokenizer):
        with pytest.raises(ValueError, match="private-use characters"):
            toy_tokenizer.mark("a\U00100000b")

    def test_offsets_cover_the_text(self, toy_tokenizer: PromptTokenizer):
        text = "The quick brown fox"
        offsets = toy_tokenizer.offsets(text)
        assert "".join(text[start:end] for start, end in offsets) == text


class TestEndTokens:
    def make(self, folder: Path, config_eos: Any, generation_eos: Any) -> PromptTokenizer:
        toy_model(folder)
        for name, value in (
            ("config.json", config_eos),
            ("generation_config.json", generation_eos),
        ):
            path = folder / name
            path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": value}))
        return PromptTokenizer(folder)

    def test_union_with_origins(self, tmp_path: Path):
        tokenizer = self.make(tmp_path, [EOS_ID, 7], 9)
        assert end_token_ids(tmp_path, CHATML, tokenizer) == {
            EOS_ID: "tokenizer, config.json",
            7: "config.json",
            9: "generation_config.json",
            TURN_END_ID: "chat template",
        }

    def test_number_null_and_absent(self, tmp_path: Path):
        tokenizer = self.make(tmp_path, 7, None)
        (tmp_path / "generation_config.json").unlink()
        assert end_token_ids(tmp_path, "{{ x }}", tokenizer) == {
            EOS_ID: "tokenizer",
            7: "config.json",
        }

    def test_turn_end_that_is_no_token_of_this_model(self, toy: Path):
        ends = end_token_ids(toy, "<|eot_id|><end_of_turn>", PromptTokenizer(toy))
        assert list(ends) == [EOS_ID]

    def test_wrong_end_token_of_a_gguf_does_not_hide_the_right_one(self, tmp_path: Path):
        self.make(tmp_path, EOS_ID, EOS_ID)
        path = tmp_path / "tokenizer_config.json"
        wrong = json.loads(path.read_text()) | {"eos_token": "<|im_start|>"}
        path.write_text(json.dumps(wrong))
        tokenizer = PromptTokenizer(tmp_path)
        assert end_token_ids(tmp_path, CHATML, tokenizer) == {
            TURN_START_ID: "tokenizer",
            EOS_ID: "config.json, generation_config.json",
            TURN_END_ID: "chat template",
        }

    def test_real_model(self, smollm2: Path, real_tokenizer: PromptTokenizer):
        template = real_tokenizer.chat_template
        assert template is not None
        assert end_token_ids(smollm2, template, real_tokenizer) == {
            2: "tokenizer, config.json, generation_config.json, chat template"
        }


class TestResolveModel:
    def test_folder_as_it_is(self, toy: Path):
        assert resolve_model(str(toy)) == toy

    @pytest.mark.parametrize("model", ["./no/such/model", "/no/such/model", "a/b/c", "~nobody/x"])
    def test_missing_folder(self, model: str):
        with pytest.raises(ValueError, match=r"^generator.model: no folder .*; download"):
            resolve_model(model)

    @pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
    def test_incomplete_folder(self, toy: Path, tmp_path: Path, name: str):
        folder = Path(shutil.copytree(toy, tmp_path / "copy"))
        (folder / name).unlink()
        with pytest.raises(ValueError, match=f"^generator.model: no {name} in .*; download it"):
            resolve_model(str(folder))

    def test_hub_without_network(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        with pytest.raises(
            ValueError, match=r"^generator.model: nobody/none is no folder here, and the hub did"
        ) as error:
            resolve_model("nobody/none")
        assert "\n" not in str(error.value)
        assert "if it is a path, correct it; if it is a hub id, check it" in str(error.value)

    @pytest.mark.parametrize("tokenizer_only", [True, False])
    def test_hub_model(self, toy: Path, monkeypatch: pytest.MonkeyPatch, tokenizer_only: bool):
        calls: list[dict[str, Any]] = []

        def snapshot_download(model: str, **options: Any) -> str:
            calls.append({"model": model, **options})
            return str(toy)

        monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
        assert resolve_model("owner/name", "abc", tokenizer_only=tokenizer_only) == toy
        (call,) = calls
        assert (call["model"], call["revision"]) == ("owner/name", "abc")
        assert ("*.safetensors" in call["allow_patterns"]) is not tokenizer_only
        assert not any(p.endswith((".bin", ".pt", "*")) for p in call["allow_patterns"])

    def test_no_weights(self, toy: Path, tmp_path: Path):
        folder = Path(shutil.copytree(toy, tmp_path / "copy"))
        check_weights(folder)
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        with pytest.raises(ValueError, match=r"^generator.model: no weights in .*; download them"):
            check_weights(folder)

    def test_broken_tokenizer(self, toy: Path, tmp_path: Path):
        folder = Path(shutil.copytree(toy, tmp_path / "copy"))
        (folder / "tokenizer.json").write_text("{")
        with pytest.raises(ValueError, match=r"^generator.model: cannot load the tokenizer"):
            PromptTokenizer(folder)

    def test_changed_tokenizer_is_loaded_again(self, tmp_path: Path):
        toy_model(tmp_path)
        first = load_tokenizer(tmp_path)
        assert load_tokenizer(tmp_path) is first
        toy_model(tmp_path, add_bos=False)
        assert load_tokenizer(tmp_path).bos_id is None


class TestFingerprint:
    @pytest.fixture
    def model(self, toy: Path, tmp_path: Path) -> Path:
        return Path(shutil.copytree(toy, tmp_path / "copy"))

    def test_copy_elsewhere_is_the_same_model(self, toy: Path, model: Path):
        assert model_fingerprint(model) == model_fingerprint(toy)
        assert len(model_fingerprint(toy)) == 32

    def test_modification_time_does_not_count(self, toy: Path, model: Path):
        (model / "model.safetensors").touch()
        assert model_fingerprint(model) == model_fingerprint(toy)

    @pytest.mark.parametrize("place", [8, 100, 5000, 300_000, -1])
    def test_flipped_byte(self, toy: Path, model: Path, place: int):
        path = model / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(data)
        assert model_fingerprint(model) != model_fingerprint(toy)

    def test_longer_shard(self, toy: Path, model: Path):
        path = model / "model.safetensors"
        path.write_bytes(path.read_bytes() + b"\0")
        assert model_fingerprint(model) != model_fingerprint(toy)

    def test_changed_config(self, toy: Path, model: Path):
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_theta": 5000.0}))
        assert model_fingerprint(model) != model_fingerprint(toy)

    @pytest.mark.parametrize("name", ["_name_or_path", "transformers_version"])
    def test_who_wrote_the_config_does_not_count(self, toy: Path, model: Path, name: str):
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {name: "other"}))
        assert model_fingerprint(model) == model_fingerprint(toy)

    def test_added_quantisation_file(self, toy: Path, model: Path):
        (model / "quantize_config.json").write_text('{"bits": 4}')
        assert model_fingerprint(model) != model_fingerprint(toy)

    def test_tokenizer_does_not_count(self, toy: Path, model: Path):
        (model / "tokenizer_config.json").unlink()  # the token ids are in the key themselves
        assert model_fingerprint(model) == model_fingerprint(toy)

    def test_extra_values(self, toy: Path):
        keys = {
            model_fingerprint(toy, extra)
            for extra in (None, {"dtype": "float32"}, {"dtype": "float64"}, {"cache": "q4"})
        }
        assert len(keys) == 4

    def test_other_weights_of_equal_shape(self, toy: Path, tmp_path: Path):
        other = toy_model(tmp_path / "other", seed=1)
        assert model_fingerprint(other) != model_fingerprint(toy)
