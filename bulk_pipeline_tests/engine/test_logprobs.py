import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from bulk_pipeline.engine import logprobs
from bulk_pipeline.engine.request import Request, Status, StructuredOutput
from bulk_pipeline_tests.engine.test_generator import (
    make_generator,
    make_ids,
    make_params,
    mixed_requests,
    run_one,
)


@pytest.fixture(scope="module")
def generator(toy_float64):
    return make_generator(toy_float64)


@pytest.fixture(scope="module")
def expected(toy_float64):
    """Log-probabilities [tokens, vocabulary] by transformers: of each token's successor."""
    model = AutoModelForCausalLM.from_pretrained(toy_float64, dtype=torch.float64)

    def log_softmax(ids):
        with torch.inference_mode():
            return model(torch.tensor([list(ids)])).logits[0].log_softmax(-1)

    return log_softmax


def of_answer(table, prompt, ids) -> list[float]:
    start = len(prompt) - 1
    return [float(table[start + i, token]) for i, token in enumerate(ids)]


def overflow_behind(generator, token_id):
    """Let the logits of rows with this token be no numbers."""
    [model] = generator._models
    forward = model.forward_chunk

    def overflowing(input_ids, **kwargs):
        output = forward(input_ids=input_ids, **kwargs)
        if "logits" in output:
            output["logits"] = output["logits"].clone()
            output["logits"][(input_ids == token_id).any(dim=1)] = float("nan")
        return output

    model.forward_chunk = overflowing


class TestOfTheAnswer:
    def test_are_the_models_own(self, generator, expected):
        prompt = make_ids(30)
        found = run_one(generator, prompt, logprobs=3)
        table = expected([*prompt, *found.token_ids])
        assert found.logprobs == pytest.approx(of_answer(table, prompt, found.token_ids))
        assert found.cumulative_logprob == pytest.approx(sum(found.logprobs))
        for place, best in enumerate(found.top_logprobs):
            values, ids = table[len(prompt) - 1 + place].topk(3)
            assert [token for token, _ in best] == ids.tolist()
            assert [value for _, value in best] == pytest.approx(values.tolist())

    def test_are_those_before_temperature_filters_penalties_and_bans(self, generator, expected):
        prompt = make_ids(30)
        found = run_one(
            generator,
            prompt,
            temperature=2.0,
            top_k=5,
            top_p=0.9,
            seed=8,
            repetition_penalty=1.5,
            logit_bias=((77, 3.0),),
            banned_token_ids=(9, 10, 11),
            stop_token_ids=(3,),
            min_new_tokens=10,
            logprobs=1,
        )
        table = expected([*prompt, *found.token_ids])
        assert found.logprobs == pytest.approx(of_answer(table, prompt, found.token_ids))
        best = [ids[0][0] for ids in found.top_logprobs]
        start = len(prompt) - 1
        assert best == table[start : start + len(best)].argmax(-1).tolist()

    def test_change_no_answer(self, generator):
        params = {"temperature": 1.0, "seed": 5, "top_p": 0.8}
        plain = run_one(generator, make_ids(9), **params)
        found = run_one(generator, make_ids(9), **params, logprobs=20)
        assert found.token_ids == plain.token_ids
        assert len(found.logprobs) == len(found.token_ids)
        assert plain.logprobs is plain.top_logprobs is plain.cumulative_logprob is None

    def test_of_the_chosen_token_alone(self, generator):
        found = run_one(generator, make_ids(9), logprobs=0)
        assert set(found.top_logprobs) == {()}
        assert len(found.logprobs) == len(found.top_logprobs) == 24

    @pytest.mark.parametrize("number", [-1, 21])
    def test_of_too_many_are_refused(self, generator, number):
        found = run_one(generator, [5], logprobs=number)
        assert found.status == Status.INVALID
        assert re.search(f"sampling.logprobs must be 0 to 20, got {number}", found.error)

    @pytest.mark.parametrize("steps_ahead", [0, 1])
    def test_of_rows_that_give_their_pages_away(self, toy_float64, steps_ahead):
        """All rows ask for another number, one for none."""
        requests = [
            Request(
                i,
                make_ids(200 + 17 * i, i),
                make_params(
                    temperature=1.0, seed=i, max_new_tokens=400, logprobs=i - 1 if i else None
                ),
            )
            for i in range(6)
        ]
        alone = {c.request_id: c for c in make_generator(toy_float64).run(requests)}
        small = make_generator(toy_float64, max_batch_size=6, cache_tokens=1280)
        small._loop._ahead = steps_ahead
        found = {c.request_id: c for c in small.run(requests)}
        assert small.stats.preemptions > 0
        assert found[0].logprobs is None
        for i in range(1, 6):
            assert found[i].token_ids == alone[i].token_ids
            assert found[i].logprobs == pytest.approx(alone[i].logprobs)
            assert {len(best) for best in found[i].top_logprobs} == {i - 1}
            ids = [[token for token, _ in best] for best in found[i].top_logprobs]
            assert ids == [[token for token, _ in best] for best in alone[i].top_logprobs]

    def test_are_the_same_where_slices_hold_a_row(self, toy_float64, monkeypatch):
        requests = [Request(i, make_ids(9 + i, i), make_params(logprobs=i % 3)) for i in range(8)]
        whole = {c.request_id: c for c in make_generator(toy_float64).run(requests)}
        monkeypatch.setattr(logprobs, "SLICE_BYTES", 1)
        for completion in make_generator(toy_float64).run(requests):
            assert completion.logprobs == pytest.approx(whole[completion.request_id].logprobs)
            assert len(completion.top_logprobs[0]) == completion.request_id % 3

    def test_half_precision_is_widened(self):
        logits = torch.tensor([[1.0, 2.0, 3.0]]).half()
        [found] = logprobs.log_probabilities(logits, torch.tensor([0]))
        assert found.dtype == torch.float32
        assert float(found) == pytest.approx(float(logits.double().log_softmax(-1)[0, 0]), rel=1e-6)


def score(generator, ids, **changes):
    params = make_params(**{"max_new_tokens": 0} | changes)
    [completion] = generator.run([Request("scored", ids, params, prompt_logprobs=True)])
    return completion


class TestOfThePrompt:
    @pytest.mark.parametrize("length", [2, 3, 256, 257, 258, 700, 1100])
    def test_are_the_models_own(self, generator, expected, length):
        ids = make_ids(length, length)
        found = score(generator, ids)
        table = expected(ids)
        wanted = [float(table[i, token]) for i, token in enumerate(ids[1:])]
        assert found.prompt_logprobs == pytest.approx(wanted)
        assert (found.status, found.token_ids, found.text) == (Status.LENGTH, (), "")
        assert found.prompt_tokens == length
        assert found.cached_tokens == 0

    def test_of_rows_that_are_padded_to_one_length(self, toy_float64):
        """As on a GPU: short rows of similar length go through the model together."""
        generator, padding = (make_generator(toy_float64) for _ in range(2))
        padding._loop.model._max_rows = 8
        params = make_params(max_new_tokens=0)
        lengths = [30, 29, 28, 30, 2, 1, 300, 299, 40]
        requests = [
            Request(i, make_ids(n, i), params, prompt_logprobs=True) for i, n in enumerate(lengths)
        ]
        alone = {c.request_id: c for c in generator.run(requests)}
        for completion in padding.run(requests):
            expected = alone[completion.request_id].prompt_logprobs
            assert completion.prompt_logprobs == pytest.approx(expected)
            assert len(expected) == lengths[completion.request_id] - 1

    def test_of_one_token(self, generator):
        found = score(generator, [5])
        assert (found.status, found.prompt_logprobs) == (Status.LENGTH, ())

    def test_are_computed_also_where_the_prompt_is_cached(self, toy_float64, expected):
        generator = make_generator(toy_float64)
        ids = make_ids(600)
        run_one(generator, ids)
        assert run_one(generator, ids).cached_tokens > 500
        again = score(generator, ids)
        table = expected(ids)
        wanted = [float(table[i, token]) for i, token in enumerate(ids[1:])]
        assert again.prompt_logprobs == pytest.approx(wanted)
        # and what was scored can be reused
        assert run_one(generator, [*ids, 7]).cached_tokens == 600

    def test_with_an_answer(self, generator):
        ids = make_ids(300)
        plain = run_one(generator, ids, logprobs=0)
        found = score(generator, ids, max_new_tokens=24, logprobs=0)
        assert found.token_ids == plain.token_ids
        assert found.logprobs == pytest.approx(plain.logprobs)
        assert len(found.prompt_logprobs) == 299
        assert plain.prompt_logprobs is None

    def test_choices_by_the_sum_of_their_tokens(self, generator, expected):
        prompt, choices = make_ids(20), [[5, 6], [7, 8, 9], [10]]
        sums = [
            sum(score(generator, prompt + choice).prompt_logprobs[len(prompt) - 1 :])
            for choice in choices
        ]
        for choice, found in zip(choices, sums, strict=True):
            assert found == pytest.approx(sum(of_answer(expected(prompt + choice), prompt, choice)))

    @pytest.mark.parametrize("steps_ahead", [0, 1])
    def test_among_others_each_gets_what_it_gets_alone(self, toy_float64, steps_ahead):
        requests = [
            replace(request, prompt_logprobs=i % 2 == 0)
            for i, request in enumerate(mixed_requests(7, 24))
        ]
        requests = [
            replace(r, sampling=replace(r.sampling, max_new_tokens=0, min_new_tokens=0))
            if i % 4 == 0
            else r
            for i, r in enumerate(requests)
        ]
        single, alone = make_generator(toy_float64, max_batch_size=1), {}
        for request in requests:
            single._loop.forget()
            [alone[request.request_id]] = single.run([request])
        generator = make_generator(toy_float64, max_batch_size=7, cache_tokens=1536)
        generator._loop._ahead = steps_ahead
        found = {c.request_id: c for c in generator.run(requests)}
        assert found.keys() == alone.keys()
        for i, completion in found.items():
            assert completion.token_ids == alone[i].token_ids
            assert (completion.prompt_logprobs is None) == (i % 2 == 1)
            if i % 2 == 0:
                assert completion.prompt_logprobs == pytest.approx(alone[i].prompt_logprobs)
                assert completion.cached_tokens == 0

    @pytest.mark.parametrize("steps_ahead", [0, 1])
    def test_of_rows_that_give_their_pages_away(self, toy_float64, steps_ahead):
        """While they are read, and while they generate."""
        requests = [
            Request(
                i, make_ids(240 + 50 * i, i), make_params(max_new_tokens=400), prompt_logprobs=True
            )
            for i in range(6)
        ]
        alone = {c.request_id: c for c in make_generator(toy_float64).run(requests)}
        small = make_generator(toy_float64, max_batch_size=6, cache_tokens=1280)
        small._loop._ahead = steps_ahead
        found = {c.request_id: c for c in small.run(requests)}
        assert small.stats.preemptions > 0
        for i, completion in found.items():
            assert completion.token_ids == alone[i].token_ids
            assert completion.prompt_logprobs == pytest.approx(alone[i].prompt_logprobs)

    def test_others_share_the_pages_of_a_row_in_the_same_pass(self, toy_float64):
        prompt = make_ids(300)
        scored = Request("scored", prompt, make_params(max_new_tokens=0), prompt_logprobs=True)
        sharing = Request("sharing", prompt[:256] + make_ids(30, 1), make_params())
        generator = make_generator(toy_float64, max_chunk_size=1024)
        found = {c.request_id: c for c in generator.run([scored, sharing])}
        assert found["sharing"].cached_tokens == 256
        alone = run_one(make_generator(toy_float64), sharing.input_ids)
        assert found["sharing"].token_ids == alone.token_ids

    @pytest.mark.parametrize("limit", range(3, 9))
    def test_are_read_before_a_row_that_waits_for_them_gives_its_pages_away(
        self, toy_float64, limit
    ):
        """Two rows begin their next page in the step that reads a third's prompt to its end."""
        growing = [
            Request(i, make_ids(762, i), make_params(max_new_tokens=n))
            for i, n in enumerate([20, 20, limit])
        ]
        prompt = make_ids(700, 9)
        scored = Request("scored", prompt, make_params(max_new_tokens=0), prompt_logprobs=True)
        generator = make_generator(
            toy_float64, max_batch_size=3, cache_tokens=10 * 256, max_chunk_size=4096
        )
        generator._loop._ahead = 1
        found = {c.request_id: c for c in generator.run([*growing, scored])}
        assert len(found) == 4
        assert len(found["scored"].prompt_logprobs) == 699
        assert all(found["scored"].prompt_logprobs)

    def test_without_generation_need_the_question(self, generator):
        found = run_one(generator, [5], max_new_tokens=0)
        assert found.status == Status.INVALID

    def test_that_are_not_numbers_are_an_error_of_that_row_alone(self, toy_float64):
        generator = make_generator(toy_float64)
        overflow_behind(generator, 77)
        params = make_params(max_new_tokens=0)
        requests = [Request(i, [5, i, 9], params, prompt_logprobs=True) for i in (76, 77, 78)]
        found = {c.request_id: c for c in generator.run(requests)}
        assert found[77].status == Status.ERROR
        assert "not numbers" in found[77].error
        assert np.isfinite(found[76].prompt_logprobs + found[78].prompt_logprobs).all()

    @pytest.mark.parametrize(
        "changes",
        [
            {"structured": StructuredOutput("choice", '["robot", "poem"]')},
            {"banned_strings": ("a", "e", "i", "o", "u")},
        ],
        ids=["structure", "banned strings"],
    )
    def test_that_are_not_numbers_are_an_error_whatever_the_answer_obeys(
        self, toy_float64, changes
    ):
        generator = make_generator(toy_float64)
        params = make_params(max_new_tokens=24, **changes)
        overflow_behind(generator, 77)
        request = Request("one", [5, 77, 9], params, prompt_logprobs=True)
        [completion] = generator.run([request])
        assert completion.status == Status.ERROR
        assert "not numbers" in completion.error

    def test_count_as_read(self, toy_float64):
        generator = make_generator(toy_float64)
        score(generator, make_ids(600))
        score(generator, make_ids(600))
        assert generator.stats.prefill_tokens == 2 * 599
        assert generator.stats.steps == generator.stats.completion_tokens == 0
        assert generator._loop.pages.num_free == generator._loop.pages.num_pages - 1
