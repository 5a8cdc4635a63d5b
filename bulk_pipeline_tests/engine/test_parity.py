"""The generator's greedy answers on a real model against transformers' own `generate`."""

import random
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bulk_pipeline.engine.loading import load_generator
from bulk_pipeline.engine.request import Request, SamplingParams
from bulk_pipeline.spec import GeneratorSettings

NUM_PROMPTS = 50
NEAR_TIE = 1e-3  # between the two best logits
TOPICS = ("the sea", "a lighthouse", "prime numbers", "bread", "Karl der Große", "C++ templates")
NOTES = (
    "Tides rise and fall twice a day. Seven is a prime number. The baker gets up at four. ",
    "Der Leuchtturm steht seit 1887 auf der Klippe. Bei Nebel läutet die Glocke. ",
    "def area(width, height): return width * height  # both in metres\n",
)


def make_prompts(tokenizer) -> list[list[int]]:
    """Chats, bare words and documents of 1 to about 600 tokens, some with a shared beginning."""
    rng = random.Random(0)
    prompts = [[rng.randrange(100, 40_000)] for _ in range(3)]
    for i in range(NUM_PROMPTS - len(prompts)):
        notes = rng.choice(NOTES) * rng.choice([0, 0, 0, 0, 1, 2, 4, 8])
        if i % 8 == 0:
            notes = NOTES[i % 3] * 16
        question = f"{notes}{i}. Tell me something about {rng.choice(TOPICS)}."
        chat = [{"role": "user", "content": question}]
        prompts.append(
            tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            if i % 5
            else tokenizer(question)["input_ids"]
        )
    return [ids[:600] for ids in prompts]


def transformers_answer(model, ids: list[int], limit: int) -> SimpleNamespace:
    output = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=limit,
        eos_token_id=2,
        pad_token_id=2,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(output.logits).topk(2, dim=-1).values
    return SimpleNamespace(
        ids=output.sequences[0, len(ids) :].tolist(), margins=(best[:, 0] - best[:, 1]).tolist()
    )


@pytest.mark.slow
def test_greedy_answers_equal_those_of_transformers(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    prompts = make_prompts(tokenizer)
    limits = [(1, 6, 12, 20, 64)[i % 5] for i in range(NUM_PROMPTS)]
    assert min(map(len, prompts)) == 1
    assert 550 <= max(map(len, prompts)) <= 600

    generator = load_generator(
        GeneratorSettings(
            model=str(smollm2),
            device="cpu",
            max_batch_size=8,
            cache_tokens=2048,
            max_chunk_size=512,
        )
    )
    answers = {}
    for half in (slice(0, 25), slice(25, None)):
        requests = [
            Request(
                i, prompts[i], SamplingParams(0.0, max_new_tokens=limits[i], stop_token_ids=(2,))
            )
            for i in range(NUM_PROMPTS)[half]
        ]
        answers |= {c.request_id: c for c in generator.run(requests)}
    assert sorted(answers) == list(range(NUM_PROMPTS))
    assert generator.stats.cached_tokens > 0
    assert generator.stats.prefill_tokens > 2 * 2048, "pages were not reused"
    assert generator.stats.mean_batch_size > 3
    generator.close()

    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    differing = []
    for i, ids in enumerate(prompts):
        expected, got = transformers_answer(model, ids, limits[i]), list(answers[i].token_ids)
        if got != expected.ids:
            pairs = zip(got, expected.ids, strict=False)
            place = next(n for n, (a, b) in enumerate(pairs) if a != b)
            differing.append((i, place, expected.margins[place]))
            print(f"prompt {i} differs from token {place} on, margin {expected.margins[place]:.2g}")
    assert all(margin < NEAR_TIE for _, _, margin in differing), differing
    assert len(differing) <= 1, differing
