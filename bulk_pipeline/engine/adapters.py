"""LoRA adapters for the engine: read from safetensors, and checked against the model.

An adapter changes some of the model's matrices by products of two small ones. One adapter is in
use at a time; how a model takes it is told by its `use_adapter`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import filterfalse
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from bulk_pipeline.engine.adapter_files import Adapter, adapter_fingerprint
from bulk_pipeline.engine.folders import read_headers

PREFIX = "base_model.model."  # of PEFT's names
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class LowRank:
    """A change of one matrix: ``scale * up @ down`` is added to it.

    Attributes
    ----------
    down
        [rank, in].
    up
        [out, rank].
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: float


class Adapters:
    """The adapters of one model, checked; their weights are read when they are used.

    Attributes
    ----------
    fingerprints
        By name.
    """

    def __init__(self, adapters: Mapping[str, Adapter] | None = None, model: Path = Path()) -> None:
        adapters = adapters or {}
        matrices = base_matrices(model) if adapters else {}
        self._changed = {
            name: check_adapter(adapter, matrices, model.name) for name, adapter in adapters.items()
        }
        self._adapters, self._model = dict(adapters), model.name
        self.fingerprints = {
            name: adapter_fingerprint(adapter.folder) for name, adapter in adapters.items()
        }

    def check(self, can_change: Callable[[str], bool]) -> None:
        """Raise a ValueError where the loaded model cannot change a matrix that an adapter does."""
        for name, matrices in self._changed.items():
            for matrix in filterfalse(can_change, matrices):
                raise ValueError(
                    f"{self._adapters[name].setting}: {matrix} of {self._model} cannot be changed "
                    "by an adapter as it is run here; merge the adapter into the model instead"
                )

    def problem_with(self, name: str | None) -> str | None:
        """Why a request for this adapter cannot run; None where it can."""
        if name is None or name in self._adapters:
            return None
        known = ", ".join(self._adapters) or "none"
        return f"there is no adapter {name!r}; add it to generator.adapters (now {known})"

    def read(self, name: str | None) -> dict[str, LowRank]:
        """The changes by the matrix's name; none without an adapter."""
        return {} if name is None else read_adapter(self._adapters[name])


def read_adapter(adapter: Adapter) -> dict[str, LowRank]:
    """Read an adapter's weights that was checked before."""
    changes = {}
    with safe_open(adapter.weights, "pt") as file:
        for key in sorted(file.keys()):
            if key.endswith(DOWN):
                matrix = _matrix(key)
                up = file.get_tensor(key.removesuffix(DOWN) + UP)
                changes[matrix] = LowRank(file.get_tensor(key), up, adapter.scale(matrix))
    return changes


def base_matrices(model: Path) -> dict[str, tuple[int, int]]:
    """Names and shapes, [out, in], of a model folder's matrices, quantised ones too."""
    tensors, found = read_headers(model.glob("*.safetensors")), {}
    for name, tensor in tensors.items():
        matrix, _, part = name.rpartition(".")
        shape = tensor["shape"]
        if part == "weight" and len(shape) == 2:
            found[matrix] = (shape[0], shape[1])
        elif part == "q_weight":  # EXL2: packed, the other side comes from a permutation
            found[matrix] = (shape[1], tensors[f"{matrix}.q_invperm"]["shape"][0])
        elif part == "qweight":  # GPTQ: eight numbers of 4 bits in one
            found[matrix] = (shape[1], 8 * shape[0])
    return found


def check_adapter(
    adapter: Adapter, matrices: Mapping[str, tuple[int, int]], model: str
) -> list[str]:
    """Check an adapter's weights against its configuration and the model.

    Parameters
    ----------
    matrices
        The model's, see `base_matrices`.
    model
        Its name, for messages.

    Returns
    -------
    The names of the matrices that it changes.

    Raises
    ------
    ValueError
        One line, where they do not fit.
    """
    tensors = read_headers([adapter.weights], adapter.setting)
    if not tensors:
        raise ValueError(f"{adapter.setting}: {adapter.weights} holds no weights; save it again")
    if foreign := next((key for key in tensors if not key.endswith((DOWN, UP))), None):
        raise ValueError(
            f"{adapter.setting}: {foreign} is no LoRA of a matrix (embeddings, biases and whole "
            "modules are not supported); merge the adapter into the model instead"
        )
    for key, tensor in tensors.items():
        if problem := _tensor_problem(key, tensor, tensors, adapter, matrices, model):
            raise ValueError(f"{adapter.setting}: {problem}")
    return sorted(_matrix(key) for key in tensors if key.endswith(DOWN))


def _tensor_problem(
    key: str,
    tensor: dict[str, Any],
    tensors: dict[str, Any],
    adapter: Adapter,
    matrices: Mapping[str, tuple[int, int]],
    model: str,
) -> str | None:
    is_down = key.endswith(DOWN)
    other = key.removesuffix(DOWN) + UP if is_down else key.removesuffix(UP) + DOWN
    if other not in tensors:
        return f"{key} stands there without {other}; download or save the adapter again"
    if tensor["dtype"] not in FLOATS:
        return f"{key} is {tensor['dtype']}, not one of {', '.join(FLOATS)}; save it as one"
    matrix, shape = _matrix(key), tensor["shape"]
    if matrix not in matrices or matrix.endswith(("embed_tokens", "lm_head")):
        return (
            f"it changes {matrix}, which {model} does not have as a matrix that an adapter may "
            "change; use an adapter made for this model"
        )
    out_size, in_size = matrices[matrix]
    rank = adapter.rank(matrix)
    if len(shape) != 2 or shape[0 if is_down else 1] != rank:
        return f"{key} is {shape}, but its rank is {rank} in adapter_config.json; correct that"
    if shape != ([rank, in_size] if is_down else [out_size, rank]):
        return (
            f"it was made for another model: {key} is {shape}, and {model} has {matrix} of "
            f"{in_size} to {out_size}; use an adapter made for this model"
        )
    return None


def _matrix(key: str) -> str:
    return key.removeprefix(PREFIX).removesuffix(DOWN).removesuffix(UP)
