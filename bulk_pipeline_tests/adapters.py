"""Tiny LoRA adapters, made on the spot in PEFT's format."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from bulk_pipeline.engine.adapters import base_matrices

EVERYWHERE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(
    folder: Path,
    model: Path,
    *,
    seed: int = 0,
    rank: int = 4,
    targets: tuple[str, ...] = EVERYWHERE,
    strength: float = 0.5,
    **config: Any,
) -> Path:
    """Write an adapter of a model folder's matrices and return its folder.

    Parameters
    ----------
    targets
        Last parts of the names of the matrices that it changes.
    strength
        Of the change: its largest elements are about this large a part of the matrix's own.
    config
        In adapter_config.json beside, or in place of, a plain LoRA's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    random, tensors = torch.Generator().manual_seed(seed), {}
    for matrix, (out_size, in_size) in sorted(base_matrices(model).items()):
        if matrix.endswith(targets):
            name = f"base_model.model.{matrix}"
            down = torch.randn(rank, in_size, generator=random)
            up = torch.randn(out_size, rank, generator=random)
            tensors[f"{name}.lora_A.weight"] = down
            tensors[f"{name}.lora_B.weight"] = up * strength * _spread(model, matrix) / rank
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(targets),
        "bias": "none",
    } | config
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


def change_tensors(folder: Path, change: Any) -> None:
    """Rewrite an adapter's weights as `change` returns them, given a dictionary."""
    path = folder / "adapter_model.safetensors"
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(change(tensors), path)


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def _spread(model: Path, matrix: str) -> float:
    """The standard deviation of a matrix's elements; of a quantised one, as models have it."""
    for shard in model.glob("*.safetensors"):
        with safe_open(shard, "pt") as file:
            if f"{matrix}.weight" in file.keys():  # noqa: SIM118
                return float(file.get_tensor(f"{matrix}.weight").float().std())
    return 0.05
