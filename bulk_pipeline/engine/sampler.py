"""Samples the rows in generation: on a GPU with its kernels, else with `sampling.sample`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from bulk_pipeline.engine.request import SamplingParams
from bulk_pipeline.engine.sampling import SamplingBatch, sample
from bulk_pipeline.engine.sampling_slots import SettingsTable, TokenCounts

if TYPE_CHECKING:
    from bulk_pipeline.engine.kernel_sampler import KernelSampler


class Sampler:
    """Samples the rows in generation, of which each keeps a slot for its life.

    Parameters
    ----------
    num_slots
        Most rows at once.
    device
        Where the logits are.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._table = SettingsTable(num_slots, vocab_size)
        self._counts = TokenCounts(num_slots, vocab_size, device)
        self._device = device
        self._slots = np.zeros(0, np.int64)
        self._batch: SamplingBatch | None = None
        self._rows_entered = True
        self._kernel: KernelSampler | None = None
        if device.type == "cuda":
            from bulk_pipeline.engine import kernel_sampler

            self._kernel = kernel_sampler.KernelSampler(self._table, vocab_size, device)

    def add(
        self,
        slot: int,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        generated_ids: Sequence[int] = (),
    ) -> None:
        """Let a row enter a slot; `generated_ids` are what it generated before it left one."""
        self._table.set(slot, params)
        self._rows_entered = True
        if params.has_penalties:
            self._counts.enter(slot, prompt_ids, generated_ids)

    def sample(
        self,
        logits: torch.Tensor,
        slots: np.ndarray,
        slots_on_device: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Draw one token id a row.

        Parameters
        ----------
        logits
            [rows, vocabulary]; those of end tokens that are held back may be overwritten.
        slots, slots_on_device
            int64 [rows]: the slot of each row.
        positions
            int64 [rows], on the device: how many tokens the row has generated before this one.

        Returns
        -------
        int64 [rows], on the device
        """
        if self._rows_entered or not np.array_equal(slots, self._slots):
            self._rows_changed(slots)
        self._counts.flush()
        counts = self._counts.counts
        if self._kernel is not None:
            return self._kernel.sample(logits, slots_on_device, positions, counts)
        assert self._batch is not None
        if self._batch.repetition is None:
            return sample(logits, self._batch, positions)
        ids = sample(logits, self._batch, positions, counts[slots_on_device])
        self._counts.add(slots_on_device, ids)
        return ids

    def _rows_changed(self, slots: np.ndarray) -> None:
        self._slots = slots.copy()
        if self._kernel is None:
            self._batch = SamplingBatch.from_table(self._table, slots, self._device)
        else:
            if self._rows_entered:
                self._kernel.settings_changed()
            self._kernel.rows_changed(slots)
        self._rows_entered = False
