"""How many answers change with the batch on a CPU, in float32.

    python benchmarks/cpu_invariance.py [MODEL_FOLDER]

The questions of the sample data, 24 tokens each, alone and in batches of 16, greedy and sampled.
In float64 none may (the tests hold that for a toy model).
"""

import json
import sys
from pathlib import Path

from transformers import AutoTokenizer

from bulk_pipeline.engine.loading import load_generator
from bulk_pipeline.engine.request import Request, SamplingParams
from bulk_pipeline.spec import GeneratorSettings

ROOT = Path(__file__).parent.parent
NEW_TOKENS = 24


def prompts(folder: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    questions: dict[str, None] = {}
    for path in sorted((ROOT / "data" / "demo").glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            text = json.loads(line)["question"]
            if text and text.strip() and "\ud83d" not in text:
                questions[text] = None
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in questions
    ]


def main() -> None:
    default = ROOT / "data" / "models" / "smollm2-135m-instruct"
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    requests = [
        Request(
            (i, temperature),
            ids,
            SamplingParams(temperature, 0.9, max_new_tokens=NEW_TOKENS, seed=i),
        )
        for i, ids in enumerate(prompts(folder))
        for temperature in (0.0, 1.0)
    ]
    answers = []
    for batch in (1, 16):
        generator = load_generator(
            GeneratorSettings(
                model=str(folder), device="cpu", max_batch_size=batch, cache_tokens=16384
            )
        )
        answers.append({c.request_id: c.token_ids for c in generator.run(requests)})
        generator.close()
    for temperature, name in ((0.0, "greedy"), (1.0, "temperature 1, top_p 0.9")):
        keys = [key for key in answers[0] if key[1] == temperature]
        changed = sum(answers[0][key] != answers[1][key] for key in keys)
        print(f"{name}: {changed} of {len(keys)} answers differ between batch 1 and batch 16")


if __name__ == "__main__":
    main()
