"""What the scheduler asks of a model: keys and values of prompts, and logits of the next tokens."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch

from bulk_pipeline.engine.adapters import LowRank


class PagedModel(Protocol):
    """A model bound to its paged cache.

    Attributes
    ----------
    device
        Where logits are, and where inputs are expected.
    vocab_size
        Tokens that can be sampled.
    """

    device: torch.device
    vocab_size: int

    def prefill(
        self,
        token_ids: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        block_table: np.ndarray,
    ) -> None:
        """Store the keys and values of prompt tokens.

        Parameters
        ----------
        token_ids
            int64 [sum of `counts`], the rows one after the other.
        starts, counts
            int32 [rows]: tokens of the row in its pages already, and new ones.
        block_table
            int32 [rows, pages]. A row may share pages that another row of the same call writes.
        """

    def score(
        self,
        token_ids: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        block_table: np.ndarray,
        targets: np.ndarray,
    ) -> torch.Tensor:
        """Store the keys and values of prompt tokens, and say how probable their successors are.

        Parameters
        ----------
        token_ids, starts, counts, block_table
            As for `prefill`.
        targets
            int64 [sum of `counts`]: the token that follows each of `token_ids`.

        Returns
        -------
        The log-probabilities of `targets`, on the device.
        """

    def decode(
        self,
        token_ids: torch.Tensor,
        lengths: torch.Tensor,
        block_table: torch.Tensor,
        max_length: int,
    ) -> torch.Tensor:
        """Run one new token of each row.

        Parameters
        ----------
        token_ids
            int64 [rows], on the device as all here.
        lengths
            int32 [rows], tokens in the pages before this one.
        block_table
            int32 [rows, pages of the longest row]; 0 past a row's end.
        max_length
            At least the largest of `lengths`, plus 1.

        Returns
        -------
        Logits [rows, vocab_size]; the next call may overwrite them.
        """

    def verify(
        self,
        token_ids: torch.Tensor,
        lengths: torch.Tensor,
        block_table: torch.Tensor,
        max_length: int,
        counts: np.ndarray,
    ) -> torch.Tensor:
        """Run several new tokens of each row, all tokens of a row one after the other.

        Parameters
        ----------
        token_ids, lengths, block_table, max_length
            As for `decode`, a place for each token: `lengths` are the tokens before it.
        counts
            On the host: tokens of each row.

        Returns
        -------
        Logits [tokens, vocab_size]; the next call may overwrite them.
        """

    def can_change(self, matrix: str) -> bool:
        """Whether an adapter may change this matrix."""

    def use_adapter(self, changes: Mapping[str, LowRank]) -> None:
        """Run with these changes of matrices from now on, in place of those of before."""
