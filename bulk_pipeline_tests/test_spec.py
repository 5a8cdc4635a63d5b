from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from bulk_pipeline.resources import ExLlamaV2Resource
from bulk_pipeline.spec import BulkInferenceSpec, GeneratorSettings, load_spec

VALID: dict[str, Any] = {
    "name": "data",
    "source": {"path": "rows.jsonl"},
    "prompt": {"column": "text"},
    "generator": {"model": "owner/name"},
}


def models(annotation: Any) -> set[type[BaseModel]]:
    """All pydantic models in an annotation, at any depth."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        found = {annotation}
        for field in annotation.model_fields.values():
            found |= models(field.annotation)
        return found
    return set().union(*(models(arg) for arg in get_args(annotation)))


def test_every_field_is_described():
    found = models(BulkInferenceSpec)
    assert {model.__name__ for model in found} == {
        "BulkInferenceSpec", "FilesSource", "HuggingFaceSource", "PartitionsSpec", "PromptSpec",
        "SamplingSpec", "GeneratorSettings", "OutputSpec", "AutomationSpec",
        "StructuredOutputSpec", "LoopGuardSpec", "ReasoningSpec", "OpTagsSpec",
    }  # fmt: skip
    for model in found:
        for name, field in model.model_fields.items():
            where = f"{model.__name__}.{name}"
            assert field.description, where
            assert field.description.rstrip().endswith((".", "null")), where
            is_optional = type(None) in get_args(field.annotation)
            if is_optional:  # what null means must be said
                assert "null" in field.description or "Default" in field.description, where


def test_the_resource_has_the_settings_of_the_spec():
    assert set(GeneratorSettings.model_fields) <= set(ExLlamaV2Resource.model_fields)


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in VALID.items() if key != name}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (without("name"), "name is missing; set it"),
        (VALID | {"nmae": "x"}, "nmae is not a setting; remove it or correct its name"),
        (VALID | {"name": "a/b"}, r"name: .*pattern.*, got 'a/b'"),
        (VALID | {"source": {}}, "source.path is missing; set it"),
        (VALID | {"source": {"type": "sql"}}, "source: .*'files', 'huggingface'"),
        (
            VALID | {"sampling": {"top_p": 1.5}},
            "sampling.top_p: input should be less than or equal to 1, got 1.5",
        ),
        (VALID | {"sampling": {"temprature": 1}}, "sampling.temprature is not a setting"),
        (
            VALID | {"sampling": {"mirostat": True}},
            r"^sampling.mirostat is not supported; remove it \(supported: temperature, top_p, ",
        ),
        (VALID | {"sampling": {"dry_multiplier": 0.8}}, "sampling.dry_multiplier is not supported"),
        (
            VALID | {"sampling": {"token_repetition_penalty": 1.1}},
            "^sampling.token_repetition_penalty is called repetition_penalty here; rename it$",
        ),
        (VALID | {"mirostat": True}, "^mirostat is not a setting; remove it"),
        (
            VALID | {"sampling": {"repetition_penalty": 0}},
            "sampling.repetition_penalty: input should be greater than 0, got 0",
        ),
        (
            VALID | {"sampling": {"presence_penalty": 2.5}},
            "sampling.presence_penalty: .* less than or equal to 2, got 2.5",
        ),
        (
            VALID | {"sampling": {"logit_bias": {5: -101}}},
            "sampling.logit_bias.5: .* greater than or equal to -100, got -101",
        ),
        (
            VALID | {"sampling": {"logit_bias": {-5: 1}}},
            "sampling.logit_bias.-5.* greater than or equal to 0, got -5",
        ),
        (
            VALID | {"sampling": {"banned_token_ids": [-1]}},
            "sampling.banned_token_ids.0: .* greater than or equal to 0, got -1",
        ),
        (
            VALID | {"sampling": {"min_new_tokens": 9, "max_new_tokens": 4}},
            r"sampling: min_new_tokens must not exceed max_new_tokens \(4\), got 9",
        ),
        (VALID | {"sampling": {"stop": [""]}}, "stop must not hold an empty string"),
        (
            VALID | {"prompt": {"column": "a", "template": "b"}},
            "prompt: set exactly one of column, .* got column and template",
        ),
        (VALID | {"prompt": {}}, "prompt: set exactly one of column, .* got none"),
        (
            VALID | {"prompt": {"column": "a", "system": "s", "system_column": "c"}},
            "prompt: set system or system_column, not both",
        ),
        (
            VALID | {"generator": {"model": "m", "max_batch_sise": 3}},
            "generator.max_batch_sise is not a setting; remove it or correct its name",
        ),
        (without("generator"), "set exactly one of generator and generator_resource"),
        (VALID | {"generator_resource": "llm"}, "set exactly one of generator and"),
        (
            VALID | {"generator": {"model": "m", "cache_tokens": 100}},
            "generator.cache_tokens: .* greater than or equal to 256, got 100",
        ),
        (
            VALID
            | {
                "source": {"type": "huggingface", "dataset": "d"},
                "partitions": {"by": "file"},
            },
            "partitions.by must be rows or none for a Hugging Face dataset, got file",
        ),
    ],
)
def test_a_wrong_setting_is_named_with_its_rule_and_value(values, message):
    with pytest.raises(ValueError, match=message) as error:
        load_spec(values)
    assert "\n" not in str(error.value)


EXLLAMAV2_ALONE = [
    "smoothing_factor",
    "min_temp",
    "max_temp",
    "temp_exponent",
    "top_a",
    "tfs",
    "typical",
    "skew",
    "temperature_last",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
    "mirostat_mu",
    "cfg_scale",
    "dry_allowed_length",
    "dry_base",
    "dry_multiplier",
    "dry_sequence_breakers",
    "dry_range",
    "dry_max_ngram",
    "xtc_probability",
    "xtc_threshold",
    "xtc_ignore_tokens",
    "token_repetition_range",
    "token_repetition_decay",
]


@pytest.mark.parametrize("name", EXLLAMAV2_ALONE)
def test_settings_of_exllamav2_that_are_not_done_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"^sampling.{name} is not supported; remove it") as error:
        load_spec(VALID | {"sampling": {name: 0.5}})
    assert "\n" not in str(error.value)


def test_token_ids_of_biases_may_be_written_as_text():
    spec = load_spec(VALID | {"sampling": {"logit_bias": {"50256": -100, 7: 1}}})
    assert spec.sampling.logit_bias == {50256: -100.0, 7: 1.0}


def test_each_of_several_problems_has_a_line():
    with pytest.raises(ValueError, match="top_p") as error:
        load_spec(VALID | {"sampling": {"top_p": 0, "min_p": 2}})
    assert len(str(error.value).splitlines()) == 2


def test_local_paths_start_at_the_project(tmp_path: Path):
    (tmp_path / "models" / "here").mkdir(parents=True)
    spec = load_spec(
        VALID
        | {
            "source": {"path": ["rows.jsonl", "s3://bucket/*.jsonl", "/data/x.csv"]},
            "prompt": {"column": "text", "chat_template": "my.jinja"},
            "generator": {"model": "models/here", "draft_model": "owner/name"},
        }
    ).resolve_paths(tmp_path)
    assert spec.source.path == [f"{tmp_path}/rows.jsonl", "s3://bucket/*.jsonl", "/data/x.csv"]
    assert spec.prompt.chat_template == f"{tmp_path}/my.jinja"
    assert spec.generator is not None
    assert spec.generator.model == f"{tmp_path}/models/here"
    assert spec.generator.draft_model == "owner/name"
    assert spec.output.root == f"{tmp_path}/data/bulk"


def test_a_missing_model_folder_is_not_taken_for_a_hub_id(tmp_path: Path):
    values = VALID | {"generator": {"model": "data/models/missing"}}
    spec = load_spec(values).resolve_paths(tmp_path)
    assert spec.generator is not None
    assert spec.generator.model == f"{tmp_path}/data/models/missing"


def test_a_family_is_not_taken_for_a_path(tmp_path: Path):
    spec = load_spec(VALID | {"prompt": {"column": "a", "chat_template": "chatml"}})
    assert spec.resolve_paths(tmp_path).prompt.chat_template == "chatml"
