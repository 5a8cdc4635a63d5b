import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulk_pipeline.engine.loops import LoopSlots
from bulk_pipeline.engine.request import LoopGuard, Request, Status
from bulk_pipeline_tests.engine.test_generator import (
    answers,
    make_generator,
    make_ids,
    make_params,
    run_one,
)

GUARD = LoopGuard(ngram=3, repeats=4)


@pytest.fixture(scope="module")
def generator(toy_float64):
    return make_generator(toy_float64)


def repeats_itself(ids, guard: LoopGuard) -> bool:
    """As the guard is described, the slow way."""
    unit = list(ids[-guard.ngram :])
    return list(ids[-guard.ngram * guard.repeats :]) == unit * guard.repeats


def first_loop(ids, guard: LoopGuard) -> int | None:
    """After how many tokens the guard strikes; None where it does not."""
    lengths = range(guard.ngram * guard.repeats, len(ids) + 1)
    return next((n for n in lengths if repeats_itself(ids[:n], guard)), None)


class TestAnswers:
    @pytest.mark.parametrize("guard", [LoopGuard(1, 5), LoopGuard(2, 3), GUARD], ids=str)
    def test_end_with_the_last_repetition(self, generator, guard):
        free = run_one(generator, make_ids(7), max_new_tokens=400, logit_bias=((40, 60.0),))
        needed = first_loop(free.token_ids, guard)
        assert needed is not None
        found = run_one(
            generator, make_ids(7), max_new_tokens=400, logit_bias=((40, 60.0),), loop_guard=guard
        )
        assert found.status == Status.LOOP
        assert found.token_ids == free.token_ids[:needed]
        assert found.stop_reason is None

    def test_that_do_not_repeat_themselves_are_left_alone(self, generator):
        params = {"temperature": 5.0, "max_new_tokens": 60, "seed": 4}
        free = run_one(generator, make_ids(7), **params)
        assert first_loop(free.token_ids, GUARD) is None
        assert run_one(generator, make_ids(7), **params, loop_guard=GUARD).status == Status.LENGTH

    def test_repetition_in_the_prompt_does_not_count(self, generator):
        found = run_one(
            generator,
            [7] * 50,
            max_new_tokens=6,
            logit_bias=((7, 90.0),),
            loop_guard=LoopGuard(1, 7),
        )
        assert (found.status, found.token_ids) == (Status.LENGTH, (7,) * 6)

    def test_an_end_token_goes_before(self, generator):
        found = run_one(
            generator,
            [7],
            min_new_tokens=4,
            stop_token_ids=(1,),
            logit_bias=((7, 80.0), (1, 200.0)),
            loop_guard=LoopGuard(1, 5),
        )
        assert (found.status, len(found.token_ids)) == (Status.STOP, 5)

    @pytest.mark.parametrize("guard", [LoopGuard(0, 3), LoopGuard(3, 1)], ids=str)
    def test_a_guard_that_makes_no_sense_is_refused(self, generator, guard):
        found = run_one(generator, [5], loop_guard=guard)
        assert found.status == Status.INVALID
        assert "sampling.loop_guard" in found.error

    @pytest.mark.parametrize("steps_ahead", [0, 1])
    def test_rows_that_give_their_pages_away_are_still_watched(self, toy_float64, steps_ahead):
        def requests(guard):
            for i in range(6):
                bias = ((40 + i, 60.0),) if i % 2 else ()
                params = make_params(temperature=1.0, seed=i, max_new_tokens=500, logit_bias=bias)
                yield Request(
                    i, make_ids(200 + 17 * i, i), replace(params, loop_guard=guard if i else None)
                )

        guard = LoopGuard(1, 120)
        expected = answers(make_generator(toy_float64, max_batch_size=1), list(requests(guard)))
        small = make_generator(toy_float64, max_batch_size=6, cache_tokens=1280)
        small._loop._ahead = steps_ahead
        assert answers(small, list(requests(guard))) == expected
        assert {expected[i][0] for i in (1, 3, 5)} == {Status.LOOP}


@given(
    st.lists(st.integers(0, 1), max_size=40),
    st.integers(1, 4),
    st.integers(2, 4),
    st.integers(0, 40),
)
def test_finds_the_same_as_the_slow_way(ids, ngram, repeats, entered_at):
    """Also where a row comes back with tokens that it has already."""
    guard, entered_at = LoopGuard(ngram, repeats), min(entered_at, len(ids))
    slots = LoopSlots(3)
    tokens = np.zeros((3, 40), np.int64)
    slots.enter(0, guard, [1] * 30)  # the row before in this slot
    slots.enter(0, guard, ids[:entered_at])
    tokens[0, :entered_at] = ids[:entered_at]
    for place, token in itertools.islice(enumerate(ids), entered_at, None):
        tokens[0, place] = token
        [found, other] = slots.loops(np.array([0, 2]), tokens, np.array([place, 0]))
        assert found == repeats_itself(ids[: place + 1], guard)
        assert not other
