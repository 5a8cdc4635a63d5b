"""The generators that the throughput benchmark compares: each takes rows and says what it did.

`PlainLoop` is exllamav2's DynamicGenerator as its examples use it: every job enqueued, iterated to
the end. `Product` is `BulkGenerator.run`. Both are timed from handing over the rows to the last
token, prefill included; making the rows, loading and a warm-up are outside.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from throughput_work import PAGE_TOKENS, SAMPLING, SPECIAL_IDS, Row

FLOOR_CONTEXT = 300  # tokens in the cache of each row
FLOOR_PAGES = 2
MEMORY_KEPT_GIB = 12  # beside weights and cache: activations, logits, kernels
GIB = 1 << 30


class PlainLoop:
    """exllamav2's own generator; the model and its cache are loaded once, for all batch sizes."""

    def __init__(self, folder: str, cache_tokens: int) -> None:
        loaded = load_exllamav2(folder, cache_tokens)
        self._model, self._cache, self._tokenizer, self._attention = loaded
        self.vocab_size = self._model.config.vocab_size
        self._batch: int | None = None
        self.settings: dict[str, Any] = {}

    def open(self, batch: str) -> None:
        """Take the batch size of the runs that follow; auto is exllamav2's own default."""
        self._batch = None if batch == "auto" else int(batch)
        generator = self._new_generator()
        self.settings = {
            "max_batch_size": generator.max_batch_size,
            "cache_tokens": self._cache.max_seq_len,
            "max_chunk_size": generator.max_chunk_size,
            "attention": self._attention,
        }
        generator.warmup()
        _shut_down(generator)

    def warm_up(self, rows: list[Row], sampling: str) -> None:
        """Compile and choose kernels: a few tokens of a full batch."""
        few = [Row(row.input_ids, 8) for row in rows[: min(self.settings["max_batch_size"], 64)]]
        self.run(few, sampling, 60)

    def run(self, rows: list[Row], sampling: str, most_seconds: float) -> dict[str, Any]:
        """Run the rows, or as many as there is time for (0: no limit)."""
        import torch

        generator, settings = self._new_generator(), self._sampler_settings(sampling)
        jobs, counts = [], [(0.0, 0)]
        steps = done = 0
        torch.cuda.synchronize()
        started = time.perf_counter()
        for number, row in enumerate(rows):
            jobs.append(self._job(row, settings, number))
            generator.enqueue(jobs[-1])
        while generator.num_remaining_jobs():
            results = [r for r in generator.iterate() if r["stage"] == "streaming"]
            steps += bool(results)
            done += sum(r["eos"] for r in results)
            counts.append((time.perf_counter() - started, counts[-1][1] + len(results)))
            if most_seconds and counts[-1][0] >= most_seconds:
                break
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        whole = not generator.num_remaining_jobs()
        _shut_down(generator)
        begun = [job for job in jobs if job.time_first_prefill is not None]
        cached = sum(job.cached_pages * PAGE_TOKENS + job.cached_tokens for job in begun)
        prompts = sum(len(rows[job.identifier].input_ids) for job in begun)
        outcome = _outcome(
            counts[-1][1],
            seconds,
            whole,
            rows_done=done,
            steps=steps,
            mean_batch=counts[-1][1] / max(steps, 1),
            prefill_tokens=prompts - cached,
            cached_tokens=cached,
        )
        if not whole:
            outcome["second_half_tokens_per_second"] = second_half_rate(counts)
        return outcome

    def close(self) -> None:
        """Free the model."""
        self._model.unload()

    def _new_generator(self) -> Any:
        """Make a generator with an empty cache."""
        from exllamav2.generator import ExLlamaV2DynamicGenerator

        return ExLlamaV2DynamicGenerator(
            model=self._model,
            cache=self._cache,
            tokenizer=self._tokenizer,
            max_batch_size=self._batch,
            max_q_size=1,
        )

    def _job(self, row: Row, settings: Any, number: int) -> Any:
        import torch
        from exllamav2.generator import ExLlamaV2DynamicJob

        return ExLlamaV2DynamicJob(
            input_ids=torch.tensor([row.input_ids]),
            max_new_tokens=row.max_new_tokens,
            stop_conditions=list(row.stop_token_ids) or None,
            identifier=number,
            gen_settings=settings,
            seed=number,
        )

    def _sampler_settings(self, sampling: str) -> Any:
        from exllamav2.generator import ExLlamaV2Sampler

        temperature, top_p = SAMPLING[sampling]
        if not temperature:
            return ExLlamaV2Sampler.Settings.greedy()
        return ExLlamaV2Sampler.Settings(
            temperature=temperature, top_k=0, top_p=top_p, token_repetition_penalty=1.0
        )


class Product:
    """The project's generator, loaded anew for each batch size, with the settings given."""

    def __init__(self, folder: str, device: str, changes: dict[str, Any]) -> None:
        self._folder, self._device, self._changes = folder, device, changes
        self._generator: Any = None
        self.vocab_size = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
        self.settings: dict[str, Any] = {}

    def open(self, batch: str) -> None:
        """Load the model for a batch size; auto is the generator's own choice."""
        from bulk_pipeline.engine.loading import load_generator
        from bulk_pipeline.spec import GeneratorSettings

        self.close()
        changes = {"model": self._folder, "device": self._device, **self._changes}
        if batch != "auto":
            changes["max_batch_size"] = int(batch)
        elif isinstance(GeneratorSettings.model_fields["max_batch_size"].default, int):
            raise ValueError("batch auto: generator.max_batch_size has no automatic value here")
        self._generator = load_generator(GeneratorSettings(**changes))
        left_out = ("model", "fingerprint", "device", "torch", "exllamav2", "transformers")
        known = {k: v for k, v in self._generator.provenance.items() if k not in left_out}
        self.settings = known | self._changes

    def warm_up(self, rows: list[Row], sampling: str) -> None:
        """Compile and choose kernels, from a full batch down to the last row."""
        self.run(rows, sampling, 0)

    def run(self, rows: list[Row], sampling: str, most_seconds: float) -> dict[str, Any]:
        """Run the rows; after `most_seconds` (0: no limit) only finished rows count."""
        outcome = self.run_requests(make_requests(rows, sampling), most_seconds)
        wanted, tokens = sum(row.max_new_tokens for row in rows), outcome["completion_tokens"]
        if outcome["whole_run"] and not rows[0].stop_token_ids and tokens != wanted:
            raise RuntimeError(f"{wanted} tokens were asked for, got {tokens}")
        return outcome

    def run_requests(self, requests: list[Any], most_seconds: float) -> dict[str, Any]:
        """Run requests; after `most_seconds` (0: no limit) only finished ones count."""
        stats = self._generator.stats
        before = (stats.steps, stats.rows, stats.prefill_tokens, stats.cached_tokens)
        tokens = done = 0
        _synchronize()
        started = time.perf_counter()
        completions = self._generator.run(iter(requests))
        for completion in completions:
            if completion.error is not None:
                raise RuntimeError(f"row {completion.request_id}: {completion.error}")
            tokens += len(completion.token_ids)
            done += 1
            if most_seconds and time.perf_counter() - started >= most_seconds:
                break
        _synchronize()
        seconds = time.perf_counter() - started
        completions.close()
        whole = done == len(requests)
        after = (stats.steps, stats.rows, stats.prefill_tokens, stats.cached_tokens)
        steps, in_steps, prefill, cached = (b - a for a, b in zip(before, after, strict=True))
        return _outcome(
            tokens,
            seconds,
            whole,
            rows_done=done,
            steps=steps,
            mean_batch=in_steps / max(steps, 1),
            prefill_tokens=prefill,
            cached_tokens=cached,
        )

    def close(self) -> None:
        """Free the model."""
        if self._generator is not None:
            self._generator.close()
            self._generator = None


def load_exllamav2(folder: str, cache_tokens: int) -> tuple[Any, Any, Any, str]:
    """Load a model with exllamav2's defaults; return it, its cache, tokenizer and attention.

    The cache is float16, as large as asked or as fits.

    Attention is flash-attn where it is installed, else the project's own.
    """
    from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer

    from bulk_pipeline.engine.cuda import use_attention
    from bulk_pipeline.engine.folders import readable_by_exllamav2

    attention = use_attention()
    with readable_by_exllamav2(Path(folder)) as readable:
        config = ExLlamaV2Config(str(readable))
        model = ExLlamaV2(config)
        tokens = min(cache_tokens, _cache_tokens_that_fit(config, folder))
        cache = ExLlamaV2Cache(model, max_seq_len=max(tokens, config.max_input_len), lazy=True)
        model.load_autosplit(cache)
        tokenizer = ExLlamaV2Tokenizer(config)
    return model, cache, tokenizer, attention


def _cache_tokens_that_fit(config: Any, folder: str) -> int:
    import torch

    free = sum(torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count()))
    weights = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    a_token = 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return (free - weights - MEMORY_KEPT_GIB * GIB) // (a_token * PAGE_TOKENS) * PAGE_TOKENS


def forward_step_seconds(model: Any, cache: Any, batch: int, most_seconds: float) -> float:
    """Time exllamav2's bare forward step: one token of `batch` rows, their context in the cache."""
    import torch
    from exllamav2.attn import ExLlamaV2Attention

    block_index = torch.arange(batch * FLOOR_PAGES, dtype=torch.int32).view(batch, FLOOR_PAGES)
    lengths = torch.full((batch,), FLOOR_CONTEXT, dtype=torch.int32)
    ids = torch.randint(SPECIAL_IDS, model.config.vocab_size - SPECIAL_IDS, (batch, 1))

    def step() -> None:
        params = ExLlamaV2Attention.PagedParams(
            batch_size=batch,
            block_index=block_index,
            cache_seqlens=lengths,
            max_cache_seqlen=FLOOR_CONTEXT,
            page_size=PAGE_TOKENS,
            q_len=1,
        )
        model.forward_chunk(input_ids=ids, attn_params=params, cache=cache)

    with torch.inference_mode():
        for _ in range(5):
            step()
        torch.cuda.synchronize()
        started, count = time.perf_counter(), 0
        while count < 20 or (count < 200 and time.perf_counter() - started < most_seconds):
            step()
            count += 1
            if count % 10 == 0:  # the host would otherwise run far ahead of the clock
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / count


def make_requests(
    rows: list[Row],
    sampling: str,
    changes: Callable[[int], dict[str, Any]] = lambda number: {},
    *,
    prompt_logprobs: bool = False,
    adapter: str | None = None,
) -> list[Any]:
    """Return the rows as the project's requests; `changes` are a row's other settings."""
    from bulk_pipeline.engine.request import Request, SamplingParams

    temperature, top_p = SAMPLING[sampling]
    return [
        Request(
            number,
            row.input_ids,
            SamplingParams(
                **{
                    "temperature": temperature,
                    "top_p": top_p,
                    "max_new_tokens": row.max_new_tokens,
                    "seed": number,
                    "stop_token_ids": row.stop_token_ids,
                }
                | changes(number)
            ),
            prompt_logprobs,
            adapter,
        )
        for number, row in enumerate(rows)
    ]


def second_half_rate(counts: list[tuple[float, int]]) -> float:
    """Tokens a second in the second half of a run: without the first batch's prefill.

    Parameters
    ----------
    counts
        Seconds since the start and tokens so far, after each step.
    """
    end, tokens = counts[-1]
    half, tokens_at_half = next(count for count in counts if count[0] >= end / 2)
    return round((tokens - tokens_at_half) / (end - half), 1) if end > half else 0.0


def _outcome(tokens: int, seconds: float, whole: bool, **more: float) -> dict[str, Any]:
    return {
        "tokens_per_second": round(tokens / seconds, 1),
        "completion_tokens": tokens,
        "seconds": round(seconds, 3),
        "whole_run": whole,
        **{name: round(value, 1) for name, value in more.items()},
    }


def _shut_down(generator: Any) -> None:
    """End the generator's threads; its jobs are dropped with it."""
    for pool in (generator.sampling_pool, generator.filter_pool):
        if pool is not None:
            pool.shutdown(wait=False)


def _synchronize() -> None:
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
