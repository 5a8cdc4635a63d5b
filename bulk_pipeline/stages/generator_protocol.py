"""What the completions need of an engine: requests in, one completion for each out, in any order.

A failure of the model may concern any request that the engine has; what else it raises counts
against none.
"""

from collections import abc
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

from bulk_pipeline.engine.request import Completion, Request, SamplingParams

CHECK_ID = -1  # of the request that shows whether the engine works; no number of one

AnswerIds = Callable[[Sequence[int], str, Collection[int]], list[int]]  # of `ChatGenerator`


class Generator(Protocol):
    """What the completions need of the engine; `BulkGenerator` is one."""

    provenance: dict[str, Any]

    def run(
        self, requests: Iterable[Request], on_step: Callable[[], None] | None = None
    ) -> abc.Generator[Completion, None, None]:
        """Yield one completion a request, in any order; call `on_step` after each step.

        Closing it drops the requests that have none yet.

        Raises
        ------
        GenerationError
            If one of the requests that it has may be why it fails; it can be used again. Any other
            exception counts against no request.
        """


class ChatGenerator(Generator, Protocol):
    """What it needs besides where rows have several turns."""

    def run(
        self,
        requests: Iterable[Request],
        on_step: Callable[[], None] | None = None,
        go_on: Callable[[Completion], Iterable[Request]] | None = None,
    ) -> abc.Generator[Completion, None, None]:
        """Also complete the requests that `go_on` gives for a completion, before others."""

    def answer_ids(
        self, token_ids: Sequence[int], text: str, stop_token_ids: Collection[int]
    ) -> list[int]:
        """Return the tokens of an answer as a chat goes on from it."""


def no_ids(token_ids: Sequence[int], text: str, stop_token_ids: Collection[int]) -> list[int]:
    """`AnswerIds` where nothing goes on from an answer."""
    return []


def check_engine(generator: Generator, adapter: str | None) -> None:
    """Answer a request of one token, which raises where a failure is no request's own."""
    params = SamplingParams(temperature=0.0, max_new_tokens=1)
    for _ in generator.run([Request(CHECK_ID, (0,), params, adapter=adapter)]):
        pass
