"""A LoRA adapter's files, as PEFT writes them: where they are, what they say, and a hash of them.

Imports no model library, see `model_files`.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bulk_pipeline.engine.model_download import download_model, find_downloaded, is_model_url
from bulk_pipeline.engine.model_files import (
    HUB_ID,
    download_from_hub,
    read_json,
    sampled_blocks,
)
from bulk_pipeline.spec import GeneratorSettings

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
FILES = (CONFIG, WEIGHTS)
# Settings that decide what the weights mean; others say where they come from.
DECIDING = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
# Ways to begin training that leave the model's own weights as they are.
PLAIN_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")
# What is more than a low-rank change of some matrices, by its setting.
NOT_DONE = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "velora_config": "VeLoRA",
    "arrow_config": "Arrow",
    "modules_to_save": "modules_to_save, which replace whole modules",
    "lora_bias": "lora_bias",
    "fan_in_fan_out": "fan_in_fan_out",
    "layer_replication": "layer_replication",
    "target_parameters": "target_parameters",
    "trainable_token_indices": "trainable_token_indices, which change the embedding",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens)",
}


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter on this machine, of which `adapter_config.json` was looked at.

    Attributes
    ----------
    name
        As requests name it.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]

    @property
    def setting(self) -> str:
        """The setting that names it, for messages."""
        return f"generator.adapters.{self.name}"

    @property
    def weights(self) -> Path:
        """The file that holds its matrices."""
        return self.folder / WEIGHTS

    def rank(self, matrix: str) -> int:
        """The rank of the change of a matrix, as the configuration has it."""
        return int(_of_matrix(self.config.get("rank_pattern"), matrix, self.config["r"]))

    def scale(self, matrix: str) -> float:
        """What the product of its two matrices is multiplied by."""
        alpha = _of_matrix(self.config.get("alpha_pattern"), matrix, self.config["lora_alpha"])
        rank = self.rank(matrix)
        return float(alpha) / (math.sqrt(rank) if self.config.get("use_rslora") else rank)


def resolve_adapters(settings: GeneratorSettings) -> dict[str, Adapter]:
    """The adapters by name; one that is not on this machine is downloaded.

    Raises
    ------
    ValueError
        One line, if there is no such adapter, or it is not one that can be used.
    """
    return {name: resolve_adapter(name, where) for name, where in settings.adapters.items()}


def resolve_adapter(name: str, where: str) -> Adapter:
    """Find one adapter, a folder, a hub id or a URL, and read its configuration."""
    setting = f"generator.adapters.{name}"
    folder = Path(where).expanduser()
    if is_model_url(where):
        folder = download_model(where, FILES)
    elif not folder.is_dir():
        if not HUB_ID.fullmatch(where):
            raise ValueError(f"{setting}: no folder {where}; correct the path")
        folder = download_from_hub(setting, where, FILES)
    if not (folder / CONFIG).is_file():
        raise ValueError(
            f"{setting}: no {CONFIG} in {where}; give the folder that PEFT's save_pretrained wrote"
        )
    if not (folder / WEIGHTS).is_file():
        other = f", only {PICKLE}, which is not read" if (folder / PICKLE).is_file() else ""
        raise ValueError(
            f"{setting}: no {WEIGHTS} in {where}{other}; save the adapter as safetensors"
        )
    adapter = Adapter(name, folder, read_json(folder / CONFIG))
    if problem := _config_problem(adapter.config):
        raise ValueError(f"{setting}: {problem}")
    return adapter


def adapter_fingerprint(folder: Path) -> str:
    """A hash of the adapter: 32 hex digits, the same for a copy elsewhere or of another name."""
    config = read_json(folder / CONFIG)
    digest = hashlib.blake2b(digest_size=16)
    deciding = {name: config[name] for name in DECIDING if config.get(name)}
    digest.update(json.dumps(deciding, sort_keys=True).encode())
    for block in sampled_blocks(folder / WEIGHTS):
        digest.update(block)
    return digest.hexdigest()


def adapter_fingerprints(settings: GeneratorSettings) -> dict[str, str]:
    """The fingerprints of all adapters by name.

    Raises
    ------
    ValueError
        As `resolve_adapters`.
    """
    adapters = resolve_adapters(settings)
    return {name: adapter_fingerprint(adapter.folder) for name, adapter in adapters.items()}


def found_fingerprints(settings: GeneratorSettings) -> dict[str, str]:
    """The fingerprints of those adapters that are on this machine; downloads nothing."""
    folders = {name: find_adapter(where) for name, where in settings.adapters.items()}
    return {name: adapter_fingerprint(folder) for name, folder in folders.items() if folder}


def find_adapter(where: str) -> Path | None:
    """An adapter's folder if it is on this machine; downloads nothing."""
    if is_model_url(where):
        return find_downloaded(where, FILES)
    folder = Path(where).expanduser()
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(where, local_files_only=True))
        except Exception:  # not a hub id, or not in the cache: many unrelated types
            return None
    return folder if all((folder / name).is_file() for name in FILES) else None


def _config_problem(config: Mapping[str, Any]) -> str | None:
    """Why an adapter cannot be used, and what to do; None where it can."""
    if config.get("peft_type") != "LORA":
        return f"its peft_type is {config.get('peft_type')}, only LORA is supported; use a LoRA"
    for name, shown in NOT_DONE.items():
        if config.get(name):
            return f"it uses {shown}, which is not supported; merge it into the model instead"
    if (beginning := config.get("init_lora_weights")) not in PLAIN_BEGINNINGS:
        return (
            f"it began with init_lora_weights={beginning!r}, which changes the model's own "
            "weights; convert it to a plain LoRA with PEFT first"
        )
    if (bias := config.get("bias", "none")) != "none":
        return f"it has biases (bias: {bias}), which are not supported; train with bias: none"
    if not all(_is_positive(config.get(name)) for name in ("r", "lora_alpha")):
        return f"r and lora_alpha in {CONFIG} must be numbers above 0; correct it"
    return next(_pattern_problems(config), None)


def _pattern_problems(config: Mapping[str, Any]) -> Iterator[str]:
    for name in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(name) or {}
        if not isinstance(patterns, dict) or not all(map(_is_positive, patterns.values())):
            yield f"{name} in {CONFIG} must map names to numbers above 0; correct it"
            return
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                yield f"{name} in {CONFIG} has {pattern!r}, no regular expression ({error})"


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _of_matrix(patterns: Mapping[str, Any] | None, matrix: str, default: Any) -> Any:
    """The value of the first pattern that the matrix's name ends with, as PEFT finds it."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", matrix):
            return value
    return default
