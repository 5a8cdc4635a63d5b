"""What equal beginnings of prompts save: pages that need not be computed again."""

import hashlib
from array import array

import numpy as np

from bulk_pipeline.spec import PAGE_TOKENS
from bulk_pipeline.storage.partition import Partition

READ_ROWS = 4096


def shared_prefixes(prompts: Partition, row_index: np.ndarray) -> tuple[int, int]:
    """Tokens of some rows' prompts, and how many of them stand in pages that are shared.

    A page is shared if another of the prompts begins with the same tokens up to its end; of equal
    pages one has to be computed. A prompt's last token is always computed, so that a page which
    ends with it is not counted.

    Parameters
    ----------
    row_index
        The rows, rising; one that stands several times asks for as many samples.
    """
    rows, samples = np.unique(row_index, return_counts=True)
    pages, num_pages, tokens = array("Q"), 0, 0
    for batch in prompts.read(["row_index", "input_ids"], READ_ROWS) if len(rows) else ():
        index = batch.column("row_index").to_numpy()
        places = np.searchsorted(rows, index)
        chosen = np.flatnonzero(rows[np.minimum(places, len(rows) - 1)] == index)
        ids = batch.column("input_ids")
        values = memoryview(ids.values.to_numpy().astype("<i4", copy=False)).cast("B")
        bounds = ids.offsets.to_numpy()
        for place in chosen.tolist():
            first, last, copies = bounds[place], bounds[place + 1], int(samples[places[place]])
            hashes = _page_hashes(values[4 * first : 4 * last])
            pages.extend(hashes)
            num_pages += copies * len(hashes)
            tokens += copies * int(last - first)
    different = len(np.unique(np.frombuffer(pages, np.uint64))) if pages else 0
    return tokens, (num_pages - different) * PAGE_TOKENS


def later_turn_tokens(prompts: Partition, row_index: np.ndarray, turns: np.ndarray) -> int:
    """Tokens that some requests of later turns add to their conversations.

    Parameters
    ----------
    row_index, turns
        Of each request; the rows do not fall.
    """
    tokens = 0
    for batch in prompts.read(["row_index", "later_turns"], READ_ROWS) if len(row_index) else ():
        first, num_rows = batch.column("row_index")[0].as_py(), batch.num_rows
        low, high = np.searchsorted(row_index, [first, first + num_rows])
        places = (row_index[low:high] - first).tolist()
        rows = batch.column("later_turns").take(places).to_pylist()
        for row, turn in zip(rows, turns[low:high].tolist(), strict=True):
            tokens += len(row[turn - 1]["input_ids"])
    return tokens


def _page_hashes(ids: memoryview) -> list[int]:
    """A hash of the prompt up to the end of each whole page, but for its last token."""
    digest, hashes = hashlib.blake2b(digest_size=8), []
    size = 4 * PAGE_TOKENS
    for start in range(0, len(ids) - 4 - size + 1, size):
        digest.update(ids[start : start + size])
        hashes.append(int.from_bytes(digest.digest(), "little"))
    return hashes
