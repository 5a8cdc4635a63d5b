"""What obstore's client of Google Cloud Storage asks for, over moto's S3 server.

Google's XML API is S3's with headers of its own: generations for versions, and conditions on them.
No emulator that pip installs has that API's writes, listings and conditions. So this is no
emulator: it shows that our side of it works, and nothing of Google's servers.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from bulk_pipeline_tests.s3 import S3, answer

ENVIRONMENT = {"GOOGLE_BEARER_TOKEN": "test"}
CONDITION = "HTTP_X_GOOG_IF_GENERATION_MATCH"


@dataclass
class Google(S3):
    """A running server whose buckets are at gs://."""

    scheme: str = "gs"
    generations: dict[str, int] = field(default_factory=dict)  # of each object, by bucket and key

    def __post_init__(self) -> None:
        super().__post_init__()
        self._numbers = itertools.count(1_700_000_000_000_000)

    def fill(self, bucket_url: str, keys: Iterable[str], data: bytes = b"") -> None:
        keys = list(keys)
        super().fill(bucket_url, keys, data)
        self.generations |= {f"{bucket_url[5:]}/{key}": next(self._numbers) for key in keys}

    def _serve(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        method, in_pieces = environ["REQUEST_METHOD"], "uploadId" in environ["QUERY_STRING"]
        name = unquote(environ["PATH_INFO"]).lstrip("/")
        # The client writes a bucket's "-" as "%2D", which is the same, and which moto takes apart.
        environ["RAW_URI"] = environ["REQUEST_URI"] = environ["RAW_URI"].replace("%2D", "-")
        wanted = environ.pop(CONDITION, None) if self.heeds_conditions else None
        if wanted is not None and int(wanted) != self.generations.get(name, 0):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            return answer(start_response, 412)
        if source := environ.pop("HTTP_X_GOOG_COPY_SOURCE", None):
            environ["HTTP_X_AMZ_COPY_SOURCE"] = source

        def start(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            if status.startswith("2"):
                if method == "DELETE" and not in_pieces:
                    self.generations.pop(name, None)
                elif method == ("POST" if in_pieces else "PUT"):
                    self.generations[name] = next(self._numbers)
                if name in self.generations:
                    headers = [*headers, ("x-goog-generation", str(self.generations[name]))]
            return start_response(status, headers, *rest)

        return list(self._app(environ, start))
