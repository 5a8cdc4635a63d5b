"""Drafting by n-grams: what is drafted, and that no answer changes."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from bulk_pipeline.engine.draft_clock import KNOWN, DraftClock
from bulk_pipeline.engine.loading import load_generator
from bulk_pipeline.engine.ngram import (
    LATE_START,
    RUN_WINDOWS,
    WINDOW,
    NgramDrafter,
    NgramSettings,
    draft_tokens,
)
from bulk_pipeline.engine.request import (
    LoopGuard,
    Request,
    SamplingParams,
    Status,
    StructuredOutput,
)
from bulk_pipeline.spec import GeneratorSettings
from bulk_pipeline_tests.toy import VOCAB_SIZE, toy_model

FEW_IDS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


class TestDraftTokens:
    @pytest.mark.parametrize(
        ("context", "expected"),
        [
            ([1, 2, 3, 4, 5, 9, 1, 2], [3, 4, 5]),
            ([1, 2, 7, 7, 7, 1, 2, 8, 8, 8, 1, 2], [8, 8, 8]),  # the latest of several
            ([5, 1, 2, 7, 7, 7, 6, 1, 2, 8, 8, 8, 5, 1, 2], [7, 7, 7]),  # the longest first
            ([4, 1, 2, 1, 2], [1, 2, 1]),  # it repeats itself
            ([3, 3], []),  # one equal token is not enough
            ([1, 2, 3, 4], []),
            ([1], []),
        ],
        ids=str,
    )
    def test_what_followed_before(self, context, expected):
        assert draft_tokens(np.array(context), 3, 4, 2).tolist() == expected

    @given(FEW_IDS, st.integers(1, 6), st.integers(1, 5), st.integers(1, 5))
    def test_as_found_by_looking_everywhere(self, context, count, longest, shortest):
        def look() -> list[int]:
            for size in range(longest, shortest - 1, -1):
                for end in range(len(context) - 1, size - 1, -1):
                    if context[end - size : end] == context[len(context) - size :]:
                        going_on = list(context)
                        while len(going_on) < len(context) + count:
                            going_on.append(going_on[len(going_on) - len(context) + end])
                        return going_on[len(context) :]
            return []

        assert draft_tokens(np.array(context), count, longest, shortest).tolist() == look()


class TestDrafter:
    def drafting(self, drafter: NgramDrafter, generated: int) -> bool:
        return bool(drafter.drafting(np.array([1]), np.array([generated]))[0])

    def test_a_row_that_gains_nothing_pauses_ever_longer(self):
        drafter = NgramDrafter(NgramSettings(), 2)
        drafter.enter(1, SamplingParams())
        looked = []
        for generated in range(12 * WINDOW):
            if self.drafting(drafter, generated):
                looked.append(generated)
                drafter.learn(1, generated + 1, 0)
        first, second = range(WINDOW), range(3 * WINDOW, 4 * WINDOW)
        assert looked == [*first, *second, *range(8 * WINDOW, 9 * WINDOW)]

    def test_a_row_that_gains_goes_on(self):
        drafter = NgramDrafter(NgramSettings(), 2)
        drafter.enter(1, SamplingParams())
        for generated in range(0, 1000, 2):
            assert self.drafting(drafter, generated)
            drafter.learn(1, generated + 2, 1)

    def test_a_row_that_enters_begins_anew(self):
        drafter = NgramDrafter(NgramSettings(), 2)
        drafter.enter(1, SamplingParams())
        for generated in range(WINDOW):
            drafter.learn(1, generated, 0)
        assert not self.drafting(drafter, WINDOW)
        drafter.enter(1, SamplingParams())
        assert self.drafting(drafter, 0)

    def starts_at_once(self, drafter: NgramDrafter, num_rows: int, num_accepted: int) -> list[bool]:
        """Let rows of a window each pass through; say which of them drafted from the first."""
        at_once = []
        for _ in range(num_rows):
            drafter.enter(1, SamplingParams())
            at_once.append(self.drafting(drafter, 0))
            for generated in range(WINDOW if at_once[-1] else 0):
                drafter.learn(1, generated + 1, num_accepted)
        return at_once

    def test_rows_start_late_where_others_gained_nothing_but_for_trials(self):
        drafter = NgramDrafter(NgramSettings(), 2)
        assert self.starts_at_once(drafter, 32, 0) == [
            *[True] * RUN_WINDOWS, *[False] * 7, True, *[False] * 15, True,
        ]  # fmt: skip
        assert self.drafting(drafter, LATE_START)
        assert self.starts_at_once(drafter, 200, 1)[-20:] == [True] * 20  # they gain again

    def test_too_many_rows_do_not_draft(self):
        drafter = NgramDrafter(NgramSettings(max_rows=2), 4, known_clock(2, 3))
        for slot in range(3):
            drafter.enter(slot, SamplingParams())
        assert drafter.drafting(np.arange(2), np.zeros(2, int)).all()
        assert not drafter.drafting(np.arange(3), np.zeros(3, int)).any()


def make_generator(folder, **changes):
    values = {
        "model": str(folder),
        "device": "cpu",
        "dtype": "float64",
        "max_batch_size": 4,
        "cache_tokens": 2048,
        "max_chunk_size": 256,
    }
    return load_generator(GeneratorSettings(**values | changes))


def known_clock(*num_rows: int) -> DraftClock:
    """One that has timed plain steps of so many rows."""
    clock = DraftClock()
    for number in num_rows:
        clock.skip()
        for _ in range(2 + KNOWN):
            clock.took(number, number, False)
    return clock


def make_params(**changes) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_new_tokens": 60} | changes)


def make_ids(length: int, seed: int = 0, most: int = VOCAB_SIZE) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, most) for _ in range(length)]


def answers(generator, requests):
    loop, found = generator._loop, {}
    if loop.drafter is not None:  # what earlier rows gained does not count
        loop.drafter = NgramDrafter(loop.drafter.settings, generator.max_batch_size)
    for c in generator.run(requests):
        assert c.error is None, c.error
        found[c.request_id] = (
            c.status, c.token_ids, c.text, c.stop_reason, c.logprobs and len(c.logprobs),
        )  # fmt: skip
    assert len(found) == len(requests)
    return found


@pytest.fixture(scope="module")
def plain(toy_float64):
    return make_generator(toy_float64)


@pytest.fixture(scope="module")
def drafting(toy_float64):
    return make_generator(toy_float64, speculative="ngram", prompt_lookup_min=1)


FEW = {"logit_bias": tuple((i, 90.0) for i in range(5, 9))}  # answers of four tokens: they repeat
SETTINGS = {
    "greedy": {},
    "greedy, of few": FEW,
    "sampled, of few": {"temperature": 1.0, "seed": 6} | FEW,
    "end token, of few": {"stop_token_ids": (8,), "min_new_tokens": 20} | FEW,
    "sampled": {"temperature": 0.3, "top_p": 0.9, "seed": 7},
    "hot": {"temperature": 1.0, "top_k": 3, "seed": 8},
    "end token": {"stop_token_ids": tuple(range(5, VOCAB_SIZE, 40))},
    "end token held back": {"stop_token_ids": tuple(range(5, 512, 3)), "min_new_tokens": 9},
    "stop string": {"stop": ("a", "e ")},
    "biased": {"logit_bias": ((9, 3.0), (11, 4.0)), "banned_token_ids": (17, 18)},
    "banned strings": {"banned_strings": ("e", "th")},
    "bad words": {"bad_words": ("a", "the")},
    "allowed tokens": {"allowed_token_ids": tuple(range(5, 200, 3))},
    "penalised": {"repetition_penalty": 1.2, "frequency_penalty": 0.1},
    "logprobs": {"logprobs": 2},
    "regex": {"structured": StructuredOutput("regex", "[0-9]{4}-[0-9]{2}-[0-9]{2}")},
    "loop guard": {"loop_guard": LoopGuard(1, 4), "max_new_tokens": 200},
    "one token": {"max_new_tokens": 1},
    "two tokens": {"max_new_tokens": 2},
}


class TestAnswers:
    """A greedy toy model repeats itself, so that much is drafted."""

    @pytest.mark.parametrize("name", SETTINGS)
    def test_alone_are_those_without_drafts(self, plain, drafting, name):
        requests = [Request(i, make_ids(9, i, 20), make_params(**SETTINGS[name])) for i in range(6)]
        assert answers(drafting, requests) == answers(plain, requests)

    @pytest.mark.parametrize("ahead", [0, 1])
    def test_in_one_batch_are_those_without_drafts(self, plain, drafting, ahead, monkeypatch):
        """Also where steps without drafts are started ahead, as on a GPU."""
        monkeypatch.setattr(drafting._loop, "_ahead", ahead)
        requests = [
            Request((name, i), make_ids(5 + 40 * i, i, 20), make_params(**changes))
            for i in range(3)
            for name, changes in SETTINGS.items()
        ]
        before = drafting.stats.accepted_tokens
        assert answers(drafting, requests) == answers(plain, requests)
        assert drafting.stats.accepted_tokens > before

    @settings(max_examples=25)
    @given(
        st.lists(st.tuples(FEW_IDS, st.integers(1, 40), st.integers(0, 9)), min_size=1, max_size=6),
        st.sampled_from([0.0, 0.2, 0.8]),
    )
    def test_of_any_prompts_are_those_without_drafts(self, plain, drafting, rows, temperature):
        requests = [
            Request(i, ids, SamplingParams(temperature, max_new_tokens=limit, seed=seed))
            for i, (ids, limit, seed) in enumerate(rows)
        ]
        assert answers(drafting, requests) == answers(plain, requests)

    def test_of_rows_that_give_their_pages_away(self, toy_float64):
        few = {"cache_tokens": 1024, "max_batch_size": 4}
        requests = [
            Request(i, make_ids(100, i, 9), make_params(max_new_tokens=400, **FEW))
            for i in range(6)
        ]
        drafting = make_generator(toy_float64, speculative="ngram", **few)
        assert answers(drafting, requests) == answers(make_generator(toy_float64), requests)
        assert drafting.stats.preemptions > 0
        assert drafting.stats.accepted_tokens > 0

    def test_that_share_pages_written_by_drafts(self, toy_float64, plain):
        drafting = make_generator(toy_float64, speculative="ngram")
        prompt = make_ids(200, 3, 9)
        [first] = drafting.run([Request("first", prompt, make_params(max_new_tokens=200, **FEW))])
        assert drafting.stats.accepted_tokens > 50
        longer = [Request("longer", [*prompt, *first.token_ids], make_params())]
        [again] = drafting.run(longer)
        assert again.cached_tokens > 390
        [alone] = plain.run(longer)
        assert again.token_ids == alone.token_ids

    def test_up_to_the_last_token_that_the_model_reads(self, tmp_path):
        folder = toy_model(tmp_path / "short", "float64", max_position_embeddings=300)
        requests = [Request(i, make_ids(n, i, 9), make_params(max_new_tokens=300 - n, **FEW))
                    for i, n in enumerate([10, 200, 290])]  # fmt: skip
        drafting = make_generator(folder, speculative="ngram")
        assert answers(drafting, requests) == answers(make_generator(folder), requests)
        assert drafting.stats.accepted_tokens > 0


@pytest.mark.parametrize("num_tokens", [1, 4, 16])
@pytest.mark.parametrize("limit", [1, 2, 5, 6, 31])
def test_an_answer_ends_exactly_at_max_new_tokens(toy_float64, limit, num_tokens):
    generator = make_generator(toy_float64, speculative="ngram", num_speculative_tokens=num_tokens)
    [completion] = generator.run([Request(0, [7, 8, 9] * 9, make_params(max_new_tokens=limit))])
    assert (completion.status, len(completion.token_ids)) == (Status.LENGTH, limit)
    assert generator.stats.completion_tokens == limit


def test_drafts_save_steps_and_are_counted(toy_float64):
    drafting = make_generator(toy_float64, speculative="ngram")
    list(drafting.run([Request(0, make_ids(9, 0, 20), make_params(max_new_tokens=300, **FEW))]))
    stats = drafting.stats
    assert stats.steps < 150
    assert stats.steps + stats.accepted_tokens == 300
    assert stats.acceptance_rate == stats.accepted_tokens / stats.drafted_tokens > 0.3


def test_auto_drafts_while_few_rows_run(toy_float64):
    requests = [Request(i, make_ids(9, i, 20), make_params()) for i in range(8)]
    auto = make_generator(toy_float64, speculative="auto", speculative_max_rows=1)
    list(auto.run(requests))
    assert auto.stats.drafted_tokens == 0  # four at once, which end together
    alone = Request(0, make_ids(9, 0, 20), make_params(max_new_tokens=300, **FEW))
    list(auto.run([alone]))
    assert auto.stats.drafted_tokens > 0


def test_nothing_is_drafted_unless_asked_for(plain):
    assert plain.stats.drafted_tokens == 0
    assert plain.stats.acceptance_rate is None


class TestADraftModelByAuto:
    def test_drafts_where_the_batch_is_small(self, toy_float64):
        draft = {"draft_model": str(toy_float64), "speculative_max_rows": 4}
        generator = make_generator(toy_float64, speculative="auto", max_batch_size=4, **draft)
        assert generator.provenance["draft_model"] == toy_float64.name
        [completion] = generator.run([Request(0, make_ids(9), make_params(max_new_tokens=21))])
        assert len(completion.token_ids) == 21
        assert generator.stats.acceptance_rate == 1.0  # it drafts for itself

    def test_is_not_loaded_where_the_batch_is_large(self, toy_float64, caplog):
        draft = {"draft_model": str(toy_float64), "speculative_max_rows": 4}
        generator = make_generator(toy_float64, speculative="auto", max_batch_size=5, **draft)
        assert "draft_model is not loaded: a batch of 5 is more than" in caplog.text
        provenance = generator.provenance
        assert (provenance["draft_model"], provenance["speculative"]) == (None, "auto")
        list(generator.run([Request(0, [7, 8, 9] * 5, make_params(**FEW))]))
        assert generator.stats.drafted_tokens > 0  # by n-grams, since one row runs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_lookup_min": 5}, r"prompt_lookup_min must be at most prompt_lookup_max \(4\)"),
        ({"speculative": "ngram", "draft_model": "a"}, "speculative: ngram does not work with"),
    ],
)
def test_settings_that_contradict_one_another(changes, message):
    with pytest.raises(ValueError, match=message):
        GeneratorSettings(model="m", **changes)


def test_an_answer_that_copies_its_prompt_takes_half_the_steps(smollm2):
    """A real model in float32: passes of other sizes round otherwise, here to no effect."""
    encode = AutoTokenizer.from_pretrained(smollm2).apply_chat_template
    text = (
        "The lamp on my desk does not light. I have changed the bulb and the fuse. Can I send the "
        "lamp back, and who pays for the parcel?"
    )
    question = f"Correct the spelling of this text. Change nothing else.\n\n{text}"
    message = [{"role": "user", "content": question}]
    ids = encode(message, add_generation_prompt=True, return_dict=False)
    params = SamplingParams(temperature=0.0, max_new_tokens=32, stop_token_ids=(2,))
    found = {}
    for speculative in ("off", "ngram"):
        generator = make_generator(smollm2, speculative=speculative, dtype="float32")
        [completion] = generator.run([Request(0, ids, params)])
        found[speculative] = completion.token_ids
    assert found["ngram"] == found["off"]
    assert generator.stats.steps <= len(completion.token_ids) / 2
    assert generator.stats.acceptance_rate > 0.5
