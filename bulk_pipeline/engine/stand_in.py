"""A stand-in for exllamav2's compiled module, so that its generator runs without a GPU.

exllamav2 imports `exllamav2_ext`, and compiles it where it is missing, which needs CUDA. The
generator uses three functions of it, short ones in Python; whatever else is asked for raises.
Install the stand-in before exllamav2 is imported, and for the CPU only.
"""

import contextlib
import importlib
import importlib.util
import io
import logging
import sys
from itertools import pairwise
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
import torch

EXTENSION = "exllamav2_ext"
NO_MATCH, PARTIAL_MATCH = -1, -2

logger = logging.getLogger(__name__)


def install_stand_in() -> None:
    """Make exllamav2 importable and its paged mode usable on the CPU.

    Where the compiled module can be imported it stays, and the stand-in takes its place in the
    generator alone, because the compiled `cache_rotate` knows CUDA tensors only.
    """
    if not _has_compiled_extension():
        logger.info("exllamav2's compiled module is not installed; the CPU runs on a stand-in")
        sys.modules[EXTENSION] = stand_in_module()
    with contextlib.redirect_stdout(io.StringIO()):  # it prints that there is no CUDA
        attn = importlib.import_module("exllamav2.attn")
        dynamic = importlib.import_module("exllamav2.generator.dynamic")
    # our own model does the attention on the pages, without flash-attn
    attn.has_flash_attn_with_paged = True  # type: ignore[attr-defined]
    dynamic.ext_c = _for_both_devices(dynamic.ext_c)  # type: ignore[attr-defined]


def is_stand_in_installed() -> bool:
    """Whether this process has the stand-in where exllamav2 looks for its compiled module."""
    return getattr(sys.modules.get(EXTENSION), "is_stand_in", False) is True


def stand_in_module() -> ModuleType:
    """Return a module with the functions that exllamav2's generator needs, and no others."""
    module = ModuleType(EXTENSION, "Stand-in for exllamav2's compiled module, CPU only.")
    module.is_stand_in = True  # type: ignore[attr-defined]
    module.count_match = count_match  # type: ignore[attr-defined]
    module.partial_strings_match = partial_strings_match  # type: ignore[attr-defined]
    module.cache_rotate = cache_rotate  # type: ignore[attr-defined]
    module.__getattr__ = _missing  # type: ignore[method-assign]
    return module


def count_match(a: torch.Tensor, b: torch.Tensor, max_a: int) -> int:
    """Count the equal leading elements of two [1, n] tensors, at most `max_a`."""
    length = min(a.shape[1], b.shape[1], max_a)
    differs = torch.nonzero(a[0, :length] != b[0, :length])
    return int(differs[0]) if len(differs) else length


def partial_strings_match(text: Any, offsets: Any, strings: Any) -> int:
    """Look for any of several strings in a text, all as UTF-32 bytes.

    Returns the place of the first full match; else PARTIAL_MATCH where the end of the text is the
    beginning of a string, else NO_MATCH. (The compiled function stops at a partial match of one
    string and misses a full match of a later one.)
    """
    haystack = _utf32_to_str(text)
    ends = np.frombuffer(offsets, dtype=np.int32).tolist()
    packed = bytes(strings)
    needles = [packed[a:b].decode("utf-32-le") for a, b in pairwise(ends)]
    found = [place for needle in needles if (place := haystack.find(needle)) >= 0]
    if found:
        return min(found)
    return PARTIAL_MATCH if any(_starts_at_end(haystack, n) for n in needles) else NO_MATCH


def cache_rotate(cache: torch.Tensor, order: torch.Tensor, temp: torch.Tensor) -> None:
    """Move pages in a ring: page[order[i]] becomes page[order[i + 1]], the last the first."""
    pages = order.tolist()
    first = temp.view(-1)
    first.copy_(cache[pages[0]].view(-1))
    for target, source in pairwise(pages):
        cache[target].copy_(cache[source])
    cache[pages[-1]].view(-1).copy_(first)


def _has_compiled_extension() -> bool:
    if EXTENSION in sys.modules:
        return True
    if importlib.util.find_spec(EXTENSION) is None:
        return False
    try:
        importlib.import_module(EXTENSION)
    except ImportError as error:  # built for another torch, or CUDA's libraries are missing
        logger.warning("exllamav2's compiled module cannot be imported (%s)", error)
        return False
    return True


def _for_both_devices(compiled: ModuleType) -> ModuleType:
    """Return the generator's functions, for tensors of a CPU and of a GPU in one process."""

    def rotate(cache: torch.Tensor, order: torch.Tensor, temp: torch.Tensor) -> None:
        on_cpu = cache.device.type == "cpu"
        (cache_rotate if on_cpu else compiled.cache_rotate)(cache, order, temp)

    module = stand_in_module()
    module.cache_rotate = rotate  # type: ignore[attr-defined]
    return module


def _utf32_to_str(buffer: Any) -> str:
    return bytes(buffer).decode("utf-32-le", errors="surrogatepass")


def _starts_at_end(text: str, needle: str) -> bool:
    return any(text.endswith(needle[:length]) for length in range(1, len(needle)))


def _missing(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    raise AttributeError(
        f"{EXTENSION}.{name} needs exllamav2's compiled module, and this process runs on its "
        "stand-in for the CPU; install exllamav2 with CUDA, or use generator.device: cpu"
    )
