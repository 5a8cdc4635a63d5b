"""`bulk-pipeline doctor`: what it shows, and each problem with its remedy."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from transformers import AutoTokenizer

from bulk_pipeline.cli import main
from bulk_pipeline.engine import doctor
from bulk_pipeline.engine.doctor import Gpu, Machine, Report, examine
from bulk_pipeline.engine.doctor import machine as machine_module
from bulk_pipeline.engine.loading import load_generator
from bulk_pipeline.engine.memory import GIB
from bulk_pipeline.spec import GeneratorSettings
from bulk_pipeline_tests.toy import EOS_ID, TURN_END_ID, TURN_START_ID, toy_model

GPU = Gpu("NVIDIA H200", free=100 * GIB, total=140 * GIB, capability=(9, 0))
TOY_BYTES_PER_TOKEN = 2 * 2 * 2 * 16  # keys and values, layers, heads, head size; times a dtype's


def make_settings(folder: Path | str, **changes: Any) -> GeneratorSettings:
    return GeneratorSettings(**{"model": str(folder)} | changes)


def make_machine(**changes: Any) -> Machine:
    """A healthy machine with one GPU."""
    values: dict[str, Any] = {
        "gpus": [GPU],
        "driver": "580.65",
        "driver_gpus": [GPU.name],
        "torch": "2.11.0+cu130",
        "cuda": "13.0",
        "exllamav2": "0.3.2",
        "extension": "exllamav2_ext.so",
        "extension_error": None,
        "flash_attn": None,
        "triton": "3.6.0",
        "memory": 64 * GIB,
    }
    return Machine(**values | changes)


def make_cpu_machine(**changes: Any) -> Machine:
    values: dict[str, Any] = {
        "gpus": [], "driver": None, "driver_gpus": [], "torch": "2.13.0+cpu", "cuda": None,
        "triton": None, "extension_error": "no module",
    }  # fmt: skip
    return make_machine(**values | changes)


def problems(report: Report, stops: bool) -> list[str]:
    return [problem.text for problem in report.problems if problem.stops == stops]


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def folder(toy: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(toy, tmp_path / "copy"))


@pytest.fixture
def visible_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine_module, "_ask_driver", lambda: (None, []))


class TestMachine:
    def test_without_a_gpu_is_no_problem(self, no_gpu):
        report = examine(machine=make_cpu_machine())
        assert (report.device, report.attention) == ("cpu", "torch")
        assert report.problems == []

    def test_with_a_gpu_is_no_problem(self):
        report = examine(machine=make_machine())
        assert (report.device, report.attention) == ("cuda", "bulk_pipeline")
        assert report.problems == []

    @pytest.mark.parametrize(
        ("version", "attention"),
        [("2.5.6", "bulk_pipeline"), ("2.5.7", "flash-attn"), ("2.8.3.post1", "flash-attn")],
    )
    def test_flash_attn_is_used_from_where_it_has_pages(self, version, attention):
        report = examine(machine=make_machine(flash_attn=version))
        assert report.attention == attention

    @pytest.mark.parametrize(
        ("changes", "problem"),
        [
            ({"extension_error": "no module; install it"}, "no module; install it"),
            ({"triton": None}, "neither flash-attn 2.5.7 nor Triton .*; pip install triton"),
            (
                {"gpus": [GPU, Gpu("Tesla V100", GIB, GIB, (7, 0))]},
                r"cuda:1 \(Tesla V100\) has compute capability 7.0, .* needs 8.0; hide it",
            ),
            ({"exllamav2": None}, "exllamav2 is not installed; pip install"),
        ],
        ids=["no module", "no attention", "old GPU", "no exllamav2"],
    )
    def test_what_stops_a_gpu(self, changes, problem):
        report = examine(machine=make_machine(**changes))
        [text] = problems(report, stops=True)
        assert report.stops
        assert re.search(problem, text)

    def test_flash_attn_needs_no_triton(self):
        assert examine(machine=make_machine(triton=None, flash_attn="2.8.3")).problems == []

    @pytest.mark.parametrize(
        ("cuda", "remedy"),
        [(None, "install a PyTorch built for CUDA"), ("13.0", "update the driver")],
    )
    def test_a_gpu_that_pytorch_cannot_use_is_named(self, cuda, remedy):
        report = examine(machine=make_cpu_machine(driver_gpus=["NVIDIA L4"], cuda=cuda))
        [text] = problems(report, stops=False)
        assert "the driver shows a GPU (NVIDIA L4) that PyTorch" in text
        assert remedy in text

    def test_cuda_without_a_gpu_stops(self, no_gpu, toy):
        report = examine(make_settings(toy, device="cuda"), machine=make_cpu_machine())
        assert any("cuda needs a GPU" in text for text in problems(report, stops=True))

    def test_the_cpu_beside_a_gpu_needs_nothing_of_it(self, visible_gpu, toy):
        machine = make_machine(extension_error="no module", triton=None)
        report = examine(make_settings(toy, device="cpu"), machine=machine)
        assert (report.device, report.problems) == ("cpu", [])

    def test_this_one_is_examined(self):
        found = doctor.examine_machine()
        assert found.torch == torch.__version__
        assert found.exllamav2 == "0.3.2"
        assert found.memory > 0
        assert len(found.gpus) == torch.cuda.device_count()

    def test_the_drivers_answer_is_read(self, monkeypatch):
        answer = SimpleNamespace(stdout="580.65.06, NVIDIA H200\n580.65.06, NVIDIA H200\n")
        monkeypatch.setattr(subprocess, "run", lambda *args, **options: answer)
        found = doctor.examine_machine()
        assert (found.driver, found.driver_gpus) == ("580.65.06", ["NVIDIA H200"] * 2)

    @pytest.mark.parametrize("answer", ["", "NVIDIA-SMI has failed\n"])
    def test_a_driver_that_gives_no_answer_is_none(self, monkeypatch, answer):
        monkeypatch.setattr(subprocess, "run", lambda *a, **o: SimpleNamespace(stdout=answer))
        found = doctor.examine_machine()
        assert (found.driver, found.driver_gpus) == (None, [])

    def test_a_module_that_can_be_compiled_is_no_error(self, monkeypatch, tmp_path):
        monkeypatch.setattr(machine_module, "check_extension", lambda: str(tmp_path))
        found = doctor.examine_machine()
        assert found.extension_error is None
        assert found.extension.endswith(f"compiled on first use with CUDA in {tmp_path}")

    def test_a_module_built_for_another_torch_is_an_error(self, monkeypatch, tmp_path):
        (tmp_path / "not_a_module_ext.py").write_text("raise ImportError('undefined symbol: x')")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(machine_module, "EXTENSION", "not_a_module_ext")
        monkeypatch.setattr(machine_module, "check_extension", lambda: "ext.so")
        error = doctor.examine_machine().extension_error
        assert error is not None
        assert "cannot load exllamav2's compiled module ext.so (undefined symbol: x); in" in error


class TestModel:
    def test_is_shown(self, no_gpu, toy):
        model = examine(make_settings(toy), machine=make_cpu_machine()).model
        assert model is not None
        assert model.architecture == "LlamaForCausalLM"
        assert model.quantization is None
        assert model.weights is not None
        assert model.weights.bits_per_weight == 32
        assert model.has_template
        assert [(end.id, end.text, end.named_by) for end in model.end_tokens] == [
            (EOS_ID, "</s>", "tokenizer, config.json, generation_config.json"),
            (TURN_END_ID, "<|im_end|>", "chat template"),
        ]
        assert (model.rope.theta, model.rope.scaling) == (10000.0, None)
        assert model.max_length == 2048

    def test_rope_of_transformers_5_is_shown_and_no_problem(self, visible_gpu, folder):
        path = folder / "config.json"
        config = json.loads(path.read_text())
        del config["rope_theta"]
        scaled = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
        path.write_text(json.dumps(config | {"rope_parameters": scaled}))
        report = examine(make_settings(folder), machine=make_machine())
        assert report.model is not None
        assert report.model.rope.theta == 5e5
        assert report.model.rope.scaling == {"rope_type": "linear", "factor": 2.0}
        assert report.model.rope.named_by == "rope_parameters"
        assert report.problems == []

    @pytest.mark.parametrize(
        ("removed", "changes", "problem"),
        [
            (
                "x",
                {"quantization_config": {"quant_method": "awq"}},
                "quantised with awq; exllamav2 reads exl2, gptq",
            ),
            ("x", {"attn_logit_softcapping": 50.0}, "caps its attention logits, which needs flash"),
            (
                "architectures",
                {"model_type": "mine"},
                "names no architectures and an unknown model_type",
            ),
            (
                "rope_theta",
                {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
                "has rope_parameters that exllamav2 does not know (dynamic)",
            ),
            ("x", {"max_position_embeddings": 100}, "generator.max_seq_len must be at most 100"),
        ],
        ids=["awq", "soft cap", "no architecture", "rope", "too long a sequence"],
    )
    def test_what_stops_it_on_a_gpu(self, visible_gpu, folder, removed, changes, problem):
        path = folder / "config.json"
        config = json.loads(path.read_text())
        config.pop(removed, None)
        path.write_text(json.dumps(config | changes))
        report = examine(make_settings(folder, max_seq_len=128), machine=make_machine())
        assert any(problem in text for text in problems(report, stops=True)), report.problems

    @pytest.mark.parametrize("method", ["exl2", "gptq", "awq"])
    def test_a_quantised_model_stops_on_a_cpu(self, no_gpu, folder, method):
        change_json(folder / "config.json", quantization_config={"quant_method": method, "bits": 4})
        report = examine(make_settings(folder), machine=make_cpu_machine())
        [text] = problems(report, stops=True)
        assert f"is quantised ({method}), which needs a GPU" in text

    @pytest.mark.parametrize(
        ("changes", "problem"),
        [
            ({"attn_logit_softcapping": 50.0}, "which a CPU does not do here; run it on a GPU"),
            ({"sliding_window": 512}, "at most 512 on a CPU, the sliding window of copy, got 2048"),
        ],
        ids=["soft cap", "sliding window"],
    )
    def test_attention_that_stops_it_on_a_cpu(self, no_gpu, folder, changes, problem):
        change_json(folder / "config.json", **changes)
        [text] = problems(examine(make_settings(folder), machine=make_cpu_machine()), stops=True)
        assert problem in text

    @pytest.mark.parametrize(
        ("changes", "max_seq_len"),
        [({"sliding_window": 512, "use_sliding_window": False}, None), ({"sliding_window": 9}, 8)],
        ids=["not used", "never reached"],
    )
    def test_a_window_that_does_not_matter(self, no_gpu, folder, changes, max_seq_len):
        change_json(folder / "config.json", **changes)
        settings = make_settings(folder, max_seq_len=max_seq_len)
        assert examine(settings, machine=make_cpu_machine()).problems == []

    def test_an_architecture_that_exllamav2_takes_for_llama_is_named(self, visible_gpu, folder):
        change_json(folder / "config.json", architectures=["FalconForCausalLM"])
        report = examine(make_settings(folder), machine=make_machine())
        [text] = problems(report, stops=True)
        assert "exllamav2 does not know FalconForCausalLM (copy) and would run it" in text

    def test_no_folder_stops(self, no_gpu, tmp_path):
        report = examine(make_settings(tmp_path / "none"), machine=make_cpu_machine())
        assert report.model is None
        [text] = problems(report, stops=True)
        assert text.startswith("generator.model: no folder")

    def test_no_weights_stop(self, no_gpu, folder):
        (folder / "model.safetensors").unlink()
        report = examine(make_settings(folder), machine=make_cpu_machine())
        [text] = problems(report, stops=True)
        assert text.startswith("generator.model: no weights in")
        assert report.model is not None
        assert report.model.weights is None
        assert report.fits == []

    def test_damaged_weights_stop(self, no_gpu, folder):
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        [text] = problems(examine(make_settings(folder), machine=make_cpu_machine()), stops=True)
        assert "is cut short or damaged; download it again" in text

    def test_weights_that_are_still_on_the_hub_do_not(self, no_gpu, folder, monkeypatch):
        (folder / "model.safetensors").unlink()
        asked: list[list[str]] = []

        def snapshot_download(model: str, allow_patterns: list[str], **options: Any) -> str:
            asked.append(allow_patterns)
            return str(folder)

        monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
        report = examine(make_settings("owner/name"), machine=make_cpu_machine())
        assert not report.stops
        [text] = problems(report, stops=False)
        assert "the weights of owner/name are not on this machine" in text
        assert not any("safetensors" in pattern for pattern in asked[0])

    def test_a_broken_tokenizer_stops(self, no_gpu, folder):
        (folder / "tokenizer.json").write_text("{")
        report = examine(make_settings(folder), machine=make_cpu_machine())
        assert any("cannot load the tokenizer" in text for text in problems(report, stops=True))
        assert report.model is not None
        assert report.model.has_template is None

    def test_a_missing_template_is_noted(self, no_gpu, tmp_path):
        folder = toy_model(tmp_path / "m", chat_template=None)
        report = examine(make_settings(folder), machine=make_cpu_machine())
        assert report.model is not None
        assert report.model.has_template is False
        [text] = problems(report, stops=False)
        assert "no chat template, and prompt.chat_template: model stops; set prompt.chat" in text

    def test_no_end_token_is_noted(self, no_gpu, tmp_path):
        folder = toy_model(tmp_path / "m", chat_template="{{ messages[0].content }}")
        for name in ("config.json", "generation_config.json"):
            change_json(folder / name, eos_token_id=None)
        change_json(folder / "tokenizer_config.json", eos_token=None)
        [text] = problems(examine(make_settings(folder), machine=make_cpu_machine()), stops=False)
        assert "names no end token, so that every completion runs to its limit; set samp" in text

    def test_an_end_token_that_only_the_tokenizer_names_is_noted(self, no_gpu, folder):
        change_json(folder / "tokenizer_config.json", eos_token="<|im_start|>")
        assert AutoTokenizer.from_pretrained(folder).eos_token_id == TURN_START_ID
        [text] = problems(examine(make_settings(folder), machine=make_cpu_machine()), stops=False)
        expected = f"names {TURN_START_ID} <|im_start|> as end token (other files: 1 </s>, 4 <|im_"
        assert expected in text

    def test_an_end_token_that_no_config_names_is_no_problem(self, no_gpu, folder):
        for name in ("config.json", "generation_config.json"):
            change_json(folder / name, eos_token_id=None)
        assert examine(make_settings(folder), machine=make_cpu_machine()).problems == []


class TestDraft:
    def test_its_size_counts(self, no_gpu, toy):
        alone = examine(make_settings(toy), machine=make_cpu_machine())
        both = examine(make_settings(toy, draft_model=str(toy)), machine=make_cpu_machine())
        assert both.fits[0].bytes_per_token == 2 * alone.fits[0].bytes_per_token
        assert both.problems == []

    def test_a_missing_one_stops(self, no_gpu, toy, tmp_path):
        settings = make_settings(toy, draft_model=str(tmp_path / "none"))
        report = examine(settings, machine=make_cpu_machine())
        assert any("no folder" in text for text in problems(report, stops=True))

    def test_another_vocabulary_stops(self, no_gpu, toy, folder):
        change_json(folder / "config.json", vocab_size=99)
        settings = make_settings(toy, draft_model=str(folder))
        [text] = problems(examine(settings, machine=make_cpu_machine()), stops=True)
        assert "must have the vocabulary of the model (512 tokens), got 99 in copy" in text


class TestFit:
    def test_on_a_cpu_is_what_the_engine_takes(self, no_gpu, toy, monkeypatch, caplog):
        settings = make_settings(toy, device="cpu", max_batch_size=3, dtype="bfloat16")
        report = examine(settings)
        generator = load_generator(settings)
        assert report.cache_tokens == generator.provenance["cache_tokens"] == 3072
        assert [fit.cache_type for fit in report.fits] == ["bfloat16"]
        assert report.fits[0].bytes_per_token == TOY_BYTES_PER_TOKEN * 2

    def test_on_a_gpu_is_told_of_each_cache_type(self, visible_gpu, folder):
        change_json(folder / "config.json", num_hidden_layers=30, head_dim=64)
        report = examine(make_settings(folder), machine=make_machine())
        fits = {fit.cache_type: fit for fit in report.fits}
        assert list(fits) == ["fp16", "q8", "q6", "q4"]
        bytes_per_token = 2 * 30 * 2 * 64 * 2  # keys and values, layers, heads, head size, float16
        assert fits["fp16"].bytes_per_token == bytes_per_token
        # 0.04 of the memory is a margin, and 16 rows of 512 logits of 64 bytes; weights are small
        room = 100 * GIB - 0.04 * 140 * GIB
        assert fits["fp16"].tokens == pytest.approx(room / bytes_per_token, rel=1e-3)
        assert fits["fp16"].tokens % 256 == 0
        assert fits["q4"].tokens > fits["q6"].tokens > fits["q8"].tokens > fits["fp16"].tokens

    def test_rows_at_once_are_whole_pages(self, visible_gpu, toy):
        fit = examine(make_settings(toy, max_seq_len=513), machine=make_machine()).fits[0]
        assert fit.rows == {512: fit.tokens // 512, 513: fit.tokens // 768}

    def test_an_automatic_cache_is_no_larger_than_the_batch_can_use(self, visible_gpu, toy):
        report = examine(make_settings(toy, max_batch_size=3), machine=make_machine())
        assert report.cache_tokens == 3 * 2048

    @pytest.mark.parametrize(
        ("changes", "total", "held"),
        [
            ({}, 140 * GIB, "float16"),
            ({"weights": "quantized"}, 140 * GIB, "quantized"),
            ({"cache_type": "q8"}, 140 * GIB, "quantized"),
            ({}, 500_000, "quantized"),
            ({"weights": "float16"}, 500_000, "float16"),
        ],
        ids=["large GPU", "as asked", "quantised cache", "small GPU", "asked for on a small GPU"],
    )
    def test_quantised_weights_are_dequantised_where_memory_allows(
        self, visible_gpu, toy, tmp_path, changes, total, held
    ):
        folder = shutil.copytree(toy, tmp_path / "gptq")
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
        (folder / "config.json").write_text(json.dumps(config))
        gpu = Gpu("G", 100 * GIB, total, (9, 0))
        report = examine(make_settings(folder, **changes), machine=make_machine(gpus=[gpu]))
        assert report.weights_held == held
        assert f"weights held {held}, batches of up to {report.batch_size}" in str(report)

    def test_memory_of_the_gpus_taken_counts(self, visible_gpu, toy):
        one = examine(make_settings(toy), machine=make_machine()).fits[0]
        machine = make_machine(gpus=[GPU, GPU])
        two = examine(make_settings(toy, gpus=2), machine=machine).fits[0]
        assert two.tokens == pytest.approx(2 * one.tokens, rel=1e-4)
        assert examine(make_settings(toy), machine=machine).fits[0] == one

    def test_too_large_a_model_stops_on_a_gpu(self, visible_gpu, toy):
        small = Gpu("small", free=1000, total=2000, capability=(8, 0))
        [text] = problems(examine(make_settings(toy), machine=make_machine(gpus=[small])), True)
        assert "GiB of GPU memory are free; free some, raise generator.gpus, or use a" in text

    def test_too_large_a_model_stops_on_a_cpu(self, no_gpu, toy):
        [text] = problems(examine(make_settings(toy), machine=make_cpu_machine(memory=1000)), True)
        assert "GiB of memory are free; use a smaller model, or generator.dtype: bfloat16" in text

    @pytest.mark.parametrize("tokens", [256 * 10**7, None], ids=["asked for", "automatic"])
    def test_too_large_a_cache_stops_on_a_gpu(self, visible_gpu, toy, tokens):
        free = 100 * GIB if tokens else GIB  # of which the margin takes all
        gpu = Gpu("G", free, 140 * GIB, (9, 0))
        report = examine(make_settings(toy, cache_tokens=tokens), machine=make_machine(gpus=[gpu]))
        [text] = problems(report, stops=True)
        assert text.startswith(f"generator.cache_tokens: {tokens or 256} tokens take")
        assert text.endswith("or use a smaller generator.cache_type")

    def test_too_small_a_cache_for_the_sequence_stops_on_a_cpu(self, no_gpu, toy):
        settings = make_settings(toy, cache_tokens=512, max_seq_len=600)
        [text] = problems(examine(settings, machine=make_cpu_machine()), stops=True)
        assert "generator.cache_tokens must hold one sequence of 600 tokens, got 512" in text

    @pytest.mark.parametrize("on_gpu", [True, False])
    def test_a_cache_smaller_than_the_longest_sequence_is_noted(self, monkeypatch, toy, on_gpu):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
        machine = make_machine() if on_gpu else make_cpu_machine()
        report = examine(make_settings(toy, cache_tokens=1024), machine=machine)
        [text] = problems(report, stops=False)
        assert "holds 1024 tokens, less than the 2048 that the model can read" in text
        assert not report.stops


class TestDisk:
    def test_a_folder_that_is_not_there_yet(self, tmp_path):
        report = examine(root=str(tmp_path / "a" / "b"), machine=make_cpu_machine())
        assert report.disk is not None
        assert report.disk.free == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)
        assert not (tmp_path / "a").exists()

    def test_low_is_noted(self, tmp_path, monkeypatch):
        usage = SimpleNamespace(free=GIB // 2)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        report = examine(root=str(tmp_path), machine=make_cpu_machine())
        [text] = problems(report, stops=False)
        assert text.startswith(f"output.root: 0.50 GiB are free in {tmp_path}; make room")

    def test_a_file_in_its_place_stops(self, tmp_path):
        (tmp_path / "file").touch()
        report = examine(root=str(tmp_path / "file" / "bulk"), machine=make_cpu_machine())
        [text] = problems(report, stops=True)
        assert text.startswith("output.root: cannot write in")

    def test_a_url_is_left_alone(self):
        report = examine(root="s3://bucket/bulk", machine=make_cpu_machine())
        assert report.disk is not None
        assert (report.disk.free, report.problems) == (None, [])


class TestText:
    def test_every_problem_is_one_line_that_stops_first(self, no_gpu, folder):
        (folder / "model.safetensors").unlink()
        change_json(folder / "tokenizer_config.json", chat_template=None)
        report = examine(make_settings(folder), "s3://b", make_cpu_machine())
        lines = str(report).splitlines()
        shown = lines[lines.index("problems") + 1 :]
        assert len(shown) == len(report.problems) == 2
        assert shown[0].split("generator.model")[0].strip() == "stops a run"
        assert shown[1].strip().startswith("note")

    def test_of_a_gpu_names_what_matters(self, visible_gpu, toy):
        text = str(examine(make_settings(toy), "data/bulk", make_machine()))
        for shown in (
            "NVIDIA H200, 100.0 of 140.0 GiB free, compute capability 9.0", "580.65", "CUDA 13.0",
            "attention by bulk_pipeline", "LlamaForCausalLM", "32.0 bits a parameter",
            "1 </s> (tokenizer, config.json", "theta 10000.0 (from rope_theta), no scaling",
            "2048 tokens", "rows of 512", "q4", "data/bulk", "no problems",
        ):  # fmt: skip
            assert shown in text, shown


class TestCommand:
    @pytest.fixture
    def run(self, tmp_path, toy, monkeypatch, no_gpu):
        """Runs the command with definitions of two datasets: `own`, and `shared` by EnvVar."""
        (tmp_path / "doctor_defs.py").write_text(
            "import dagster as dg\n"
            "from bulk_pipeline import ExLlamaV2Resource, build_bulk_inference_defs\n"
            "def values(name, **changes):\n"
            "    return {'name': name, 'source': {'path': 'x'}, 'prompt': {'column': 'text'},\n"
            f"        'output': {{'root': '{tmp_path}/tables'}}}} | changes\n"
            f"own = {{'generator': {{'model': '{toy}', 'max_batch_size': 5}}}}\n"
            "defs = dg.Definitions.merge(\n"
            "    build_bulk_inference_defs(values('own', **own)),\n"
            "    build_bulk_inference_defs(values('shared', generator_resource='llm')),\n"
            "    build_bulk_inference_defs(values('without', generator_resource='none')),\n"
            "    build_bulk_inference_defs(values('bad', **own, sampling={\n"
            "        'structured_output': {'json_schema': {'type': 'strnig'}}})),\n"
            "    dg.Definitions(resources={\n"
            "        'none': dg.ResourceDefinition.hardcoded_resource(1),\n"
            "        'llm': ExLlamaV2Resource(model=dg.EnvVar('DOCTOR_MODEL'))}),\n"
            ")\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("DOCTOR_MODEL", str(toy))
        monkeypatch.delitem(sys.modules, "doctor_defs", raising=False)

        def invoke(*arguments: str) -> Result:
            return CliRunner().invoke(main, ["doctor", "-m", "doctor_defs", *arguments])

        return invoke

    @pytest.mark.parametrize("dataset", ["own", "shared"])
    def test_takes_model_and_root_from_the_dataset(self, run, toy, tmp_path, dataset):
        result = run(dataset, "--json")
        report = json.loads(result.stdout)
        assert (result.exit_code, report["stops"]) == (0, False)
        assert report["model"]["folder"] == str(toy)
        assert report["disk"]["root"] == f"{tmp_path}/tables"
        assert report["cache_tokens"] == (5 if dataset == "own" else 16) * 1024

    def test_a_schema_that_cannot_be_used_stops(self, run):
        result = run("bad")
        assert result.exit_code == 1
        assert "sampling.structured_output.json_schema: cannot be used" in result.stdout

    def test_without_a_name_it_looks_at_all_datasets_and_at_each_model_once(
        self, run, toy, tmp_path
    ):
        result = run()
        assert result.exit_code == 1
        lines = result.stdout.splitlines()
        assert lines.count("machine") == 1
        assert [line for line in lines if line.startswith("dataset")] == [
            "dataset bad, own", "dataset shared",
        ]  # fmt: skip
        assert lines.count(f"  folder         {toy}") == 2
        assert "bad: sampling.structured_output.json_schema: cannot be used" in result.stdout
        assert result.stderr.startswith("Error: without: no ExLlamaV2Resource among its resources")
        found = json.loads(run("--json").stdout)
        stops = {", ".join(each["datasets"]): each["stops"] for each in found["reports"]}
        assert stops == {"bad, own": True, "shared": False}
        assert list(found["bad"]) == ["without"]

    def test_a_variable_that_is_not_set_is_named(self, run, monkeypatch):
        monkeypatch.delenv("DOCTOR_MODEL")
        result = run("shared")
        assert result.exit_code == 1
        (line,) = result.output.splitlines()
        assert line.startswith("Error: shared: ")
        assert 'environment variable "DOCTOR_MODEL" which is not set' in line
        assert "Trace" not in line

    def test_in_no_project_it_looks_at_the_machine(self, tmp_path, monkeypatch, no_gpu):
        (tmp_path / "empty").mkdir()
        monkeypatch.chdir(tmp_path / "empty")
        result = CliRunner().invoke(main, ["doctor"])
        assert result.exit_code == 0
        assert result.stdout.startswith("machine\n")
        assert "dataset" not in result.stdout

    def test_needs_no_dataset(self, run, toy):
        result = run("--model", str(toy))
        assert result.exit_code == 0
        assert str(toy) in result.stdout
        assert "output.root" not in result.stdout

    def test_another_model_keeps_the_datasets_settings(self, run, folder):
        report = json.loads(run("own", "--model", str(folder), "--json").stdout)
        assert report["model"]["folder"] == str(folder)
        assert report["cache_tokens"] == 5 * 1024

    def test_a_problem_that_stops_a_run_is_the_exit_code(self, run, folder):
        (folder / "model.safetensors").unlink()
        result = run("--model", str(folder))
        assert result.exit_code == 1
        assert "stops a run" in result.stdout

    def test_a_note_is_not(self, run, tmp_path):
        result = run("--model", str(toy_model(tmp_path / "m", chat_template=None)))
        assert result.exit_code == 0
        assert "note" in result.stdout

    @pytest.mark.parametrize(("limit", "note"), [(1, "1 idle"), (2, "no problems")])
    def test_the_pool_is_compared_with_the_gpus(
        self, run, visible_gpu, monkeypatch, tmp_path, limit, note
    ):
        machine = make_machine(gpus=[GPU, GPU])
        monkeypatch.setattr(doctor, "examine_machine", lambda: machine)
        monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
        pools = (
            f"concurrency: {{pools: {{default_limit: {limit}}}}}\ntelemetry: {{enabled: false}}\n"
        )
        (tmp_path / "dagster.yaml").write_text(pools)
        result = run("own")
        assert note in result.stdout
        assert result.exit_code == 0

    def test_unknown_dataset_is_named(self, run):
        result = run("other")
        assert result.exit_code == 2
        assert (
            "no dataset other in doctor_defs; there are bad, own, shared, without" in result.output
        )

    def test_a_dataset_without_a_model_is_named(self, run):
        result = run("without")
        assert result.exit_code == 1
        assert "without: no ExLlamaV2Resource among its resources (io_manager, none)" in (
            result.output
        )


def test_importing_the_command_line_imports_no_model_library():
    heavy = ("torch", "exllamav2", "transformers", "tokenizers")
    code = f"import sys, bulk_pipeline.cli; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
