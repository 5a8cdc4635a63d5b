"""What the files of a model folder say, without loading weights or exllamav2.

Here stand the checks that the engine makes before it loads, and the sizes that `doctor` shows.
"""

import importlib.util
import json
import math
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from bulk_pipeline.engine.tokenizer import read_config
from bulk_pipeline.spec import GeneratorSettings

QUANTIZATIONS = ("exl2", "gptq")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # that exllamav2 computes as transformers does
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")  # the longest row of a batch changes the others
OWN_ATTENTION = "bulk_pipeline"  # in place of flash-attn
# Vision models whose positions have three parts.
MROPE_ARCHITECTURES = ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")

# Architectures that the project's own forward pass over float16 weights surely runs.
DENSE_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)

HALF_BYTES = 2  # of a float16, in which a GPU holds whatever is not quantised
FLOATS = ("F64", "F32", "F16", "BF16")
# Bytes that exllamav2 stores for an element of a key and of a value, without scales.
CACHE_BYTES = {"fp16": (2.0, 2.0), "q8": (1.0, 1.0), "q6": (1.0, 0.5), "q4": (0.5, 0.5)}
CACHE_BLOCK = 32  # elements of a quantised cache that share a float16 scale


@dataclass(frozen=True, slots=True)
class Weights:
    """The sizes of a folder's safetensors.

    Attributes
    ----------
    num_bytes
        Of all tensors, as stored.
    gpu_bytes
        What stands on the GPUs where the weights are held as they are stored; floats as float16.
    num_parameters
        Of the model; of quantised matrices, the elements before quantisation.
    """

    num_bytes: int
    gpu_bytes: int
    num_parameters: int

    @property
    def bits_per_weight(self) -> float:
        """Stored bits for a parameter."""
        return 8 * self.num_bytes / self.num_parameters


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a token takes in the KV cache."""

    num_layers: int
    num_heads: int
    head_size: int

    def bytes_per_token(self, element_bytes: int) -> int:
        """Of a cache in one dtype."""
        return 2 * self.num_layers * self.num_heads * self.head_size * element_bytes

    def gpu_bytes_per_token(self, cache_type: str, num_gpus: int = 1) -> int:
        """Of exllamav2's cache of this type; a quantised one also has a float16 layer a GPU."""
        key_bytes, value_bytes = CACHE_BYTES[cache_type]
        size = self.head_size * (key_bytes + value_bytes)
        if cache_type == "fp16":
            return self.num_layers * self.num_heads * int(size)
        size += 2 * (self.head_size // CACHE_BLOCK) * HALF_BYTES
        working = num_gpus * 2 * self.num_heads * self.head_size * HALF_BYTES
        return self.num_layers * self.num_heads * int(size) + working


def check_quantization(folder: Path) -> str:
    """Return ``exl2``, ``gptq`` or ``float16``.

    Raises
    ------
    ValueError
        If the folder is quantised in a way that exllamav2 does not read.
    """
    method = quantization_method(folder)
    if method is None:
        return "float16"
    if method not in QUANTIZATIONS:
        raise ValueError(
            f"generator.model: {folder} is quantised with {method}; exllamav2 reads "
            f"{', '.join(QUANTIZATIONS)} and unquantised folders"
        )
    return method


def quantization_method(folder: Path) -> str | None:
    """Return the name of the quantisation that config.json gives, or None."""
    quantization = json.loads((folder / "config.json").read_text()).get("quantization_config")
    return str(quantization.get("quant_method", "unknown")).lower() if quantization else None


def read_architecture(folder: Path) -> str:
    """Return the architecture that config.json names, or what follows from its model_type.

    Raises
    ------
    ValueError
        If neither is known.
    """
    return _architecture(json.loads((folder / "config.json").read_text()), folder)


def _architecture(config: dict[str, Any], folder: Path) -> str:
    named = config.get("architectures") or [
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.get("model_type", ""))
    ]
    if named[0] is None:
        raise ValueError(
            f"generator.model: {folder}/config.json names no architectures and an unknown "
            f"model_type ({config.get('model_type')}); add architectures to it"
        )
    return str(named[0])


def check_architecture(folder: Path, attention: str) -> None:
    """Raise a ValueError for a model that `attention` or the generator cannot run on a GPU."""
    architecture = read_architecture(folder)
    if attention == OWN_ATTENTION and read_config(folder).get("attn_logit_softcapping"):
        raise ValueError(
            f"generator.model: {folder.name} ({architecture}) caps its attention logits, which "
            "needs flash-attn; install it"
        )
    if not is_known_to_exllamav2(architecture):
        raise ValueError(
            f"generator.model: exllamav2 does not know {architecture} ({folder.name}) and would "
            "run it as if it were Llama; use another model"
        )
    if architecture in MROPE_ARCHITECTURES:
        raise ValueError(
            f"generator.model: {folder.name} ({architecture}) is a vision model with positions "
            "of its own, which is not supported; use a text model"
        )


def is_known_to_exllamav2(architecture: str) -> bool:
    """Whether exllamav2 has rules for an architecture; it loads any other as if it were Llama."""
    spec = importlib.util.find_spec("exllamav2")  # importing it would compile its module
    if spec is None or spec.origin is None or architecture == "LlamaForCausalLM":
        return True
    return f'"{architecture}"' in Path(spec.origin).with_name("architecture.py").read_text()


@contextmanager
def readable_by_exllamav2(folder: Path) -> Iterator[Path]:
    """Give a folder whose config.json says what exllamav2 reads, see `translated_config`."""
    config = json.loads((folder / "config.json").read_text())
    changed = translated_config(config, folder)
    if changed == config:
        yield folder
        return
    with tempfile.TemporaryDirectory() as temporary:
        for path in folder.iterdir():
            if path.name != "config.json":
                (Path(temporary) / path.name).symlink_to(path.resolve())
        (Path(temporary) / "config.json").write_text(json.dumps(changed))
        yield Path(temporary)


def translated_config(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return config.json as exllamav2 reads it.

    transformers 5 writes ``rope_parameters`` where exllamav2 looks for ``rope_theta`` and
    ``rope_scaling`` (and silently takes 10000 and none), and may leave ``architectures`` out.

    Raises
    ------
    ValueError
        If the architecture is not to be found out, or exllamav2 does not know the kind of rope.
    """
    config = config | {"architectures": [_architecture(config, folder)]}
    text_config = config | config.get("text_config", {})
    rope = text_config.get("rope_parameters")
    if not rope:
        return config
    kind = rope.get("rope_type", "default")
    is_per_layer_type = any(isinstance(value, dict) for value in rope.values())
    has_scaling = kind == "default" or bool(text_config.get("rope_scaling"))
    if "rope_theta" in text_config and (is_per_layer_type or has_scaling):
        return config
    if is_per_layer_type or kind not in ROPE_TYPES:
        raise ValueError(
            f"generator.model: {folder}/config.json has rope_parameters that exllamav2 does not "
            f"know ({'one set a layer type' if is_per_layer_type else kind}); use a folder whose "
            "config.json has rope_theta and rope_scaling, as transformers 4 wrote them"
        )
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rope and key not in text_config:
            config[key] = rope[key]
    if not has_scaling:
        config["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    return config


def model_max_seq_len(folder: Path, wanted: int | None) -> int:
    """Return the longest sequence to allow on a CPU: `wanted`, or what the model was made for."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config()
    if quantization := getattr(config, "quantization_config", None):
        method = quantization.get("quant_method", "unknown")
        raise ValueError(
            f"generator.model: {folder} is quantised ({method}), which needs a GPU; "
            "on a CPU use the unquantised model"
        )
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if limit is None:
        raise ValueError(
            f"generator.model: {config.model_type} models have no max_position_embeddings and "
            "are not supported on a CPU"
        )
    limit = int(limit)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in LENGTH_DEPENDENT_ROPE:
        limit = int(rope.get("original_max_position_embeddings") or limit)
    if wanted is not None and wanted > limit:
        raise ValueError(
            f"generator.max_seq_len must be at most {limit}, the length of {folder.name}, "
            f"got {wanted}"
        )
    return wanted or limit


def check_max_seq_len(limit: int, settings: GeneratorSettings, name: str) -> int:
    """Return the longest sequence to allow on a GPU, of a model that was made for `limit`."""
    wanted = settings.max_seq_len
    is_extended = settings.rope_scale is not None or settings.rope_alpha is not None
    if wanted is not None and wanted > limit and not is_extended:
        raise ValueError(
            f"generator.max_seq_len must be at most {limit}, the length of {name}, got {wanted}; "
            "lower it, or extend the model with generator.rope_alpha or rope_scale"
        )
    return wanted or limit


def read_weights(folder: Path) -> Weights:
    """Add up the headers of a folder's safetensors.

    Raises
    ------
    ValueError
        If a shard is missing or cut short.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        for name in sorted(set(json.loads(index.read_text())["weight_map"].values())):
            if not (folder / name).is_file():
                raise ValueError(f"generator.model: {folder} has no {name}; download it")
    tensors = read_headers(folder.glob("*.safetensors"))
    num_bytes = gpu_bytes = num_parameters = 0
    for name, tensor in tensors.items():
        stored = tensor["data_offsets"][1] - tensor["data_offsets"][0]
        elements = math.prod(tensor["shape"])
        num_bytes += stored
        num_parameters += _num_parameters(name, tensors)
        gpu_bytes += elements * HALF_BYTES if tensor["dtype"] in FLOATS else stored
    return Weights(num_bytes, gpu_bytes, num_parameters)


def read_headers(shards: Iterable[Path], setting: str = "generator.model") -> dict[str, Any]:
    """What the headers of safetensors say of each tensor: its dtype, shape and place.

    Raises
    ------
    ValueError
        If one is cut short; it names the `setting`.
    """
    tensors: dict[str, Any] = {}
    for shard in sorted(shards):
        tensors |= _read_header(shard, setting)
    return tensors


def _read_header(shard: Path, setting: str) -> dict[str, Any]:
    size = shard.stat().st_size
    with open(shard, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(min(length, size)))
        except ValueError:
            header = None
    if isinstance(header, dict):
        header.pop("__metadata__", None)
        end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        if 8 + length + end <= size:
            return header
    raise ValueError(f"{setting}: {shard} is cut short or damaged; download it again")


def _num_parameters(name: str, tensors: dict[str, Any]) -> int:
    """Parameters that a tensor stands for; 0 for what belongs to a quantised matrix beside it."""
    matrix, _, part = name.rpartition(".")
    shape = tensors[name]["shape"]
    if part == "q_weight":  # EXL2: packed, so the width comes from the permutation of its rows
        return math.prod(tensors[f"{matrix}.q_invperm"]["shape"]) * shape[1]
    if part == "qweight" and f"{matrix}.g_idx" in tensors:  # GPTQ
        return math.prod(tensors[f"{matrix}.g_idx"]["shape"]) * shape[1]
    is_quantised = f"{matrix}.q_weight" in tensors or f"{matrix}.qweight" in tensors
    return 0 if is_quantised and part != "bias" else math.prod(shape)


def read_cache_shape(folder: Path) -> CacheShape:
    """Return the shape of the KV cache that config.json gives."""
    config = read_config(folder)

    def first(*names: str) -> int | None:
        return next((int(config[name]) for name in names if config.get(name)), None)

    layers = first("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    heads = first("num_attention_heads", "n_head", "n_heads")
    width = first("hidden_size", "n_embd", "d_model")
    if layers is None or heads is None or width is None:
        raise ValueError(
            f"generator.model: {folder}/config.json does not say how many layers and heads the "
            "model has; download it again"
        )
    kv_heads = first("num_key_value_heads") or heads
    return CacheShape(layers, kv_heads, first("head_dim") or width // heads)
