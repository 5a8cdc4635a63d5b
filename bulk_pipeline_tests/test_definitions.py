"""What Dagster sees: the definitions, and what importing them must not bring along."""

import subprocess
import sys

import dagster as dg
import pytest
import yaml

from bulk_pipeline import ExLlamaV2Resource, build_bulk_inference_defs

HEAVY = ("torch", "exllamav2", "transformers", "datasets", "tokenizers")


def values(name: str, **changes):
    return {
        "name": name,
        "source": {"path": "rows.jsonl"},
        "prompt": {"column": "text"},
        "generator": {"model": "owner/name"},
    } | changes


def test_loading_the_definitions_imports_no_model_library():
    code = (
        "import sys; from bulk_pipeline.definitions import defs; d = defs(); "
        "d.resolve_asset_graph(); "
        f"print([m for m in {HEAVY} if m in sys.modules], len(d.resolve_all_job_defs()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("]")[0] == "["
    assert int(done.stdout.split()[-1]) >= 2


def test_a_dataset_is_four_assets_in_a_chain():
    defs = build_bulk_inference_defs(values("data"))
    graph = defs.resolve_asset_graph()
    keys = {key.to_user_string() for key in graph.get_all_asset_keys()}
    assert keys == {f"data/{t}" for t in ("raw_dataset", "prompts", "completions", "output")}
    parents = graph.get(dg.AssetKey(["data", "output"])).parent_keys
    assert {key.path[-1] for key in parents} == {"raw_dataset", "completions"}
    assert {graph.get(key).partitions_def for key in graph.get_all_asset_keys()} == {
        dg.StaticPartitionsDefinition(["all"])
    }


def test_datasets_live_side_by_side():
    cut = {"partitions": {"by": "file"}}
    defs = dg.Definitions.merge(
        build_bulk_inference_defs(values("one", **cut)),
        build_bulk_inference_defs(values("two", **cut)),
    )
    graph = defs.resolve_asset_graph()
    partitions = {graph.get(key).partitions_def.name for key in graph.get_all_asset_keys()}
    assert partitions == {"one_partitions", "two_partitions"}
    assert {job.name for job in defs.resolve_all_job_defs() if not job.name.startswith("__")} == {
        "one_job", "two_job", "one_sync_partitions", "two_sync_partitions",
        "one_partitions_status", "two_partitions_status",
    }  # fmt: skip


def test_datasets_may_share_a_model():
    shared = {"generator": None, "generator_resource": "llm"}
    defs = dg.Definitions.merge(
        build_bulk_inference_defs(values("one", **shared)),
        build_bulk_inference_defs(values("two", **shared)),
        dg.Definitions(resources={"llm": ExLlamaV2Resource(model="owner/name")}),
    )
    for name in ("one_job", "two_job"):
        assert defs.resolve_job_def(name).get_required_resource_defs().keys() >= {"llm"}


def test_only_completions_waits_for_the_gpu():
    defs = build_bulk_inference_defs(values("data"))
    pools = {asset.key.path[-1]: asset.op.pool for asset in defs.resolve_asset_graph().assets_defs}
    assert pools == {"raw_dataset": None, "prompts": None, "completions": "gpu", "output": None}


def test_a_step_carries_the_tags_that_place_it():
    tags = {"completions": {"dagster-ray/config": {"num_gpus": 1}}, "output": {"team": "search"}}
    defs = build_bulk_inference_defs(values("data", op_tags=tags))
    found = {asset.key.path[-1]: asset.op.tags for asset in defs.resolve_asset_graph().assets_defs}
    assert found["completions"] == {"dagster-ray/config": '{"num_gpus": 1}'}
    assert found["output"] == {"team": "search"}
    assert found["prompts"] == found["raw_dataset"] == {}


def test_tags_of_a_step_that_is_not_there_are_refused():
    with pytest.raises(ValueError, match=r"^op_tags.completion is not a setting; remove it or"):
        build_bulk_inference_defs(values("data", op_tags={"completion": {}}))


def test_a_backfill_is_one_run_unless_limited():
    def policies(**changes):
        graph = build_bulk_inference_defs(values("data", **changes)).resolve_asset_graph()
        return {graph.get(key).backfill_policy for key in graph.get_all_asset_keys()}

    assert policies() == {dg.BackfillPolicy.single_run()}
    assert policies(partitions={"max_per_run": 3}) == {dg.BackfillPolicy.multi_run(3)}


def test_a_wrong_spec_is_refused_in_one_line():
    with pytest.raises(ValueError, match="sampling.top_p: input should be less than or equal to 1"):
        build_bulk_inference_defs(values("data", sampling={"top_p": 2}))


TEXTS = [
    "\n",
    "###\n",
    '"Be brief."',
    "42",
    "1e3",
    "True",
    "[1,2]",
    "a\r\nb",
    "{# no comment #}",
    "x ",
]


@pytest.fixture
def load_yaml(tmp_path, monkeypatch):
    """Give what makes the spec that Dagster makes of a defs.yaml with these attributes."""
    name = tmp_path.name
    package = tmp_path / name
    (package / "defs" / "data").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "defs" / "__init__.py").touch()
    (tmp_path / "pyproject.toml").write_text(
        f'[tool.dg]\ndirectory_type = "project"\n[tool.dg.project]\nroot_module = "{name}"\n'
    )
    monkeypatch.syspath_prepend(tmp_path)

    def load(**attributes):
        component = {
            "type": "bulk_pipeline.BulkInferenceComponent",
            "attributes": values("data") | attributes,
        }
        (package / "defs" / "data" / "defs.yaml").write_text(yaml.safe_dump(component))
        return dg.ComponentTree.for_project(tmp_path).load_component("data").spec

    return load


def test_texts_in_yaml_come_through_to_the_letter(load_yaml):
    prompt = {
        "template": "{{ text }} {% if x %}{% endif %}\n",
        "system": '"quoted"\n',
        "assistant_prefix": "42\n",
    }
    spec = load_yaml(prompt=prompt, sampling={"stop": TEXTS})
    assert spec.sampling.stop == TEXTS
    assert spec.prompt.model_dump(include=set(prompt)) == prompt


def test_the_environment_can_be_used_in_yaml(load_yaml, monkeypatch):
    monkeypatch.setenv("MY_MODEL", "owner/other")
    monkeypatch.setenv("MY_TOKENS", "77")
    spec = load_yaml(
        generator={"model": "{{ env.MY_MODEL }}"},
        prompt={"column": "text", "system": "{{ env.MY_TOKENS }} words at most"},
        sampling={"max_new_tokens": "{{ env.MY_TOKENS }}"},
    )
    assert spec.generator.model == "owner/other"
    assert spec.prompt.system == "77 words at most"
    assert spec.sampling.max_new_tokens == 77


def test_a_variable_that_is_not_set_is_named(load_yaml, monkeypatch):
    monkeypatch.delenv("MY_ROWS", raising=False)
    with pytest.raises(Exception, match="loading component") as caught:
        load_yaml(source={"path": "{{ env.MY_ROWS }}"})
    assert str(caught.value.__cause__) == (
        "cannot fill in '{{ env.MY_ROWS }}': it gives nothing; correct it"
    )


@pytest.fixture
def upstream(tmp_path):
    """An asset that writes the rows of `values`, in two partitions."""

    @dg.asset(key=["crm", "rows"], partitions_def=dg.StaticPartitionsDefinition(["a", "b"]))
    def rows():
        (tmp_path / "rows.jsonl").write_text('{"text": "hi"}\n')

    return rows


@pytest.mark.parametrize("by", ["none", "file"])
def test_assets_that_write_the_source_are_upstream(upstream, by):
    source = {"path": "rows.jsonl", "deps": ["crm/rows", "other"]}
    ours = build_bulk_inference_defs(values("data", source=source, partitions={"by": by}))
    defs = dg.Definitions.merge(dg.Definitions([upstream, dg.AssetSpec("other")]), ours)
    dg.Definitions.validate_loadable(defs)
    raw = defs.resolve_asset_graph().get(dg.AssetKey(["data", "raw_dataset"]))
    assert raw.parent_keys == {dg.AssetKey(["crm", "rows"]), dg.AssetKey("other")}
    assert {key.name for key in raw.check_keys} == {"unique_row_ids", "schema"}


def test_a_run_makes_the_source_first(tmp_path):
    @dg.asset
    def zz_rows():  # of assets that do not depend on each other, the first by name would run first
        (tmp_path / "rows.jsonl").write_text('{"text": "hi"}\n')

    source = {"path": "rows.jsonl", "deps": ["zz_rows"]}
    ours = build_bulk_inference_defs(values("data", source=source), tmp_path)
    raw = dg.AssetSelection.assets(["data", "raw_dataset"], "zz_rows")
    job = dg.define_asset_job("both", selection=raw)
    defs = dg.Definitions.merge(dg.Definitions([zz_rows], jobs=[job]), ours)
    result = defs.resolve_job_def("both").execute_in_process(partition_key="all")
    assert result.success
