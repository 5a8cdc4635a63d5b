import itertools
import random
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from bulk_pipeline.engine.errors import GenerationError
from bulk_pipeline.engine.loading import load_generator
from bulk_pipeline.engine.request import Completion, Request, SamplingParams, Status
from bulk_pipeline.spec import GeneratorSettings
from bulk_pipeline_tests.toy import VOCAB_SIZE, toy_model

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24)


def make_generator(folder: Path, **changes):
    settings = {
        "model": str(folder),
        "device": "cpu",
        "dtype": "float64",
        "max_batch_size": 4,
        "cache_tokens": 2048,
        "max_chunk_size": 256,
    }
    return load_generator(GeneratorSettings(**settings | changes))


def make_params(**changes) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_new_tokens": 24} | changes)


def make_ids(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, VOCAB_SIZE) for _ in range(length)]


def run_one(generator, ids, **changes) -> Completion:
    [completion] = generator.run([Request("one", ids, make_params(**changes))])
    return completion


@pytest.fixture(scope="module")
def generator(toy_float64):
    return make_generator(toy_float64)


@pytest.fixture(scope="module")
def decode(toy_float64):
    tokenizer = AutoTokenizer.from_pretrained(toy_float64)
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


class TestEveryRequestIsAnswered:
    def test_in_any_order_and_once(self, generator):
        requests = [
            Request(i, make_ids(3 + i, i), make_params(max_new_tokens=1 + i % 7)) for i in range(30)
        ]
        completions = list(generator.run(iter(requests)))
        assert sorted(c.request_id for c in completions) == list(range(30))
        for completion in completions:
            assert completion.prompt_tokens == 3 + completion.request_id
            assert len(completion.token_ids) == 1 + completion.request_id % 7
            assert completion.error is None

    def test_without_requests(self, generator):
        assert list(generator.run([])) == []

    @pytest.mark.parametrize(
        ("ids", "changes", "status", "error"),
        [
            ([], {}, Status.EMPTY, "has no tokens"),
            ([5, VOCAB_SIZE], {}, Status.INVALID, "must be below 512, got 512"),
            ([-1, 5], {}, Status.INVALID, "must be below 512, got -1"),
            ([5], {"max_new_tokens": 0}, Status.INVALID, "at least 1, got 0"),
            ([5] * 2000, {"max_new_tokens": 49}, Status.TOO_LONG, r"2000 .*49\) exceed 2048"),
        ],
        ids=["empty", "id too large", "negative id", "no tokens wanted", "too long"],
    )
    def test_also_where_it_cannot_run(self, generator, ids, changes, status, error):
        fine = Request("fine", [5, 6], GREEDY)
        bad = Request("bad", ids, make_params(**changes))
        completions = {c.request_id: c for c in generator.run([bad, fine, bad])}
        assert completions["fine"].status == Status.LENGTH
        assert completions["bad"].status == status
        assert completions["bad"].token_ids == ()
        assert re.search(error, completions["bad"].error)

    def test_up_to_the_last_token_that_fits(self, generator):
        completion = run_one(generator, make_ids(2000), max_new_tokens=48)
        assert (completion.status, len(completion.token_ids)) == (Status.LENGTH, 48)

    def test_where_the_cache_is_smaller_than_the_model(self, toy_float64):
        small = make_generator(toy_float64, cache_tokens=256 + 255)
        assert small.max_seq_len == 256
        assert run_one(small, make_ids(200), max_new_tokens=56).status == Status.LENGTH
        assert run_one(small, make_ids(200), max_new_tokens=57).status == Status.TOO_LONG

    def test_with_numpy_ids(self, generator):
        expected = run_one(generator, [7, 8, 9]).token_ids
        numpy_ids = torch.tensor([7, 8, 9]).numpy()
        assert run_one(generator, numpy_ids).token_ids == expected


class TestStream:
    def test_reads_requests_only_as_they_are_needed(self, generator):
        read = []

        def requests() -> Iterator[Request]:
            for i in range(1000):
                read.append(i)
                yield Request(i, [5, 6, 7 + i % 9], make_params(max_new_tokens=3))

        run = generator.run(requests())
        next(run)
        assert len(read) <= 2 * 4
        run.close()

    def test_can_be_closed_early_and_used_again(self, generator):
        expected = run_one(generator, make_ids(300)).token_ids
        run = generator.run(Request(i, make_ids(300, i), GREEDY) for i in range(50))
        next(run)
        run.close()
        assert run_one(generator, make_ids(300)).token_ids == expected

    def test_refuses_a_second_run_beside_the_first(self, generator):
        run = generator.run([Request(0, [5], GREEDY), Request(1, [6], GREEDY)])
        next(run)
        with pytest.raises(RuntimeError, match="runs already"):
            next(generator.run([]))
        run.close()

    def test_calls_back_after_each_step(self, generator):
        steps = []
        list(
            generator.run(
                [Request(0, [5], make_params(max_new_tokens=9))], on_step=lambda: steps.append(1)
            )
        )
        assert len(steps) == 9

    def test_an_error_in_the_model_comes_after_what_was_finished(self, toy_float64):
        generator = make_generator(toy_float64, max_batch_size=3)
        expected = run_one(generator, [5, 6], max_new_tokens=8).token_ids
        [model] = generator._models
        forward, left = model.forward_chunk, [6]

        def failing(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                raise MemoryError("no memory left")
            return forward(*args, **kwargs)

        model.forward_chunk = failing
        lengths = {"short": 2, "middle": 4, "long": 8}
        requests = [Request(k, [5], make_params(max_new_tokens=n)) for k, n in lengths.items()]
        finished = []
        with pytest.raises(MemoryError, match="no memory left"):
            finished.extend(c for c in generator.run(requests) if finished.append(c) is None)
        assert {c.request_id for c in finished} == {"short", "middle"}
        model.forward_chunk = forward
        assert run_one(generator, [5, 6], max_new_tokens=8).token_ids == expected

    @pytest.mark.parametrize("drafts", [False, True], ids=["alone", "with a draft model"])
    def test_logits_that_are_not_numbers_are_an_error_of_that_row_alone(self, toy_float64, drafts):
        draft = {"draft_model": str(toy_float64)} if drafts else {}
        generator = make_generator(toy_float64, **draft)
        expected = run_one(generator, [5, 6]).token_ids
        model = generator._models[0]
        forward = model.forward_chunk

        def overflowing(input_ids, **kwargs):
            output = forward(input_ids=input_ids, **kwargs)
            if "logits" in output:
                output["logits"] = output["logits"].clone()
                output["logits"][(input_ids == expected[3]).any(dim=1)] = float("nan")
            return output

        model.forward_chunk = overflowing
        requests = [
            Request("bad", [5, 6], GREEDY),
            Request("good", [7], make_params(max_new_tokens=2)),
        ]
        found = {c.request_id: c for c in generator.run(requests)}
        assert found["bad"].status == Status.ERROR
        assert "not numbers" in found["bad"].error
        assert found["bad"].token_ids == ()
        assert found["good"].status == Status.LENGTH

    def test_what_finished_in_a_failing_step_is_not_lost(self, toy_float64, monkeypatch):
        generator = make_generator(toy_float64, draft_model=str(toy_float64))

        def fail():
            raise RuntimeError("defragmentation failed")

        monkeypatch.setattr(generator._loop.generator, "defrag_cache", fail)
        run = generator.run([Request("last", [5], make_params(max_new_tokens=2))])
        assert next(run).request_id == "last"
        with pytest.raises(RuntimeError, match="defragmentation failed"):
            next(run)

    def test_an_error_in_the_model_names_its_kind_in_one_line(self, toy_float64):
        generator = make_generator(toy_float64)
        forward = generator._models[0].forward_chunk

        def failing(*args, **kwargs):
            raise AssertionError("pages are wrong\nand much more")

        generator._models[0].forward_chunk = failing
        with pytest.raises(GenerationError, match="generation: AssertionError: pages are wrong$"):
            run_one(generator, [5, 6])
        generator._models[0].forward_chunk = forward
        assert run_one(generator, [5, 6]).status in (Status.STOP, Status.LENGTH)

    def test_a_gpu_that_is_lost_is_not_asked_again(self, toy_float64, monkeypatch):
        generator = make_generator(toy_float64)
        monkeypatch.setattr(generator._models[0], "forward_chunk", None)
        monkeypatch.setattr("bulk_pipeline.engine.generator.is_gpu_lost", lambda: True)
        with pytest.raises(GenerationError, match="TypeError"):
            run_one(generator, [5, 6])
        read = iter([Request(0, [5], GREEDY)])
        with pytest.raises(RuntimeError, match="the GPU failed earlier in this process") as error:
            next(generator.run(read))
        assert not isinstance(error.value, GenerationError)
        assert len(list(read)) == 1, "no request is taken for the reason"

    @pytest.mark.parametrize("kind", [TypeError, type("PanicException", (BaseException,), {})])
    @pytest.mark.parametrize("where", ["prepared", "decoded"])
    def test_an_error_of_one_request_is_its_own(self, toy_float64, monkeypatch, kind, where):
        generator = make_generator(toy_float64)
        expected = run_one(generator, [5, 6]).token_ids
        place = {"prepared": generator._grammars, "decoded": generator._decoder}[where]
        name = {"prepared": "start", "decoded": "decode"}[where]
        original, left = getattr(place, name), [1]

        def failing(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                raise kind("nobody expected this\nnor that")
            return original(*args, **kwargs)

        monkeypatch.setattr(place, name, failing)
        requests = [Request(i, [5, 6], GREEDY) for i in range(3)]
        found = sorted(generator.run(requests), key=lambda each: each.status != Status.ERROR)
        assert [each.status for each in found].count(Status.ERROR) == 1
        said = f"{where}: {kind.__name__}: nobody expected this"
        assert found[0].error is not None
        assert found[0].error.endswith(said)
        assert (found[0].text, found[0].token_ids, found[0].prompt_tokens) == ("", (), 2)
        assert [each.token_ids for each in found[1:]] == [expected, expected]

    def test_a_request_that_exllamav2_refuses_does_not_stop_others(self, toy_float64):
        generator = make_generator(toy_float64, draft_model=str(toy_float64))
        enqueue = generator._loop.generator.enqueue

        def failing(job):
            assert job.request.request_id != "bad", "no room"
            enqueue(job)

        generator._loop.generator.enqueue = failing
        requests = [Request(name, [5, 6], GREEDY) for name in ("good", "bad", "better")]
        found = {each.request_id: each for each in generator.run(requests)}
        assert found["bad"].status == Status.INVALID
        assert "prepared: AssertionError: no room" in found["bad"].error
        assert found["good"].token_ids == found["better"].token_ids != ()

    def test_an_interrupt_is_none(self, toy_float64, monkeypatch):
        generator = make_generator(toy_float64)

        def interrupted(*args, **kwargs):
            raise KeyboardInterrupt

        monkeypatch.setattr(generator._grammars, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_one(generator, [5, 6])

    def test_it_says_which_libraries_made_an_answer(self, generator):
        for name in ("torch", "exllamav2", "transformers", "llguidance"):
            assert generator.provenance[name] == version(name)

    def test_cannot_be_used_once_closed(self, toy_float64):
        generator = make_generator(toy_float64)
        generator.close()
        with pytest.raises(RuntimeError, match="was closed"):
            next(generator.run([Request(0, [5], GREEDY)]))


class TestEnd:
    IDS = make_ids(12, seed=3)

    def test_by_an_end_token(self, generator, decode):
        free = run_one(generator, self.IDS).token_ids
        end = free[5]
        place = free.index(end)
        completion = run_one(generator, self.IDS, stop_token_ids=(end,))
        assert completion.token_ids == free[: place + 1]
        assert (completion.status, completion.stop_reason) == (Status.STOP, str(end))
        assert completion.text == decode(free[:place])

    def test_by_nothing_but_the_limit_where_no_stop_is_given(self, generator):
        completion = run_one(generator, self.IDS)
        assert (completion.status, completion.stop_reason) == (Status.LENGTH, None)
        assert len(completion.token_ids) == 24

    def test_end_tokens_wait_for_min_new_tokens(self, generator):
        free = run_one(generator, self.IDS).token_ids
        completion = run_one(
            generator, self.IDS, stop_token_ids=free[:3], min_new_tokens=5, max_new_tokens=200
        )
        assert len(completion.token_ids) > 5 or completion.status == Status.LENGTH
        assert not set(completion.token_ids[:5]) & set(free[:3])

    def test_by_a_stop_string_that_straddles_tokens(self, generator, decode):
        free = run_one(generator, self.IDS, max_new_tokens=60)
        text, ids = free.text, free.token_ids
        stop, needed = _straddling_string(text, ids, decode)
        completion = run_one(generator, self.IDS, max_new_tokens=60, stop=(stop,))
        assert (completion.status, completion.stop_reason) == (Status.STOP, stop)
        assert completion.text == text[: text.index(stop)]
        assert completion.token_ids == ids[:needed]

    def test_by_the_earliest_of_several_stop_strings(self, generator):
        text = run_one(generator, self.IDS, max_new_tokens=60).text
        early, late = text[10:12], text[30:34]
        completion = run_one(
            generator, self.IDS, max_new_tokens=60, stop=(late, "never there", early)
        )
        assert completion.text == text[: text.index(early)]
        assert completion.stop_reason == early

    def test_a_stop_string_that_never_comes_holds_nothing_back(self, generator):
        free = run_one(generator, self.IDS)
        # its beginning is the end of the text, which exllamav2 would hold back
        completion = run_one(generator, self.IDS, stop=(free.text[-3:] + "###",))
        assert completion.text == free.text
        assert completion.status == Status.LENGTH

    def test_text_before_an_end_token_is_kept_where_a_stop_string_could_begin(
        self, generator, decode
    ):
        free = run_one(generator, self.IDS).token_ids
        end = free[5]
        before = decode(free[: free.index(end)])
        completion = run_one(
            generator, self.IDS, stop_token_ids=(end,), stop=(before[-2:] + "###",)
        )
        assert completion.text == before

    def test_stop_strings_are_seen_after_broken_characters(self, generator, decode):
        free = run_one(generator, make_ids(20, seed=11), max_new_tokens=120)
        place = free.text.index("\ufffd")
        stop = next(
            free.text[i : i + 2]
            for i in range(place + 1, len(free.text) - 2)
            if "\ufffd" not in free.text[i : i + 2] and free.text[i : i + 2] not in free.text[:i]
        )
        needed = next(n for n in range(1, 121) if stop in decode(free.token_ids[:n]))
        completion = run_one(generator, make_ids(20, seed=11), max_new_tokens=120, stop=(stop,))
        assert completion.token_ids == free.token_ids[:needed]

    def test_a_character_cut_in_half_is_removed_and_flagged(self, generator, decode):
        free = run_one(generator, make_ids(20, seed=11), max_new_tokens=120).token_ids
        lengths = range(1, 121)
        cut = next(n for n in lengths if decode(free[:n]).endswith("\ufffd"))
        whole = next(n for n in lengths if not decode(free[:n]).endswith("\ufffd"))
        completion = run_one(generator, make_ids(20, seed=11), max_new_tokens=cut)
        assert completion.text == decode(free[:cut]).rstrip("\ufffd")
        assert completion.incomplete_character
        assert completion.token_ids == free[:cut]
        completion = run_one(generator, make_ids(20, seed=11), max_new_tokens=whole)
        assert completion.text == decode(free[:whole])
        assert not completion.incomplete_character


def _straddling_string(text, ids, decode):
    """A string of the text that no single token holds, and how many tokens complete it."""
    pieces = [decode([i]) for i in ids]
    for start in range(8, len(text) - 4):
        stop = text[start : start + 4]
        in_one_token = any(stop in piece for piece in pieces)
        if "\ufffd" not in stop and text.index(stop) == start and not in_one_token:
            return stop, next(n for n in range(len(ids)) if stop in decode(ids[:n]))
    raise AssertionError("the toy's text has no such string")


def mixed_requests(seed: int, count: int = 20) -> list[Request]:
    """Equal prompts, shared prefixes of more than a page, and prompts that end at a page's end."""
    rng = random.Random(seed)
    prefixes = [make_ids(n, n) for n in (0, 255, 256, 300, 513)] + [[7] * 300]
    requests: list[Request] = []
    for i in range(count):
        ids = rng.choice(prefixes) + make_ids(rng.choice([1, 2, 40, 256, 257]), rng.randrange(9))
        if requests and rng.random() < 0.25:
            ids = list(rng.choice(requests).input_ids)
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.7, 1.0]),
            top_k=rng.choice([0, 3]),
            top_p=rng.choice([1.0, 0.8]),
            seed=rng.randrange(2**64),
            max_new_tokens=rng.choice([1, 2, 7, 40, 258]),
            min_new_tokens=rng.choice([0, 1]),
            stop=rng.choice([(), ("e", "th")]),
            stop_token_ids=rng.choice([(), tuple(range(40, 60))]),
        )
        requests.append(Request(i, ids, params))
    return requests


def answers(generator, requests):
    completions = list(generator.run(requests))
    assert sorted(c.request_id for c in completions) == sorted(r.request_id for r in requests)
    return {c.request_id: (c.status, c.token_ids, c.text, c.stop_reason) for c in completions}


@pytest.mark.parametrize("seed", range(3))
def test_answers_depend_on_the_request_alone(toy_float64, seed):
    requests = mixed_requests(seed)
    single, alone = make_generator(toy_float64, max_batch_size=1), {}
    for request in requests:
        single._loop.forget()  # each without history
        alone |= answers(single, [request])
    for batch, cache_tokens, steps_ahead in ((7, 1280, 0), (7, 1280, 1), (3, 2048, 2)):
        generator = make_generator(toy_float64, max_batch_size=batch, cache_tokens=cache_tokens)
        generator._loop._ahead = steps_ahead
        for shuffle_seed in range(2):
            order = random.Random(shuffle_seed).sample(requests, len(requests))
            assert answers(generator, order) == alone
        assert generator.stats.cached_tokens > 0


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_rows_that_give_their_pages_away_lose_nothing(toy_float64, steps_ahead):
    """Pages are taken as rows grow; where none is free, the row that came last waits again."""
    requests = [
        Request(
            i,
            make_ids(200 + 17 * i, i),
            make_params(temperature=i % 2, seed=i, max_new_tokens=600, stop=("never there",)),
        )
        for i in range(6)
    ]
    expected = answers(make_generator(toy_float64, max_batch_size=1), requests)
    small = make_generator(toy_float64, max_batch_size=6, cache_tokens=1280)
    small._loop._ahead = steps_ahead
    assert answers(small, requests) == expected
    assert small.stats.preemptions > 0
    assert small._loop.pages.num_free == 5


@pytest.mark.parametrize("steps_ahead", [0, 1, 2])
def test_a_row_that_ends_at_once_has_the_scores_of_its_prompt(toy_float64, steps_ahead):
    scores = []
    for limit in (1, 5):
        generator = make_generator(toy_float64)
        generator._loop._ahead = steps_ahead
        params = make_params(max_new_tokens=limit)
        [found] = generator.run([Request(0, make_ids(6), params, prompt_logprobs=True)])
        scores.append(found.prompt_logprobs)
    assert scores[0] == scores[1]
    assert all(score < 0 for score in scores[0])


def test_long_prompts_are_read_in_chunks_while_others_generate(toy_float64):
    generator = make_generator(toy_float64, max_batch_size=2, cache_tokens=4096)
    limits = [30, 1, 1, 1]
    requests = [
        Request(i, make_ids(5, i), make_params(max_new_tokens=n)) for i, n in enumerate(limits)
    ]
    requests.append(Request("long", make_ids(1500, 1), make_params(max_new_tokens=2)))
    passes = []
    finished = [c.request_id for c in generator.run(requests, on_step=lambda: passes.append(1))]
    assert finished[-2:] == ["long", 0]
    assert generator.stats.steps == len(passes) == 30  # the row of 30 tokens never waited
    alone = run_one(make_generator(toy_float64, max_chunk_size=2048), make_ids(1500, 1))
    again = run_one(generator, make_ids(1500, 1))
    assert again.token_ids == alone.token_ids


@pytest.mark.parametrize("draft_seed", [0, 1], ids=["the same model", "another model"])
@pytest.mark.parametrize("num_draft_tokens", [1, 4])
def test_drafting_changes_no_answer(toy_float64, tmp_path, draft_seed, num_draft_tokens):
    draft = toy_model(tmp_path / "draft", "float64", seed=draft_seed)
    requests = mixed_requests(5)
    plain = make_generator(toy_float64)
    drafting = make_generator(
        toy_float64,
        draft_model=str(draft),
        num_draft_tokens=num_draft_tokens,
        cache_tokens=1536,
    )
    assert answers(drafting, requests) == answers(plain, requests)
    if draft_seed == 0:  # most drafts are accepted
        assert drafting.stats.steps < plain.stats.steps


@pytest.mark.parametrize("limit", [1, 2, 5, 6, 31])
def test_drafting_ends_exactly_at_max_new_tokens(toy_float64, limit):
    drafting = make_generator(toy_float64, draft_model=str(toy_float64), num_draft_tokens=5)
    completion = run_one(drafting, make_ids(9), max_new_tokens=limit)
    assert (completion.status, len(completion.token_ids)) == (Status.LENGTH, limit)


def test_default_sampling_leaves_out_no_token(generator):
    """exllamav2's own defaults would: top-k 50, a temperature of 0.8."""
    params = [SamplingParams(temperature=1e4, max_new_tokens=1, seed=i) for i in range(300)]
    completions = generator.run(Request(i, [5], p) for i, p in enumerate(params))
    distinct = {completion.token_ids for completion in completions}
    assert len(distinct) > 150  # 300 draws of 512 equal tokens give 227 on average


def test_default_sampling_penalises_no_repetition(generator, monkeypatch):
    """exllamav2's default would: what the prompt holds would be less likely."""
    [model] = generator._models
    forward = model.forward_chunk

    def almost_equal(*args, **kwargs):  # token 7 is ahead by less than a penalty of 1.025
        output = forward(*args, **kwargs)
        if "logits" in output:
            output["logits"] = torch.full_like(output["logits"], 10.0)
            output["logits"][..., 7] = 10.1
        return output

    monkeypatch.setattr(model, "forward_chunk", almost_equal)
    assert run_one(generator, [7] * 20, max_new_tokens=9).token_ids == (7,) * 9


class TestPages:
    """Pages that exllamav2 would offer to other prompts although they were made in other places."""

    def test_after_a_wholly_cached_prompt(self, toy_float64):
        generator = make_generator(toy_float64)
        prompt = make_ids(257)
        first = run_one(generator, prompt)
        assert run_one(generator, prompt).cached_tokens == 256
        misleading = [prompt[-1], *first.token_ids[:20]]
        completion = run_one(generator, misleading)
        assert completion.cached_tokens == 0
        fresh = make_generator(toy_float64)
        assert completion.token_ids == run_one(fresh, misleading).token_ids

    def test_after_a_reserved_page_was_not_needed(self, toy_float64):
        generator = make_generator(toy_float64)
        prompt = make_ids(769)
        run_one(generator, prompt, max_new_tokens=1)
        run_one(generator, make_ids(900, 1), max_new_tokens=1)  # touches all other pages
        brief = make_ids(10, 2)
        end = run_one(make_generator(toy_float64), brief).token_ids[2]
        reserving = Request("r", brief, make_params(max_new_tokens=900, stop_token_ids=(end,)))
        again = Request("a", prompt, make_params(max_new_tokens=8))
        assert len(list(generator.run([reserving, again]))) == 2
        misleading = prompt[512:700]  # the page before it is the next to be taken
        completion = run_one(generator, misleading)
        assert completion.cached_tokens == 0
        fresh = make_generator(toy_float64)
        assert completion.token_ids == run_one(fresh, misleading).token_ids

    def test_a_shared_prefix_is_read_once(self, toy_float64):
        generator = make_generator(toy_float64)
        prefix = make_ids(600)
        requests = [Request(i, [*prefix, 5 + i], GREEDY) for i in range(4)]
        cached = [c.cached_tokens for c in generator.run(requests)]
        assert sorted(cached) == [0, 600, 600, 600]
        assert generator.stats.prefill_tokens + sum(cached) == 4 * 600
        assert generator.stats.cached_tokens == sum(cached)


def test_stats_count_what_was_done(toy_float64):
    generator = make_generator(toy_float64, max_batch_size=4)
    list(
        generator.run(
            [Request(i, make_ids(11, i), make_params(max_new_tokens=5)) for i in range(8)]
        )
    )
    stats = generator.stats
    assert stats.prefill_tokens == 80
    assert stats.completion_tokens == stats.rows == 40
    assert (stats.steps, stats.mean_batch_size) == (10, 4.0)
    assert stats.cache_use == 4 / 8  # a page a row, of 2048 tokens
    assert stats.seconds > 0


class TestGoingOn:
    """Requests that follow from completions, as the turns of a conversation."""

    @pytest.fixture(params=[None, "draft"], ids=["plain", "draft model"])
    def one_at_a_time(self, request, toy_float64):
        draft = request.param and str(toy_float64)
        return make_generator(toy_float64, max_batch_size=1, draft_model=draft)

    def test_they_come_before_what_waits_and_find_their_pages(self, one_at_a_time):
        prompts = [make_ids(280, i) for i in range(4)]

        def go_on(completion: Completion) -> Iterator[Request]:
            number, turn = completion.request_id
            if turn < 2:
                prompts[number] += [*completion.token_ids, 7]
                yield Request((number, turn + 1), list(prompts[number]), GREEDY)

        first = [Request((i, 0), list(ids), GREEDY) for i, ids in enumerate(prompts)]
        completions = list(one_at_a_time.run(first, go_on=go_on))
        assert [c.request_id for c in completions] == [(i, t) for i in range(4) for t in range(3)]
        assert [c.cached_tokens >= 256 for c in completions] == [False, True, True] * 4
        for completion in completions:
            number, turn = completion.request_id
            alone = run_one(one_at_a_time, prompts[number][: completion.prompt_tokens])
            assert completion.token_ids == alone.token_ids, (number, turn)

    def test_they_may_be_many_or_refused(self, generator):
        def go_on(completion: Completion) -> list[Request]:
            if completion.request_id != "one":
                return []
            return [Request("empty", [], GREEDY), *(Request(i, [5, 6], GREEDY) for i in range(9))]

        completions = list(generator.run([Request("one", [5], GREEDY)], go_on=go_on))
        statuses = {c.request_id: c.status for c in completions}
        assert len(completions) == len(statuses) == 11
        assert statuses.pop("empty") == Status.EMPTY
        assert set(statuses.values()) <= {Status.LENGTH, Status.STOP}


class TestAnswerIds:
    def test_those_of_the_text_without_what_ended_it(self, generator, toy_float64):
        ids = AutoTokenizer.from_pretrained(toy_float64).encode("Write a story.")[1:]
        assert generator.answer_ids(ids, "Write a story.", [2]) == ids
        assert generator.answer_ids([*ids, 2], "Write a story.", [2]) == ids
        cut = generator.answer_ids([*ids, 2], "Write", [2])  # by a stop string found behind it
        assert cut == AutoTokenizer.from_pretrained(toy_float64).encode("Write")[1:]

    @given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(0, 20))
    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_of_a_text_that_was_cut_anywhere(self, generator, decode, toy_float64, text, length):
        ids = AutoTokenizer.from_pretrained(toy_float64).encode(text, split_special_tokens=True)[1:]
        kept = generator.answer_ids(ids, text[:length], [2])
        assert decode(kept) == text[:length]
        pairs = zip(kept, ids, strict=False)
        same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        assert len(kept) - same <= len(text[:length].encode()) - len(decode(ids[:same]).encode())
