"""The way of sampling settings through the prompts table into requests."""

import numpy as np
import pyarrow as pa

from bulk_pipeline.engine.request import SamplingParams, request_key
from bulk_pipeline.spec import SamplingSpec
from bulk_pipeline.stages.row_sampling import resolve_sampling
from bulk_pipeline.stages.wanted import requests_at
from bulk_pipeline.storage.schemas import PROMPTS, PROMPTS_SCHEMA, SAMPLING_TYPE
from bulk_pipeline_tests.factories import KEY, make_prompt, make_spec, make_store, write_prompts

EARLIER_TYPE = pa.struct(list(SAMPLING_TYPE)[:9])


def requests(store):
    return list(requests_at(store.partition(PROMPTS, KEY), "model", np.arange(2)))


def test_every_sampling_setting_reaches_the_request(tmp_path):
    store = make_store(make_spec(tmp_path))
    spec = SamplingSpec(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        min_new_tokens=2,
        max_new_tokens=9,
        stop=["x"],
        stop_token_ids=[3],
        repetition_penalty=1.25,
        frequency_penalty=0.5,
        presence_penalty=-1.5,
        logit_bias={8: 2.0, 5: -100.0},
        banned_token_ids=[4, 2],
    )
    values = resolve_sampling(spec, {}, {})
    write_prompts(store, [make_prompt(0, sampling=values), make_prompt(1)])
    first, second = requests(store)
    assert first.sampling == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        min_new_tokens=2,
        max_new_tokens=9,
        seed=first.sampling.seed,
        stop=("x",),
        stop_token_ids=(3,),
        repetition_penalty=1.25,
        frequency_penalty=0.5,
        presence_penalty=-1.5,
        logit_bias=((5, -100.0), (8, 2.0)),
        banned_token_ids=(4, 2),
    )
    assert first.key == request_key(first.input_ids, first.sampling, "model")
    assert second.sampling == SamplingParams(temperature=0.0, max_new_tokens=8)


def test_a_table_of_an_earlier_version_has_the_later_settings_off(tmp_path):
    store = make_store(make_spec(tmp_path))
    place = PROMPTS_SCHEMA.get_field_index("sampling")
    schema = PROMPTS_SCHEMA.set(place, pa.field("sampling", EARLIER_TYPE))
    rows = [make_prompt(0), make_prompt(1, sampling={"top_p": 0.5, "temperature": 1.0})]
    with store.partition(PROMPTS, KEY).writer() as writer:
        with writer.new_part(schema) as part:
            part.write(pa.Table.from_pylist(rows, schema=schema))
        writer.commit([part.part], complete=True)
    first, second = requests(store)
    assert first.sampling == SamplingParams(temperature=0.0, max_new_tokens=8)
    assert (second.sampling.top_p, second.sampling.token_biases) == (0.5, ())
    assert not second.sampling.has_penalties
