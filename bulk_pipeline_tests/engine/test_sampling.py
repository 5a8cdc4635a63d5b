import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bulk_pipeline.engine.request import SamplingParams
from bulk_pipeline.engine.sampler import Sampler
from bulk_pipeline.engine.sampling import (
    GAMMA,
    MIX_1,
    MIX_2,
    TOP_P_PREFIX,
    SamplingBatch,
    draw,
    problem_with,
    sample,
    uniform,
)
from bulk_pipeline.engine.sampling_slots import MAX_COUNT, SharedLists

MASK = (1 << 64) - 1
NUMBERS = [0.6524484863740322, 0.7058601101654737, 0.4747642291100628]


def mix_reference(z):
    z = ((z ^ (z >> 30)) * MIX_1) & MASK
    z = ((z ^ (z >> 27)) * MIX_2) & MASK
    return z ^ (z >> 31)


def uniform_reference(seed, position, token):
    state = mix_reference((mix_reference(seed) + (position + 1) * GAMMA) & MASK)
    bits = mix_reference((state + (token + 1) * GAMMA) & MASK)
    return ((bits >> 12) + 0.5) / 2**52


def sample_rows(logits, params, positions=None):
    logits = torch.as_tensor(logits, dtype=torch.float64)
    batch = SamplingBatch.from_params(params, logits.shape[1])
    positions = [0] * len(params) if positions is None else positions
    return sample(logits, batch, torch.tensor(positions)).tolist()


def support(probabilities, draws=400, **settings):
    """The set of ids that ever come, out of many seeds."""
    logits = torch.tensor(probabilities, dtype=torch.float64).log().expand(draws, -1)
    params = [SamplingParams(seed=seed, **settings) for seed in range(draws)]
    return set(sample_rows(logits, params))


class TestRandomNumbers:
    @given(st.integers(0, MASK), st.integers(0, 2**40), st.integers(0, 2**18))
    def test_equal_the_plain_python_hash(self, seed, position, token):
        signed = seed - (1 << 64) if seed >> 63 else seed
        found = uniform(*(torch.tensor([value]) for value in (signed, position, token)))
        assert found.item() == uniform_reference(seed, position, token)

    def test_are_splitmix64(self):
        # the first outputs of the published generator from state 1234567
        state, expected = 1234567, [6457827717110365317, 3203168211198807973]
        for output in expected:
            state = (state + GAMMA) & MASK
            assert mix_reference(state) == output

    def test_never_change(self):
        seeds, positions, ids = torch.tensor([[0, 1, -1], [0, 1, 2**20], [0, 5, 49151]])
        assert uniform(seeds, positions, ids).tolist() == NUMBERS

    @pytest.mark.parametrize("varying", [0, 1, 2], ids=["seeds", "positions", "ids"])
    def test_are_uniform(self, varying):
        given_ = [torch.full((20_000,), value) for value in (7, 3, 11)]
        given_[varying] = torch.arange(20_000)
        numbers = uniform(*given_)
        counts = torch.histc(numbers, 20, 0, 1)
        chi_squared = ((counts - 1000) ** 2 / 1000).sum().item()
        assert chi_squared < 45.3  # 19 degrees of freedom, p = 0.0006
        assert 0 < numbers.min() < numbers.max() < 1
        pairs = torch.corrcoef(torch.stack([numbers[:-1], numbers[1:]]))[0, 1]
        assert abs(pairs) < 0.028  # four standard deviations

    def test_a_seed_counts_with_all_64_bits(self):
        logits = torch.zeros(1, 1000)
        drawn = {sample_rows(logits, [SamplingParams(seed=1 << bit)])[0] for bit in range(64)}
        assert len(drawn) > 55


class TestDraw:
    def test_never_takes_a_token_that_is_not_kept(self):
        scaled = torch.tensor([[0.0, 50.0, 0.0, 0.0]], dtype=torch.float64).expand(500, -1)
        kept = torch.tensor([[True, False, True, True]]).expand(500, -1)
        seeds = torch.arange(500)
        assert set(draw(scaled, kept, seeds, seeds * 0).tolist()) == {0, 2, 3}

    def test_rounding_of_the_logits_changes_a_token_rarely(self):
        """Noise as of float16 over a flat distribution, where cumulative sums would drift."""
        generator = torch.Generator().manual_seed(1)
        logits = torch.randn(2000, 1000, generator=generator, dtype=torch.float64)
        params = [SamplingParams(seed=seed) for seed in range(2000)]
        noise = 1e-3 * torch.randn(logits.shape, generator=generator, dtype=torch.float64)
        before, after = sample_rows(logits, params), sample_rows(logits + noise, params)
        assert sum(a != b for a, b in zip(before, after, strict=True)) <= 10

    def test_follows_softmax(self):
        logits = torch.tensor([2.0, 0.0, -1.0, 1.0, 0.5], dtype=torch.float64)
        for temperature in (0.5, 1.0, 2.0):
            params = [SamplingParams(temperature, seed=seed) for seed in range(20_000)]
            ids = torch.tensor(sample_rows(logits.expand(20_000, -1), params))
            expected = torch.softmax(logits / temperature, 0) * 20_000
            observed = torch.bincount(ids, minlength=5)
            chi_squared = ((observed - expected) ** 2 / expected).sum().item()
            assert chi_squared < 20.0  # 4 degrees of freedom, p = 0.0005

    def test_a_nan_row_does_not_reach_past_the_vocabulary(self):
        ids = sample_rows([[math.nan, 0.0, 1.0], [0.0, 0.0, 90.0]], [SamplingParams()] * 2)
        assert 0 <= ids[0] < 3
        assert ids[1] == 2


PROBABILITIES = [0.05, 0.40, 0.20, 0.25, 0.10]
SUPPORTS = {
    "no limits": ({}, {0, 1, 2, 3, 4}),
    "top_k 1": ({"top_k": 1}, {1}),
    "top_k 3": ({"top_k": 3}, {1, 2, 3}),
    "top_k over the vocabulary": ({"top_k": 50}, {0, 1, 2, 3, 4}),
    "top_p takes the token that reaches it": ({"top_p": 0.41}, {1, 3}),
    "top_p below the best token": ({"top_p": 0.1}, {1}),
    "top_p 0.9": ({"top_p": 0.9}, {1, 2, 3, 4}),
    "min_p": ({"min_p": 0.3}, {1, 2, 3}),
    "min_p 1": ({"min_p": 1.0}, {1}),
    "top_p counts what top_k left": ({"top_k": 2, "top_p": 0.6}, {1}),
    "top_k after nothing": ({"top_k": 2, "top_p": 0.7}, {1, 3}),
    "min_p after both": ({"top_k": 4, "top_p": 0.95, "min_p": 0.6}, {1, 3}),
    "temperature first": ({"temperature": 0.25, "min_p": 0.3}, {1}),
}


@pytest.mark.parametrize("name", SUPPORTS)
def test_support_is_exact(name):
    limits, expected = SUPPORTS[name]
    assert support(PROBABILITIES, **limits) == expected


@pytest.mark.parametrize("limits", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.9}])
def test_ties_stay_together(limits):
    assert support([0.4, 0.1, 0.2, 0.2, 0.1, 0.0], top_k=2) == {0, 2, 3}
    assert support([0.3, 0.05, 0.3, 0.3, 0.05], **limits) == {0, 2, 3}


def test_top_p_beyond_the_prefix_is_exact():
    size = 3 * TOP_P_PREFIX
    flat = torch.zeros(1, size, dtype=torch.float64) - torch.arange(size) * 1e-9
    params = [SamplingParams(top_p=0.5, seed=seed) for seed in range(2000)]
    ids = sample_rows(flat.expand(2000, -1), params)
    assert 0.49 * size < max(ids) < 0.5 * size + 1


class TestGreedy:
    @pytest.mark.parametrize("temperature", [0.0, 9e-6])
    def test_takes_the_best(self, temperature):
        params = [SamplingParams(temperature, top_k=5, seed=s) for s in range(3)]
        assert sample_rows([[1, 3, 2], [9, 0, 0], [0, 0, 1]], params) == [1, 0, 2]

    def test_mixes_with_sampled_rows(self):
        row = torch.randn(1, 50, dtype=torch.float64)
        sampled = SamplingParams(seed=5, top_p=0.9)
        greedy = SamplingParams(0.0, top_k=1)
        mixed = sample_rows(row.expand(2, -1), [greedy, sampled])
        assert mixed == [row.argmax().item(), *sample_rows(row, [sampled])]

    def test_uses_nothing_that_no_row_needs(self):
        batch = SamplingBatch.from_params([SamplingParams(0.0, top_k=3, top_p=0.5, min_p=0.1)], 9)
        assert batch.temperature is batch.top_k is batch.top_p is batch.log_min_p is None


class TestMinNewTokens:
    PARAMS = SamplingParams(0.0, min_new_tokens=2, stop_token_ids=(1, 3, 99))

    @pytest.mark.parametrize(("position", "expected"), [(0, 2), (1, 2), (2, 1), (9, 1)])
    def test_holds_end_tokens_back_until_then(self, position, expected):
        assert sample_rows([[0, 9, 1, 5]], [self.PARAMS], [position]) == [expected]

    def test_is_each_rows_own(self):
        free, other = (
            SamplingParams(0.0),
            SamplingParams(0.0, min_new_tokens=5, stop_token_ids=(2,)),
        )
        no_ends = SamplingParams(0.0, min_new_tokens=5)
        logits = [[0, 9, 1, 5]] * 3 + [[9, 0, 0, 0]]
        assert sample_rows(logits, [self.PARAMS, free, other, no_ends]) == [2, 1, 1, 0]

    def test_leaves_the_logits_as_they_were(self):
        logits = torch.tensor([[0.0, 9, 1, 5]])
        sample(logits, SamplingBatch.from_params([self.PARAMS], 4), torch.tensor([0]))
        assert logits.tolist() == [[0, 9, 1, 5]]


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    top_k=st.sampled_from([0, 1, 3, 40, 1000]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    min_new_tokens=st.integers(0, 3),
    seed=st.integers(0, MASK),
    stop_token_ids=st.sampled_from([(), (0,), (1, 2, 3)]),
    logit_bias=st.sampled_from([(), ((7, 2.0),), ((0, -100.0), (9, 1.5), (4, 0.25))]),
    banned_token_ids=st.sampled_from([(), (), (3,), (1, 2, 30)]),
)
penalised_strategy = st.builds(
    replace,
    params_strategy,
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5, -1.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.8]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(params_strategy, min_size=1, max_size=8), st.integers(0, 2**31), st.data())
def test_a_row_does_not_depend_on_its_batch(params, logit_seed, data):
    rows = len(params)
    generator = torch.Generator().manual_seed(logit_seed)
    logits = torch.randn(rows, 200, dtype=torch.float64, generator=generator) * 3
    positions = data.draw(st.lists(st.integers(0, 5), min_size=rows, max_size=rows))
    together = sample_rows(logits, params, positions)
    order = data.draw(st.permutations(range(rows)))
    shuffled = sample_rows(logits[order], [params[i] for i in order], [positions[i] for i in order])
    alone = [sample_rows(logits[i : i + 1], [params[i]], [positions[i]])[0] for i in range(rows)]
    assert together == alone
    assert [together[i] for i in order] == shuffled


def sampler_sample(sampler, logits, slots, positions=None):
    slots = np.array(slots)
    positions = torch.zeros(len(slots), dtype=torch.int64) if positions is None else positions
    return sampler.sample(logits, slots, torch.from_numpy(slots), positions).tolist()


@settings(max_examples=40, deadline=None)
@given(st.lists(params_strategy, min_size=1, max_size=12), st.integers(0, 2**31), st.data())
def test_slots_sample_as_a_batch_does(params, logit_seed, data):
    """Rows come and go in four slots; each is sampled by its own settings at every step."""
    sampler = Sampler(4, 50, torch.device("cpu"))
    generator = torch.Generator().manual_seed(logit_seed)
    held = {}
    for row in params:
        slot = data.draw(st.integers(0, 3))
        sampler.add(slot, row, [1, 2])
        held[slot] = row
        slots = data.draw(st.permutations(sorted(held)))
        slots = slots[: data.draw(st.integers(1, len(slots)))]
        logits = torch.randn(len(slots), 50, generator=generator) * 3
        positions = torch.arange(len(slots))
        batch = SamplingBatch.from_params([held[s] for s in slots], 50)
        assert batch.repetition is None
        expected = sample(logits, batch, positions).tolist()
        assert sampler_sample(sampler, logits, slots, positions) == expected


def test_a_row_that_enters_a_slot_replaces_its_settings():
    sampler = Sampler(2, 3, torch.device("cpu"))
    logits = torch.tensor([[1.0, 0.0, 5.0]])
    held = SamplingParams(0.0, min_new_tokens=5, stop_token_ids=(2,))
    sampler.add(1, held, [])
    assert sampler_sample(sampler, logits, [1]) == [0]
    sampler.add(1, replace(held, min_new_tokens=0), [])
    assert sampler_sample(sampler, logits, [1]) == [2]


class TestSharedLists:
    @given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=40))
    def test_hold_what_was_set(self, changes):
        lists, expected = SharedLists(3), {}
        for slot, size in changes:
            items = tuple((token, token / 8) for token in range(size, 3 * size))
            expected[slot] = (lists.set(slot, items), items)
            for place, wanted in expected.values():
                found = dict.fromkeys(lists.ids[place].tolist(), 0.0)
                for token, number in zip(lists.ids[place], lists.numbers[place], strict=True):
                    found[int(token)] += float(number)
                assert found == (dict(wanted) or {0: 0.0})
        assert len(lists.ids) <= 8  # one a slot, the empty one, one while they change; doubling

    def test_equal_lists_are_held_once(self):
        lists = SharedLists(100)
        assert {lists.set(slot, ((7, 1.0),)) for slot in range(100)} == {1}
        assert lists.ids.shape == (2, 1)


class TestBiases:
    LOGITS = ((1.0, 5.0, 2.0, 4.5),)

    @pytest.mark.parametrize(
        ("settings", "expected"),
        [
            ({}, 1),
            ({"logit_bias": ((3, 0.6),)}, 3),
            ({"logit_bias": ((3, 0.4),)}, 1),
            ({"logit_bias": ((1, -100), (0, 3.0))}, 3),
            ({"banned_token_ids": (1,)}, 3),
            ({"banned_token_ids": (3, 1, 3)}, 2),
            ({"banned_token_ids": (1,), "logit_bias": ((1, 100.0),)}, 3),
            ({"banned_token_ids": (0,)}, 1),
        ],
        ids=str,
    )
    def test_greedy(self, settings, expected):
        assert sample_rows(self.LOGITS, [SamplingParams(0.0, **settings)]) == [expected]

    def test_a_banned_token_never_comes_and_a_bias_shifts(self):
        probabilities = [0.5, 0.3, 0.2]
        assert support(probabilities, banned_token_ids=(0,)) == {1, 2}
        biased = math.log(0.3 / 0.2)  # makes the last two equal
        assert support(probabilities, logit_bias=((2, biased), (0, -100)), min_p=0.999) == {1, 2}

    def test_are_each_rows_own(self):
        params = [
            SamplingParams(0.0, banned_token_ids=(1, 3)),
            SamplingParams(0.0),
            SamplingParams(0.0, logit_bias=((0, 9.0),)),
        ]
        assert sample_rows(self.LOGITS * 3, params) == [2, 1, 0]


class TestPenalties:
    def greedy(self, logits, prompt, generated, **settings):
        sampler = Sampler(1, len(logits), torch.device("cpu"))
        sampler.add(0, SamplingParams(0.0, **settings), prompt, generated)
        return sampler_sample(sampler, torch.tensor([logits]), [0])[0]

    @pytest.mark.parametrize(
        ("settings", "expected"),
        [
            ({"repetition_penalty": 1.2}, 1),  # 6 becomes 5, 5.5 stays
            ({"repetition_penalty": 1.05}, 0),
            ({"frequency_penalty": 0.3}, 0),  # token 0 is in the prompt alone
            ({"presence_penalty": 2.0}, 0),
            ({"repetition_penalty": 0.5}, 0),
        ],
        ids=str,
    )
    def test_of_a_token_of_the_prompt(self, settings, expected):
        assert self.greedy([6.0, 5.5, 0.0], [0, 0, 2], [], **settings) == expected

    @pytest.mark.parametrize(
        ("settings", "expected"),
        [
            ({"repetition_penalty": 1.2}, 1),
            ({"frequency_penalty": 0.3}, 1),  # twice
            ({"frequency_penalty": 0.2}, 0),
            ({"presence_penalty": 0.6}, 1),
            ({"presence_penalty": 0.4}, 0),
            ({"presence_penalty": 0.2, "frequency_penalty": 0.2}, 1),
        ],
        ids=str,
    )
    def test_of_a_token_of_the_output(self, settings, expected):
        assert self.greedy([6.0, 5.5, 0.0], [], [0, 2, 0], **settings) == expected

    def test_a_negative_logit_is_multiplied(self):
        assert self.greedy([-1.0, -1.5], [0], [], repetition_penalty=1.6) == 1
        assert self.greedy([-1.0, -1.5], [0], [], repetition_penalty=1.4) == 0

    def test_biases_come_first(self):
        """4 - 6 is negative and multiplied; penalised first it were 2 - 6."""
        settings = {"repetition_penalty": 2.0, "logit_bias": ((0, -6.0),)}
        assert self.greedy([4.0, -3.9], [0], [], **settings) == 1
        assert self.greedy([4.0, -4.1], [0], [], **settings) == 0

    def test_equal_those_of_transformers(self):
        processors = pytest.importorskip("transformers.generation.logits_process")
        generator = torch.Generator().manual_seed(3)
        for seed in range(20):
            logits = torch.randn(1, 30, generator=generator) * 2
            prompt = torch.randint(0, 30, (1, 12), generator=generator)
            processor = processors.RepetitionPenaltyLogitsProcessor(1.7)
            expected = processor(prompt, logits.clone()).argmax().item()
            found = self.greedy(logits[0].tolist(), prompt[0].tolist(), [], repetition_penalty=1.7)
            assert found == expected, seed

    def test_tokens_are_counted_as_they_come(self):
        """With equal steps down, the best three tokens take turns; a row without does not."""
        sampler = Sampler(3, 4, torch.device("cpu"))
        sampler.add(2, SamplingParams(0.0, frequency_penalty=1.0), [0])
        sampler.add(0, SamplingParams(0.0), [0])
        logits = torch.tensor([[3.0, 2.5, 2.25, 0.0]] * 2)
        drawn = [sampler_sample(sampler, logits, [2, 0]) for _ in range(6)]
        assert [ids[0] for ids in drawn] == [0, 1, 2, 0, 1, 2]
        assert [ids[1] for ids in drawn] == [0] * 6

    def test_a_row_that_comes_back_goes_on(self):
        params = SamplingParams(0.0, frequency_penalty=1.0, repetition_penalty=1.1)
        logits = torch.tensor([[3.0, 2.6, 2.3, 1.9]])
        sampler = Sampler(2, 4, torch.device("cpu"))
        sampler.add(0, params, [1, 2])
        generated = [sampler_sample(sampler, logits, [0])[0] for _ in range(9)]
        for cut in range(9):
            sampler.add(1, SamplingParams(0.0, presence_penalty=2.0), [0, 1, 2, 3])  # another
            sampler_sample(sampler, logits, [1])
            sampler.add(1, params, [1, 2], generated[:cut])
            rest = [sampler_sample(sampler, logits, [1])[0] for _ in range(9 - cut)]
            assert rest == generated[cut:]

    def test_nothing_is_counted_where_no_row_needs_it(self):
        sampler = Sampler(2, 4, torch.device("cpu"))
        sampler.add(0, SamplingParams(0.0), [1])
        sampler_sample(sampler, torch.zeros(1, 4), [0])
        assert sampler._counts.counts.numel() == 0

    def test_counting_ends_before_it_overflows(self):
        generated = [0] * 20_000
        settings = {"frequency_penalty": 1e-4}
        assert self.greedy([6.0, 4.5, 0.0], [], generated, **settings) == 1
        sampler = Sampler(1, 2, torch.device("cpu"))
        sampler.add(0, SamplingParams(0.0, frequency_penalty=1e-9), [], [0] * (MAX_COUNT - 1))
        for _ in range(4):
            sampler_sample(sampler, torch.tensor([[6.0, 4.5]]), [0])
        assert sampler._counts.counts.tolist() == [[2 * MAX_COUNT, 0]]


class TestProblems:
    @pytest.mark.parametrize(
        ("settings", "problem"),
        [
            ({}, None),
            ({"logit_bias": ((49, 1.0),), "banned_token_ids": (0,)}, None),
            ({"stop_token_ids": (99,)}, None),
            (
                {"logit_bias": ((50, 1.0),)},
                "sampling.logit_bias: token ids must be below 50, got 50; remove it",
            ),
            (
                {"banned_token_ids": (3, -1)},
                "sampling.banned_token_ids: token ids must be below 50, got -1; remove it",
            ),
            (
                {"banned_token_ids": tuple(range(50))},
                "sampling.banned_token_ids: all 50 tokens are banned; remove some",
            ),
            (
                {"repetition_penalty": 0.0},
                "sampling.repetition_penalty must be above 0, got 0.0",
            ),
        ],
        ids=str,
    )
    def test_are_told_in_a_line(self, settings, problem):
        assert problem_with(SamplingParams(**settings), 50) == problem


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(penalised_strategy, st.lists(st.integers(0, 49), max_size=9)), min_size=1),
    st.integers(0, 2**31),
    st.data(),
)
def test_a_slot_does_not_depend_on_the_others(rows, logit_seed, data):
    """Rows come and go in four slots; each draws what it draws alone, bit for bit."""
    sampler = Sampler(4, 50, torch.device("cpu"))
    generator = torch.Generator().manual_seed(logit_seed)
    held = {}
    for params, prompt in rows:
        slot = data.draw(st.integers(0, 3))
        sampler.add(slot, params, prompt)
        alone = Sampler(1, 50, torch.device("cpu"))
        alone.add(0, params, prompt)
        held[slot] = [alone, 0]
        for _ in range(2):
            slots = data.draw(st.permutations(sorted(held)))
            slots = slots[: data.draw(st.integers(1, len(slots)))]
            logits = torch.randn(len(slots), 50, generator=generator).half()
            positions = torch.tensor([held[s][1] for s in slots])
            ids = sampler_sample(sampler, logits, slots, positions)
            for i, s in enumerate(slots):
                (expected,) = sampler_sample(
                    held[s][0], logits[i : i + 1], [0], positions[i : i + 1]
                )
                assert ids[i] == expected
                held[s][1] += 1
