import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bulk_pipeline.engine.stand_in import (
    NO_MATCH,
    PARTIAL_MATCH,
    cache_rotate,
    count_match,
    partial_strings_match,
    stand_in_module,
)


def match(text: str, *strings: str) -> int:
    encoded = [s.encode("utf-32-le") for s in strings]
    offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    return partial_strings_match(
        np.frombuffer(text.encode("utf-32-le"), dtype=np.uint8),
        np.frombuffer(offsets, dtype=np.uint8),
        np.frombuffer(b"".join(encoded), dtype=np.uint8),
    )


@pytest.mark.parametrize(
    ("text", "strings", "expected"),
    [
        ("hello world", ["world"], 6),
        ("hello", ["world"], NO_MATCH),
        ("hello wor", ["world"], PARTIAL_MATCH),
        ("aab", ["ab"], 1),
        ("aaab", ["aab"], 1),
        ("a stop and a half of st", ["stop", "half"], 2),
        ("x end of partia", ["partial", "end"], 2),
        ("日本語🙂!", ["🙂"], 3),
        ("", ["a"], NO_MATCH),
    ],
    ids=[
        "full",
        "none",
        "partial",
        "restart",
        "overlap",
        "earliest of two",
        "a full match is not hidden by a partial one",
        "beyond the BMP",
        "no text",
    ],
)
def test_strings_are_found(text, strings, expected):
    assert match(text, *strings) == expected


@given(
    st.lists(st.integers(0, 2), max_size=9),
    st.lists(st.integers(0, 2), max_size=9),
    st.integers(0, 9),
)
def test_count_match_counts_equal_leading_tokens(a, b, limit):
    expected = 0
    for x, y in list(zip(a, b, strict=False))[:limit]:
        if x != y:
            break
        expected += 1
    tensors = [torch.tensor([ids], dtype=torch.long) for ids in (a, b)]
    assert count_match(*tensors, limit) == expected


@given(st.permutations(range(6)), st.integers(2, 6))
def test_cache_rotate_moves_pages_byte_for_byte(pages, length):
    order = pages[:length]
    cache = torch.randn(6, 40, dtype=torch.float64)
    cache[0, 0] = float("nan")
    before = cache.clone()
    cache_rotate(cache, torch.tensor(order, dtype=torch.int32), torch.empty(1, 4, 2, 5).double())
    expected = before.clone()
    for target, source in zip(order, order[1:] + order[:1], strict=True):
        expected[target] = before[source]
    assert cache.numpy().tobytes() == expected.numpy().tobytes()


def test_anything_else_says_what_is_missing():
    with pytest.raises(AttributeError, match=r"exllamav2_ext.make_q_matrix needs .*device: cpu"):
        stand_in_module().make_q_matrix(1)


def test_exllamav2_prints_nothing_and_runs_paged_in_a_fresh_process():
    code = (
        "from bulk_pipeline.engine.stand_in import install_stand_in; install_stand_in()\n"
        "from exllamav2.attn import assert_paged_attn; assert_paged_attn()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
