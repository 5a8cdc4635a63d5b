"""Result files of OpenAI's batch API: rows of the output table in, one line for each input row out.

A row with answers has a ``response``, its samples being the choices; one without has an ``error``.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any

import orjson
import pyarrow as pa

from bulk_pipeline.engine.request import Status
from bulk_pipeline.stages.formats.openai_batch import TEXT

TokenBytes = Callable[[Sequence[int]], list[bytes]]  # each token's own part of the text

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
    "reasoning",
    "completion_ids",
    "logprobs",
    "top_logprobs",
)


@contextmanager
def export_openai_batch(file: IO[bytes], token_bytes: TokenBytes) -> Iterator["Results"]:
    """Open a result file; what it gives takes rows of the output table, in their order."""
    results = Results(file, token_bytes)
    yield results
    results.finish_line()


class Results:
    """Writes a line for each input row, once all its samples are there."""

    def __init__(self, file: IO[bytes], token_bytes: TokenBytes):
        self._file, self._token_bytes = file, token_bytes
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
            self._file.write(orjson.dumps(self._result()) + b"\n")
        self._rows = []

    def _result(self) -> dict[str, Any]:
        # Of a row with several turns the last answer is the one to the whole conversation.
        answers = list({row["sample_index"]: row for row in self._rows}.values())
        failed = next((row for row in answers if row["status"] not in FINISH_REASONS), None)
        id_, first = _id(self._rows), self._rows[0]
        head = {"id": f"batch_req_{id_}", "custom_id": first.get("custom_id") or first["row_id"]}
        if failed:
            return head | {"response": None, "error": _error(failed, len(answers))}
        response = {"status_code": 200, "request_id": id_, "body": self._body(id_, answers)}
        return head | {"response": response, "error": None}

    def _body(self, id_: str, answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        is_text = answers[0].get("url") == TEXT
        choice = self._text_choice if is_text else self._chat_choice
        run = (self._meta.get("runs") or [{}])[-1]
        prompt_tokens = answers[0]["prompt_tokens"]
        completion_tokens = sum(row["completion_tokens"] for row in answers)
        return {
            "id": f"{'cmpl' if is_text else 'chatcmpl'}-{id_}",
            "object": "text_completion" if is_text else "chat.completion",
            "created": int(run.get("began", 0) + run.get("seconds", 0)),
            "model": run.get("settings", {}).get("model") or answers[0].get("model") or "unknown",
            "choices": [{"index": index, **choice(row)} for index, row in enumerate(answers)],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": completion_tokens,
                "total_tokens": prompt_tokens + completion_tokens,
            },
            "system_fingerprint": None,
        }

    def _chat_choice(self, row: Mapping[str, Any]) -> dict[str, Any]:
        message = {"role": "assistant", "content": row["completion"], "refusal": None}
        if row.get("reasoning") is not None:
            message["reasoning_content"] = row[
                "reasoning"
            ]  # OpenAI's shows none; others name it so
        has_logprobs = row.get("logprobs") is not None
        return {
            "message": message,
            "logprobs": {"content": self._logprobs(row), "refusal": None} if has_logprobs else None,
            "finish_reason": FINISH_REASONS[row["status"]],
        }

    def _logprobs(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        chosen = self._tokens(row["completion_ids"], row["logprobs"])
        best = row.get("top_logprobs") or [[] for _ in chosen]
        return [
            token | {"top_logprobs": self._tokens(*_ids_and_logprobs(others))}
            for token, others in zip(chosen, best, strict=True)
        ]

    def _tokens(self, ids: Sequence[int], logprobs: Sequence[float]) -> list[dict[str, Any]]:
        return [
            {"token": _shown(token), "bytes": list(token), "logprob": logprob}
            for token, logprob in zip(self._token_bytes(ids), logprobs, strict=True)
        ]

    def _text_choice(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "text": row["completion"],
            "logprobs": None if row.get("logprobs") is None else self._text_logprobs(row),
            "finish_reason": FINISH_REASONS[row["status"]],
        }

    def _text_logprobs(self, row: Mapping[str, Any]) -> dict[str, Any]:
        tokens = self._token_bytes(row["completion_ids"])
        offsets, text = [], b""
        for token in tokens:
            offsets.append(len(text.decode("utf-8", "ignore")))
            text += token
        best = row.get("top_logprobs")
        return {
            "tokens": list(map(_shown, tokens)),
            "token_logprobs": row["logprobs"],
            "top_logprobs": best and list(map(self._by_text, best)),
            "text_offset": offsets,
        }

    def _by_text(self, others: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        ids, logprobs = _ids_and_logprobs(others)
        return dict(zip(map(_shown, self._token_bytes(ids)), logprobs, strict=True))


def _is_next(row: Mapping[str, Any], last: Mapping[str, Any]) -> bool:
    """Whether `row` is another request of the input row that `last` is of."""
    places = [(each["sample_index"], each["turn"]) for each in (last, row)]
    return row["row_index"] == last["row_index"] and places[0] < places[1]


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


def _ids_and_logprobs(tokens: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[float]]:
    return [each["token_id"] for each in tokens], [each["logprob"] for each in tokens]


def _shown(token: bytes) -> str:
    """A token's text; bytes that are only a part of a character are shown as OpenAI does."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
