import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulk_pipeline.engine.pages import SCRATCH_PAGE, PageTable
from bulk_pipeline.spec import PAGE_TOKENS


def make_ids(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, length)


def store(table: PageTable, ids: np.ndarray) -> list[int]:
    """A row's way: match, take, and describe what was computed, in a round of its own."""
    table.round += 1
    prefix = table.match(ids)
    pages = table.take(prefix, len(ids) // PAGE_TOKENS + 1 - len(prefix.pages))
    assert pages is not None
    table.describe(pages, ids)
    table.round += 1
    return pages


class TestMatch:
    def test_shares_full_pages_and_copies_the_beginning_of_the_next(self):
        table, ids = PageTable(20), make_ids(700)
        pages = store(table, ids)
        prefix = table.match(np.concatenate([ids[:650], make_ids(100, 1)]))
        assert prefix.pages == pages[:2]
        assert (prefix.source, prefix.copied, prefix.num_tokens) == (pages[2], 138, 650)

    @pytest.mark.parametrize(("common", "copied"), [(31, 0), (32, 32), (255, 255)])
    def test_copies_only_what_is_worth_it(self, common, copied):
        table, ids = PageTable(20), make_ids(255)
        store(table, ids)
        assert table.match(np.append(ids[:common], [1001, 1001])).copied == copied

    def test_a_full_page_serves_as_the_beginning_of_another(self):
        table, ids = PageTable(20), make_ids(256)
        [page, _] = store(table, ids)
        prefix = table.match(ids[:200])
        assert (prefix.pages, prefix.source, prefix.copied) == ([], page, 200)

    def test_equal_tokens_after_other_tokens_do_not_match(self):
        table, ids = PageTable(20), make_ids(512)
        store(table, ids)
        assert table.match(ids[256:]).num_tokens == 0

    def test_a_page_of_this_round_is_shared_but_not_copied(self):
        table, ids = PageTable(20), make_ids(300)
        table.round += 1
        pages = table.take(table.match(ids), 2)
        table.describe(pages, ids)
        assert table.match(ids).num_tokens == 256
        assert table.match(ids, pending=True).num_tokens == 300
        table.round += 1
        assert table.match(ids).num_tokens == 300


class TestTake:
    def test_never_gives_the_scratch_page(self):
        table = PageTable(5)
        pages = table.take(table.match(make_ids(10)), 4)
        assert sorted(pages) == [1, 2, 3, 4]
        assert SCRATCH_PAGE not in pages
        assert table.take_one() is None

    def test_counts_shared_pages_that_nobody_uses(self):
        table, ids = PageTable(4), make_ids(600)
        table.release(store(table, ids))
        prefix = table.match(ids)
        assert len(prefix.pages) == 2
        assert table.take(prefix, 2) is None
        assert table.num_free == 3

    def test_overwrites_what_was_unused_the_longest_and_ends_before_beginnings(self):
        table, old, new = PageTable(6), make_ids(256, 1), make_ids(600, 2)
        table.release(store(table, old)[:2])
        table.release(store(table, new))
        table.take(table.match(make_ids(5, 3)), 1)  # the blank page of `old`
        assert table.match(old).num_tokens == 256
        table.take(table.match(make_ids(5, 4)), 1)
        assert table.match(old).num_tokens == 0
        table.take(table.match(make_ids(5, 5)), 1)
        assert table.match(new).num_tokens == 512


rows = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([1, 40, 255, 256, 257, 600]), st.booleans()),
    max_size=30,
)


@settings(deadline=None)
@given(rows, st.integers(8, 20))
def test_what_matches_is_what_was_written(rows, num_pages):
    """Follow every page's content by hand; rows share beginnings, some end at once."""
    table = PageTable(num_pages)
    content: dict[int, np.ndarray] = {}
    running: list[list[int]] = []
    for seed, length, ends in rows:
        ids = np.concatenate([make_ids(300, seed % 2), make_ids(length, seed)])[-length:]
        table.round += 1
        prefix = table.match(ids)
        for index, page in enumerate(prefix.pages):
            expected = ids[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS]
            assert (content[page] == expected).all()
        if prefix.source is not None:
            begin = len(prefix.pages) * PAGE_TOKENS
            expected = ids[begin : begin + prefix.copied]
            assert (content[prefix.source][: prefix.copied] == expected).all()
        pages = table.take(prefix, len(ids) // PAGE_TOKENS + 1 - len(prefix.pages))
        if pages is None:
            if running:
                table.release(running.pop(0))
            continue
        in_use = {page for other in running for page in other}
        assert not in_use & set(pages[len(prefix.pages) :])
        for index, page in enumerate(pages):
            content[page] = ids[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS].copy()
        table.describe(pages, ids)
        if ends:
            table.release(pages)
        else:
            running.append(pages)
    for pages in running:
        table.release(pages)
    assert table.num_free == num_pages - 1
