"""LoRA adapters on a GPU: exllamav2's way, the resident float16 weights, and the CPU's answers.

The real quantised model is the folder that the variable SMOLLM2_EXL2 names.
"""

from pathlib import Path

import pytest
import torch

from bulk_pipeline.engine.loading import load_generator
from bulk_pipeline.engine.request import Request, SamplingParams
from bulk_pipeline.spec import GeneratorSettings
from bulk_pipeline_tests.adapters import make_adapter
from bulk_pipeline_tests.engine.test_generator import make_ids
from bulk_pipeline_tests.toy import toy_model

pytestmark = pytest.mark.gpu

SCORED = SamplingParams(temperature=0.0, max_new_tokens=0)
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24)
HELD = ["quantized", "float16"]  # exllamav2's own modules, and `dense`
NAMES = [None, "a", "b"]


@pytest.fixture(scope="module")
def toy16(tmp_path_factory) -> Path:
    return toy_model(tmp_path_factory.mktemp("toy16") / "toy", "float16")


def adapters_of(model: Path, folder: Path, strength: float = 0.5) -> dict[str, str]:
    return {
        name: str(make_adapter(folder / name, model, seed=i, rank=8 * (i + 1), strength=strength))
        for i, name in enumerate("ab")
    }


def load(model: Path, adapters: dict[str, str], **changes):
    settings = {"model": str(model), "device": "cuda", "cache_tokens": 8192, "max_batch_size": 16}
    return load_generator(GeneratorSettings(adapters=adapters, **settings | changes))


def run(generator, requests):
    found = {completion.request_id: completion for completion in generator.run(requests)}
    assert len(found) == len(requests)
    return found


def scores(generator, ids) -> dict[str | None, torch.Tensor]:
    """The log-probabilities of a prompt with each adapter."""
    requests = [Request(name, ids, SCORED, True, name) for name in NAMES]
    return {name: torch.tensor(c.prompt_logprobs) for name, c in run(generator, requests).items()}


def mean_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """As a part of the log-probabilities themselves."""
    return float((found - expected).abs().mean() / expected.abs().mean())


@pytest.mark.parametrize("weights", HELD)
def test_scores_are_those_of_the_cpu(toy16, tmp_path, weights):
    adapters, ids = adapters_of(toy16, tmp_path), make_ids(300)
    on_gpu = load(toy16, adapters, weights=weights)
    try:
        found = scores(on_gpu, ids)
    finally:
        on_gpu.close()
    expected = scores(load(toy16, adapters, device="cpu"), ids)
    for name in NAMES:
        assert mean_difference(found[name], expected[name]) < 0.02
    assert mean_difference(expected["a"], expected["b"]) > 0.2


def test_merging_agrees_with_exllamav2(exl2, tmp_path):
    adapters, found = adapters_of(exl2, tmp_path, strength=0.2), {}
    ids = [int(i) for i in torch.arange(500, 700)]
    for weights in HELD:
        generator = load(exl2, adapters, weights=weights)
        try:
            assert generator.provenance["weights"] == weights
            found[weights] = scores(generator, ids)
        finally:
            generator.close()
    for name in NAMES:
        difference = mean_difference(found["quantized"][name], found["float16"][name])
        assert difference < 0.02, (name, difference)
    # what the adapter changes stands out from how weights are held
    assert mean_difference(found["float16"]["a"], found["float16"][None]) > 0.04


@pytest.mark.parametrize("weights", HELD)
def test_mixed_rows_get_what_they_get_alone(toy16, tmp_path, weights):
    adapters = adapters_of(toy16, tmp_path)
    rows = [
        Request(i, make_ids(280 + i % 2, i % 4), GREEDY, adapter=NAMES[i % 3]) for i in range(36)
    ]
    generator = load(toy16, adapters, weights=weights)
    try:
        mixed = run(generator, rows)
        same = 0
        for name in NAMES:
            alone = run(generator, [row for row in rows if row.adapter == name])
            same += sum(mixed[i].token_ids == c.token_ids for i, c in alone.items())
        assert same >= 34  # the batch differs, and so may a last digit
        assert len({c.token_ids for c in mixed.values()}) == 12  # four prompts, each three ways
    finally:
        generator.close()


def test_the_weights_are_restored_bit_by_bit(exl2, tmp_path):
    adapters = adapters_of(exl2, tmp_path)
    generator = load(exl2, adapters, weights="float16")
    try:
        model = generator._loop.model
        before = {name: matrix.clone() for name, matrix in model._matrices.items()}
        rows = [Request(i, [5, 6, 7 + i], GREEDY) for i in range(8)]  # records a graph
        expected = run(generator, rows)
        run(generator, [Request(i, [5, 6, 7], GREEDY, adapter=n) for i, n in enumerate("ab")])
        changed = sum(not torch.equal(m, before[name]) for name, m in model._matrices.items())
        assert changed == len(before)
        found = run(generator, rows)
        assert all(torch.equal(m, before[name]) for name, m in model._matrices.items())
        assert [found[i].token_ids for i in range(8)] == [expected[i].token_ids for i in range(8)]
    finally:
        generator.close()
