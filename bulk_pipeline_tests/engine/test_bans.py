import random
import re

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from bulk_pipeline.engine import bans
from bulk_pipeline.engine.bans import BanSlots, RowBans, TokenBans
from bulk_pipeline.engine.request import (
    Request,
    SamplingParams,
    Status,
    StructuredOutput,
    ThinkingBudget,
)
from bulk_pipeline_tests.engine.test_generator import (
    make_generator,
    make_ids,
    make_params,
    run_one,
)
from bulk_pipeline_tests.toy import EOS_ID, VOCAB_SIZE

THOUGHTS = ThinkingBudget(6, "[[", "]]", is_open=True)


@pytest.fixture(scope="module")
def generator(toy_float64):
    return make_generator(toy_float64)


@pytest.fixture(scope="module")
def tokenizer(toy_float64):
    return AutoTokenizer.from_pretrained(toy_float64)


def decode(tokenizer, ids) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=True)


def banned_of(generator, ids, count: int = 3, length: int = 4, **changes) -> tuple[str, ...]:
    """Strings that the answer would hold, in other letters, and where it is not broken."""
    text = run_one(generator, ids, **changes).text
    random_numbers = random.Random(sum(ids))
    starts = random_numbers.sample(range(len(text) - length), min(40, len(text) - length))
    found = [text[start : start + length].swapcase() for start in starts]
    return tuple(s for s in found if "\ufffd" not in s and s.strip())[:count]


def slow_way(generator, tokenizer, ids, banned, limit: int, **changes) -> list[int]:
    """Greedy, a request a token: after each, look at the whole text and go back."""
    kept: list[int] = []
    forbidden: dict[int, set[int]] = {}
    while len(kept) < limit:
        here = tuple(forbidden.get(len(kept), ()))
        completion = run_one(
            generator, [*ids, *kept], max_new_tokens=1, banned_token_ids=here, **changes
        )
        kept += completion.token_ids
        text = decode(tokenizer, kept).lower()
        starts = [start for s in banned if (start := text.find(s.lower())) >= 0]
        if starts:
            place = next(
                n for n in range(len(kept))
                if len(decode(tokenizer, kept[: n + 1]).lower()) > min(starts)
            )  # fmt: skip
            forbidden = {p: tokens for p, tokens in forbidden.items() if p <= place}
            forbidden.setdefault(place, set()).add(kept[place])
            del kept[place:]
    return kept


class TestBannedStrings:
    @pytest.mark.parametrize("seed", range(3))
    def test_are_what_going_back_token_by_token_gives(self, generator, tokenizer, seed):
        ids = make_ids(7, seed)
        banned = banned_of(generator, ids)
        assert banned
        expected = slow_way(generator, tokenizer, ids, banned, 20)
        free = run_one(generator, ids, max_new_tokens=20)
        found = run_one(generator, ids, max_new_tokens=20, banned_strings=banned)
        assert list(found.token_ids) == expected
        assert free.token_ids != found.token_ids
        assert found.status == Status.LENGTH

    @pytest.mark.parametrize("seed", range(4))
    def test_a_penalty_forgets_what_was_taken_back(self, generator, tokenizer, seed):
        """A repetition counts in the prompt as it does in the answer."""
        ids, more = make_ids(5, seed), {"repetition_penalty": 1.5}
        # few tokens that are likely: those that were taken back come again
        more |= {"logit_bias": tuple((i, 12.0) for i in range(40, 56))}
        banned = banned_of(generator, ids, count=20, length=4, **more, max_new_tokens=60)
        expected = slow_way(generator, tokenizer, ids, banned, 30, **more)
        found = run_one(generator, ids, max_new_tokens=30, banned_strings=banned, **more)
        assert list(found.token_ids) == expected

    @pytest.mark.parametrize("temperature", [0.0, 1.5])
    def test_are_in_no_answer_in_any_case(self, generator, temperature):
        for seed in range(4):
            sampling = {"temperature": temperature, "seed": seed}
            ids = make_ids(5, seed)
            banned = banned_of(generator, ids, **sampling, max_new_tokens=40)
            before = run_one(generator, ids, **sampling, max_new_tokens=40)
            after = run_one(
                generator, ids, **sampling, max_new_tokens=40, banned_strings=banned, logprobs=1
            )
            assert len(after.token_ids) == len(after.logprobs) == len(after.top_logprobs) == 40
            assert not any(text.lower() in after.text.lower() for text in banned)
            assert any(text.lower() in before.text.lower() for text in banned)

    def test_that_do_not_come_change_nothing(self, generator):
        sampling = {"temperature": 1.0, "seed": 3, "max_new_tokens": 40}
        free = run_one(generator, make_ids(6), **sampling)
        found = run_one(generator, make_ids(6), **sampling, banned_strings=("never there",))
        assert found.token_ids == free.token_ids

    def test_log_probabilities_are_those_of_the_tokens_that_stay(self, generator, tokenizer):
        ids = make_ids(7, 1)
        banned = banned_of(generator, ids)
        found = run_one(generator, ids, max_new_tokens=12, banned_strings=banned, logprobs=0)
        [scored] = generator.run(
            [
                Request(
                    0, [*ids, *found.token_ids], make_params(max_new_tokens=0),
                    prompt_logprobs=True,
                )
            ]
        )  # fmt: skip
        assert scored.prompt_logprobs[len(ids) - 1 :] == pytest.approx(found.logprobs)

    def test_a_stop_string_waits_while_a_banned_one_may_come(self, generator, tokenizer):
        """The stop string is the beginning of the banned one, which then comes whole."""
        ids = make_ids(8, 2)
        text = run_one(generator, ids).text
        start = next(i for i in range(3, len(text) - 6) if "\ufffd" not in text[i : i + 6])
        stop, banned = text[start : start + 2], text[start : start + 6]
        stopped = run_one(generator, ids, stop=(stop,))
        assert stopped.status == Status.STOP
        found = run_one(generator, ids, stop=(stop,), banned_strings=(banned,))
        assert banned.lower() not in found.text.lower()
        assert found.token_ids != stopped.token_ids

    def test_a_stop_string_counts_once_the_banned_one_did_not_come(self, generator):
        ids = make_ids(8, 2)
        text = run_one(generator, ids).text
        start = next(i for i in range(3, len(text) - 6) if "\ufffd" not in text[i : i + 6])
        stop = text[start : start + 2]
        found = run_one(generator, ids, stop=(stop,), banned_strings=(stop + "\0\0",))
        assert (found.status, found.stop_reason) == (Status.STOP, stop)
        assert found.text == text[: text.index(stop)]

    def test_an_end_token_ends_a_text_with_a_stop_string_that_waits(self, generator):
        ids = make_ids(8, 2)
        free = run_one(generator, ids)
        decoded = [decode(generator._decoder, free.token_ids[:n]) for n in range(4, 12)]
        n, before = next(
            (n, text)
            for n, text in enumerate(decoded, 4)
            if text.index(text[-2:]) == len(text) - 2
            and "\ufffd" not in text[-2:]
            and free.token_ids[n] not in free.token_ids[:n]
        )
        stop, end = before[-2:], free.token_ids[n]
        banned = stop + "\0"
        found = run_one(
            generator, ids, stop=(stop,), stop_token_ids=(end,), banned_strings=(banned,)
        )
        assert (found.status, found.stop_reason, found.text) == (Status.STOP, stop, before[:-2])

    def test_a_row_that_goes_round_and_round_ends(self, toy_float64, monkeypatch):
        """Every token begins the banned string: one of them after another is banned."""
        monkeypatch.setattr(bans, "MAX_ROUNDS", 5)
        generator = make_generator(toy_float64)
        ids = make_ids(4)
        text = run_one(generator, ids, max_new_tokens=6).text
        letters = tuple(sorted(set(map(chr, range(32, 127))) | set(text)))
        found = run_one(generator, ids, max_new_tokens=6, banned_strings=letters)
        assert (found.status, found.stop_reason) == (Status.LOOP, "banned_strings")
        assert not any(letter.lower() in found.text.lower() for letter in letters)
        assert generator._loop.num_rows == 0

    def test_a_row_without_a_token_left_is_an_error(self, generator, tokenizer):
        allowed = [tokenizer.convert_tokens_to_ids(letter) for letter in "abc"]
        found = run_one(
            generator, [9, 8], allowed_token_ids=tuple(allowed), banned_strings=("a", "B", "c")
        )
        assert found.status == Status.ERROR
        assert "no token is left" in found.error


class TestBadWords:
    def test_never_come_at_the_beginning_or_after_a_space(self, generator, tokenizer):
        for seed in range(4):
            ids, sampling = make_ids(6, seed), {"temperature": 1.0, "seed": seed}
            free = run_one(generator, ids, **sampling, max_new_tokens=40)
            n = 3 + seed
            word = decode(tokenizer, free.token_ids[n : n + 3])
            found = run_one(generator, ids, **sampling, max_new_tokens=40, bad_words=(word,))
            for variant in (word.lstrip() or word, " " + (word.lstrip() or word)):
                banned = tuple(tokenizer.encode(variant, add_special_tokens=False))
                places = range(len(found.token_ids) - len(banned) + 1)
                assert all(found.token_ids[i : i + len(banned)] != banned for i in places)

    def test_the_last_token_alone_is_banned_and_only_there(self, generator, tokenizer):
        ids = make_ids(6)
        free = run_one(generator, ids, max_new_tokens=10).token_ids
        word = decode(tokenizer, free[4:6])
        assert tuple(tokenizer.encode(word, add_special_tokens=False)) == free[4:6]
        found = run_one(generator, ids, max_new_tokens=10, bad_words=(word,)).token_ids
        assert found[:5] == free[:5]
        assert found[5] != free[5]

    def test_a_word_of_one_token_never_comes(self, generator, tokenizer):
        ids = make_ids(6)
        free = run_one(generator, ids, max_new_tokens=10).token_ids
        word = decode(tokenizer, free[3:4])
        banned = tokenizer.encode(word, add_special_tokens=False)
        found = run_one(generator, ids, max_new_tokens=10, bad_words=(word,)).token_ids
        assert len(banned) == 1
        assert free[3] == banned[0]
        assert found == run_one(
            generator, ids, max_new_tokens=10,
            banned_token_ids=(*banned, *_one_token(tokenizer, " " + word)),
        ).token_ids  # fmt: skip


def _one_token(tokenizer, text: str) -> list[int]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids if len(ids) == 1 else []


class TestAllowedTokens:
    def test_no_other_comes(self, generator):
        allowed = tuple(range(40, 90, 7))
        for seed in range(3):
            found = run_one(
                generator, make_ids(6, seed), temperature=2.0, seed=seed, allowed_token_ids=allowed
            )
            assert set(found.token_ids) <= set(allowed)
            assert len(set(found.token_ids)) > 1

    def test_is_the_same_as_banning_all_others(self, generator):
        allowed = (41, 77, 130, 301)
        others = tuple(set(range(VOCAB_SIZE)) - set(allowed))
        for temperature in (0.0, 1.0):
            sampling = {"temperature": temperature, "seed": 5, "repetition_penalty": 1.2}
            a = run_one(generator, make_ids(5), **sampling, allowed_token_ids=allowed)
            b = run_one(generator, make_ids(5), **sampling, banned_token_ids=others)
            assert a.token_ids == b.token_ids


class TestThinkingBudget:
    def marks(self, tokenizer) -> list[int]:
        return tokenizer.encode(THOUGHTS.end, add_special_tokens=False)

    @pytest.mark.parametrize("steps_ahead", [0, 1, 2])
    @pytest.mark.parametrize("budget", [0, 1, 6])
    def test_ends_thoughts_with_its_mark(self, toy_float64, tokenizer, budget, steps_ahead):
        """Up to the mark, the answer is what it was; what follows is the mark's answer."""
        generator = make_generator(toy_float64)
        generator._loop._ahead = steps_ahead
        end, ids = self.marks(tokenizer), make_ids(9)
        free = run_one(generator, ids, max_new_tokens=20)
        thinking = ThinkingBudget(budget, "[[", "]]", is_open=True)
        found = run_one(generator, ids, max_new_tokens=20, thinking=thinking, logprobs=0)
        expected = [*free.token_ids[:budget], *end]
        assert list(found.token_ids[: len(expected)]) == expected
        assert len(found.token_ids) == len(found.logprobs) == 20
        rest = run_one(generator, [*ids, *expected], max_new_tokens=20 - len(expected))
        assert found.token_ids[len(expected) :] == rest.token_ids
        assert all(np.isfinite(found.logprobs))

    def test_thoughts_that_end_in_time_are_left_alone(self, generator, tokenizer):
        end = self.marks(tokenizer)
        bias = make_params(logit_bias=((end[0], 200.0),))
        budget = ThinkingBudget(8, "[[", decode(tokenizer, end[:1]), is_open=True)
        free = run_one(generator, make_ids(9), logit_bias=bias.logit_bias)
        found = run_one(generator, make_ids(9), logit_bias=bias.logit_bias, thinking=budget)
        assert free.token_ids == found.token_ids
        assert free.token_ids[0] == end[0]

    def test_counts_from_the_mark_that_the_answer_begins_with(self, generator, tokenizer):
        """A structure makes the beginning; the same ids without one are the expected answer."""
        start = tokenizer.encode("[[", add_special_tokens=False)
        ids = make_ids(5)
        row = generator._bans.start(make_params(thinking=ThinkingBudget(2, "[[", "]]")))
        for token in [*start, 77, 78]:
            assert row.forced_at(len(row.ids)) is None
            row.take(token, is_end=False)
        for token in self.marks(tokenizer):
            assert row.forced_at(len(row.ids)) == token
            row.take(token, is_end=False)
        assert row.forced_at(len(row.ids)) is None
        never = run_one(generator, ids, thinking=ThinkingBudget(2, "[[", "]]"))
        assert never.token_ids == run_one(generator, ids).token_ids  # it does not think

    def test_the_limit_still_rules(self, generator):
        thinking = ThinkingBudget(50, "[[", "]]", is_open=True)
        found = run_one(generator, make_ids(9), max_new_tokens=10, thinking=thinking)
        assert found.token_ids == run_one(generator, make_ids(9), max_new_tokens=10).token_ids
        assert found.status == Status.LENGTH

    def test_goes_back_with_a_banned_string(self, generator, tokenizer):
        ids = make_ids(9, 3)
        banned = banned_of(generator, ids, max_new_tokens=6)
        found = run_one(generator, ids, max_new_tokens=20, thinking=THOUGHTS, banned_strings=banned)
        without = run_one(generator, ids, max_new_tokens=6, banned_strings=banned)
        end = self.marks(tokenizer)
        assert list(found.token_ids[: 6 + len(end)]) == [*without.token_ids, *end]

    def test_a_banned_string_that_begins_in_the_mark_is_taken_back_behind_it(
        self, generator, tokenizer
    ):
        """The mark is put in again wherever the row goes back to."""
        ids = make_ids(9)
        free = run_one(generator, ids, max_new_tokens=20, thinking=THOUGHTS)
        kept = THOUGHTS.tokens + len(self.marks(tokenizer))
        following = decode(tokenizer, free.token_ids[kept : kept + 2])
        banned = ("]" + following,)
        found = run_one(generator, ids, max_new_tokens=20, thinking=THOUGHTS, banned_strings=banned)
        assert found.status == Status.LENGTH
        assert len(found.token_ids) == 20
        assert found.token_ids[:kept] == free.token_ids[:kept]
        assert found.token_ids[kept] != free.token_ids[kept]
        assert banned[0] not in found.text


class TestRefused:
    @pytest.mark.parametrize(
        ("changes", "error"),
        [
            ({"bad_words": ("",)}, "sampling.bad_words must not hold an empty string; remove it"),
            ({"banned_strings": ("a", "")}, "sampling.banned_strings must not hold an empty"),
            ({"allowed_token_ids": (VOCAB_SIZE,)}, "allowed_token_ids: token ids must be below"),
            ({"allowed_token_ids": (7,), "banned_token_ids": (7,)}, "no token is left"),
            (
                {"allowed_token_ids": (7,), "stop_token_ids": (7,), "min_new_tokens": 2},
                "no token is left",
            ),
            (
                {"banned_strings": ("a",), "structured": StructuredOutput("regex", "a+")},
                "set sampling.structured_output or sampling.banned_strings, not both",
            ),
            (
                {"thinking": THOUGHTS, "structured": StructuredOutput("regex", "a+")},
                "set sampling.structured_output or sampling.thinking_token_budget, not both",
            ),
            ({"thinking": ThinkingBudget(-1)}, "thinking_token_budget must be 0 or more, got -1"),
            ({"thinking": ThinkingBudget(1, "<s>", "</s>")}, "'</s>' is no text of the model"),
            ({"thinking": THOUGHTS, "banned_strings": ("]",)}, "']]' is banned"),
        ],
    )
    def test_in_one_line(self, generator, changes, error):
        found = run_one(generator, [5, 6], **changes)
        assert found.status == Status.INVALID
        assert error in found.error
        assert "\n" not in found.error

    @pytest.mark.parametrize(
        ("changes", "name"),
        [
            ({"allowed_token_ids": (7,)}, "allowed_token_ids"),
            ({"bad_words": ("a",)}, "bad_words"),
            ({"banned_strings": ("a",)}, "banned_strings"),
            ({"thinking": THOUGHTS}, "thinking_token_budget"),
        ],
    )
    def test_with_a_draft_model(self, toy_float64, changes, name):
        drafting = make_generator(toy_float64, draft_model=str(toy_float64))
        found = run_one(drafting, [5], **changes)
        assert found.status == Status.INVALID
        assert f"sampling.{name} does not work with a draft model" in found.error


def mixed_bans() -> list[Request]:
    """Rows with all kinds of bans, and rows without among them."""
    rng = random.Random(0)
    requests = []
    for i in range(24):
        params = SamplingParams(
            temperature=rng.choice([0.0, 1.0, 2.0]),
            top_p=rng.choice([1.0, 0.8]),
            seed=i,
            max_new_tokens=rng.choice([1, 5, 40]),
            min_new_tokens=rng.choice([0, 3]) if i % 3 else 0,
            stop=rng.choice([(), ("e", "th")]),
            stop_token_ids=rng.choice([(), (EOS_ID, 50, 60)]),
            repetition_penalty=rng.choice([1.0, 1.3]),
            logprobs=rng.choice([None, 2]),
            allowed_token_ids=rng.choice([(), tuple(range(30, 400))]),
            bad_words=rng.choice([(), ("th", "er", "a b", "q")]),
            banned_strings=rng.choice([(), ("e", "an", " t"), ("never there",)]),
            thinking=rng.choice([None, ThinkingBudget(rng.choice([0, 4]), "[", "]", True)]),
        )
        if params.max_new_tokens < params.min_new_tokens:
            params = make_params(bad_words=("a",))
        requests.append(Request(i, make_ids(rng.choice([2, 9, 60, 300]), rng.randrange(5)), params))
    return requests


@pytest.fixture(scope="module")
def alone(toy_float64):
    single, found = make_generator(toy_float64, max_batch_size=1), {}
    for request in mixed_bans():
        single._loop.forget()
        [found[request.request_id]] = single.run([request])
    return found


def check_equal(completions, alone) -> None:
    for completion in completions:
        expected = alone[completion.request_id]
        for name in ("status", "token_ids", "text", "stop_reason", "error"):
            assert getattr(completion, name) == getattr(expected, name), (completion, name)
        assert (completion.logprobs or ()) == pytest.approx(expected.logprobs or (), rel=1e-9)


@pytest.mark.parametrize("steps_ahead", [0, 1, 2])
def test_every_row_gets_what_it_gets_alone(toy_float64, alone, steps_ahead):
    generator = make_generator(toy_float64, max_batch_size=7, cache_tokens=2048)
    generator._loop._ahead = steps_ahead
    check_equal(generator.run(mixed_bans()), alone)
    assert {c.status for c in alone.values()} >= {Status.STOP, Status.LENGTH}


@pytest.fixture(scope="module")
def long_bans(toy_float64):
    """Rows whose banned strings are several tokens long, and what each gets alone."""
    single, requests = make_generator(toy_float64, max_batch_size=1), []
    for i in range(10):
        ids = make_ids(20 + 40 * (i // 2), i // 2)
        sampling = {"temperature": float(i % 2), "seed": i, "max_new_tokens": 30}
        sampling |= {"repetition_penalty": 1.3, "frequency_penalty": 0.3} if i % 3 else {}
        banned = banned_of(single, ids, count=6, length=8, **sampling)
        params = make_params(**sampling, banned_strings=banned, logprobs=0)
        requests.append(Request(i, ids, params))
    return requests, {c.request_id: c for c in single.run(requests)}


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_rows_that_wait_again_go_back_alike(toy_float64, long_bans, steps_ahead):
    """Pages that a row comes back to may be shared: it must not go back into them.

    A row that waited is counted anew, for its penalties; one that goes back must be, too.
    """
    requests, alone = long_bans
    generator = make_generator(toy_float64, max_batch_size=7, cache_tokens=4096)
    loop, random_numbers, counts = generator._loop, random.Random(1), [0, 0]
    loop._ahead, put_back = steps_ahead, loop._put_back

    def counted(row) -> None:
        counts[0] += 1
        put_back(row)

    def disturb() -> None:
        loop._take_steps()
        active = loop._slots.active
        for slot in active[active % 2 == random_numbers.randrange(4)]:
            counts[1] += 1
            loop._preempt(int(slot))

    loop._put_back = counted
    check_equal(generator.run(requests, disturb), alone)
    assert counts[0] > counts[1] > 10


def test_masks_leave_other_rows_as_they_are():
    slots = BanSlots(4, 70, torch.device("cpu"))
    mask = np.zeros(3, np.uint32)
    mask[2] = 1 << 3  # token 67
    slots.enter(2, RowBans(TokenBans(mask), None, None, (0, frozenset())))
    logits = torch.arange(140.0).reshape(2, 70)
    edited = slots.edit(logits, np.array([1, 2]), np.array([0, 0]))
    assert torch.equal(edited[0], logits[0])
    assert edited[1].isfinite().nonzero().flatten().tolist() == [67]
    assert logits.isfinite().all()


def test_the_place_of_a_banned_string_in_a_broken_character(toy_float64, tokenizer):
    """A string that begins with a character of several tokens begins with its first token."""
    generator = make_generator(toy_float64)
    ids = tokenizer.encode("x☃y", add_special_tokens=False)
    row = generator._bans.start(make_params(banned_strings=("☃",)))
    went_back = [row.take(token, is_end=False) for token in ids[:-1]]
    assert went_back[-1]
    assert not any(went_back[:-1])
    assert row.goes_back_to == 1
    assert len(ids) == 5
    assert re.match("x", decode(tokenizer, ids[: row.goes_back_to]))
