"""Rows with several turns: how they are rendered, asked one after another, stored and resumed."""

import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from bulk_pipeline.engine.request import Completion, Request, Status
from bulk_pipeline.engine.tokenizer import load_tokenizer
from bulk_pipeline.spec import PromptSpec, load_spec
from bulk_pipeline.stages.chat_template import chat_template_text
from bulk_pipeline.stages.complete import complete_partition
from bulk_pipeline.stages.format import format_partition
from bulk_pipeline.stages.join import join_partition
from bulk_pipeline.stages.journal import JOURNAL
from bulk_pipeline.stages.stage_report import StageReport
from bulk_pipeline.storage.schemas import COMPLETIONS, OUTPUT, PROMPTS
from bulk_pipeline.storage.store import Store
from bulk_pipeline_tests.factories import (
    KEY,
    EchoGenerator,
    make_prompt,
    make_spec,
    make_store,
    read_rows,
    stable,
    write_prompts,
    write_raw,
)

TEXTS = pa.schema([("turns", pa.list_(pa.string()))])
CHAT = pa.schema(
    [("turns", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])))]
)


# --- prompts --------------------------------------------------------------------------------------


def format_turns(
    root: Path, model: Path, turns: list[Any], schema: pa.Schema = TEXTS, **changes: Any
) -> list[dict[str, Any]]:
    """The prompts of rows with these turns; `changes` are of the section prompt, or others."""
    prompt = {"turns_column": "turns"} | changes.pop("prompt", {})
    spec = load_spec(
        {
            "name": "data",
            "source": {"path": "unused"},
            "prompt": prompt,
            "sampling": {"max_new_tokens": 8},
            "generator": {"model": str(model)},
            "output": {"root": str(root / "tables")},
        }
        | changes
    )
    store = Store(spec.output.root, spec.name)
    rows = [
        {"turns": each, "row_id": f"row-{i}", "row_index": i, "row_error": None}
        for i, each in enumerate(turns)
    ]
    write_raw(store, rows, schema)
    assert spec.generator is not None
    format_partition(spec, store, KEY, spec.generator)
    return read_rows(store, PROMPTS)


def whole_ids(row: dict[str, Any], answers: list[list[int]]) -> list[int]:
    """The ids of the last turn's prompt, after these answers."""
    ids = list(row["input_ids"])
    for answer, turn in zip(answers, row["later_turns"], strict=True):
        ids += [*answer, *turn["input_ids"]]
    return ids


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=2, max_size=4),
    st.sampled_from(["Yes.", "two\nlines", "é ", "1"]),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_last_prompt_is_what_the_template_makes_of_the_whole_chat(tmp_path, toy, turns, answer):
    (row,) = format_turns(tmp_path, toy, [turns])
    if not all(turn.strip() for turn in turns):
        assert (row["status"], row["num_turns"]) == ("empty", len(turns))
        return
    tokenizer = AutoTokenizer.from_pretrained(toy)
    chat: list[dict[str, str]] = []
    for turn in turns[:-1]:
        chat += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
    chat.append({"role": "user", "content": turns[-1]})
    text = row["prompt"] + "".join(answer + turn["text"] for turn in row["later_turns"])
    assert text == tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(answer, add_special_tokens=False)
    expected = tokenizer.encode(text, add_special_tokens=False)
    assert whole_ids(row, [ids] * (len(turns) - 1)) == expected


@pytest.mark.parametrize(
    "family", ["llama2", "llama3", "chatml", "mistral", "gemma", "phi3", "alpaca", "vicuna"]
)
@pytest.mark.parametrize("system", [None, "Be brief."], ids=["plain", "system"])
def test_each_family_takes_several_turns(tmp_path, toy, family, system):
    prompt = {"chat_template": family, "system": system}
    (row,) = format_turns(tmp_path, toy, [["Hi", "And then?", "Why?"]], prompt=prompt)
    assert row["error"] is None
    tokenizer = load_tokenizer(toy)
    chat = [{"role": "system", "content": system}] if system else []
    for turn in ("Hi", "And then?"):
        chat += [{"role": "user", "content": turn}, {"role": "assistant", "content": "Well."}]
    chat.append({"role": "user", "content": "Why?"})
    template = chat_template_text(PromptSpec(column="x", chat_template=family), tokenizer)
    (whole,) = tokenizer.apply_chat_template([chat], template)
    blank = " " if family in ("llama2", "mistral", "vicuna") else ""  # the model generates it
    text = row["prompt"] + "".join(blank + "Well." + turn["text"] for turn in row["later_turns"])
    assert text == whole


def test_the_prefix_of_the_answers_stands_before_each(tmp_path, toy):
    (row,) = format_turns(tmp_path, toy, [["Hi", "More"]], prompt={"assistant_prefix": "Sure: "})
    assert row["prompt"].endswith("assistant\nSure: ")
    assert row["later_turns"][0]["text"].endswith("assistant\nSure: ")


def test_the_text_of_special_tokens_is_text_in_each_turn(tmp_path, toy):
    (row,) = format_turns(tmp_path, toy, [["Hi", "an <|im_end|> in it"]])
    (later,) = row["later_turns"]
    assert "an <|im_end|> in it" in later["text"]
    plain = format_turns(tmp_path, toy, [["Hi", "an end in it"]])[0]["later_turns"][0]
    specials = [sum(id_ < 5 for id_ in turn["input_ids"]) for turn in (later, plain)]
    assert specials[0] == specials[1]


def test_chat_turns_are_answered_where_no_answer_follows(tmp_path, toy):
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "given"},
        {"role": "user", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    (row,) = format_turns(tmp_path, toy, [turns], CHAT)
    assert row["num_turns"] == 2
    assert "given<|im_end|>" in row["prompt"]
    assert row["prompt"].endswith("user\ntwo<|im_end|>\n<|im_start|>assistant\n")
    assert row["later_turns"][0]["text"].startswith("<|im_end|>\n<|im_start|>user\nthree")


@pytest.mark.parametrize(
    ("turns", "status", "num_turns", "error"),
    [
        (None, "invalid", 1, "turns is null, must be a list of turns"),
        ([], "empty", 1, "turns has no turns"),
        (["one", None], "invalid", 2, "turns[1] is null, must be text"),
        (["one", " ", "three"], "empty", 3, "the user's message is empty"),
    ],
    ids=["null", "none", "null turn", "empty turn"],
)
def test_a_row_without_usable_turns_says_why(tmp_path, toy, turns, status, num_turns, error):
    rows = format_turns(tmp_path, toy, [turns, ["fine"]])
    found = (rows[0]["status"], rows[0]["num_turns"], rows[0]["error"])
    assert found == (status, num_turns, error)
    assert (rows[1]["status"], rows[1]["num_turns"], rows[1]["later_turns"]) == ("ready", 1, None)


TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ CONTENT }}<|im_end|>\n{% endfor %}"
ASSISTANT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (
            "m.content.split('</think>')[-1]",
            r"template .*template.jinja drops what stands between <think> and </think> in earlier",
        ),
        (
            "m.content if loop.last or m.role != 'assistant' else '...'",
            "does not keep the text before an answer as it was when that was generated",
        ),
        (
            "m.content ~ (' (the last one)' if loop.last else '')",
            "does not keep the text before an answer as it was when that was generated",
        ),
        ("raise_exception('one turn only') if loop.index > 1 else m.content", "one turn only"),
    ],
    ids=["drops thoughts", "drops answers", "changes questions", "refuses"],
)
def test_a_template_that_does_not_keep_answers_is_refused_by_name(tmp_path, toy, content, error):
    (tmp_path / "template.jinja").write_text(TEMPLATE.replace("CONTENT", content) + ASSISTANT)
    prompt = {"chat_template": str(tmp_path / "template.jinja")}
    with pytest.raises(ValueError, match=rf"^prompt\.turns_column: .*{error}.*set prompt.chat_"):
        format_turns(tmp_path, toy, [["Hi", "More"]], prompt=prompt)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (
            {"prompt": {"turns_column": "t", "column": "c"}},
            "set exactly one of column, messages_column, turns_column and template",
        ),
        (
            {"prompt": {"turns_column": "t", "too_long": "truncate_left"}},
            "too_long must be error_row or fail with turns_column, got truncate_left",
        ),
        (
            {"prompt": {"turns_column": "t"}, "sampling": {"prompt_logprobs": True}},
            "sampling.prompt_logprobs scores prompts, and those of later turns hold answers",
        ),
    ],
    ids=["two ways", "truncation", "scores"],
)
def test_settings_that_do_not_go_with_turns_are_refused(tmp_path, changes, error):
    with pytest.raises(ValueError, match=error):
        make_spec(tmp_path, **changes)


# --- completions ----------------------------------------------------------------------------------


class ChatGenerator(EchoGenerator):
    """Answers with two tokens made of its prompt, and 99, which ends it; one request at a time.

    `ends` are the statuses of requests whose prompt ends so.
    """

    def __init__(self, ends: dict[int, Status] | None = None, **fails: Any):
        super().__init__(**fails)
        self.ends = ends or {}

    def run(
        self,
        requests: Iterable[Request],
        on_step: Callable[[], None] | None = None,
        go_on: Callable[[Completion], Iterable[Request]] | None = None,
    ) -> Iterator[Completion]:
        for request in requests:
            waiting = [request]
            while waiting:
                self.requests.append(waiting[0])
                if self.requests[-1].input_ids[-1] in self.fails_at:
                    raise RuntimeError("the generator broke")
                completion = self._answer(waiting.pop(0))
                waiting[:0] = list(go_on(completion)) if go_on else []
                yield completion

    def answer_ids(self, token_ids, text, stop_token_ids) -> list[int]:
        return list(token_ids[:-1] if token_ids[-1] in stop_token_ids else token_ids)

    def _answer(self, request: Request) -> Completion:
        ids, seed = request.input_ids, request.sampling.seed
        status = self.ends.get(ids[-1], Status.STOP)
        length = len(ids)
        if status not in (Status.STOP, Status.LENGTH):
            return Completion(request.request_id, status, prompt_tokens=length, error="broken")
        answer = (200 + sum(ids) % 1000, 200 + seed % 1000)
        return Completion(
            request.request_id,
            status,
            text=f"{answer[0]} {answer[1]}",
            token_ids=(*answer, 99) if status == Status.STOP else answer,
            prompt_tokens=length,
        )


def make_turns(index: int, *later: int, **changes: Any) -> dict[str, Any]:
    """A row whose later turns are these tokens."""
    turns = [{"text": f"turn {token}", "input_ids": [token]} for token in later]
    changes["sampling"] = {"stop_token_ids": [99]} | changes.pop("sampling", {})
    return make_prompt(index, num_turns=1 + len(later), later_turns=turns, **changes)


@pytest.fixture
def spec(tmp_path):
    return make_spec(tmp_path)


@pytest.fixture
def store(spec):
    return make_store(spec)


def complete(spec, store, generator=None, key=KEY, **kwargs) -> StageReport:
    generator = ChatGenerator() if generator is None else generator
    return complete_partition(spec, store, key, lambda: generator, "model", **kwargs)


def rows_of(store, key: str = KEY) -> list[dict[str, Any]]:
    """Completions, without what differs between two equal runs."""
    return stable(read_rows(store, COMPLETIONS, key))


def test_each_turn_is_asked_with_the_answers_before_it(spec, store):
    write_prompts(store, [make_turns(0, 50, 60), make_turns(1, 51), make_prompt(2)])
    generator = ChatGenerator()
    report = complete(spec, store, generator)
    rows = rows_of(store)
    assert [(row["row_index"], row["turn"]) for row in rows] == [
        (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0),
    ]  # fmt: skip
    first, second, third = (list(request.input_ids) for request in generator.requests[:3])
    assert second == [*first, *rows[0]["completion_ids"][:-1], 50]
    assert third == [*second, *rows[1]["completion_ids"][:-1], 60]
    assert [row["prompt_tokens"] for row in rows] == [4, 7, 10, 4, 7, 4]
    assert (report.rows, report.metadata["requests_run"]) == (6, 6)
    assert len({row["request_key"] for row in rows}) == 6
    assert join_partition(spec, store, KEY).rows == 6
    assert [row["turn"] for row in read_rows(store, OUTPUT)] == [0, 1, 2, 0, 1, 0]


def test_an_answer_that_was_cut_off_is_gone_on_from_whole(spec, store):
    write_prompts(store, [make_turns(0, 50)])
    generator = ChatGenerator({0: Status.LENGTH})
    complete(spec, store, generator)
    answer = rows_of(store)[0]["completion_ids"]
    assert list(generator.requests[1].input_ids) == [1, 2, 3, 0, *answer, 50]


def test_each_sample_is_a_conversation_of_its_own(spec, store):
    sampled = {"temperature": 1.0}
    write_prompts(store, [make_turns(0, 50, num_samples=3, sampling=sampled)])
    generator = ChatGenerator()
    complete(spec, store, generator)
    rows = rows_of(store)
    assert [(row["sample_index"], row["turn"]) for row in rows] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1),
    ]  # fmt: skip
    assert len({row["seed"] for row in rows}) == 6
    for sample in range(3):
        answer = rows[2 * sample]["completion_ids"][:-1]
        assert list(generator.requests[2 * sample + 1].input_ids) == [1, 2, 3, 0, *answer, 50]


def test_rows_that_begin_alike_share_the_turns_that_are_alike(spec, store):
    same = {"input_ids": [7, 7]}
    prompts = [make_turns(0, 50, 60, **same), make_turns(1, 50, 61, **same), make_turns(2, 50)]
    prompts += [make_prompt(3, sampling={"stop_token_ids": [99]}, **same)]
    write_prompts(store, prompts)
    generator = ChatGenerator()
    report = complete(spec, store, generator)
    assert len(generator.requests) == 6  # two turns once, two ends, and the other row's two
    assert report.metadata["requests_shared"] == 3
    rows = rows_of(store)
    ends = [list(r.input_ids) for r in generator.requests if r.input_ids[-1] in (60, 61)]
    assert ends[0][:-1] == ends[1][:-1]
    assert rows[0]["completion"] == rows[3]["completion"] == rows[8]["completion"]
    assert complete(spec, store).metadata["requests_run"] == 0


def test_limits_of_equal_conversations_do_not_mix_their_answers(tmp_path, store):
    spec = make_spec(tmp_path, output={"flush_rows": 1})

    class Uneven(ChatGenerator):  # as floating-point arithmetic is in other batches
        def _answer(self, request: Request) -> Completion:
            ids = (100 + len(self.requests), 99)
            return Completion(request.request_id, Status.STOP, text=str(ids[0]), token_ids=ids)

    prompts = [
        make_turns(i, 50, input_ids=[7, 7], sampling={"max_new_tokens": limit})
        for i, limit in enumerate([8, 9, 8, 9])
    ]
    write_prompts(store, prompts)
    generator = Uneven()
    complete(spec, store, generator)
    rows = rows_of(store)
    assert [row["completion"] for row in rows] == ["101", "102", "103", "104"] * 2
    later = [
        list(request.input_ids) for request in generator.requests if request.input_ids[-1] == 50
    ]
    assert later == [[7, 7, 101, 50], [7, 7, 103, 50]]
    assert complete(spec, store).metadata["requests_run"] == 0


@pytest.mark.parametrize("status", [Status.ERROR, Status.TOO_LONG, Status.INVALID])
def test_turns_after_one_without_an_answer_say_so(spec, store, status):
    write_prompts(store, [make_turns(0, 50, 60, 70), make_turns(1, 51)])
    report = complete(spec, store, ChatGenerator({50: status}))
    rows = rows_of(store)
    assert [row["status"] for row in rows] == ["stop", status, status, status, "stop", "stop"]
    assert rows[1]["error"] == "broken"
    assert {row["error"] for row in rows[2:4]} == {
        f"turn 1 ended as {status}, so that this one was not asked"
    }
    assert [row["turn"] for row in rows[:4]] == [0, 1, 2, 3]
    assert [row["completion"] for row in rows[2:4]] == [None, None]
    assert [row["request_key"] for row in rows[2:4]] == [None, None]
    assert report.metadata["requests_run"] == 4
    repaired = complete(spec, store)  # an error is unfinished work
    assert repaired.metadata["requests_run"] == 3
    assert {row["status"] for row in rows_of(store)} == {"stop"}


def test_turns_of_a_row_that_cannot_run_are_accounted_for(spec, store):
    bad = make_turns(0, 50, status="too_long", error="9 tokens over", num_samples=2)
    write_prompts(store, [bad])
    complete_partition(spec, store, KEY, lambda: pytest.fail("the model was loaded"), "model")
    rows = rows_of(store)
    assert [(row["sample_index"], row["turn"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {(row["status"], row["error"]) for row in rows} == {("too_long", "9 tokens over")}


def test_a_changed_question_is_asked_after_the_stored_answers(spec, store):
    write_prompts(store, [make_turns(i, 50, 60) for i in range(5)])
    complete(spec, store)
    before = rows_of(store)
    write_prompts(store, [make_turns(i, 50, 61) for i in range(5)])
    generator = ChatGenerator()
    report = complete(spec, store, generator)
    assert report.metadata["requests_run_prompt_changed"] == 5
    assert [request.input_ids[-1] for request in generator.requests] == [61] * 5
    asked = [list(request.input_ids) for request in generator.requests]
    rows = rows_of(store)
    for i in range(5):
        answers = [row["completion_ids"][:-1] for row in rows[3 * i : 3 * i + 2]]
        assert asked[i] == [1, 2, 3, i, *answers[0], 50, *answers[1], 61]
        assert rows[3 * i : 3 * i + 2] == before[3 * i : 3 * i + 2]


def test_what_follows_an_answer_that_is_made_anew_is_made_anew(spec, store):
    write_prompts(store, [make_turns(0, 50), make_turns(1, 50)])
    complete(spec, store, ChatGenerator({1: Status.LENGTH}))

    class Other(ChatGenerator):
        def _answer(self, request: Request) -> Completion:
            completion = super()._answer(request)
            ids = (7, *completion.token_ids)
            return Completion(request.request_id, Status.STOP, text="other", token_ids=ids)

    report = complete(spec, store, Other(), redo=["length"])
    assert report.metadata["requests_run_redo"] == 1
    assert report.metadata["requests_run_turn_before_changed"] == 1
    assert [row["completion"] == "other" for row in rows_of(store)] == [False, False, True, True]


def test_turns_after_one_that_another_row_makes_anew_are_asked_in_their_order(spec, store):
    """What was stored for them follows the new answer too, where that is the old one."""
    prompts = [
        make_turns(i, *turns, input_ids=[7, 7]) for i, turns in enumerate([[50], [50, 60, 70]])
    ]
    write_prompts(store, prompts)
    complete(spec, store, ChatGenerator({50: Status.LENGTH}))
    before = rows_of(store)
    generator = ChatGenerator({50: Status.LENGTH})
    complete(spec, store, generator, redo=("length",))
    assert [request.input_ids[-1] for request in generator.requests] == [50, 60, 70]
    assert rows_of(store) == before


def test_a_turn_that_is_too_long_is_not_tried_again_until_there_is_room(spec, store):
    def write(limit: int) -> None:
        write_prompts(store, [make_turns(0, 50, 60)])
        with store.partition(PROMPTS, KEY).writer() as writer:
            meta = writer.manifest.meta | {"max_seq_len": limit}
            writer.commit(writer.manifest.parts, complete=True, meta=meta)

    write(12)
    complete(spec, store, ChatGenerator({50: Status.TOO_LONG}))
    assert [row["status"] for row in rows_of(store)] == ["stop", "too_long", "too_long"]
    write(12)
    complete_partition(spec, store, KEY, lambda: pytest.fail("the model was loaded"), "model")
    write(100)
    assert complete(spec, store).metadata["requests_run"] == 2
    assert {row["status"] for row in rows_of(store)} == {"stop"}


@pytest.mark.parametrize("status", [Status.STOP, Status.ERROR])
def test_the_journal_on_object_storage_is_put_once_for_many_turns(status):
    """Each put takes as long as several steps of the model, which waits for it."""
    spec = make_spec(Path(), output={"root": f"memory://{uuid.uuid4().hex}"})
    store = make_store(spec)
    journals: list[str] = []

    class Looking(ChatGenerator):
        def _answer(self, request: Request) -> Completion:
            (path,) = store.fs.glob(f"{store.partition(COMPLETIONS, KEY).path}/*.{JOURNAL}")
            journals.append(store.fs.cat_file(path).decode())
            return super()._answer(request)

    prompts = [make_turns(i, 50, 60, input_ids=[7, i]) for i in range(3)]
    write_prompts(store, prompts)
    complete(spec, store, Looking({50: status}))
    assert len(set(journals)) == 1
    asked = [row["request_key"] for row in rows_of(store) if row["request_key"]]
    assert len(asked) == len(journals)
    assert all(f"+{key}\n" in journals[0] for key in asked)
    assert not store.fs.glob(f"{store.partition(COMPLETIONS, KEY).path}/*.{JOURNAL}")


def test_conversations_of_another_partition_are_copied(spec, store):
    write_prompts(store, [make_turns(0, 50), make_turns(1, 51)])
    complete(spec, store)
    write_prompts(store, [make_turns(0, 50, 60)], "other")
    generator = ChatGenerator()
    report = complete(spec, store, generator, key="other")
    assert report.metadata["requests_copied"] == 2
    assert [request.input_ids[-1] for request in generator.requests] == [60]
    assert [row["turn"] for row in rows_of(store, "other")] == [0, 1, 2]


@given(st.data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_runs_that_break_anywhere_end_as_one_that_does_not(tmp_path_factory, data):
    lengths = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=5))
    samples = data.draw(st.integers(1, 2))
    kinds = st.integers(0, 2)  # few, so that rows share their first turns
    prompts = [
        make_turns(
            i,
            *(50 + turn for turn in range(length)),
            input_ids=[1, data.draw(kinds)],
            num_samples=samples,
            sampling={"temperature": data.draw(st.sampled_from([0.0, 1.0]))},
        )
        for i, length in enumerate(lengths)
    ]
    tables = []
    for breaks in (False, True):
        spec = make_spec(tmp_path_factory.mktemp("run"), output={"flush_rows": 1})
        store = make_store(spec)
        write_prompts(store, prompts)
        for _ in range(data.draw(st.integers(1, 3)) if breaks else 0):
            broken = ChatGenerator(fails_at=[data.draw(st.sampled_from([0, 1, 2, 50, 51, 52]))])
            with suppress(RuntimeError):  # where it gets so far
                complete(spec, store, broken)
        complete(spec, store)
        assert complete(spec, store, EchoGenerator()).metadata["requests_run"] == 0
        tables.append(rows_of(store))
    assert tables[0] == tables[1]
    assert len(tables[0]) == samples * sum(1 + length for length in lengths)


def test_the_best_of_some_samples_are_kept_with_all_their_turns(tmp_path):
    means = {0: -3.0, 1: -1.0, 2: -2.0}

    class Sampled(ChatGenerator):
        def _answer(self, request: Request) -> Completion:
            completion = super()._answer(request)
            sample = (len(self.requests) - 1) // 2
            logprobs = (means[sample],) * len(completion.token_ids)
            return Completion(
                request.request_id,
                Status.STOP,
                text="x",
                token_ids=completion.token_ids,
                logprobs=logprobs,
            )

    spec = make_spec(tmp_path, sampling={"n": 2, "best_of": 3})
    store = make_store(spec)
    sampling = {"temperature": 1.0, "logprobs": 0}
    prompts = [make_turns(0, 50, num_samples=3, sampling=sampling)]
    write_prompts(store, prompts, inputs={"sampling": spec.sampling.model_dump(mode="json")})
    complete(spec, store, Sampled())
    assert join_partition(spec, store, KEY).rows == 4
    found = [(row["sample_index"], row["turn"]) for row in read_rows(store, OUTPUT)]
    assert found == [(1, 0), (1, 1), (2, 0), (2, 1)]
