"""Penalties, biases and bans through the whole generator, against transformers' generate."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from bulk_pipeline.engine.request import Request, SamplingParams
from bulk_pipeline_tests.engine.test_generator import make_generator, make_ids

PROMPTS = [make_ids(5 + 3 * i, i) for i in range(6)]
SETTINGS = {
    "repetition": ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    "bias": (
        {"logit_bias": ((40, 3.0), (41, -3.0))},
        {"sequence_bias": [[[40], 3.0], [[41], -3.0]]},
    ),
    "bans": (
        {"banned_token_ids": tuple(range(60, 400))},
        {"bad_words_ids": [[token] for token in range(60, 400)]},
    ),
}


@pytest.fixture(scope="module")
def generator(toy_float64):
    return make_generator(toy_float64)


@pytest.fixture(scope="module")
def model(toy_float64):
    return AutoModelForCausalLM.from_pretrained(toy_float64, dtype=torch.float64)


def completed(generator, settings, prompts=PROMPTS):
    params = SamplingParams(temperature=0.0, max_new_tokens=16, **settings)
    requests = [Request(i, ids, params) for i, ids in enumerate(prompts)]
    found = {c.request_id: c.token_ids for c in generator.run(requests)}
    return [found[i] for i in range(len(prompts))]


@pytest.mark.parametrize("name", SETTINGS)
def test_greedy_as_transformers(generator, model, name):
    ours, theirs = SETTINGS[name]
    found = completed(generator, ours)
    assert found != completed(generator, {})
    for prompt, ids in zip(PROMPTS, found, strict=True):
        expected = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=16, eos_token_id=None, **theirs
        )
        assert list(ids) == expected[0, len(prompt) :].tolist()


def test_frequency_and_presence_make_an_answer_richer(generator):
    plain = completed(generator, {})
    for settings in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}):
        richer = completed(generator, settings)
        assert sum(len(set(ids)) for ids in richer) > sum(len(set(ids)) for ids in plain)


def test_rows_with_and_without_share_a_batch(generator):
    """Each row's answer is the one it has alone."""
    several = [
        SamplingParams(temperature=0.0, max_new_tokens=9),
        SamplingParams(temperature=0.0, max_new_tokens=14, repetition_penalty=1.5),
        SamplingParams(max_new_tokens=11, seed=3, frequency_penalty=1.0, top_p=0.9),
        SamplingParams(max_new_tokens=12, seed=4, banned_token_ids=tuple(range(0, 500, 2))),
    ]
    requests = [Request(i, PROMPTS[i % 6], several[i % 4]) for i in range(12)]
    together = {c.request_id: c.token_ids for c in generator.run(requests)}
    for request in requests:
        [alone] = generator.run([request])
        assert alone.token_ids == together[request.request_id]
