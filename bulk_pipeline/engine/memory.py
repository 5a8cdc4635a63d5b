"""Running out of GPU memory, said in one line with what to lower; and a GPU that is lost."""

import torch

GIB = 1 << 30
MARGIN_SHARE = 0.04  # of a GPU's memory, left free by an automatic cache: kernels, fragmentation
BYTES_PER_LOGIT = 16  # the logits of a batch, and a float32 copy where penalties change them
BATCH_SHARE = 0.04  # of a GPU's memory, for the logits of an automatic batch
AUTO_BATCH_SIZES = (16, 1024)  # the least and the most
BATCH_STEP = 64
DENSE_SHARE = 1 / 3  # of a GPU's memory, for weights that are dequantised without being asked to
SIGNS = ("out of memory", "Insufficient VRAM", "Insufficient space")  # exllamav2's own errors too


def is_out_of_memory(error: Exception) -> bool:
    """Whether an exception of PyTorch or exllamav2 says that a GPU's memory is full."""
    is_cuda = isinstance(error, RuntimeError | AssertionError)
    return isinstance(error, torch.OutOfMemoryError) or (
        is_cuda and any(sign in str(error) for sign in SIGNS)
    )


def is_gpu_lost() -> bool:
    """Whether an error was one of those after which CUDA does nothing more in this process."""
    if not torch.cuda.is_initialized():
        return False
    try:
        for device in range(torch.cuda.device_count()):
            if torch.cuda.memory_reserved(device):  # else this would begin to use it
                torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def cache_margin(total_bytes: int, num_rows: int, vocab_size: int) -> int:
    """Bytes of a GPU that an automatic cache leaves free beside the weights."""
    return int(total_bytes * MARGIN_SHARE) + num_rows * vocab_size * BYTES_PER_LOGIT


def auto_batch_size(total_bytes: int, vocab_size: int) -> int:
    """Rows in generation at once on a GPU of so much memory."""
    rows = int(total_bytes * BATCH_SHARE) // (vocab_size * BYTES_PER_LOGIT)
    least, most = AUTO_BATCH_SIZES
    return min(max(rows // BATCH_STEP * BATCH_STEP, least), most)


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
        f"generator.cache_type, or take more with generator.gpus"
    )
