import gc
import logging
import sys
import weakref

import pytest
import torch

from bulk_pipeline.engine import loading
from bulk_pipeline.engine.loading import (
    fingerprint_extras,
    load_generator,
    resolve_device,
    settings_fingerprint,
)
from bulk_pipeline.engine.request import Request, SamplingParams
from bulk_pipeline.engine.stand_in import EXTENSION, stand_in_module
from bulk_pipeline.spec import GeneratorSettings
from bulk_pipeline_tests.toy import toy_model


def make_settings(folder, **changes) -> GeneratorSettings:
    return GeneratorSettings(**{"model": str(folder), "device": "cpu"} | changes)


@pytest.fixture
def visible_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


class TestDevice:
    @pytest.mark.parametrize("device", ["auto", "cpu"])
    def test_is_the_cpu_without_a_gpu(self, monkeypatch, device):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert resolve_device(make_settings("m", device=device)) == "cpu"

    def test_cuda_without_a_gpu_is_an_error(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(ValueError, match=r"generator.device: cuda needs a GPU .*device: cpu"):
            resolve_device(make_settings("m", device="cuda"))

    @pytest.mark.parametrize("device", ["auto", "cuda"])
    def test_a_visible_gpu_never_falls_back_to_the_cpu(self, visible_gpu, toy, device):
        assert resolve_device(make_settings(toy, device=device)) == "cuda"
        with pytest.raises(RuntimeError, match=r"generator.device: .*set generator.device: cpu"):
            load_generator(make_settings(toy, device=device))

    def test_a_gpu_after_the_stand_in_is_an_error(self, visible_gpu, toy, monkeypatch):
        monkeypatch.setitem(sys.modules, EXTENSION, stand_in_module())
        with pytest.raises(RuntimeError, match="process that has loaded a model on the CPU"):
            load_generator(make_settings(toy, device="cuda"))

    def test_a_missing_module_and_compiler_are_named(self, visible_gpu, toy, monkeypatch):
        monkeypatch.delitem(sys.modules, EXTENSION, raising=False)
        monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", None)
        with pytest.raises(RuntimeError, match=r"neither it nor CUDA's compiler \(nvcc\)"):
            load_generator(make_settings(toy, device="cuda"))

    def test_the_cpu_can_be_chosen_beside_a_gpu(self, visible_gpu):
        assert resolve_device(make_settings("m", device="cpu")) == "cpu"


class TestCache:
    def test_is_rounded_down_to_pages(self, toy):
        generator = load_generator(make_settings(toy, cache_tokens=1023))
        assert generator.max_seq_len == 768

    def test_holds_the_longest_sequence_by_default(self, toy, caplog):
        with caplog.at_level(logging.INFO):
            generator = load_generator(make_settings(toy, max_batch_size=1))
        assert generator.max_seq_len == 2048
        assert "cache of 2048 tokens, sequences of at most 2048, batches of 1" in caplog.text

    def test_grows_with_the_batch_by_default(self, toy, caplog):
        with caplog.at_level(logging.INFO):
            load_generator(make_settings(toy, max_batch_size=5))
        assert "cache of 5120 tokens" in caplog.text

    def test_takes_no_more_than_memory_allows_and_says_so(self, toy, monkeypatch, caplog):
        _leave_memory(monkeypatch, num_tokens=600)
        generator = load_generator(make_settings(toy))
        assert generator.max_seq_len == 512
        assert "cache of 512 tokens, less than the 2048 that the model can read" in caplog.text

    def test_too_small_for_the_sequence_asked_for_is_an_error(self, toy):
        settings = make_settings(toy, cache_tokens=1023, max_seq_len=800)
        with pytest.raises(
            ValueError,
            match=r"generator.cache_tokens must hold one sequence of 800 tokens, got 768; raise",
        ):
            load_generator(settings)

    def test_too_little_memory_for_the_sequence_asked_for_is_an_error(self, toy, monkeypatch):
        _leave_memory(monkeypatch, num_tokens=600)
        with pytest.raises(ValueError, match=r"auto must hold one sequence of 1000 .* got 512"):
            load_generator(make_settings(toy, max_seq_len=1000))

    def test_too_little_memory_for_a_page_is_an_error(self, toy, monkeypatch):
        _leave_memory(monkeypatch, num_tokens=100)
        with pytest.raises(ValueError, match="got 0; set generator.cache_tokens"):
            load_generator(make_settings(toy))


def _leave_memory(monkeypatch, num_tokens: int) -> None:
    bytes_per_token = 2 * 2 * 2 * 16 * 4  # of the toy in float32
    free = int(num_tokens * bytes_per_token / loading.AUTO_MEMORY_SHARE)
    memory = type("Memory", (), {"available": free})
    monkeypatch.setattr(loading.psutil, "virtual_memory", lambda: memory)


class TestModel:
    def test_without_weights_is_an_error(self, tmp_path):
        folder = toy_model(tmp_path / "m")
        (folder / "model.safetensors").unlink()
        with pytest.raises(ValueError, match="generator.model: no weights in"):
            load_generator(make_settings(folder))

    def test_max_seq_len_over_the_models_is_an_error(self, toy):
        with pytest.raises(ValueError, match=r"generator.max_seq_len must be at most 2048"):
            load_generator(make_settings(toy, max_seq_len=2049))

    def test_a_draft_with_a_shorter_memory_is_an_error(self, toy, tmp_path):
        draft = toy_model(tmp_path / "draft", max_position_embeddings=512)
        with pytest.raises(ValueError, match=r"generator.draft_model: draft reads at most 512"):
            load_generator(make_settings(toy, draft_model=str(draft)))

    def test_is_freed_when_closed(self, toy):
        generator = load_generator(make_settings(toy))
        assert len(list(generator.run([Request(0, [5], SamplingParams(max_new_tokens=2))]))) == 1
        weights = weakref.ref(generator._models[0].model)
        generator.close()
        gc.collect()
        assert weights() is None


class TestFingerprint:
    def test_depends_on_arithmetic_and_not_on_batch_or_cache_size(self, toy):
        base = settings_fingerprint(make_settings(toy))
        other = make_settings(toy, max_batch_size=3, cache_tokens=512, max_seq_len=100)
        assert settings_fingerprint(other) == base
        assert settings_fingerprint(make_settings(toy, dtype="bfloat16")) != base

    def test_on_a_gpu_the_cache_type_counts(self, visible_gpu):
        q4 = fingerprint_extras(make_settings("m", device="auto", cache_type="q4"))
        q8 = fingerprint_extras(make_settings("m", device="auto", cache_type="q8"))
        assert q4 != q8
        assert q4["dtype"] == "float16"
