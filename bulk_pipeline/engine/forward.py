"""exllamav2's forward pass for the scheduler, and the CPU model's, which takes the same call."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from exllamav2.attn_params import PagedParams

from bulk_pipeline.engine.adapters import LowRank
from bulk_pipeline.engine.logprobs import log_probabilities
from bulk_pipeline.engine.sampling_slots import upload
from bulk_pipeline.spec import PAGE_TOKENS

MAX_PADDING = 1.125  # tokens of a padded pass, for each of the rows' own
SCORED_TOKENS = 256  # most tokens of a pass that makes logits for all of them


class ChunkForward:
    """A model with exllamav2's `forward_chunk`, bound to its cache: a `PagedModel`.

    Parameters
    ----------
    max_tokens
        Most tokens of a pass, padding included.
    max_positions
        Positions that the model knows.
    max_rows
        Most rows of a pass over prompts; 1 where padding costs more than it saves.
    ids_device
        Where the model takes token ids.
    stream
        The CUDA stream that the model runs on.
    """

    def __init__(
        self,
        model: Any,
        cache: Any,
        device: torch.device,
        *,
        max_tokens: int,
        max_positions: int,
        max_rows: int,
        ids_device: torch.device,
        stream: "torch.cuda.Stream | None" = None,
    ) -> None:
        self.device = device
        self.vocab_size = int(model.config.vocab_size)
        self.stream = stream
        self._model, self._cache = model, cache
        self._max_tokens, self._max_positions, self._max_rows = max_tokens, max_positions, max_rows
        self._ids_device = ids_device

    def prefill(
        self,
        token_ids: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        block_table: np.ndarray,
    ) -> None:
        """Store keys and values, in passes over rows of similar length, padded to the longest."""
        for rows in self._passes(starts, counts, block_table, self._max_tokens):
            inputs = _padded(token_ids, starts, counts, block_table, rows)
            self._run(*inputs, preprocess_only=True)

    def score(
        self,
        token_ids: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        block_table: np.ndarray,
        targets: np.ndarray,
    ) -> torch.Tensor:
        """Store keys and values; return the log-probability of each token's successor."""
        # logits of all tokens at once would not fit: rows become pieces, one after the other
        starts, counts, owners = _pieces(starts, counts)
        block_table = block_table[owners]
        ends = counts.cumsum()
        found = []
        for rows in self._passes(starts, counts, block_table, SCORED_TOKENS):
            inputs = _padded(token_ids, starts, counts, block_table, rows)
            logits = self._run(*inputs)["logits"]
            [places] = np.nonzero((np.arange(logits.shape[1]) < counts[rows][:, None]).ravel())
            own = logits.flatten(0, 1)[upload(places, logits.device), : self.vocab_size]
            first = ends[rows[0]] - counts[rows[0]]
            wanted = upload(targets[first : ends[rows[-1]]], logits.device)
            found.append(log_probabilities(own, wanted).to(self.device))
        return torch.cat(found)

    def decode(
        self,
        token_ids: torch.Tensor,
        lengths: torch.Tensor,
        block_table: torch.Tensor,
        max_length: int,
    ) -> torch.Tensor:
        """Run one new token of each row."""
        table = block_table[:, : -(-max_length // PAGE_TOKENS)].contiguous()
        output = self._run(token_ids[:, None], lengths, table, max_length=max_length)
        logits = output["logits"][:, 0, : self.vocab_size]  # exllamav2 pads the vocabulary
        return logits.to(self.device)

    def verify(
        self,
        token_ids: torch.Tensor,
        lengths: torch.Tensor,
        block_table: torch.Tensor,
        max_length: int,
        counts: np.ndarray,
    ) -> torch.Tensor:
        """Run several new tokens of each row, padded to the most."""
        width = int(counts.max())
        if max_length + width > self._max_positions:  # no room for padding
            split = (t.split(counts.tolist()) for t in (token_ids, lengths, block_table))
            logits = [
                self._verify(ids[None], before[:1], table[:1], max_length)
                for ids, before, table in zip(*split, strict=True)
            ]
            return torch.cat(logits)
        firsts = (counts.cumsum() - counts)[:, None]
        offsets = np.arange(width)
        padded = upload(firsts + np.minimum(offsets, counts[:, None] - 1), self.device)
        rows = padded[:, 0]
        found = self._verify(
            token_ids[padded], lengths[rows], block_table[rows], max_length + width - 1
        )
        return found[upload(np.flatnonzero(offsets < counts[:, None]), self.device)]

    def _verify(
        self, ids: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor, max_length: int
    ) -> torch.Tensor:
        """Return the logits of ids [rows, tokens], one row after the other."""
        more_pages = -(-max_length // PAGE_TOKENS) - table.shape[1]
        # what padding writes past a row's pages goes to the scratch page
        table = F.pad(table, (0, more_pages)).contiguous()
        logits = self._run(ids, lengths, table, max_length=max_length)["logits"]
        return logits.flatten(0, 1)[:, : self.vocab_size].to(self.device)

    def can_change(self, matrix: str) -> bool:
        """Whether an adapter may change this matrix."""
        return bool(self._model.can_change(matrix))

    def use_adapter(self, changes: Mapping[str, LowRank]) -> None:
        """Run with these changes of matrices from now on, in place of those of before."""
        self._model.use_adapter(changes)

    def _passes(
        self, starts: np.ndarray, counts: np.ndarray, block_table: np.ndarray, max_tokens: int
    ) -> list[list[int]]:
        """Group neighbours of similar length; the order stays, because rows may share pages.

        A row never reads what another row of its pass writes: flash-attn orders them in no way.
        """
        passes: list[list[int]] = []
        rows: list[int] = []
        written: set[int] = set()
        width = own = 0
        for row, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
            read = block_table[row, : -(-start // PAGE_TOKENS)].tolist()
            fits = (
                0 < len(rows) < self._max_rows
                and count <= width
                and (len(rows) + 1) * width <= min(max_tokens, MAX_PADDING * (own + count))
                and start + width <= self._max_positions
                and written.isdisjoint(read)
            )
            if not fits:
                passes.append(rows := [])
                width, own, written = count, 0, set()
            rows.append(row)
            last = -(-(start + count) // PAGE_TOKENS)
            written.update(block_table[row, start // PAGE_TOKENS : last].tolist())
            own += count
        return passes

    def _run(
        self,
        ids: torch.Tensor,
        lengths: torch.Tensor,
        table: torch.Tensor,
        *,
        max_length: int | None = None,
        preprocess_only: bool = False,
    ) -> Any:
        # the constructor insists on host tensors; what it holds may be anywhere
        params = PagedParams(
            len(ids),
            torch.zeros((2, 1), dtype=torch.int32),
            torch.zeros(2, dtype=torch.int32),
            int(lengths.max()) if max_length is None else max_length - 1,
            PAGE_TOKENS,
            ids.shape[1],
        )
        params.block_index, params.cache_seqlens = table, lengths
        output = self._model.forward_chunk(
            input_ids=ids.to(self._ids_device),
            attn_params=params,
            cache=self._cache,
            preprocess_only=preprocess_only,
        )
        if self.stream is not None:  # split over GPUs, exllamav2 leaves another one current
            torch.cuda.set_stream(self.stream)
        return output


def _padded(
    token_ids: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    block_table: np.ndarray,
    rows: list[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return token ids, lengths before them and pages of these rows, padded to the longest."""
    ends = counts.cumsum()
    width = int(counts[rows].max())
    ids = np.zeros((len(rows), width), np.int64)
    for line, row in zip(ids, rows, strict=True):
        line[: counts[row]] = token_ids[ends[row] - counts[row] : ends[row]]
    num_pages = -(-int(starts[rows].max() + width) // PAGE_TOKENS)
    # what padding writes past a row's pages goes to the scratch page
    table = np.zeros((len(rows), num_pages), np.int32)
    known = min(num_pages, block_table.shape[1])
    table[:, :known] = block_table[rows, :known]
    return torch.from_numpy(ids), torch.from_numpy(starts[rows]), torch.from_numpy(table)


def _pieces(starts: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut rows into pieces of at most `SCORED_TOKENS`; return starts, counts and their rows."""
    numbers = -(-counts // SCORED_TOKENS)
    owners = np.repeat(np.arange(len(counts)), numbers)
    index = np.arange(len(owners)) - np.repeat(numbers.cumsum() - numbers, numbers)
    before = (index * SCORED_TOKENS).astype(np.int32)
    sizes = np.minimum(counts[owners] - before, SCORED_TOKENS)
    return starts[owners] + before, sizes, owners
