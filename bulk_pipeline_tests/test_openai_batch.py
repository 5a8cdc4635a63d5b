"""A batch file of OpenAI's through the whole pipeline, with the settings that `init` writes."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
import yaml
from click.testing import CliRunner
from openai.types import Completion
from openai.types import completion_create_params as text_params
from openai.types.chat import ChatCompletion
from openai.types.chat import completion_create_params as chat_params

from bulk_pipeline import build_bulk_inference_defs
from bulk_pipeline.cli import main
from bulk_pipeline.export import export_output
from bulk_pipeline.init import defs_yaml, find_project, look_at
from bulk_pipeline.spec import GeneratorSettings
from bulk_pipeline.storage.store import Store

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


def chat(custom_id: str, **changes: Any) -> dict[str, Any]:
    """A request for the chat endpoint, as the package types it."""
    body: chat_params.CompletionCreateParamsNonStreaming = {
        "model": "gpt-4o-mini",
        "messages": HELLO,
        "max_tokens": 6,
        "temperature": 0,
    }
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {**body, **changes}}


def text(custom_id: str, **changes: Any) -> dict[str, Any]:
    """A request for the completions endpoint, as the package types it."""
    body: text_params.CompletionCreateParamsNonStreaming = {
        "model": "davinci-002",
        "prompt": "The quick brown",
        "max_tokens": 6,
    }
    return {"custom_id": custom_id, "method": "POST", "url": TEXT, "body": {**body, **changes}}


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    return path


def run(folder: Path, toy: Path, lines: list[Any]) -> SimpleNamespace:
    """Write a batch file and run the dataset that init makes of it; its result lines."""
    path = write(folder / "requests.jsonl", lines)
    look = look_at(str(path))
    settings = defs_yaml(find_project(folder), str(path), "batch", look.prompt, str(toy), look)
    values = yaml.safe_load(settings)["attributes"]
    values["generator"] |= {"device": "cpu", "cache_tokens": 8192, "max_batch_size": 8}
    values["sampling"]["max_new_tokens"] = 24
    defs = build_bulk_inference_defs(values, folder)
    with dg.DagsterInstance.ephemeral() as instance:
        assets = list(defs.assets or [])
        result = dg.materialize(
            assets, instance=instance, resources=defs.resources, partition_key="all"
        )
    assert result.success
    file = folder / "data/bulk/batch/output/all/output.openai_batch.jsonl"
    results = [json.loads(line) for line in file.read_text().splitlines()]
    store = Store(f"{folder}/data/bulk", "batch")
    return SimpleNamespace(values=values, store=store, bytes=file.read_bytes(), results=results)


def message(result: dict[str, Any]) -> tuple[str, str]:
    return result["error"]["code"], result["error"]["message"]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory, toy: Path) -> SimpleNamespace:
    """A file with a line of each kind."""
    lines = [
        chat("plain"),
        chat("samples", n=3, temperature=0.8, seed=5),
        chat("biased", logit_bias={"65": 100}),
        chat("no limit", max_tokens=None),
        chat("stopped", logit_bias={"65": 100}, max_tokens=8, stop="not there"),
        chat("tools", tools=[{"type": "function", "function": {"name": "f"}}]),
        '{"custom_id": "torn", "meth',
        chat("hot", temperature=300),
        chat("empty", messages=[{"role": "user", "content": " "}]),
        chat("too long", messages=[{"role": "user", "content": "long " * 3000}]),
        text("other endpoint"),
        chat("scored", logprobs=True, top_logprobs=2),
        chat("json", response_format={"type": "json_object"}, max_completion_tokens=6),
        chat("last", messages=[{"role": "system", "content": "Be brief."}, *HELLO], user="me"),
    ]
    return run(tmp_path_factory.mktemp("chats"), toy, lines)


def test_results_are_in_the_order_of_the_requests(chats):
    assert [result["custom_id"] for result in chats.results] == [
        "plain",
        "samples",
        "biased",
        "no limit",
        "stopped",
        "tools",
        "line 7 of requests.jsonl",
        "hot",
        "empty",
        "too long",
        "other endpoint",
        "scored",
        "json",
        "last",
    ]


def test_each_answer_is_what_its_line_asked_for(chats):
    found = {result["custom_id"]: result for result in chats.results if result["response"]}
    completions = {
        name: ChatCompletion.model_validate(result["response"]["body"], strict=True)
        for name, result in found.items()
    }
    assert completions.keys() == {
        *("plain", "samples", "biased", "no limit", "stopped", "scored", "json", "last")
    }
    for name, limit in {"plain": 6, "samples": 18, "no limit": 24, "json": 6}.items():
        usage = completions[name].usage
        assert 0 < usage.completion_tokens <= limit, name
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    choices = completions["samples"].choices
    assert [choice.index for choice in choices] == [0, 1, 2]
    assert len({choice.message.content for choice in choices}) > 1
    (biased,) = completions["biased"].choices
    assert len(set(biased.message.content)) == 1
    assert (len(biased.message.content), biased.finish_reason) == (6, "length")
    assert len(completions["stopped"].choices[0].message.content) == 8
    scored = completions["scored"].choices[0]
    tokens = scored.logprobs.content
    assert len(tokens) == completions["scored"].usage.completion_tokens
    assert scored.message.content.startswith(tokens[0].token)
    for token in tokens:  # it is greedy
        assert [len(token.top_logprobs), token.top_logprobs[0].token] == [2, token.token]
    assert completions["plain"].choices[0].message.content == scored.message.content
    assert completions["plain"].choices[0].logprobs is None
    assert completions["json"].choices[0].message.content.lstrip().startswith("{")
    assert {completion.model for completion in completions.values()} == {toy_name(chats)}
    assert len({completion.id for completion in completions.values()}) == len(completions)


def toy_name(chats: SimpleNamespace) -> str:
    return Path(chats.values["generator"]["model"]).name


def test_what_has_no_answer_says_why(chats):
    errors = {result["custom_id"]: result for result in chats.results if result["error"]}
    assert message(errors["tools"]) == (
        "invalid_request",
        "line 6 of requests.jsonl: body.tools is not supported; remove it",
    )
    assert "not valid JSON" in message(errors["line 7 of requests.jsonl"])[1]
    code, reason = message(errors["hot"])
    assert (code, "temperature" in reason) == ("invalid_request", True)
    assert message(errors["empty"])[0] == "empty_prompt"
    assert message(errors["too long"])[0] == "context_length_exceeded"
    assert message(errors["other endpoint"])[0] == "invalid_request"
    assert len(errors) == 6


def test_an_export_is_the_same_file(chats):
    file = io.BytesIO()
    model = GeneratorSettings(**chats.values["generator"])
    assert export_output(chats.store, ["all"], "openai_batch", file, model) == 16  # samples
    assert file.getvalue() == chats.bytes


def test_a_file_for_the_completions_endpoint(tmp_path, toy):
    batch = run(tmp_path, toy, [text("a"), text("b", prompt=["Once"], n=2), chat("c")])
    assert batch.values["prompt"] == {"column": "prompt", "chat_template": "raw"}
    first, second, third = batch.results
    for result, num_choices in ((first, 1), (second, 2)):
        completion = Completion.model_validate(result["response"]["body"], strict=True)
        assert len(completion.choices) == num_choices
    assert third["error"]["code"] == "invalid_request"


def test_init_makes_a_dataset_that_loads(tmp_path, toy, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))
    write(tmp_path / "requests.jsonl", [chat("a")])
    result = CliRunner().invoke(main, ["init", "--model", str(toy), "requests.jsonl"])
    assert result.exit_code == 0, result.output
    assert "prompt.messages_column: 'messages'" in result.output
