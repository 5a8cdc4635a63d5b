"""Result files of OpenAI's batch API: rows of the output table in, one line for each input row out.

A row with answers has a ``response``, its samples being the choices; one without has an ``error``.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any

import orjson
import pyarrow as pa

from bulk_pipeline.engine.request import Status
from bulk_pipeline.stages.formats.openai_batch import TEXT

# A loop is cut off as a limit does it; OpenAI has no word of its own for it.
FINISH_REASONS = {Status.STOP: "stop", Status.LENGTH: "length", Status.LOOP: "length"}
ERROR_CODES = {
    Status.TOO_LONG: "context_length_exceeded",
    Status.INVALID: "invalid_request",
    Status.EMPTY: "empty_prompt",
    Status.ERROR: "server_error",
}
READ_COLUMNS = (
    "custom_id",
    "url",
    "model",
    "row_id",
    "row_index",
    "sample_index",
    "turn",
    "status",
    "completion",
    "prompt_tokens",
    "completion_tokens",
    "request_key",
    "error",
)


@contextmanager
def export_openai_batch(file: IO[bytes]) -> Iterator["Results"]:
    """Open a result file; what it gives takes rows of the output table, in their order."""
    results = Results(file)
    yield results
    results.finish_line()


class Results:
    """Writes a line for each input row, once all its samples are there."""

    def __init__(self, file: IO[bytes]):
        self._file = file
        self._rows: list[dict[str, Any]] = []  # the requests of one input row
        self._meta: Mapping[str, Any] = {}  # of the partition that they are from

    def __call__(self, table: pa.Table, meta: Mapping[str, Any]) -> None:
        """Take rows, and what the manifest of their partition says of them."""
        names = [name for name in READ_COLUMNS if name in table.column_names]
        for row in table.select(names).to_pylist():
            if self._rows and not _is_next(row, self._rows[-1]):
                self.finish_line()
            self._rows.append(row)
            self._meta = meta

    def finish_line(self) -> None:
        """Write the line of the rows so far, if there are any."""
        if self._rows:
            self._file.write(orjson.dumps(_result(self._rows, self._meta)) + b"\n")
        self._rows = []


def _is_next(row: Mapping[str, Any], last: Mapping[str, Any]) -> bool:
    """Whether `row` is another request of the input row that `last` is of."""
    places = [(each["sample_index"], each["turn"]) for each in (last, row)]
    return row["row_index"] == last["row_index"] and places[0] < places[1]


def _result(rows: Sequence[Mapping[str, Any]], meta: Mapping[str, Any]) -> dict[str, Any]:
    # Of a row with several turns the last answer is the one to the whole conversation.
    answers = list({row["sample_index"]: row for row in rows}.values())
    failed = next((row for row in answers if row["status"] not in FINISH_REASONS), None)
    id_ = _id(rows)
    return {
        "id": f"batch_req_{id_}",
        "custom_id": rows[0].get("custom_id") or rows[0]["row_id"],
        "response": None
        if failed
        else {"status_code": 200, "request_id": id_, "body": _body(id_, answers, meta)},
        "error": _error(failed, len(answers)) if failed else None,
    }


def _id(rows: Sequence[Mapping[str, Any]]) -> str:
    """The same for the same answers, wherever they are exported from."""
    text = orjson.dumps([[row["row_id"], row["request_key"]] for row in rows])
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def _error(row: Mapping[str, Any], num_samples: int) -> dict[str, str]:
    status = row["status"]
    sample = f"sample {row['sample_index']} of {num_samples} (from 0): " if num_samples > 1 else ""
    return {
        "code": ERROR_CODES.get(status, status),
        "message": f"{sample}{row['error'] or status}",
    }


def _body(
    id_: str, answers: Sequence[Mapping[str, Any]], meta: Mapping[str, Any]
) -> dict[str, Any]:
    is_text = answers[0].get("url") == TEXT
    run = (meta.get("runs") or [{}])[-1]
    prompt_tokens = answers[0]["prompt_tokens"]
    completion_tokens = sum(row["completion_tokens"] for row in answers)
    return {
        "id": f"{'cmpl' if is_text else 'chatcmpl'}-{id_}",
        "object": "text_completion" if is_text else "chat.completion",
        "created": int(run.get("began", 0) + run.get("seconds", 0)),
        "model": run.get("settings", {}).get("model") or answers[0].get("model") or "unknown",
        "choices": [(_text_choice if is_text else _chat_choice)(row) for row in answers],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
        "system_fingerprint": None,
    }


def _chat_choice(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "index": row["sample_index"],
        "message": {"role": "assistant", "content": row["completion"], "refusal": None},
        "logprobs": None,
        "finish_reason": FINISH_REASONS[row["status"]],
    }


def _text_choice(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "index": row["sample_index"],
        "text": row["completion"],
        "logprobs": None,
        "finish_reason": FINISH_REASONS[row["status"]],
    }
