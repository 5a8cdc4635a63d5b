"""The project's own paged attention against attention in float64, on random pages."""

import pytest
import torch

pytestmark = pytest.mark.gpu

PAGE = 256
CASES = {  # heads, key heads, head size
    "9/3 x 64": (9, 3, 64),
    "32/8 x 128": (32, 8, 128),
    "32/32 x 96": (32, 32, 96),
    "16/2 x 128": (16, 2, 128),
    "8/1 x 256": (8, 1, 256),
}
LENGTHS = {  # keys in the pages before the new ones, a row each
    "one": [0, 1, 255, 256, 257],
    "mixed": [3000, 1, 700, 255, 4096, 512],
    "long row alone": [9000],
    "many rows": [(17 * i) % 900 for i in range(80)],
}
TOLERANCE = 2e-3  # of float16 keys, values and outputs of size about 1


def expected(q, keys, values, lengths, scale, window):
    """[rows, new, heads, size] in float64, row by row from contiguous keys and values."""
    num_new, heads = q.shape[1:3]
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for row, before in enumerate(lengths):
        total = before + num_new
        group = heads // keys[row].shape[1]
        k, v = (t[row][:total].double().repeat_interleave(group, 1) for t in (keys, values))
        scores = torch.einsum("nhd,thd->hnt", q[row].double(), k) * scale
        place = torch.arange(total, device=q.device)
        own = before + torch.arange(num_new, device=q.device)
        seen = place[None] <= own[:, None]
        if window >= 0:
            seen &= place[None] >= own[:, None] - window
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out[row] = torch.einsum("hnt,thd->nhd", weights, v)
    return out


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)


@pytest.mark.parametrize("window", [-1, 100], ids=["full", "window"])
@pytest.mark.parametrize("num_new", [1, 5, 40, 300])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("shape", CASES.values(), ids=CASES)
def test_paged_attention(device, shape, lengths, num_new, window):
    from bulk_pipeline.engine.attention import flash_attn_with_kvcache

    heads, kv_heads, size = shape
    generator = torch.Generator(device).manual_seed(len(lengths) * num_new + size)

    def random(*dims):
        return torch.randn(*dims, device=device, generator=generator).half()

    rows, width = len(lengths), -(-(max(lengths) + num_new) // PAGE)
    num_pages = rows * width + 3
    table = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1))
    table = table[: rows * width].view(rows, width).int().to(device)
    k_cache, v_cache = (random(num_pages, PAGE, kv_heads, size) for _ in range(2))
    q, k, v = random(rows, num_new, heads, size), *(random(rows, num_new, kv_heads, size),) * 2
    v = random(rows, num_new, kv_heads, size)
    keys, values = [], []
    for row, before in enumerate(lengths):
        for cache, new, kept in ((k_cache, k, keys), (v_cache, v, values)):
            whole = cache[table[row].long()].reshape(-1, kv_heads, size).clone()
            whole[before : before + num_new] = new[row]
            kept.append(whole)
    before = torch.tensor(lengths, dtype=torch.int32, device=device)
    scale = size**-0.5
    found = flash_attn_with_kvcache(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        k=k,
        v=v,
        cache_seqlens=before,
        block_table=table,
        softmax_scale=scale,
        window_size=(window, window),
    )
    wanted = expected(q, keys, values, lengths, scale, window)
    assert (found.double() - wanted).abs().max() < TOLERANCE
    for row, length in enumerate(lengths):  # the new keys stand in the pages
        position = length + num_new - 1
        slot = k_cache[table[row, position // PAGE].long(), position % PAGE]
        assert torch.equal(slot, k[row, -1])
    again = flash_attn_with_kvcache(  # as exllamav2 calls it where it has written the keys itself
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        cache_seqlens=before + num_new,
        block_table=table,
        softmax_scale=scale,
        window_size=(window, window),
    )
    assert torch.equal(found, again)


def test_softcap_is_refused(device):
    from bulk_pipeline.engine.attention import flash_attn_func

    q = torch.zeros(1, 4, 2, 64, device=device, dtype=torch.half)
    with pytest.raises(AssertionError, match="soft-capped"):
        flash_attn_func(q, q, q, softcap=50.0)
