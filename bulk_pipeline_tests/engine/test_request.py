from dataclasses import FrozenInstanceError, replace
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulk_pipeline.engine.request import (
    GREEDY_BELOW,
    Completion,
    KeyHasher,
    LoopGuard,
    Request,
    SamplingParams,
    Status,
    StructuredOutput,
    ThinkingBudget,
    request_key,
    request_seed,
    serves,
)

IDS = (5, 6, 7)
GREEDY = SamplingParams(temperature=0.0, stop=("a", "b"), stop_token_ids=(1, 2))
SAMPLED = replace(GREEDY, temperature=0.8, top_p=0.9, top_k=40, min_p=0.05, seed=11)


def key(ids=IDS, params=SAMPLED, fingerprint="model", **changes):
    return request_key(ids, replace(params, **changes), fingerprint)


class TestKey:
    def test_never_changes(self):
        assert key() == "a8dea5915dfdeea2a794a415507b340f"
        assert key(params=GREEDY) == "0d6c999b74fbb420d6a5175f9eaac41b"

    @pytest.mark.parametrize(
        "changes",
        [
            {"ids": (5, 6)},
            {"ids": (6, 5, 7)},
            {"fingerprint": "other"},
            {"temperature": 0.81},
            {"top_p": 0.91},
            {"top_k": 41},
            {"min_p": 0.06},
            {"seed": 12},
            {"min_new_tokens": 1},
            {"stop": ("a",)},
            {"stop_token_ids": (1,)},
            {"repetition_penalty": 1.1},
            {"frequency_penalty": 0.1},
            {"presence_penalty": 0.1},
            {"logit_bias": ((1, 0.5),)},
            {"banned_token_ids": (1,)},
            {"logprobs": 0},
            {"structured": StructuredOutput("regex", "a+")},
            {"loop_guard": LoopGuard(3, 4)},
            {"allowed_token_ids": (1,)},
            {"bad_words": ("a",)},
            {"banned_strings": ("a",)},
            {"thinking": ThinkingBudget(5)},
        ],
        ids=str,
    )
    def test_counts_what_decides_the_answer(self, changes):
        assert key(**changes) != key()

    @pytest.mark.parametrize(
        "changes",
        [
            {"max_new_tokens": 1},
            {"stop": ("b", "a", "b")},
            {"stop_token_ids": (2, 1, 1)},
            {"ids": list(IDS)},
            {"repetition_penalty": 1, "frequency_penalty": 0, "presence_penalty": -0.0},
            {"logit_bias": ((1, 0.0), (2, 0))},
        ],
        ids=str,
    )
    def test_does_not_count_what_does_not(self, changes):
        assert key(**changes) == key()

    @pytest.mark.parametrize(
        "changes",
        [
            {"seed": 5},
            {"top_p": 0.5},
            {"top_k": 3},
            {"min_p": 0.5},
            {"temperature": GREEDY_BELOW / 2},
        ],
        ids=str,
    )
    def test_a_greedy_request_has_no_sampling_settings(self, changes):
        assert key(params=GREEDY, **changes) == key(params=GREEDY)

    EDITS: ClassVar = {"logit_bias": ((4, 1.0), (9, -2.0)), "banned_token_ids": (7, 8)}

    @pytest.mark.parametrize(
        "changes",
        [
            {"logit_bias": ((9, -2), (4, 1))},
            {"banned_token_ids": (8, 7, 8)},
            {"logit_bias": ((4, 1.0), (7, 3.0), (9, -2.0))},
        ],
        ids=["order and type of biases", "order of bans", "the bias of a banned token"],
    )
    def test_biases_count_by_what_they_do(self, changes):
        assert key(**self.EDITS | changes) == key(**self.EDITS)
        assert key(**self.EDITS) != key()

    @pytest.mark.parametrize(
        ("name", "value", "same"),
        [
            ("allowed_token_ids", (9, 3), (3, 9, 3)),
            ("bad_words", ("a", "b"), ("b", "a")),
            ("banned_strings", ("A", "b"), ("B", "a", "A")),
        ],
    )
    def test_bans_count_by_what_they_do(self, name, value, same):
        assert key(**{name: value}) == key(**{name: same})

    @pytest.mark.parametrize("name", ["repetition_penalty", "frequency_penalty", "logit_bias"])
    def test_penalties_and_biases_count_where_greedy(self, name):
        value = {"logit_bias": ((1, 1.0),)}.get(name, 1.5)
        assert key(params=GREEDY, **{name: value}) != key(params=GREEDY)

    @pytest.mark.parametrize(
        ("kind", "value", "same", "other"),
        [
            ("regex", "a+", "a+", "a +"),
            ("grammar", "start: /a/", "start: /a/", "start:  /a/"),
            ("json_schema", '{"a": 1, "b": 2}', '{"a":1,"b":2}', '{"b":2,"a":1}'),
            ("json_schema", "not JSON", "not JSON", "not  JSON"),
            ("choice", '["a", "b"]', '["b","a","b"]', '["a"]'),
        ],
    )
    def test_grammars_count_by_what_they_do(self, kind, value, same, other):
        keys = [key(structured=StructuredOutput(kind, text)) for text in (value, same, other)]
        assert keys[0] == keys[1] != keys[2]

    def test_the_kind_of_a_grammar_counts(self):
        kinds = ("json_schema", "regex", "choice", "grammar")
        assert len({key(structured=StructuredOutput(kind, '["a"]')) for kind in kinds}) == 4

    def test_every_extra_counts_by_its_value(self):
        extras = [
            {"logprobs": 0},
            {"logprobs": 1},
            {"loop_guard": LoopGuard(3, 4)},
            {"loop_guard": LoopGuard(4, 3)},
            {"allowed_token_ids": (1,)},
            {"bad_words": ("a",)},
            {"bad_words": ("A",)},
            {"banned_strings": ("a",)},
            {"thinking": ThinkingBudget(5)},
            {"thinking": ThinkingBudget(6)},
            {"thinking": ThinkingBudget(5, is_open=True)},
            {"thinking": ThinkingBudget(5, end="[/THINK]")},
        ]
        assert len({key(params=GREEDY, **extra) for extra in extras}) == len(extras)

    def test_scoring_the_prompt_counts(self):
        scored = request_key(IDS, SAMPLED, "model", prompt_logprobs=True)
        assert scored != key() == request_key(IDS, SAMPLED, "model", prompt_logprobs=False)

    def test_numbers_of_equal_value_are_equal(self):
        assert key(temperature=1) == key(temperature=1.0)

    @given(
        st.lists(st.integers(0, 2**31 - 1), max_size=8),
        st.lists(st.integers(0, 2**31 - 1), max_size=8),
    )
    def test_different_ids_have_different_keys(self, a, b):
        assert (key(ids=a) == key(ids=b)) == (a == b)

    @pytest.mark.parametrize("params", [GREEDY, SAMPLED, replace(SAMPLED, stop=('"seed": 0',))])
    @given(st.lists(st.integers(0, 2**31 - 1), max_size=8), st.integers(0, 2**64 - 1))
    def test_one_hasher_serves_all_seeds(self, params, ids, seed):
        data = b"".join(i.to_bytes(4, "little") for i in ids)
        expected = request_key(ids, replace(params, seed=seed), 'a "seed": 0')
        assert KeyHasher(params, 'a "seed": 0').digest(data, seed).hex() == expected


class TestSeed:
    def test_never_changes(self):
        assert request_seed(0, "row", 0) == 2270744334806352862

    def test_depends_on_run_row_and_sample(self):
        seeds = {
            request_seed(r, i, s) for r in range(3) for i in ("a", "b", "a0") for s in range(9)
        }
        assert len(seeds) == 3 * 3 * 9
        assert all(0 <= seed < 2**64 for seed in seeds)

    @given(st.text(), st.text(), st.integers(0, 99), st.integers(0, 99))
    def test_parts_do_not_run_together(self, a, b, m, n):
        assert (request_seed(0, a, m) == request_seed(0, b, n)) == ((a, m) == (b, n))

    def test_takes_a_lone_surrogate(self):
        assert request_seed(0, "\ud800", 0) != request_seed(0, "\ud801", 0)


@pytest.mark.parametrize(
    ("status", "tokens", "stored_limit", "limit", "expected"),
    [
        (Status.STOP, 10, 64, 64, True),
        (Status.STOP, 10, 64, 10, True),
        (Status.STOP, 10, 64, 9, False),
        (Status.STOP, 10, 64, 500, True),
        (Status.LENGTH, 64, 64, 64, True),
        (Status.LENGTH, 64, 64, 65, False),
        (Status.LENGTH, 64, 64, 63, False),
        (Status.LOOP, 10, 64, 64, True),
        (Status.ERROR, 0, 64, 64, False),
        (Status.TOO_LONG, 0, 64, 64, False),
    ],
)
def test_a_stored_answer_serves_what_it_would_have_been(
    status, tokens, stored_limit, limit, expected
):
    assert serves(status, tokens, stored_limit, limit) is expected
    assert serves(str(status), tokens, stored_limit, limit) is expected


def test_a_request_cannot_be_changed():
    request = Request("r", IDS, GREEDY)
    with pytest.raises(FrozenInstanceError):
        request.sampling.max_new_tokens = 3


def test_the_cumulative_logprob_is_the_sum():
    assert Completion("r", Status.STOP).cumulative_logprob is None
    assert Completion("r", Status.STOP, logprobs=(-0.5, -1.25)).cumulative_logprob == -1.75
