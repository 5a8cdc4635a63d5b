"""Specs, tables and a trivial generator for tests of the stages."""

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, ClassVar

import pyarrow as pa

from bulk_pipeline.engine.request import Completion, Request, Status
from bulk_pipeline.spec import BulkInferenceSpec, load_spec
from bulk_pipeline.storage.schemas import (
    COMPLETIONS_SCHEMA,
    PROMPTS,
    PROMPTS_SCHEMA,
    RAW_DATASET,
    ROW_ERROR_FIELD,
    ROW_FIELDS,
)
from bulk_pipeline.storage.store import Store

KEY = "all"


def make_spec(root: Any, **changes: Any) -> BulkInferenceSpec:
    """A valid spec whose tables are under `root`."""
    values: dict[str, Any] = {
        "name": "data",
        "source": {"path": f"{root}/source.jsonl"},
        "prompt": {"column": "text"},
        "generator": {"model": f"{root}/model"},
    } | changes
    values["output"] = {"root": f"{root}/tables", **values.get("output", {})}
    return load_spec(values)


def make_store(spec: BulkInferenceSpec) -> Store:
    return Store(spec.output.root, spec.name)


def make_prompt(index: int, **changes: Any) -> dict[str, Any]:
    """A ready row of the prompts table; `sampling` is merged into greedy defaults."""
    sampling = {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "max_new_tokens": 8,
        "min_new_tokens": 0,
        "seed": 0,
        "stop": [],
        "stop_token_ids": [],
    } | changes.pop("sampling", {})
    input_ids = changes.pop("input_ids", [1, 2, 3, index])
    return {
        "row_id": f"row-{index}",
        "row_index": index,
        "prompt": f"prompt {index}",
        "input_ids": input_ids,
        "prompt_tokens": len(input_ids),
        "status": "ready",
        "error": None,
        "truncated": False,
        "sampling": sampling,
        "num_samples": 1,
    } | changes


def write_prompts(
    store: Store,
    rows: list[dict[str, Any]],
    key: str = KEY,
    inputs: dict[str, Any] | None = None,
    renumber: bool = False,
) -> None:
    """Write prompts, and a raw table with a column `text` that belongs to them.

    `renumber` gives the rows their place in the list as row_index.
    """
    if renumber:
        rows = [row | {"row_index": place} for place, row in enumerate(rows)]
    with store.partition(PROMPTS, key).writer() as writer:
        with writer.new_part(PROMPTS_SCHEMA) as part:
            part.write(pa.Table.from_pylist(rows, schema=PROMPTS_SCHEMA))
        longest = max(
            (row["prompt_tokens"] + row["sampling"]["max_new_tokens"] for row in rows), default=0
        )
        meta = {
            "max_request_tokens": longest,
            "num_requests": sum(row["num_samples"] * row.get("num_turns", 1) for row in rows),
        }
        writer.commit([part.part], complete=True, inputs=inputs, meta=meta)
    write_raw(
        store,
        [
            {
                "text": f"text {row['row_index']}",
                "row_id": row["row_id"],
                "row_index": row["row_index"],
            }
            for row in rows
        ],
        pa.schema([("text", pa.string())]),
        key,
    )


def write_raw(
    store: Store, rows: list[dict[str, Any]], source_schema: pa.Schema, key: str = KEY
) -> None:
    schema = pa.schema([*source_schema, *ROW_FIELDS, ROW_ERROR_FIELD])
    with store.partition(RAW_DATASET, key).writer() as writer:
        with writer.new_part(schema) as part:
            part.write(pa.Table.from_pylist(rows, schema=schema))
        writer.commit([part.part], complete=True)


def read_rows(store: Store, table: str, key: str = KEY) -> list[dict[str, Any]]:
    return [row for batch in store.partition(table, key).read() for row in batch.to_pylist()]


def stable(rows: list[dict[str, Any]], but: Collection[str] = ()) -> list[dict[str, Any]]:
    """Rows without `but` and the columns in which two equal runs of a generator differ."""
    unstable = {f.name for f in COMPLETIONS_SCHEMA if (f.metadata or {}).get(b"stable")}
    assert "generate_seconds" in unstable
    unstable |= set(but)
    return [{k: v for k, v in row.items() if k not in unstable} for row in rows]


class EchoGenerator:
    """Answers a request with its own prompt's tokens as text; counts what it ran.

    It finishes requests out of order, two at a time, and fails at a request whose first token
    id is in `fails_at`.
    """

    provenance: ClassVar[dict[str, Any]] = {"generator": "echo"}

    def __init__(self, fails_at: Iterable[int] = (), errors_at: Iterable[int] = ()):
        self.requests: list[Request] = []
        self.fails_at, self.errors_at = set(fails_at), set(errors_at)

    def run(
        self, requests: Iterable[Request], on_step: Callable[[], None] | None = None
    ) -> Iterator[Completion]:
        waiting: list[Request] = []
        for request in requests:
            self.requests.append(request)
            if request.input_ids[-1] in self.fails_at:
                raise RuntimeError("the generator broke")
            waiting.append(request)
            if len(waiting) == 2:
                yield self._answer(waiting.pop())
                yield self._answer(waiting.pop())
            if on_step is not None:
                on_step()
        yield from map(self._answer, waiting)

    def _answer(self, request: Request) -> Completion:
        if request.input_ids[-1] in self.errors_at:
            return Completion(request.request_id, Status.ERROR, error="broken")
        text = " ".join(map(str, request.input_ids))
        if not request.sampling.is_greedy:
            text += f" seed {request.sampling.seed}"
        return Completion(
            request.request_id,
            Status.STOP,
            text=text,
            token_ids=tuple(request.input_ids[: request.sampling.max_new_tokens]),
            prompt_tokens=len(request.input_ids),
            generate_seconds=0.5,
        )
