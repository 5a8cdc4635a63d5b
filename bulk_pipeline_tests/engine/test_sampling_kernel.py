"""The GPU's sampler against the reference, `sampling.sample`.

Without a GPU the kernels run in Triton's interpreter: install Triton and set TRITON_INTERPRET=1.
"""

import itertools
import math
import os
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

HAS_GPU = torch.cuda.is_available()
triton = pytest.importorskip("triton")
if not HAS_GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

import triton.language as tl  # noqa: E402

from bulk_pipeline.engine import edit_kernels, kernel_sampler, sampling_kernel  # noqa: E402
from bulk_pipeline.engine.request import SamplingParams  # noqa: E402
from bulk_pipeline.engine.sampler import Sampler  # noqa: E402
from bulk_pipeline.engine.sampling import GAMMA, _mix, uniform  # noqa: E402
from bulk_pipeline.engine.sampling_slots import to_int64  # noqa: E402
from bulk_pipeline.engine.structured import masked  # noqa: E402
from bulk_pipeline_tests.engine.test_sampling import PROBABILITIES, SUPPORTS  # noqa: E402

pytestmark = [pytest.mark.gpu] if HAS_GPU else []
CPU = torch.device("cpu")
DEVICE = torch.device("cuda", 0) if HAS_GPU else CPU
VOCAB = 128_256 if HAS_GPU else 700
ROWS = 64 if HAS_GPU else 6
END_IDS = (1, 5, 9)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks a row, also where the interpreter makes rows short."""
    if not HAS_GPU:
        monkeypatch.setattr(sampling_kernel, "BLOCK", 256)
        monkeypatch.setattr(edit_kernels, "EDIT_BLOCK", 128)
        monkeypatch.setattr(edit_kernels, "LIST_BLOCK", 4)


def make_sampler(num_slots: int, vocab_size: int) -> Sampler:
    sampler = Sampler(num_slots, vocab_size, DEVICE)
    if not HAS_GPU:
        sampler._kernel = kernel_sampler.KernelSampler(sampler._table, vocab_size, DEVICE)
    return sampler


class Pair:
    """The kernels and the reference, with the same rows in the same slots."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self.kernel = make_sampler(num_slots, vocab_size)
        self.reference = Sampler(num_slots, vocab_size, CPU)

    def add(self, slot, params, prompt=(), generated=()):
        self.kernel.add(slot, params, prompt, generated)
        self.reference.add(slot, params, prompt, generated)

    def sample(self, logits, slots=None, positions=None):
        """The ids of both, in lists."""
        slots = np.arange(len(logits)) if slots is None else np.array(slots)
        positions = torch.zeros(len(logits), dtype=torch.int64) if positions is None else positions
        on_device = torch.from_numpy(slots).to(DEVICE)
        ids = self.kernel.sample(logits.clone().to(DEVICE), slots, on_device, positions.to(DEVICE))
        expected = self.reference.sample(logits, slots, torch.from_numpy(slots), positions)
        return ids.tolist(), expected.tolist()


def sample_both(logits, params, **settings):
    pair = Pair(len(params), logits.shape[1])
    for slot, row in enumerate(params):
        pair.add(slot, row)
    return pair.sample(logits, **settings)


def random_logits(rows, vocab_size=VOCAB, spread=2.0, seed=0, dtype=torch.float16):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab_size, generator=generator) * spread).to(dtype)


ALONE = {
    "greedy": {"temperature": 0.0},
    "nothing": {},
    "hot": {"temperature": 5.0},
    "cold": {"temperature": 0.1},
    "coldest": {"temperature": 1e-5},
    "top_k 1": {"top_k": 1},
    "top_k 3": {"top_k": 3},
    "top_k 40": {"top_k": 40},
    "top_k 600": {"top_k": 600},
    "top_p 0.6": {"top_p": 0.6},
    "top_p 0.99": {"top_p": 0.99},
    "top_p tiny": {"top_p": 1e-6},
    "top_p almost 1": {"top_p": 0.999999},
    "min_p 0.05": {"min_p": 0.05},
    "min_p 1": {"min_p": 1.0},
    "min_new_tokens": {"min_new_tokens": 2, "stop_token_ids": END_IDS},
    "repetition": {"repetition_penalty": 1.3},
    "frequency": {"frequency_penalty": 0.7},
    "presence": {"presence_penalty": -1.5},
    "bias": {"logit_bias": tuple((token, token / 4) for token in range(3, 12))},
    "bans": {"banned_token_ids": tuple(range(0, 600, 3))},
}


@pytest.mark.parametrize("spread", [0.6, 6.0], ids=["flat", "peaked"])
@pytest.mark.parametrize("name", ALONE)
def test_each_setting_alone(name, spread):
    params = [SamplingParams(seed=seed, **ALONE[name]) for seed in range(ROWS)]
    logits = random_logits(ROWS, spread=spread)
    found, expected = sample_both(logits, params, positions=torch.arange(ROWS) % 4)
    assert found == expected


def random_params(choice: random.Random) -> SamplingParams:
    has_edits = choice.random() < 0.5
    return SamplingParams(
        temperature=choice.choice([0.0, 0.3, 1.0, 1.0, 5.0]),
        top_p=choice.choice([1.0, 0.9, 0.5, 0.01]),
        top_k=choice.choice([0, 1, 3, 40]),
        min_p=choice.choice([0.0, 0.05, 0.5]),
        min_new_tokens=choice.choice([0, 2]),
        stop_token_ids=choice.choice([(), END_IDS, (3,)]),
        seed=choice.getrandbits(64),
        repetition_penalty=choice.choice([1.0, 1.3, 0.7]) if has_edits else 1.0,
        frequency_penalty=choice.choice([0.0, 0.5, -1.0]) if has_edits else 0.0,
        presence_penalty=choice.choice([0.0, 0.8]) if has_edits else 0.0,
        logit_bias=choice.choice([(), ((7, 2.0),), ALONE["bias"]["logit_bias"]]),
        banned_token_ids=choice.choice([(), (3,), (1, 2, 30)]),
    )


@pytest.mark.parametrize("spread", [0.6, 3.0], ids=["flat", "peaked"])
def test_all_together_while_rows_come_and_go(spread):
    choice = random.Random(7)
    pair = Pair(ROWS, VOCAB)
    positions = torch.zeros(ROWS, dtype=torch.int64)
    different = 0
    for step in range(8):
        for slot in range(ROWS) if step == 0 else choice.sample(range(ROWS), ROWS // 3):
            prompt = [choice.randrange(VOCAB) for _ in range(30)]
            pair.add(slot, random_params(choice), prompt, prompt[: choice.randrange(4)])
            positions[slot] = 0
        slots = choice.sample(range(ROWS), choice.randrange(1, ROWS + 1))
        logits = random_logits(len(slots), spread=spread, seed=step)
        found, expected = pair.sample(logits, slots, positions[slots])
        different += sum(a != b for a, b in zip(found, expected, strict=True))
        positions[slots] += 1
    assert different == 0


@pytest.mark.parametrize("name", SUPPORTS)
def test_support(name):
    limits, support = SUPPORTS[name]
    draws = 400 if HAS_GPU else 20
    logits = torch.tensor(PROBABILITIES).log().half().expand(draws, -1).contiguous()
    params = [SamplingParams(seed=seed, **limits) for seed in range(draws)]
    found, expected = sample_both(logits, params)
    assert found == expected
    assert set(found) <= support
    assert not HAS_GPU or set(found) == support


def test_equal_logits_stay_together():
    """Most logits of a flat row in float16 are shared by several tokens."""
    logits = (random_logits(ROWS, 400) * 4).round() / 4
    for limits in ({"top_k": 50}, {"top_p": 0.3}, {"top_k": 200, "top_p": 0.5, "min_p": 0.01}):
        params = [SamplingParams(seed=seed, **limits) for seed in range(ROWS)]
        found, expected = sample_both(logits, params)
        assert found == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16], ids=str)
def test_types_and_strides(temperature, dtype):
    """A vocabulary that the model pads, and pads that must never win."""
    padded = random_logits(ROWS, VOCAB + 16, dtype=dtype)
    padded[:, VOCAB:] = 100
    params = [SamplingParams(temperature, top_p=0.9, seed=seed) for seed in range(ROWS)]
    found, expected = sample_both(padded[:, :VOCAB], params)
    assert found == expected
    pair = Pair(ROWS, VOCAB)
    for slot, row in enumerate(params):
        pair.add(slot, row)
    slots = np.arange(ROWS)
    places = torch.from_numpy(slots).to(DEVICE)
    assert pair.kernel.sample(padded.to(DEVICE)[:, :VOCAB], slots, places, places * 0).tolist() == (
        expected
    )


class TestSpecialValues:
    VALUES: tuple[tuple[float, ...], ...] = (
        (0.0, -0.0, 0.0, -1.0),
        (-0.0, 0.0, -1.0, -2.0),
        (-3.0, -3.0, -4.0, -math.inf),
        (65504.0, -65504.0, 65504.0, 0.0),
        (6e-8, -6e-8, 0.0, 1e-7),
        (-math.inf, -math.inf, 2.0, -math.inf),
        (-math.inf, -math.inf, -math.inf, -math.inf),
    )

    @pytest.mark.parametrize(
        "limits",
        [{"temperature": 0.0}, {}, {"top_k": 2}, {"top_p": 0.7}, {"min_p": 0.5}, {"top_k": 3}],
        ids=str,
    )
    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
    def test_as_the_reference(self, limits, dtype):
        logits = torch.tensor(self.VALUES, dtype=dtype).repeat(3, 1)
        params = [SamplingParams(seed=seed, **limits) for seed in range(len(logits))]
        found, expected = sample_both(logits, params)
        assert found == expected

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_broken_rows_stay_in_the_vocabulary_and_alone(self, temperature):
        broken = [[math.nan] * 4, [math.inf, math.nan, 0.0, 1.0], [math.inf, math.inf, 0.0, 0.0]]
        logits = torch.tensor([*broken, [0.0, 0.0, 90.0, 0.0]]).half()
        params = [SamplingParams(temperature, top_p=0.9, seed=seed) for seed in range(4)]
        sampler = make_sampler(4, 4)
        for slot, row in enumerate(params):
            sampler.add(slot, row, [])
        slots = torch.arange(4, device=DEVICE)
        ids = sampler.sample(logits.to(DEVICE), np.arange(4), slots, slots * 0).tolist()
        assert all(0 <= token < 4 for token in ids)
        assert ids[3] == 2


@triton.jit
def rough_gumbel_kernel(states_ptr, out_ptr, BLOCK: tl.constexpr):
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    state = tl.load(states_ptr + tl.program_id(0)).to(tl.uint64, bitcast=True)
    row = out_ptr + tl.program_id(0) * tl.num_programs(1) * BLOCK
    tl.store(row + ids, sampling_kernel._rough_gumbel(state, ids))


def test_scores_in_float32_are_well_within_the_margin():
    size, num_states = 2**16, 8
    seeds = torch.arange(num_states)
    states = _mix(_mix(seeds) + to_int64(GAMMA))
    found = torch.empty(num_states * size, device=DEVICE)
    rough_gumbel_kernel[(num_states, size // 1024)](states.to(DEVICE), found, BLOCK=1024)
    ids = torch.arange(size).repeat(num_states)
    numbers = uniform(seeds.repeat_interleave(size), torch.zeros_like(ids), ids)
    exact = -(-numbers.log()).log()
    assert numbers.max() > 1 - 1e-5  # where the number itself has lost its last digits
    assert (found.cpu() - exact).abs().max() < sampling_kernel.MARGIN / 10


def test_the_first_of_equal_logits_is_the_best():
    rows = torch.zeros(2, VOCAB).half()
    rows[1, :7] = -1
    assert sample_both(rows, [SamplingParams(0.0)] * 2)[0] == [0, 7]


def test_scores_that_float32_cannot_tell_apart():
    """Two tokens that share a lane, with logits that all but level their random numbers."""
    pair = torch.tensor([3, 3 + sampling_kernel.BLOCK])
    seeds, zeros = torch.arange(24).repeat_interleave(2), torch.zeros(48, dtype=torch.int64)
    gumbel = -(-uniform(seeds, zeros, pair.repeat(24)).log()).log()
    logits = torch.full((24, 2 * sampling_kernel.BLOCK), -1e4)
    logits[:, pair[0]] = 1.0
    logits[:, pair[1]] = (1 + gumbel[::2] - gumbel[1::2]).float()
    found, expected = sample_both(logits, [SamplingParams(seed=seed) for seed in range(24)])
    assert found == expected
    assert set(found) == set(pair.tolist())


def test_candidates_in_one_lane_are_compared_in_float64(monkeypatch):
    """With a margin that nothing escapes, every kept token is a candidate."""
    monkeypatch.setattr(sampling_kernel, "MARGIN", 1e9)
    logits = random_logits(ROWS, spread=0.6)
    params = [SamplingParams(seed=seed, top_p=0.7) for seed in range(ROWS)]
    found, expected = sample_both(logits, params)
    assert found == expected


def test_penalised_rows_are_copied_in_pieces(monkeypatch):
    monkeypatch.setattr(kernel_sampler, "COPY_BYTES", 3 * 4 * VOCAB)
    params = [
        SamplingParams(
            seed=slot, repetition_penalty=1.5 if slot % 3 else 1.0, logit_bias=((slot, 9),)
        )
        for slot in range(ROWS)
    ]
    pair = Pair(ROWS, VOCAB)
    for slot, row in enumerate(params):
        pair.add(slot, row, [slot, slot + 1])
    for step in range(2):
        found, expected = pair.sample(random_logits(ROWS, seed=step))
        assert found == expected


def test_a_row_does_not_depend_on_its_batch():
    choice = random.Random(11)
    params = [random_params(choice) for _ in range(ROWS)]
    prompts = [[choice.randrange(VOCAB) for _ in range(20)] for _ in range(ROWS)]
    logits = random_logits(ROWS).to(DEVICE)

    def drawn(slots):
        sampler = make_sampler(ROWS, VOCAB)
        for slot in slots:
            sampler.add(slot, params[slot], prompts[slot])
        places = torch.tensor(slots, device=DEVICE)
        return sampler.sample(logits[places], np.array(slots), places, places * 0).tolist()

    together = drawn(list(range(ROWS)))
    assert drawn(list(range(ROWS))[::-1]) == together[::-1]
    assert [drawn([slot])[0] for slot in range(ROWS)] == together


needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="too many draws for the interpreter")


def frequencies(logits: torch.Tensor, params: dict, steps: int, generated=()) -> torch.Tensor:
    """How often each token comes in 4096 rows of `steps` positions."""
    rows, vocab_size = 4096, len(logits)
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    slots = torch.arange(rows, device=DEVICE)
    for step in range(steps):
        sampler = make_sampler(rows, vocab_size)  # anew: no token drawn here is penalised
        for slot in range(rows):
            sampler.add(slot, SamplingParams(seed=slot, **params), [], generated)
        batch = logits.expand(rows, -1).contiguous().to(DEVICE)
        ids = sampler.sample(batch, np.arange(rows), slots, slots * 0 + step)
        counts += torch.bincount(ids.cpu(), minlength=vocab_size)
    return counts


def assert_fits(counts: torch.Tensor, probabilities: torch.Tensor) -> None:
    """No token outside the support, and a chi-squared below 1 in 10,000."""
    assert not counts[probabilities == 0].any()
    expected = probabilities * counts.sum()
    is_common = expected >= 10
    observed = torch.cat([counts[is_common], counts[~is_common].sum()[None]]).double()
    wanted = torch.cat([expected[is_common], expected[~is_common].sum()[None]]).double()
    wanted, observed = wanted[wanted > 0], observed[wanted > 0]
    freedom = max(len(wanted) - 1, 1)
    chi_squared = ((observed - wanted) ** 2 / wanted).sum().item()
    # Wilson and Hilferty's approximation of the chi-squared distribution by a normal one
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi_squared < limit


@needs_gpu
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_softmax(temperature):
    logits = random_logits(1, 500, spread=1.5)[0]
    probabilities = torch.softmax(logits.double() / temperature, 0)
    assert_fits(frequencies(logits, {"temperature": temperature}, 25), probabilities)


EXLLAMAV2 = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 9},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "repetition": {"repetition_penalty": 1.4},
    "frequency": {"frequency_penalty": 0.6},
    "presence": {"presence_penalty": 0.9},
    "limits together": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    "all": {
        "temperature": 0.8,
        "top_k": 30,
        "top_p": 0.9,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.3,
    },
}


def exllamav2_probabilities(logits, generated, settings) -> torch.Tensor:
    """What exllamav2's sampler draws at evenly spaced random numbers."""
    from exllamav2.generator import ExLlamaV2Sampler

    names = {
        "repetition_penalty": "token_repetition_penalty",
        "frequency_penalty": "token_frequency_penalty",
        "presence_penalty": "token_presence_penalty",
    }
    off = {"temperature": 1.0, "top_k": 0, "top_p": 0.0, "token_repetition_penalty": 1.0}
    given = {names.get(name, name): value for name, value in settings.items()}
    theirs = ExLlamaV2Sampler.Settings(**off | given)
    tokenizer = SimpleNamespace(get_vocab_size=lambda: len(logits))
    sequence = torch.tensor([list(generated)])
    draws = 4000
    counts = torch.zeros(len(logits), dtype=torch.float64)
    for i in range(draws):
        batch = logits.float()[None, None].clone()
        ids, *_ = ExLlamaV2Sampler.sample(batch, theirs, sequence, (i + 0.5) / draws, tokenizer)
        counts[ids.item()] += 1
    return counts / draws


@needs_gpu
@pytest.mark.parametrize("name", EXLLAMAV2)
def test_as_exllamav2_samples(name):
    """The same tokens as often, save at the edge of top_p.

    The token that reaches top_p is kept here, as by vLLM and transformers. exllamav2 leaves it
    out, and fills what is missing to top_p with less probable tokens, as many as fit.
    """
    settings = EXLLAMAV2[name]
    logits = random_logits(1, 64, spread=1.5, seed=5)[0]
    generated = [3, 3, 8, 21, 21, 21, 40]
    theirs = exllamav2_probabilities(logits, generated, settings)
    counts = frequencies(logits, settings, 5, generated).double()
    ours = counts / counts.sum()
    only_ours, only_theirs = (ours > 0) & (theirs == 0), (theirs > 0) & (ours == 0)
    if "top_p" in settings:
        assert only_ours.sum() <= 1
        common = (ours > 0) & (theirs > 0)
        assert (ours[only_ours] <= ours[common].min() * 1.2).all()
        assert theirs[only_theirs].sum() <= ours[only_ours].sum() * 1.2
        ours, theirs = ours * common / ours[common].sum(), theirs * common / theirs[common].sum()
    else:  # what only one of them drew is rarer than the other's numbers lie
        assert (ours[only_ours] < 1e-3).all()
        assert (theirs[only_theirs] < 1e-3).all()
    assert (ours - theirs).abs().max() < 0.012


@needs_gpu
def test_nothing_waits_for_the_device():
    """Sampling is queued without a word from the device: torch raises where it would wait."""
    sampler = make_sampler(8, VOCAB)
    logits = random_logits(8).to(DEVICE)
    slots = torch.arange(8, device=DEVICE)
    choice = random.Random(3)
    for _ in itertools.repeat(None, 2):  # the first compiles
        for slot in range(8):
            sampler.add(slot, random_params(choice), [1, 2, 3], [4])
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            sampler.sample(logits.clone(), np.arange(8), slots, slots)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_masks_are_those_of_the_reference(dtype):
    """In a view, as the models return it; rows without a mask keep all."""
    vocab_size = 1001 if HAS_GPU else 301
    whole = torch.randn(5, vocab_size + 19).to(dtype)
    rows = torch.tensor([3, 0, 1])
    masks = torch.randint(-(2**31), 2**31, (3, -(-vocab_size // 32)), dtype=torch.int32)
    found = whole.clone().to(DEVICE)
    edit_kernels.mask_in_place(found[:, :vocab_size], rows.to(DEVICE), masks.to(DEVICE))
    expected = whole.clone()
    expected[rows, :vocab_size] = masked(whole[rows, :vocab_size], masks)
    assert torch.equal(found.cpu(), expected)
    assert 0.4 < expected[rows].isinf().float().mean() < 0.6
