"""What comes with an answer: reasoning, log-probabilities, the best samples, typed columns."""

import json
import math
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulk_pipeline.engine.request import Completion, Request, Status
from bulk_pipeline.spec import ReasoningSpec, load_spec
from bulk_pipeline.stages.best_of import keep_best
from bulk_pipeline.stages.complete import complete_partition
from bulk_pipeline.stages.join import join_partition
from bulk_pipeline.stages.reasoning import is_reasoning_open, split_reasoning
from bulk_pipeline.stages.unfold import Unfolder
from bulk_pipeline.storage.schemas import COMPLETIONS, COMPLETIONS_SCHEMA, OUTPUT
from bulk_pipeline_tests.factories import (
    KEY,
    EchoGenerator,
    make_prompt,
    make_spec,
    make_store,
    read_rows,
    write_prompts,
    write_raw,
)
from bulk_pipeline_tests.stages.test_format import Stage

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "description": "Of the person"},
        "age": {"type": "integer"},
        "height": {"type": ["number", "null"]},
        "is_old": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        "kind": {"$ref": "#/$defs/kind"},
        "tags": {"type": "array"},
        "status": {"const": "fine"},
    },
    "required": ["name"],
    "$defs": {"kind": {"enum": ["a", "b", None]}},
}


class ScriptedGenerator(EchoGenerator):
    """Answers a request whose prompt ends with token i with the i-th completion."""

    def __init__(self, answers: list[dict[str, Any]]):
        super().__init__()
        self.answers = answers

    def _answer(self, request: Request) -> Completion:
        answer = self.answers[request.input_ids[-1]]
        return Completion(
            request.request_id,
            **{"status": Status.STOP, "token_ids": (7,), "prompt_tokens": 4} | answer,
        )


def output(
    tmp_path: Any,
    answers: list[dict[str, Any]],
    prompts: list[dict[str, Any]] | None = None,
    **changes: Any,
) -> list[dict[str, Any]]:
    """The output of a dataset whose model gives these answers."""
    spec = make_spec(tmp_path, **changes)
    store = make_store(spec)
    changed = prompts or [{}] * len(answers)
    rows = [make_prompt(i, **change) for i, change in enumerate(changed)]
    write_prompts(store, rows, inputs={"sampling": spec.sampling.model_dump(mode="json")})
    complete_partition(spec, store, KEY, lambda: ScriptedGenerator(answers), "model")
    join_partition(spec, store, KEY)
    return read_rows(store, OUTPUT)


class TestReasoning:
    MARKS = ReasoningSpec()

    @pytest.mark.parametrize(
        ("text", "is_open", "thoughts", "answer"),
        [
            ("<think>why</think>because", False, "why", "because"),
            ("\n<think>\nwhy\n</think>\n\nbecause\n", False, "why", "because\n"),
            ("<think>why", False, "why", ""),
            ("<think>", False, "", ""),
            ("why\n</think>\nbecause", True, "why", "because"),
            ("why", True, "why", ""),
            ("<think>why</think>because", True, "why", "because"),
            ("why</think>because", False, "why", "because"),
            ("</think>because", True, "", "because"),
            ("because", False, None, "because"),
            (" because <think> is a tag", False, None, " because <think> is a tag"),
            ("a <think>b</think> c", False, None, "a <think>b</think> c"),
            ("", False, None, ""),
            ("<think>a</think>b</think>c", False, "a", "b</think>c"),
        ],
    )
    def test_a_text_is_split(self, text, is_open, thoughts, answer):
        assert split_reasoning(text, self.MARKS, is_open) == (thoughts, answer)

    @given(st.lists(st.sampled_from(["<think>", "</think>", "a ", "\n", "b"])), st.booleans())
    def test_no_word_is_lost(self, parts, is_open):
        text = "".join(parts)
        thoughts, answer = split_reasoning(text, self.MARKS, is_open)
        words = text.replace("<think>", "").replace("</think>", "").split()
        found = ((thoughts or "") + answer).replace("<think>", "").replace("</think>", "").split()
        assert "".join(found) == "".join(words)

    @pytest.mark.parametrize(
        ("prompt", "prefix", "is_open"),
        [
            ("assistant\n<think>\n", "", True),
            ("assistant\n<think>\n\n</think>\n\n", "", False),
            ("what is <think>?\nassistant\n", "", False),
            ("assistant\n<think>\nOkay,", "Okay,", True),
            ("assistant\n<think>Okay,", "<think>Okay,", True),
            ("assistant\n<think></think>", "<think></think>", False),
            ("", "", False),
        ],
    )
    def test_a_prompt_may_open_it(self, prompt, prefix, is_open):
        assert is_reasoning_open(prompt, prefix, self.MARKS) == is_open

    def test_the_output_has_it_beside_the_answer(self, tmp_path):
        answers = [
            {"text": "<think>why</think>because"},
            {"text": "<think>why but", "status": Status.LENGTH},
            {"text": "long thoughts", "status": Status.LENGTH},
            {"text": "because"},
            {},
        ]
        prompts = [{}, {}, {"prompt": "assistant\n<think>\n"}, {}, {"status": "invalid"}]
        rows = output(tmp_path, answers, prompts, output={"reasoning": True})
        assert [(row["reasoning"], row["completion"], row["status"]) for row in rows] == [
            ("why", "because", "stop"),
            ("why but", "", "length"),
            ("long thoughts", "", "length"),
            (None, "because", "stop"),
            (None, None, "invalid"),
        ]
        stored = read_rows(make_store(make_spec(tmp_path)), COMPLETIONS)
        assert stored[0]["completion"] == "<think>why</think>because"  # all of it is kept

    def test_other_marks(self, tmp_path):
        marks = {"start": "[T]", "end": "[/T]"}
        (row,) = output(tmp_path, [{"text": "[T]a[/T]b"}], output={"reasoning": marks})
        assert (row["reasoning"], row["completion"]) == ("a", "b")

    def test_without_it_the_text_stays_whole(self, tmp_path):
        (row,) = output(tmp_path, [{"text": "<think>a</think>b"}])
        assert row["completion"] == "<think>a</think>b"
        assert "reasoning" not in row

    def test_marks_that_no_text_holds_are_refused_before_the_run(self, tmp_path, toy):
        marks = {"start": "<think>", "end": "<pad>"}
        message = r"^output.reasoning.end: <pad> is a special token of the model"
        with pytest.raises(ValueError, match=message):
            Stage(tmp_path, toy).run(["Hi"], output={"reasoning": marks})

    def test_a_structure_within_the_thoughts_is_refused_before_the_run(self, tmp_path, toy):
        template = tmp_path / "thinks.jinja"
        template.write_text("{{ messages[-1].content }}\n<think>\n")
        prompt = {"column": "text", "chat_template": str(template)}
        settings = {
            "output": {"reasoning": True},
            "sampling": {"structured_output": {"choice": ["a"]}},
        }
        stage = Stage(tmp_path, toy)
        with pytest.raises(ValueError, match=r"opens <think>.*set prompt.assistant_prefix to '</"):
            stage.run(["Hi"], prompt, **settings)
        (row,) = stage.run(["Hi"], prompt | {"assistant_prefix": "</think>"}, **settings)
        assert row["status"] == "ready"

    def test_prompts_that_were_made_anew_are_refused(self, tmp_path):
        output(tmp_path, [{"text": "a"}])
        spec = make_spec(tmp_path, output={"reasoning": {}})
        store = make_store(spec)
        write_prompts(store, [make_prompt(0)])
        with pytest.raises(ValueError, match=r"was made from other prompts.*materialise comp"):
            join_partition(spec, store, KEY)


class TestLogprobs:
    ANSWER: dict[str, Any] = {  # noqa: RUF012
        "text": "a b",
        "token_ids": (5, 6),
        "logprobs": (-0.5, -1.5),
        "top_logprobs": (((5, -0.5), (9, -2.0)), ((3, -0.25), (6, -1.5))),
    }

    def test_they_are_in_both_tables(self, tmp_path):
        (row,) = output(tmp_path, [self.ANSWER], sampling={"logprobs": 2})
        (stored,) = read_rows(make_store(make_spec(tmp_path)), COMPLETIONS)
        for each in (row, stored):
            assert each["logprobs"] == [-0.5, -1.5]
            assert each["cumulative_logprob"] == -2.0
            assert each["top_logprobs"] == [
                [{"token_id": 5, "logprob": -0.5}, {"token_id": 9, "logprob": -2.0}],
                [{"token_id": 3, "logprob": -0.25}, {"token_id": 6, "logprob": -1.5}],
            ]

    def test_rows_that_ask_for_them_have_them(self, tmp_path):
        sampling = {"from_columns": {"logprobs": "own"}}
        rows = output(tmp_path, [self.ANSWER, {"text": "c"}], sampling=sampling)
        assert [row["cumulative_logprob"] for row in rows] == [-2.0, None]

    def test_without_them_the_output_has_no_such_columns(self, tmp_path):
        (row,) = output(tmp_path, [{"text": "a"}])
        assert not {"logprobs", "cumulative_logprob", "prompt_logprobs", "perplexity"} & row.keys()

    def test_a_scored_prompt_has_a_perplexity(self, tmp_path):
        answers = [
            {"prompt_logprobs": (-1.0, -3.0), "token_ids": (), "status": Status.LENGTH},
            {"prompt_logprobs": (), "token_ids": (), "status": Status.LENGTH},
            {"prompt_logprobs": (-1e9,), "token_ids": (), "status": Status.LENGTH},
            {"status": Status.ERROR, "error": "broken"},
        ]
        sampling = {"prompt_logprobs": True, "max_new_tokens": 0}
        rows = output(tmp_path, answers, sampling=sampling)
        assert rows[0]["prompt_logprobs"] == [-1.0, -3.0]
        assert rows[0]["cumulative_prompt_logprob"] == -4.0
        assert rows[0]["perplexity"] == pytest.approx(math.e**2)
        assert [row["perplexity"] for row in rows[1:]] == [None, math.inf, None]

    def test_a_column_of_the_source_that_has_the_name_is_refused(self, tmp_path):
        output(tmp_path, [self.ANSWER])
        spec = make_spec(tmp_path, output={"reasoning": True})
        store = make_store(spec)
        row = {"reasoning": "own", "row_id": "row-0", "row_index": 0}
        write_raw(store, [row], pa.schema([("reasoning", pa.string())]))
        with pytest.raises(ValueError, match=r"column reasoning has .*materialise raw_dataset"):
            join_partition(spec, store, KEY)


class TestBestOf:
    def test_the_best_samples_are_kept_in_their_order(self, tmp_path):
        means = [-3.0, -1.0, -2.0, -0.5]

        class Sampled(ScriptedGenerator):
            def _answer(self, request: Request) -> Completion:
                mean = means[[r.sampling.seed for r in self.requests].index(request.sampling.seed)]
                tokens = 1 + len(self.requests) % 3
                return Completion(
                    request.request_id,
                    Status.STOP,
                    text=str(mean),
                    token_ids=(7,) * tokens,
                    logprobs=(mean,) * tokens,
                )

        spec = make_spec(tmp_path, sampling={"n": 2, "best_of": 4})
        store = make_store(spec)
        sampling = {"temperature": 1.0, "logprobs": 0}
        prompts = [
            make_prompt(0, num_samples=4, sampling=sampling),
            make_prompt(1, num_samples=4, status="invalid", error="bad"),
        ]
        write_prompts(store, prompts, inputs={"sampling": spec.sampling.model_dump(mode="json")})
        complete_partition(spec, store, KEY, lambda: Sampled([]), "model")
        assert join_partition(spec, store, KEY).rows == 4
        rows = read_rows(store, OUTPUT)
        found = [(row["row_index"], row["sample_index"], row["completion"]) for row in rows]
        assert found == [(0, 1, "-1.0"), (0, 3, "-0.5"), (1, 0, None), (1, 1, None)]
        assert rows[0]["cumulative_logprob"] == -1.0 * rows[0]["completion_tokens"]
        assert "logprobs" not in rows[0]
        assert len(read_rows(store, COMPLETIONS)) == 8

    @given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3))), st.integers(1, 9))
    def test_wherever_the_table_is_cut(self, rows_, size):
        totals = [None, -1.0, -2.0, -2.5]
        rows = [
            {
                "row_index": index,
                "sample_index": sample,
                "cumulative_logprob": totals[(index + sample * first) % 4],
                "completion_tokens": 1,
            }
            for index, (samples, first) in enumerate(rows_)
            for sample in range(samples)
        ]
        schema = pa.schema(
            [COMPLETIONS_SCHEMA.field(name) for name in (rows[0] if rows else ["row_index"])]
        )
        batches = [
            pa.RecordBatch.from_pylist(rows[start : start + size], schema)
            for start in range(0, len(rows), size)
        ]
        found = [row for batch in keep_best(iter(batches), 2) for row in batch.to_pylist()]
        expected = []
        for index in range(len(rows_)):
            own = [row for row in rows if row["row_index"] == index]
            ranked = sorted(own, key=lambda row: -(row["cumulative_logprob"] or -math.inf))
            expected += sorted(ranked[:2], key=lambda row: row["sample_index"])
        assert found == expected


class TestUnfold:
    def test_properties_are_columns_of_their_types(self, tmp_path):
        answer = {
            "name": "Ann",
            "age": 30,
            "height": 1,
            "is_old": False,
            "kind": "b",
            "tags": ["x", {"é": None}],
            "status": "fine",
        }
        texts = [
            json.dumps(answer),
            '{"name": "Bob"}',
            '{"name": "Cut o',
            '{"name": 5}',
            json.dumps(answer | {"age": 2**63}),
            '{"name": "half \\ud800"}',
            '{"name": "no", "height": NaN}',
            "[1]",
            "",
        ]
        answers: list[dict[str, Any]] = [{"text": text} for text in texts]
        answers[2]["status"] = Status.LENGTH
        rows = output(
            tmp_path,
            answers,
            sampling={"structured_output": {"json_schema": SCHEMA}},
            output={"unfold": True},
        )
        assert [row["parsed"] for row in rows] == [
            True, True, False, False, False, True, False, False, False,
        ]  # fmt: skip
        names = ["name", "age", "height", "is_old", "kind", "tags", "answer_status"]
        values = ["Ann", 30, 1.0, False, "b", '["x", {"é": null}]', "fine"]
        assert [rows[0][name] for name in names] == values
        assert [rows[1][name] for name in names] == ["Bob", *[None] * 6]
        assert (rows[2]["name"], rows[2]["completion"]) == (None, '{"name": "Cut o')
        assert (rows[2]["status"], rows[0]["status"]) == ("length", "stop")
        assert rows[5]["name"] == "half \\ud800"
        schema = make_store(make_spec(tmp_path)).partition(OUTPUT, KEY).schema()
        types = [schema.field(name).type for name in names]
        assert types[:4] == [pa.string(), pa.int64(), pa.float64(), pa.bool_()]
        assert types[4:] == [pa.string()] * 3
        assert schema.field("name").metadata[b"description"] == b"Of the person"

    def test_the_answer_behind_the_reasoning_is_unfolded(self, tmp_path):
        (row,) = output(
            tmp_path,
            [{"text": '<think>hm</think>{"name": "Ann"}'}],
            sampling={"structured_output": {"json_schema": SCHEMA}},
            output={"unfold": True, "reasoning": True},
        )
        assert (row["reasoning"], row["name"], row["parsed"]) == ("hm", "Ann", True)

    def test_an_answer_that_is_no_object_has_no_properties(self):
        columns = Unfolder({"properties": {"a": {"type": "string"}}}, []).columns(["[1]"])
        assert [column.to_pylist() for column in columns] == [[True], [None]]

    def test_it_needs_a_schema(self, tmp_path):
        with pytest.raises(ValueError, match=r"^output.unfold needs sampling.structured_output.js"):
            make_spec(tmp_path, output={"unfold": True})

    def test_a_name_that_is_taken_gets_a_prefix(self):
        unfolder = Unfolder({"properties": {"a": {"type": "string"}}}, ["a", "answer_a"])
        assert [field.name for field in unfolder.fields] == ["parsed", "answer_answer_a"]

    def test_nothing_is_fetched_that_a_schema_refers_to(self):
        schema = {"properties": {"a": {"$ref": "http://127.0.0.1:9/x.json"}}}
        parsed, values = Unfolder(schema, []).columns(['{"a": "x"}', "{}"])
        assert parsed.to_pylist() == [False, True]
        assert values.to_pylist() == [None, None]

    @given(st.text(alphabet='{}[]":, \\u1ntrue0.e-', max_size=30))
    def test_any_text_parses_or_does_not(self, text):
        columns = Unfolder(SCHEMA, []).columns([text, None])
        assert all(len(column) == 2 for column in columns)
        assert not columns[0][1].as_py()


def test_an_older_table_of_completions_is_joined(tmp_path):
    spec = make_spec(tmp_path, output={"reasoning": True})
    store = make_store(spec)
    write_prompts(store, [make_prompt(0)])
    complete_partition(spec, store, KEY, lambda: ScriptedGenerator([{"text": "a"}]), "model")
    earlier = pa.schema([column for column in COMPLETIONS_SCHEMA if "logprob" not in column.name])
    partition = store.partition(COMPLETIONS, KEY)
    rows = [row for batch in partition.read(earlier.names) for row in batch.to_pylist()]
    with partition.writer() as writer:
        with writer.new_part(earlier) as part:
            part.write(pa.Table.from_pylist(rows, schema=earlier))
        writer.commit([part.part], complete=True)
    join_partition(spec, store, KEY)
    assert read_rows(store, OUTPUT)[0]["completion"] == "a"
    # A new prompt runs; the stored answer goes on beside it.
    write_prompts(store, [make_prompt(0), make_prompt(1)])
    generator = ScriptedGenerator([{}, {"text": "b"}])
    report = complete_partition(spec, store, KEY, lambda: generator, "model")
    assert report.metadata["requests_run"] == 1
    assert [row["completion"] for row in read_rows(store, COMPLETIONS)] == ["a", "b"]


def test_reasoning_may_be_switched_by_a_boolean():
    values = {
        "name": "data",
        "source": {"path": "rows.jsonl"},
        "prompt": {"column": "text"},
        "generator": {"model": "owner/name"},
    }
    assert load_spec(values | {"output": {"reasoning": False}}).output.reasoning is None
    with pytest.raises(ValueError, match=r"output.reasoning.start: .*at least 1 character"):
        load_spec(values | {"output": {"reasoning": {"start": ""}}})
