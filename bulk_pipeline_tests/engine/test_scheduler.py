"""The scheduler over a model that only counts: how full the batch is, what goes into a pass."""

import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bulk_pipeline.engine.loading import load_generator
from bulk_pipeline.engine.request import Request, SamplingParams
from bulk_pipeline.engine.rows import Row, Stats
from bulk_pipeline.spec import PAGE_TOKENS, GeneratorSettings

VOCAB_SIZE = 64


class CountingModel:
    """Logits that are always the same, at once."""

    device = torch.device("cpu")
    vocab_size = VOCAB_SIZE

    def prefill(self, *args: np.ndarray) -> None:
        pass

    def decode(self, token_ids: torch.Tensor, *args: object) -> torch.Tensor:
        return torch.zeros(len(token_ids), VOCAB_SIZE)


@pytest.fixture(scope="module")
def make_scheduler(toy_float64):
    # imports exllamav2 on a CPU, which needs the stand-in that loading installs
    load_generator(
        GeneratorSettings(model=str(toy_float64), device="cpu", cache_tokens=512)
    ).close()
    from bulk_pipeline.engine.scheduler import Scheduler

    def make(num_pages: int, batch: int):
        finished = []
        stats = Stats()
        cache = [torch.zeros(1, num_pages * PAGE_TOKENS, 1, 1)]
        scheduler = Scheduler(
            CountingModel(), cache, num_pages, max_batch_size=batch, max_seq_len=8192,
            max_chunk_size=8192, stats=stats, on_finish=finished.append,
        )  # fmt: skip
        return scheduler, stats, finished

    return make


def test_a_long_prompt_among_short_ones_does_not_empty_the_batch(make_scheduler):
    """It waits for pages; for more of them than the cache has it would wait until none is used."""
    scheduler, stats, finished = make_scheduler(num_pages=260, batch=256)
    rng = np.random.default_rng(0)
    lengths = [20] * 700 + [31 * PAGE_TOKENS - 10] + [20] * 799
    waiting = [
        Row(
            Request(
                i,
                rng.integers(0, VOCAB_SIZE, length).tolist(),
                SamplingParams(0.0, max_new_tokens=int(rng.integers(20, 200))),
            )
        )
        for i, length in enumerate(lengths)
    ]
    while waiting or scheduler.num_rows:
        room = 512 - scheduler.num_rows
        if room > 128:
            scheduler.enqueue(waiting[:room])
            waiting = waiting[room:]
        scheduler.step()
    assert len(finished) == len(lengths)
    assert stats.mean_batch_size > 180  # 168 where the batch is emptied


def test_a_scheduler_that_is_dropped_frees_its_cache_at_once(make_scheduler):
    """Without waiting for the garbage collector, which knows nothing of a GPU's memory."""
    scheduler, _, finished = make_scheduler(num_pages=8, batch=2)
    scheduler.enqueue([Row(Request(0, [1, 2, 3], SamplingParams(0.0, max_new_tokens=2)))])
    while scheduler.num_rows:
        scheduler.step()
    dropped = weakref.ref(scheduler)
    del scheduler
    assert len(finished) == 1
    assert dropped() is None


def test_a_padded_pass_holds_no_row_that_reads_what_another_of_it_writes(make_scheduler):
    """flash-attn orders the rows of a pass in no way."""
    from bulk_pipeline.engine.forward import ChunkForward

    cpu = torch.device("cpu")
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=VOCAB_SIZE))
    forward = ChunkForward(
        model, None, cpu, max_tokens=8192, max_positions=8192, max_rows=8, ids_device=cpu
    )
    starts, counts = np.array([0, 256, 0, 0]), np.array([600, 590, 580, 570])
    table = np.array([[1, 2, 3, 0], [1, 4, 5, 6], [7, 8, 9, 0], [10, 11, 12, 0]])
    assert forward._passes(starts, counts, table, 8192) == [[0], [1, 2, 3]]
