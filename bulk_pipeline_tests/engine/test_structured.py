import json
import os
import re
import threading
from dataclasses import replace

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from bulk_pipeline.engine import structured
from bulk_pipeline.engine.request import LoopGuard, Request, Status, StructuredOutput
from bulk_pipeline.engine.structured import Grammars, RowGrammar, masked
from bulk_pipeline_tests.engine.test_generator import (
    make_generator,
    make_ids,
    make_params,
    run_one,
)
from bulk_pipeline_tests.toy import EOS_ID, TURN_END_ID, VOCAB_SIZE

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", "dé"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
LARK = 'start: greeting ", " NAME "!"\ngreeting: "Hello" | "Good day"\nNAME: /[A-Z][a-z]{2,7}/'
GBNF = 'root ::= ("yes" | "no") ("!" | "?")'
GRAMMARS = {
    "schema": StructuredOutput("json_schema", json.dumps(SCHEMA)),
    "regex": StructuredOutput("regex", r"[0-9]{4}-[0-9]{2}-[0-9]{2}"),
    "choice": StructuredOutput("choice", json.dumps(["spring", "summer", "größer", "win ter"])),
    "lark": StructuredOutput("grammar", LARK),
    "gbnf": StructuredOutput("grammar", GBNF),
}


def check(name: str, text: str) -> None:
    """Fail where a finished text does not follow the grammar."""
    if name == "schema":
        jsonschema.validate(json.loads(text), SCHEMA)
    elif name == "choice":
        assert text in json.loads(GRAMMARS[name].value)
    else:
        patterns = {
            "regex": GRAMMARS["regex"].value,
            "lark": r"(Hello|Good day), [A-Z][a-z]{2,7}!",
            "gbnf": r"(yes|no)[!?]",
        }
        assert re.fullmatch(patterns[name], text)


def structured_requests() -> list[Request]:
    """All grammars, greedy and sampled, some cut off early, and rows without among them."""
    requests = []
    for i in range(30):
        name = [*GRAMMARS, None][i % 6]
        params = make_params(
            temperature=(0.0, 1.0, 3.0)[i % 3],
            seed=i,
            max_new_tokens=5 if i % 7 == 0 else 80,
            structured=GRAMMARS[name] if name else None,
            stop_token_ids=(EOS_ID, TURN_END_ID),
            repetition_penalty=1.2 if i % 5 == 0 else 1.0,
            min_new_tokens=3 if i % 4 == 0 else 0,
            logprobs=i % 3 if i % 2 else None,
        )
        requests.append(Request((i, name), make_ids(3 + 20 * (i % 11), i), params))
    return requests


def answers(generator, requests):
    return {
        c.request_id: (c.status, c.token_ids, c.text, c.stop_reason, c.error)
        for c in generator.run(requests)
    }


@pytest.fixture(scope="module")
def generator(toy_float64):
    return make_generator(toy_float64)


@pytest.fixture(scope="module")
def alone(toy_float64):
    single = make_generator(toy_float64, max_batch_size=1)
    return answers(single, structured_requests())


class TestText:
    @pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
    @pytest.mark.parametrize("name", GRAMMARS)
    def test_follows_the_grammar(self, generator, name, temperature):
        for seed in range(4):
            completion = run_one(
                generator,
                make_ids(9, seed),
                temperature=temperature,
                seed=seed,
                max_new_tokens=120,
                structured=GRAMMARS[name],
                stop_token_ids=(EOS_ID,),
            )
            assert completion.status == Status.STOP
            check(name, completion.text)

    def test_ends_without_an_end_token_where_nothing_can_follow(self, generator):
        completion = run_one(generator, make_ids(5), structured=GRAMMARS["regex"])
        assert (completion.status, completion.stop_reason) == (Status.STOP, "grammar")
        assert EOS_ID not in completion.token_ids

    @pytest.mark.parametrize("end", [EOS_ID, TURN_END_ID])
    def test_ends_by_the_end_token_of_the_row_where_more_could_follow(self, generator, end):
        bias = ((EOS_ID, 100.0), (TURN_END_ID, 100.0))
        completion = run_one(
            generator,
            make_ids(5),
            structured=StructuredOutput("regex", "ab*"),
            stop_token_ids=(end,),
            logit_bias=bias,
        )
        assert (completion.text, completion.token_ids[-1]) == ("a", end)
        assert (completion.status, completion.stop_reason) == (Status.STOP, str(end))

    def test_ends_by_the_tokenizers_end_token_where_the_row_has_none(self, generator):
        completion = run_one(
            generator,
            make_ids(5),
            structured=StructuredOutput("regex", "ab*"),
            logit_bias=((EOS_ID, 100.0),),
        )
        assert completion.token_ids[-1] == EOS_ID
        assert (completion.text, completion.status) == ("a", Status.STOP)

    def test_waits_with_the_end_for_min_new_tokens(self, generator):
        completion = run_one(
            generator,
            make_ids(5),
            structured=StructuredOutput("regex", "b*"),
            stop_token_ids=(EOS_ID,),
            logit_bias=((EOS_ID, 100.0),),
            min_new_tokens=4,
        )
        assert len(completion.token_ids) == 5
        assert set(completion.text) == {"b"}

    def test_cut_off_is_length(self, generator):
        completion = run_one(
            generator, make_ids(5), max_new_tokens=3, structured=GRAMMARS["schema"]
        )
        assert (completion.status, len(completion.token_ids)) == (Status.LENGTH, 3)

    def test_complete_with_the_last_token_is_stop(self, generator):
        full = run_one(generator, make_ids(5), structured=GRAMMARS["regex"])
        limit = len(full.token_ids)
        again = run_one(generator, make_ids(5), structured=GRAMMARS["regex"], max_new_tokens=limit)
        assert (again.status, again.token_ids) == (Status.STOP, full.token_ids)

    def test_stop_strings_count_too(self, generator):
        completion = run_one(generator, make_ids(5), structured=GRAMMARS["regex"], stop=("-",))
        assert re.fullmatch("[0-9]{4}", completion.text)
        assert (completion.status, completion.stop_reason) == (Status.STOP, "-")

    def test_of_json_has_no_white_space_to_get_lost_in(self, generator):
        schema = {
            "type": "object",
            "properties": {"a": {"enum": [[1, 2], [2]]}},
            "required": ["a"],
            "additionalProperties": False,
        }
        completion = run_one(
            generator,
            make_ids(5),
            structured=StructuredOutput("json_schema", json.dumps(schema)),
            logit_bias=tuple((i, 50.0) for i in _white_tokens(generator)),
            max_new_tokens=200,
        )
        assert completion.status == Status.STOP
        assert completion.text in ('{"a": [1, 2]}', '{"a": [2]}')


def _white_tokens(generator) -> list[int]:
    decoder = generator._decoder
    return [i for i in range(5, VOCAB_SIZE) if not decoder.decode([i]).strip()]


class TestBatch:
    @pytest.mark.parametrize("steps_ahead", [0, 1, 2])
    def test_every_row_gets_what_it_gets_alone(self, toy_float64, alone, steps_ahead):
        generator = make_generator(toy_float64, max_batch_size=7, cache_tokens=4096)
        generator._loop._ahead = steps_ahead
        found = answers(generator, structured_requests())
        assert found == alone
        assert {status for status, *_ in alone.values()} == {Status.STOP, Status.LENGTH}
        for (_, name), (status, _, text, *_) in alone.items():
            if name and status == Status.STOP:
                check(name, text)

    @pytest.mark.parametrize("steps_ahead", [0, 1])
    def test_also_where_rows_give_their_pages_away(self, toy_float64, steps_ahead):
        long = StructuredOutput("regex", r"(abc, |d[0-9]+\. ){200}")
        requests = [
            Request(
                i,
                make_ids(230 + 17 * i, i),
                make_params(
                    temperature=i % 2, seed=i, max_new_tokens=300, structured=long if i else None
                ),
            )
            for i in range(6)
        ]
        expected = answers(make_generator(toy_float64, max_batch_size=1), requests)
        small = make_generator(toy_float64, max_batch_size=6, cache_tokens=1280)
        small._loop._ahead = steps_ahead
        assert answers(small, requests) == expected
        assert small.stats.preemptions > 0
        for i in range(1, 6):
            assert re.match(r"(abc, |d[0-9]+\. )+", expected[i][2])

    def test_a_row_after_one_with_a_grammar_is_free(self, toy_float64):
        generator = make_generator(toy_float64, max_batch_size=1)
        free = run_one(make_generator(toy_float64), make_ids(8))
        run_one(generator, make_ids(5), structured=GRAMMARS["choice"])
        assert run_one(generator, make_ids(8)).token_ids == free.token_ids


class TestWrong:
    @pytest.mark.parametrize(
        ("kind", "value", "error"),
        [
            ("json_schema", '{"type": "strin"}', r"json_schema: .*Invalid type: strin\)"),
            ("json_schema", "nope", "json_schema: .*Expecting value"),
            ("json_schema", "[1]", "must be a JSON object"),
            ("json_schema", '{"contains": {}}', "Unimplemented keys"),
            ("regex", "(a", "regex: .*unclosed group"),
            ("regex", "a(?=b)", "look-around"),
            ("choice", "[]", "list of texts"),
            ("choice", '["a", 1]', "list of texts"),
            ("choice", '["a", ""]', "list of texts"),
            ("grammar", 'start: "a" b', 'unknown name: "b"'),
        ],
    )
    def test_is_refused_with_the_reason_in_one_line(self, generator, kind, value, error):
        completion = run_one(generator, [5], structured=StructuredOutput(kind, value))
        assert completion.status == Status.INVALID
        assert re.search(error, completion.error)
        assert "\n" not in completion.error
        assert len(completion.error) < 350

    def test_others_run_beside_it(self, generator):
        bad = make_params(structured=StructuredOutput("regex", "(a"))
        found = answers(generator, [Request("bad", [5], bad), Request("good", [5], make_params())])
        assert found["bad"][0] == Status.INVALID
        assert found["good"][0] == Status.LENGTH

    def test_with_bans_that_leave_no_token(self, generator):
        tokenizer = generator._decoder
        banned = [i for i in range(VOCAB_SIZE) if "a" in tokenizer.decode([i])]
        completion = run_one(
            generator,
            [5],
            structured=StructuredOutput("regex", "a+"),
            banned_token_ids=tuple(banned),
        )
        assert completion.status == Status.ERROR
        assert "no token is left" in completion.error
        assert "\n" not in completion.error

    @pytest.mark.parametrize(
        ("changes", "error"),
        [
            ({"structured": GRAMMARS["regex"]}, "structured_output does not work with a draft"),
            ({"logprobs": 0}, "logprobs does not work with a draft"),
            ({"loop_guard": LoopGuard(2, 3)}, "loop_guard does not work with a draft"),
        ],
    )
    def test_with_a_draft_model(self, toy_float64, changes, error):
        drafting = make_generator(toy_float64, draft_model=str(toy_float64))
        completion = run_one(drafting, [5], **changes)
        assert completion.status == Status.INVALID
        assert error in completion.error


BAD = 500  # the request whose grammar is wrong


def choice_request(number: int) -> Request:
    """A request that only one text answers."""
    value = "[]" if number == BAD else json.dumps([f"no {number}"])
    choice = StructuredOutput("choice", value)
    return Request(number, make_ids(5), make_params(structured=choice, max_new_tokens=40))


def num_kept(grammars: Grammars) -> int:
    return sum(len(copies) for copies in grammars._compiled.values())


def begun(grammars: Grammars, name: str, **changes) -> RowGrammar:
    grammar = grammars.start(make_params(structured=GRAMMARS[name], **changes))
    assert grammar.begin() is None
    return grammar


class TestCompiled:
    @pytest.mark.parametrize(
        ("processors", "limit", "num_copies"),
        [(1, "", 1), (2, "", 8), (8, "max 100000", 32), (8, "250000 100000", 8), (8, "9 100", 1)],
    )
    def test_so_often_that_threads_hardly_wait_for_each_other(
        self, toy_float64, monkeypatch, tmp_path, processors, limit, num_copies
    ):
        """A lexer that rows share works for one of llguidance's threads at a time."""
        (tmp_path / "cpu.max").write_text(limit)
        monkeypatch.setattr(structured, "CPU_LIMIT", tmp_path / "cpu.max")
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(processors)))
        grammars = Grammars(AutoTokenizer.from_pretrained(toy_float64), VOCAB_SIZE)
        rows = [begun(grammars, "regex") for _ in range(2 * num_copies)]
        others = [begun(grammars, "choice") for _ in range(num_copies)]
        copies = [row.copy for row in rows]
        assert copies[:num_copies] == copies[num_copies:]
        assert len({row.copy for row in rows + others}) == 2 * num_copies

    def test_no_more_often_than_there_are_rows_at_once(self, toy_float64, monkeypatch):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
        grammars = Grammars(AutoTokenizer.from_pretrained(toy_float64), VOCAB_SIZE)
        first, second = begun(grammars, "regex"), begun(grammars, "regex")
        copy = second.copy
        del second
        assert [begun(grammars, "regex").copy for _ in range(9)] == [copy] * 9
        assert first.copy != copy

    def test_each_grammar_once(self, toy_float64):
        grammars = Grammars(AutoTokenizer.from_pretrained(toy_float64), VOCAB_SIZE)
        first, second = begun(grammars, "regex"), begun(grammars, "regex", seed=3)
        assert len(grammars._compiled) == 1
        assert first.matcher.consume_tokens([_digit(grammars)] * 4)
        assert first.matcher.compute_bitmask() != second.matcher.compute_bitmask()

    def test_a_thousand_grammars_of_which_few_are_kept(self, toy_float64, monkeypatch):
        monkeypatch.setattr(structured, "KEPT_COPIES", 5)
        generator = make_generator(toy_float64, max_batch_size=16)
        kept = []
        found = {
            c.request_id: c
            for c in generator.run(
                (choice_request(i) for i in range(1000)),
                on_step=lambda: kept.append(num_kept(generator._grammars)),
            )
        }
        assert sorted(found) == list(range(1000))
        assert max(kept) <= 5
        for i, completion in found.items():
            if i == BAD:
                assert completion.status == Status.INVALID
                assert "structured_output.choice: cannot be used" in completion.error
            else:
                assert completion.status == Status.STOP
                assert completion.text == f"no {i}"

    def test_another_time_after_it_was_dropped(self, toy_float64, monkeypatch):
        monkeypatch.setattr(structured, "KEPT_COPIES", 1)
        generator = make_generator(toy_float64)
        requests = [replace(choice_request(i % 2), request_id=i) for i in range(8)]
        found = {c.request_id: c.text for c in generator.run(requests)}
        assert found == {i: f"no {i % 2}" for i in range(8)}


class TestThreads:
    """Grammars are compiled in threads of their own, while rows wait."""

    @pytest.fixture
    def compiling(self, monkeypatch):
        """Grammars are compiled once this is set, by one thread; which does it, each time."""
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
        gate, names = threading.Event(), []
        grammar_of = structured.grammar_of

        def wait(grammar: StructuredOutput) -> str:
            names.append(threading.current_thread().name)
            assert gate.wait(10)
            return grammar_of(grammar)

        monkeypatch.setattr(structured, "grammar_of", wait)
        yield gate, names
        gate.set()

    def test_others_compile_than_the_one_that_runs_the_model(self, toy_float64, compiling):
        gate, names = compiling
        gate.set()
        generator = make_generator(toy_float64, max_batch_size=2)
        found = answers(generator, [choice_request(i) for i in range(6)])
        assert {found[i][2] for i in range(6)} == {f"no {i}" for i in range(6)}
        assert len(names) == 6
        assert threading.current_thread().name not in names

    def test_rows_run_while_those_behind_wait_for_their_grammars(self, toy_float64, compiling):
        gate, _ = compiling
        generator = make_generator(toy_float64, max_batch_size=1)
        run = generator.run([Request("free", make_ids(9), make_params()), choice_request(1)])
        assert next(run).request_id == "free"  # none is compiled yet
        gate.set()
        assert [completion.text for completion in run] == ["no 1"]

    @pytest.mark.parametrize("how", ["run closed", "generator closed", "error"])
    def test_end_with_the_run_and_begin_again(self, toy_float64, compiling, how):
        gate, names = compiling
        generator = make_generator(toy_float64, max_batch_size=20, max_chunk_size=256)
        requests = [choice_request(i) for i in range(30)]
        # the longest comes first, and leaves no room in its pass for those that are not ready
        free = Request("free", make_ids(257), make_params(max_new_tokens=1))
        run = generator.run([free, *requests], on_step=_fail if how == "error" else None)
        assert next(run).request_id == "free"
        if how == "run closed":
            run.close()
        elif how == "generator closed":
            generator.close()
        else:
            with pytest.raises(ZeroDivisionError):
                next(run)
        gate.set()
        for thread in threading.enumerate():
            if thread.name.startswith("compile-grammar"):
                thread.join(10)
                assert not thread.is_alive()
        assert len(names) <= 1
        if how != "generator closed":
            assert {c.text for c in generator.run(requests)} == {f"no {i}" for i in range(30)}


def _fail() -> None:
    raise ZeroDivisionError


def _digit(grammars: Grammars) -> int:
    [token] = grammars._hf_tokenizer.encode("7", add_special_tokens=False)
    return token


@settings(max_examples=30)
@given(st.integers(1, 100), st.randoms(use_true_random=False))
def test_masks_let_through_what_their_bits_say(vocab_size, random):
    allowed = np.array([random.random() < 0.5 for _ in range(vocab_size)])
    padded = np.pad(allowed, (0, -vocab_size % 32), constant_values=True)
    words = np.packbits(padded, bitorder="little").view(np.int32)
    logits = torch.arange(float(vocab_size))[None]
    found = masked(logits, torch.from_numpy(words)[None])[0]
    assert torch.equal(found.isinf(), torch.from_numpy(~allowed))
    assert torch.equal(found[allowed], logits[0][allowed])


@pytest.mark.slow
class TestSmolLm2:
    def test_answers_in_json(self, smollm2):
        generator = make_generator(smollm2, dtype="float32", max_chunk_size=512)
        tokenizer = AutoTokenizer.from_pretrained(smollm2)
        schema = {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 30},
                "population": {"type": "integer", "minimum": 0, "maximum": 99999999},
            },
            "required": ["city", "population"],
            "additionalProperties": False,
        }
        requests = [
            Request(
                i,
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": f"Name the capital of {country} as JSON."}],
                    add_generation_prompt=True,
                    return_dict=False,
                ),
                make_params(
                    temperature=0.8 * (i % 2),
                    max_new_tokens=60,
                    stop_token_ids=(tokenizer.eos_token_id,),
                    structured=StructuredOutput("json_schema", json.dumps(schema)),
                ),
            )
            for i, country in enumerate(["France", "Spain", "Japan", "Peru"])
        ]
        completions = list(generator.run(requests))
        assert len(completions) == 4
        for completion in completions:
            assert completion.status == Status.STOP
            jsonschema.validate(json.loads(completion.text), schema)


def test_a_tokenizer_that_llguidance_does_not_take_concerns_rows_with_a_grammar(
    toy_float64, monkeypatch
):
    def refuse(*args: object, **kwargs: object) -> None:
        raise ValueError("no such tokenizer")

    monkeypatch.setattr(structured, "from_tokenizer", refuse)
    generator = make_generator(toy_float64)
    requests = [
        Request(name, [5, 6], make_params(max_new_tokens=3, structured=GRAMMARS.get(name)))
        for name in ("regex", "none")
    ]
    found = {completion.request_id: completion for completion in generator.run(requests)}
    assert found["none"].status == Status.LENGTH
    assert found["regex"].status == Status.INVALID
    assert "no such tokenizer" in str(found["regex"].error)


@pytest.mark.parametrize("kind", [TypeError, type("PanicException", (BaseException,), {})])
def test_a_grammar_that_breaks_its_compiler_concerns_its_own_rows(toy_float64, monkeypatch, kind):
    compile_ = structured.grammar_of

    def breaking(grammar: StructuredOutput) -> str:
        if grammar == GRAMMARS["regex"]:
            raise kind("nobody expected this\nnor that")
        return compile_(grammar)

    monkeypatch.setattr(structured, "grammar_of", breaking)
    generator = make_generator(toy_float64)
    requests = [
        Request(name, [5, 6], make_params(max_new_tokens=9, structured=GRAMMARS.get(name)))
        for name in ("regex", "choice", "none")
    ]
    found = {each.request_id: each for each in generator.run(requests)}
    assert found["regex"].status == Status.INVALID
    assert f"cannot be used ({kind.__name__}: nobody expected this)" in (found["regex"].error or "")
    assert found["choice"].token_ids
    assert found["none"].token_ids
