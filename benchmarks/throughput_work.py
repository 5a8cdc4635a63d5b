"""What every generator of the throughput benchmark gets to do, and what a result says of itself.

A workload is a list of rows drawn from one seed: fewer rows are the first ones of more. Lengths and
stop tokens are always the same; `variant` moves every token id by a constant, so that a second pass
finds nothing of the first in the cache.
"""

import json
import os
import platform
import random
import subprocess
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SEED = 1
PAGE_TOKENS = 256
SPECIAL_IDS = 300  # ids at both ends of the vocabulary that prompts leave out, of a large one
LONG_PROMPT = 2000
SHARED_PREFIX, OWN_SUFFIX = 1500, 50
STOP_EVERY = 160  # one token id in so many is a stop token
EARLY_STOP_LIMIT = 512  # tokens that rows of early_stop may take; few of them do
WORKLOADS = ("mixed", "long_prompt", "shared_prefix", "early_stop")
SAMPLING = {"greedy": (0.0, 1.0), "sampled": (1.0, 0.6)}  # temperature, top_p
SHAPE = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "vocab_size",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt, the most tokens to generate, and the token ids that end it before."""

    input_ids: list[int]
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()


def make_work(workload: str, num_rows: int, vocab_size: int, variant: int = 0) -> list[Row]:
    """Return the first rows of a workload."""
    random_numbers = random.Random(SEED)
    special_ids = min(SPECIAL_IDS, vocab_size // 8)
    num_ids = vocab_size - 2 * special_ids
    stop_ids = tuple(range(STOP_EVERY // 2, vocab_size, STOP_EVERY))

    def ids(count: int) -> list[int]:
        drawn = (
            random_numbers.randrange(special_ids, vocab_size - special_ids) for _ in range(count)
        )
        return [special_ids + (i - special_ids + variant) % num_ids for i in drawn]

    def rows() -> Iterator[Row]:
        prefix = ids(SHARED_PREFIX) if workload == "shared_prefix" else []
        while True:
            if workload == "long_prompt":
                prompt = ids(LONG_PROMPT)
            elif workload == "shared_prefix":
                prompt = prefix + ids(OWN_SUFFIX)
            else:
                prompt = ids(random_numbers.randint(64, 320))
            limit = random_numbers.randint(64, 256)
            if workload == "early_stop":
                yield Row(prompt, EARLY_STOP_LIMIT, stop_ids)
            else:
                yield Row(prompt, limit)

    if workload not in WORKLOADS:
        raise ValueError(f"--workloads: one of {', '.join(WORKLOADS)}, got {workload}")
    return list(islice(rows(), num_rows))


def variant_of(*setting: object) -> int:
    """Return the variant of a pass: the same for both generators, another for another pass."""
    return zlib.crc32(repr(setting).encode())


def pages_of_longest(workloads: Sequence[str]) -> int:
    """Pages of the longest row that these workloads can have."""
    prompts = {"long_prompt": LONG_PROMPT, "shared_prefix": SHARED_PREFIX + OWN_SUFFIX}
    limits = {"early_stop": EARLY_STOP_LIMIT}
    longest = max(prompts.get(name, 320) + limits.get(name, 256) for name in workloads)
    return -(-longest // PAGE_TOKENS)


def describe_model(folder: str, name: str | None) -> dict[str, Any]:
    """Return a model's name, shape and quantisation, from its config.json."""
    config = json.loads((Path(folder) / "config.json").read_text())
    quantised = config.get("quantization_config")
    kind = "unquantised"
    if quantised is not None:
        kind = f"{quantised['quant_method']} {quantised.get('bits', '?')}-bit"
    return {
        "name": name or Path(folder).resolve().name,
        "shape": {key: config[key] for key in SHAPE if key in config},
        "quantisation": kind,
    }


def describe_machine(on_gpu: bool) -> dict[str, Any]:
    """Return the GPU's name, how many are visible, and the number of cores."""
    import torch

    return {
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "gpus": torch.cuda.device_count() if on_gpu else 0,
        "cores": len(os.sched_getaffinity(0)),
        "processor": platform.machine(),
    }


def describe_versions(commit: str | None) -> dict[str, Any]:
    """Return the versions of what was measured."""
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "exllamav2": version("exllamav2"),
        "bulk_pipeline": commit or _commit(),
    }


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _commit() -> str | None:
    """Return the checkout's commit, with a mark where files differ from it; None without git."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=ROOT, capture_output=True, text=True, timeout=30,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
