"""How many rows of the agreement test come by a place where two tokens are almost equally likely.

    python benchmarks/near_ties.py FOLDER

Runs on a CPU in float32: the greedy answers by the engine, then transformers' logits for them.
Prints, for several gaps, the rows whose two best logits lie closer than that somewhere within
the first 32 tokens. One step of a float16 logit of size 16 to 32 is 1/64.
"""

import sys
from pathlib import Path

import torch
from gpu_correctness import AGREED_TOKENS, END, prompts
from transformers import AutoModelForCausalLM, AutoTokenizer

from bulk_pipeline.engine.loading import load_generator
from bulk_pipeline.engine.request import Request, SamplingParams
from bulk_pipeline.spec import GeneratorSettings

GAPS = (256, 128, 64, 32, 16)  # one over each


def main() -> None:
    folder = Path(sys.argv[1])
    all_ids = prompts(AutoTokenizer.from_pretrained(folder))
    settings = GeneratorSettings(model=str(folder), device="cpu", max_batch_size=32)
    params = SamplingParams(temperature=0, max_new_tokens=AGREED_TOKENS, stop_token_ids=END)
    generator = load_generator(settings)
    requests = [Request(i, ids, params) for i, ids in enumerate(all_ids)]
    answers = {c.request_id: c.token_ids for c in generator.run(requests)}
    generator.close()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    smallest, best = [], []
    for i, ids in enumerate(all_ids):
        with torch.inference_mode():
            logits = model(torch.tensor([[*ids, *answers[i]]])).logits[0]
        top = logits[len(ids) - 1 : len(ids) - 1 + len(answers[i])].topk(2).values
        smallest.append(float((top[:, 0] - top[:, 1]).min()))
        best.append(float(top[:, 0].mean()))
    for gap in GAPS:
        print(f"closer than 1/{gap}: {sum(value < 1 / gap for value in smallest)} rows")
    print(f"{len(all_ids)} rows; mean of the best logits {sum(best) / len(best):.1f}")


if __name__ == "__main__":
    main()
