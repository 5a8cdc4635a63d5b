"""A loaded model's weights in float16, for `dense`: which models can be held so, and their bytes.

exllamav2's matrices are reconstructed once, layer by layer; what belongs together stands in one
matrix, one part below the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bulk_pipeline.spec import PAGE_TOKENS

HALF_BYTES = 2
KINDS_WITH_RMS_HEAD_NORM = ("Qwen3ForCausalLM",)  # whatever exllamav2 does there


@dataclass(slots=True)
class DenseLayer:
    """One layer's weights, matrices as [out, in].

    Attributes
    ----------
    qkv, gate_up
        Queries, keys and values, and gate and up, one below the other.
    head_norms
        [2, head size]: the norms of query and key heads, where there are such.
    matrices
        The model's own matrices by name: parts of `qkv`, `o`, `gate_up` and `down`, not copies.
    """

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    head_norms: torch.Tensor | None = None
    matrices: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class DenseWeights:
    """A model's weights and shape.

    Attributes
    ----------
    head
        [vocabulary and its padding, hidden].
    rope
        Cosines and sines, float16 [positions, head size / 2].
    """

    embedding: torch.Tensor
    layers: list[DenseLayer]
    norm: torch.Tensor
    head: torch.Tensor
    rope: tuple[torch.Tensor, torch.Tensor]
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    eps: float
    scale: float


def dense_model_problem(model: Any, cache: Any) -> str | None:
    """Say in one line why a loaded exllamav2 model cannot run this way; None where it can."""
    from exllamav2 import ExLlamaV2Cache

    if model.tp_context is not None:
        return "its layers are split over devices (tensor_parallel)"
    devices = {module.device_idx for module in model.modules[1:]}
    if len(devices) != 1:
        return f"it is spread over {len(devices)} devices"
    if type(cache) is not ExLlamaV2Cache:
        return f"its cache is quantised ({type(cache).__name__})"
    if cache.batch_size != 1 or cache.max_seq_len % PAGE_TOKENS:
        return f"its cache is not made of pages of {PAGE_TOKENS} tokens"
    return _config_problem(model.config) or _module_problem(model)


def _config_problem(config: Any) -> str | None:
    from exllamav2.architecture import RopeStyle

    kind = config.arch.lm
    problems = {
        "it is a mixture of experts": kind.is_moe,
        "its layers are parallel blocks": kind.parallel_decoder_blocks,
        f"its norm is {kind.norm}": kind.norm != "rmsnorm",
        "it adds a constant to its norms": kind.norm_constant_bias != 0,
        f"its activation is {kind.mlp_act_func}": kind.mlp_act_func != "silu",
        "its MLP has no gate": not kind.mlp_gate,
        "its rope is not the rotate-half one": kind.rope_style != RopeStyle.NEOX,
        "its positions have three parts": kind.mrope,
        "its positions are learned": bool(kind.keys["learned_pos_emb"]),
        "its rope is partial": config.partial_rotary_factor != 1.0,
        "its rope has two bases": bool(config.rotary_embedding_base_alt),
        "its residual stream is float32": kind.residual_stream_fp32,
        "it clamps its hidden states": kind.clamp_hidden_states,
        "it normalises or scales its embeddings": (
            kind.normalize_embeddings or config.scale_emb != 1
        ),
        "it caps its logits": bool(config.attn_logit_softcapping or config.final_logit_softcapping),
        "it scales its logits": config.logit_scale != 1,
        "it scales its residuals": config.scale_depth != 1,
        "it normalises its output matrix": bool(config.norm_head),
        f"its head size is {config.head_dim}": config.head_dim % 16 != 0 or config.head_dim > 256,
        "its query and key heads have a LayerNorm": (
            config.use_qk_norm
            and kind.headnorm != "rmsnorm"
            and config.architecture not in KINDS_WITH_RMS_HEAD_NORM
        ),
    }
    return next((problem for problem, is_so in problems.items() if is_so), None)


def _module_problem(model: Any) -> str | None:
    for attention, mlp in _layers(model):
        if attention.sliding_window:
            return f"it has a sliding window of {attention.sliding_window} tokens"
        if attention.post_layernorm is not None or mlp.post_layernorm is not None:
            return "it has norms behind attention or MLP"
        if attention.pre_layernorm is None or mlp.pre_layernorm is None:
            return "it has no norm before attention or MLP"
    return None


def _layers(model: Any) -> list[tuple[Any, Any]]:
    """Attention and MLP of each layer; embedding, norm and head stand around them."""
    return list(zip(model.modules[1:-2:2], model.modules[2:-2:2], strict=True))


def dense_bytes(config: Any) -> int:
    """Bytes of the resident weights of a model, from exllamav2's configuration."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    layer = hidden * (2 * q_size + 2 * kv_size) + 3 * hidden * inner + 2 * hidden
    vocabulary = config.vocab_size * hidden * (1 if _is_tied(config) else 2)
    rope = config.max_seq_len * config.head_dim
    return (config.num_hidden_layers * layer + vocabulary + hidden + rope) * HALF_BYTES


def _is_tied(config: Any) -> bool:
    """Whether the output matrix is the embedding; a quantised one always stands for itself."""
    names = (f"lm_head.{part}" for part in ("weight", "qweight", "q_weight"))
    return not any(config.arch.lm_prefix + name in config.tensor_file_map for name in names)


@torch.inference_mode()
def dense_weights(model: Any, keep_quantized: bool = False) -> DenseWeights:
    """Dequantise a loaded model's weights, layer by layer; see `DenseModel.from_exllamav2`."""
    config, kept = model.config, keep_quantized
    embedding, norm, head = model.modules[0], model.modules[-2], model.modules[-1]
    device = norm.weight.device
    layers = []
    for attention, mlp in _layers(model):
        layers.append(_layer_of(attention, mlp))
        scale = attention.scaling
        if not kept:
            attention.unload()
            mlp.unload()
            torch.cuda.empty_cache()
    head_weight, _ = _joined([head], keep_padding=True)
    is_tied = _is_tied(config) and head.linear is not None
    tokens = head_weight[: config.vocab_size] if is_tied else embedding.embedding.weight.data
    weights = DenseWeights(
        embedding=tokens.to(device, torch.float16),
        layers=layers,
        norm=norm.weight.data,
        head=head_weight,
        rope=_rope_of(config, device),
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_size=config.head_dim,
        vocab_size=config.vocab_size,
        eps=config.norm_eps,
        scale=scale,
    )
    if not kept:
        for module in (embedding, norm, head):
            module.unload()
        for context in filter(None, model.device_context):
            context.free()
        torch.cuda.empty_cache()
    return weights


def _layer_of(attention: Any, mlp: Any) -> DenseLayer:
    qkv, qkv_bias = _joined([attention.q_proj, attention.k_proj, attention.v_proj])
    o, o_bias = _joined([attention.o_proj])
    gate_up, gate_up_bias = _joined([mlp.gate_proj, mlp.up_proj])
    down, down_bias = _joined([mlp.down_proj])
    head_norms = None
    if attention.q_norm is not None:  # exllamav2 repeats one weight for every head
        head_norms = torch.stack([attention.q_norm.weight[0], attention.k_norm.weight[0]])
    return DenseLayer(
        attention_norm=attention.pre_layernorm.weight.data,
        qkv=qkv,
        o=o,
        mlp_norm=mlp.pre_layernorm.weight.data,
        gate_up=gate_up,
        down=down,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        head_norms=head_norms,
        matrices={
            **_parts([attention.q_proj, attention.k_proj, attention.v_proj], qkv),
            **_parts([attention.o_proj], o),
            **_parts([mlp.gate_proj, mlp.up_proj], gate_up),
            **_parts([mlp.down_proj], down),
        },
    )


def _parts(linears: Sequence[Any], joined: torch.Tensor) -> dict[str, torch.Tensor]:
    """What of a joined weight belongs to each of exllamav2's matrices, by its name."""
    parts = joined.split([one.out_features - one.padding for one in linears])
    return {one.key: part for one, part in zip(linears, parts, strict=True)}


def _joined(
    linears: Sequence[Any], keep_padding: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the weights [out, in] of exllamav2's matrices, one below the other, and the biases."""
    sizes = [one.out_features - (0 if keep_padding else one.padding) for one in linears]
    bias = None
    if linears[0].has_bias:
        parts = zip(linears, sizes, strict=True)
        bias = torch.cat([one.get_bias_tensor()[:size] for one, size in parts])
    if len(linears) == 1 and linears[0].linear is not None and sizes[0] == linears[0].out_features:
        return linears[0].linear.weight.data.contiguous(), bias
    shape = (sum(sizes), linears[0].in_features)
    weight = torch.empty(shape, dtype=torch.float16, device=linears[0].device())
    place = 0
    for one, size in zip(linears, sizes, strict=True):
        weight[place : place + size] = one.get_weight_tensor_dq()[:, :size].T
        place += size
    return weight, bias


def _rope_of(config: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Make exllamav2's tables in the order of operations of transformers, so that all bits agree.

    transformers computes the frequencies on the CPU, scales them, and turns by them on the device.
    """
    from exllamav2 import rope

    frequencies, factor = rope.get_rope_params("cpu", config, config.rotary_embedding_base)
    frequencies = frequencies.float() / (config.scale_pos_emb or 1.0)
    places = torch.arange(config.max_seq_len, dtype=torch.float32, device=device)
    places += config.pos_id_index or 0
    angles = places[:, None] * frequencies.to(device)
    return (angles.cos() * factor).half(), (angles.sin() * factor).half()
