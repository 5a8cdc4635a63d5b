"""The device's part of `Sampler`: settings on the GPU, and which rows' logits are changed first.

Import this module only where there is a GPU (or under TRITON_INTERPRET=1).
"""

import numpy as np
import torch

from bulk_pipeline.engine.edit_kernels import edited_copy, hold_back
from bulk_pipeline.engine.sampling_kernel import draw_into
from bulk_pipeline.engine.sampling_slots import (
    BIASES,
    MIN_NEW,
    SettingsTable,
    SharedLists,
    upload,
)

COPY_BYTES = 1 << 27  # most memory for float32 copies of logits with biases and penalties


class KernelSampler:
    """The device's part of `Sampler`.

    Parameters
    ----------
    table
        The settings by slot; `settings_changed` says that it was written to.
    """

    def __init__(self, table: SettingsTable, vocab_size: int, device: torch.device) -> None:
        self._table, self._device = table, device
        self._ends = _DeviceLists(table.ends, device)
        self._biases = _DeviceLists(table.biases, device)
        self._all_rows = torch.arange(table.integers.shape[1], dtype=torch.int64, device=device)
        self._copy_rows = max(1, COPY_BYTES // (4 * vocab_size))
        self._plain = self._edited = self._all_rows[:0]
        self._is_held = self._is_biased = False
        self._integers = torch.zeros(0, dtype=torch.int64, device=device)
        self._floats = torch.zeros(0, dtype=torch.float64, device=device)

    def settings_changed(self) -> None:
        """Copy the settings to the device."""
        self._integers = upload(self._table.integers, self._device)
        self._floats = self._integers.view(torch.float64)

    def rows_changed(self, slots: np.ndarray) -> None:
        """Take note of the slots of the rows that are sampled from now on."""
        table, num_rows = self._table, len(slots)
        if num_rows > len(self._all_rows):  # several tokens of each slot
            self._all_rows = torch.arange(num_rows, dtype=torch.int64, device=self._device)
        is_biased = table.integers[BIASES, slots] != 0
        is_edited = is_biased | table.is_penalised(slots)
        self._is_held = bool(table.integers[MIN_NEW, slots].any())
        self._is_biased = bool(is_biased.any())
        self._plain, self._edited = self._all_rows[:num_rows], self._all_rows[:0]
        if is_edited.all():
            self._plain, self._edited = self._edited, self._plain
        elif is_edited.any():
            order = upload(np.argsort(is_edited, kind="stable"), self._device)
            num_plain = num_rows - int(is_edited.sum())
            self._plain, self._edited = order[:num_plain], order[num_plain:]

    def sample(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        counts: torch.Tensor,
    ) -> torch.Tensor:
        """Draw a token id a row, and count it where `counts` (of `TokenCounts`) has rows.

        Logits of end tokens that are held back are overwritten with -inf.
        """
        if logits.dtype not in (torch.float16, torch.float32) or logits.stride(1) != 1:
            logits = logits.float().contiguous()
        ids = torch.empty(len(slots), dtype=torch.int64, device=logits.device)
        settings = (self._integers, self._floats)
        if self._is_held:
            hold_back(logits, slots, positions, self._integers, self._ends.tensors()[0])
        if len(self._plain):
            plain = (logits, self._plain, slots, positions)
            draw_into(ids, *plain, *settings, counts[:0], is_copy=False)
        biases = self._biases.tensors() if self._is_biased else None
        for first in range(0, len(self._edited), self._copy_rows):
            rows = self._edited[first : first + self._copy_rows]
            copy = edited_copy(logits, rows, slots, *settings, counts, biases)
            draw_into(ids, copy, rows, slots, positions, *settings, counts, is_copy=True)
        return ids


class _DeviceLists:
    """The device's copy of `SharedLists`."""

    def __init__(self, lists: SharedLists, device: torch.device) -> None:
        self._lists, self._device, self._version = lists, device, -1

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids and numbers, as they are on the host now."""
        if self._version != self._lists.version:
            self._version = self._lists.version
            self._tensors = (
                upload(self._lists.ids, self._device),
                upload(self._lists.numbers, self._device),
            )
        return self._tensors
