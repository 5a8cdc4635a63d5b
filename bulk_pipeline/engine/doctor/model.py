"""What the files of the model folder are, and what in them would stop a run."""

from pathlib import Path
from typing import Any

from bulk_pipeline.engine.adapter_files import find_adapter, resolve_adapter
from bulk_pipeline.engine.adapters import base_matrices, check_adapter
from bulk_pipeline.engine.doctor.report import AdapterInfo, EndToken, Model, Report, Rope
from bulk_pipeline.engine.folders import (
    Weights,
    check_architecture,
    check_max_seq_len,
    check_quantization,
    model_max_seq_len,
    quantization_method,
    read_architecture,
    read_cache_shape,
    read_weights,
    translated_config,
)
from bulk_pipeline.engine.loading import check_draft
from bulk_pipeline.engine.model_download import is_model_url
from bulk_pipeline.engine.model_files import HUB_ID
from bulk_pipeline.engine.tokenizer import (
    PromptTokenizer,
    check_weights,
    end_token_ids,
    read_config,
    resolve_model,
)
from bulk_pipeline.spec import GeneratorSettings

# Where exllamav2 looks for a model's length, and what it takes where there is none.
LENGTH_NAMES = (
    "max_sequence_length", "model_max_length", "max_position_embeddings", "max_seq_len",
    "n_positions",
)  # fmt: skip
DEFAULT_LENGTH = 2048


def examine_model(report: Report, settings: GeneratorSettings) -> None:
    """Fill in the model, and the draft model where there is one."""
    folder = report.tried(resolve_model, settings.model, settings.revision, True)
    config = report.tried(read_config, folder) if folder else None
    if folder is None or config is None:
        return
    on_gpu = report.device == "cuda"
    has_template, end_tokens = _examine_tokenizer(report, folder)
    report.model = model = Model(
        folder=str(folder),
        architecture=report.tried(read_architecture, folder, stops=on_gpu),
        quantization=quantization_method(folder),
        weights=_examine_weights(report, folder, settings.model),
        has_template=has_template,
        end_tokens=end_tokens,
        rope=_rope(config),
        max_length=next((int(config[n]) for n in LENGTH_NAMES if config.get(n)), DEFAULT_LENGTH),
        vocab_size=int(config.get("vocab_size", 0)),
        cache=report.tried(read_cache_shape, folder),
    )
    if on_gpu:
        model.max_seq_len = _check_for_gpu(report, folder, model, settings)
    else:
        model.max_seq_len = _check_for_cpu(report, folder, config, settings)
    model.adapters = _examine_adapters(report, folder, settings)
    if settings.draft_model is not None:
        _examine_draft(report, settings.draft_model, model)


def _examine_adapters(
    report: Report, folder: Path, settings: GeneratorSettings
) -> dict[str, AdapterInfo]:
    if not settings.adapters:
        return {}
    found, matrices = {}, report.tried(base_matrices, folder) or {}
    for name, where in settings.adapters.items():
        is_remote = bool(HUB_ID.fullmatch(where)) or is_model_url(where)
        if is_remote and not Path(where).is_dir() and find_adapter(where) is None:
            report.note(
                f"generator.adapters.{name}: {where} is no folder here; the first run downloads "
                "it; if it is a path, correct it"
            )
            continue
        adapter = report.tried(resolve_adapter, name, where)
        if adapter is None or not matrices:
            continue
        changed = report.tried(check_adapter, adapter, matrices, folder.name)
        if changed is not None:
            size = adapter.weights.stat().st_size
            found[name] = AdapterInfo(max(map(adapter.rank, changed)), len(changed), size)
    return found


def _examine_draft(report: Report, name: str, model: Model) -> None:
    folder = report.tried(resolve_model, name, None, True)
    if folder is None:
        return
    draft_size = int(read_config(folder).get("vocab_size", 0))
    report.tried(check_draft, draft_size, model.vocab_size, folder.name)
    model.draft_weights = _examine_weights(report, folder, name)
    model.draft_cache = report.tried(read_cache_shape, folder)


def _examine_tokenizer(report: Report, folder: Path) -> tuple[bool | None, list[EndToken]]:
    tokenizer = report.tried(PromptTokenizer, folder)
    if tokenizer is None:
        return None, []
    template = tokenizer.chat_template
    if template is None:
        report.note(
            f"{folder.name} has no chat template, and prompt.chat_template: model stops; set "
            "prompt.chat_template to a family, a file or raw"
        )
    named_by = end_token_ids(folder, template or "", tokenizer)
    texts = {id_: text for text, id_ in tokenizer.special_tokens.items()}
    tokens = [EndToken(id_, texts.get(id_), by) for id_, by in named_by.items()]
    if not tokens:
        report.note(
            f"{folder.name} names no end token, so that every completion runs to its limit; set "
            "sampling.stop_token_ids or sampling.stop"
        )
    is_in_config = any("config.json" in token.named_by for token in tokens)
    if is_in_config and tokens[0].named_by == "tokenizer":
        others = ", ".join(str(token) for token in tokens[1:])
        report.note(
            f"only the tokenizer of {folder.name} names {tokens[0]} as end token (other files: "
            f"{others}), as folders made from a GGUF do; all of them end a completion; correct "
            "eos_token in tokenizer_config.json if it is none"
        )
    return template is not None, tokens


def _examine_weights(report: Report, folder: Path, model: str) -> Weights | None:
    is_from_hub = not Path(model).expanduser().is_dir()
    if is_from_hub and not any(folder.glob("*.safetensors")):
        report.note(
            f"generator.model: the weights of {model} are not on this machine, their size is not "
            "known; the first run downloads them"
        )
        return None
    report.tried(check_weights, folder)
    has_any = any(folder.glob("*.safetensors"))
    return report.tried(read_weights, folder, stops=not is_from_hub) if has_any else None


def _rope(config: dict[str, Any]) -> Rope:
    parameters = config.get("rope_parameters") or {}
    theta = config.get("rope_theta", parameters.get("rope_theta"))
    scaling = config.get("rope_scaling")
    if not scaling and parameters.get("rope_type", "default") != "default":
        scaling = {name: value for name, value in parameters.items() if name != "rope_theta"}
    named_by = "rope_theta" if "rope_theta" in config else "rope_parameters" if parameters else None
    return Rope(theta, scaling or None, named_by)


def _check_for_gpu(
    report: Report, folder: Path, model: Model, settings: GeneratorSettings
) -> int | None:
    """Note what exllamav2 would refuse; return the longest sequence."""
    report.tried(check_quantization, folder)
    if model.architecture is not None:
        report.tried(check_architecture, folder, report.attention)
        report.tried(translated_config, read_config(folder), folder)
    return report.tried(check_max_seq_len, model.max_length, settings, folder.name)


def _check_for_cpu(
    report: Report, folder: Path, config: dict[str, Any], settings: GeneratorSettings
) -> int | None:
    """Note what would be refused on a CPU; return the longest sequence."""
    length = report.tried(model_max_seq_len, folder, settings.max_seq_len)
    if config.get("attn_logit_softcapping"):
        report.note(
            f"generator.model: {folder.name} caps its attention logits, which a CPU does not do "
            "here; run it on a GPU with flash-attn",
            stops=True,
        )
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if length and window and window < length:
        report.note(
            f"generator.max_seq_len must be at most {window} on a CPU, the sliding window of "
            f"{folder.name}, got {length}; lower it",
            stops=True,
        )
    return length
