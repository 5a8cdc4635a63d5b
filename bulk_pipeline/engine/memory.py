"""Running out of GPU memory, said in one line with the numbers and what to lower."""

import torch

GIB = 1 << 30
MARGIN_SHARE = 0.04  # of a GPU's memory, left free by an automatic cache: kernels, fragmentation
SAMPLING_BYTES_PER_LOGIT = 64  # float64 copies of a batch's logits while sampling
SIGNS = ("out of memory", "Insufficient VRAM", "Insufficient space")  # exllamav2's own errors too


def is_out_of_memory(error: Exception) -> bool:
    """Whether an exception of PyTorch or exllamav2 says that a GPU's memory is full."""
    is_cuda = isinstance(error, RuntimeError)
    return isinstance(error, torch.OutOfMemoryError) or (
        is_cuda and any(sign in str(error) for sign in SIGNS)
    )


def cache_margin(total_bytes: int, num_rows: int, vocab_size: int) -> int:
    """Bytes of a GPU that an automatic cache leaves free beside the weights."""
    return int(total_bytes * MARGIN_SHARE) + num_rows * vocab_size * SAMPLING_BYTES_PER_LOGIT


def out_of_memory_message(doing: str) -> str:
    """One line: what was being done, what is free on each GPU, and which settings to lower."""
    free = (torch.cuda.mem_get_info(i) for i in range(torch.cuda.device_count()))
    devices = ", ".join(
        f"cuda:{i} {left / GIB:.2f} of {total / GIB:.2f} GiB free"
        for i, (left, total) in enumerate(free)
    )
    return (
        f"out of GPU memory while {doing} ({devices}); lower generator.cache_tokens, "
        f"generator.max_batch_size or generator.max_chunk_size, or set a smaller "
        f"generator.cache_type"
    )
