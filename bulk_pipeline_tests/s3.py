"""An S3 server for tests: moto's, in this process, which notes requests and fails when told to."""

import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import boto3
from moto.core import DEFAULT_ACCOUNT_ID
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.s3.models import s3_backends
from werkzeug.serving import WSGIRequestHandler, make_server

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_REGION": "us-east-1",
}
CODES = {
    401: "Unauthenticated",
    403: "AccessDenied",
    404: "NoSuchKey",
    412: "PreconditionFailed",
    429: "SlowDown",
    500: "InternalError",
    503: "SlowDown",
}
# Called with method and key before a request counts; what it returns is the answer's status.
Fault = Callable[[str, str], int | None]


class _Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, type: str, message: str, *args: Any) -> None:
        pass


@dataclass
class S3:
    """A running server.

    Attributes
    ----------
    requests
        Method, key and query of each request so far.
    before, after
        Answer in place of the server: without doing what was asked, and after it was done.
    heeds_conditions
        Whether it looks at If-Match and If-None-Match, as old servers do not.
    scheme
        How URLs of its buckets begin.
    """

    url: str = ""
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    before: Fault = lambda method, key: None
    after: Fault = lambda method, key: None
    heeds_conditions: bool = True
    scheme: str = "s3"

    def __post_init__(self) -> None:
        self._app = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()  # moto looks at a condition and puts in two steps

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        method, key = environ["REQUEST_METHOD"], unquote(environ["PATH_INFO"]).lstrip("/")
        if not self.heeds_conditions:
            environ.pop("HTTP_IF_MATCH", None), environ.pop("HTTP_IF_NONE_MATCH", None)
        self.requests.append((method, key, environ["QUERY_STRING"]))
        if status := self.before(method, key):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            return answer(start_response, status)
        with self._lock:
            body = self._serve(environ, start_response)
        if status := self.after(method, key):
            return answer(start_response, status)
        return body

    def _serve(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        return list(self._app(environ, start_response))

    def stop_faults(self) -> None:
        """Go on as a server that works."""
        self.heeds_conditions = True
        self.before = self.after = lambda method, key: None

    def counts(self, key_part: str = "") -> dict[str, int]:
        """How many requests of each method there were about keys with a text in them."""
        methods = [method for method, key, _ in self.requests if key_part in key]
        return {method: methods.count(method) for method in sorted(set(methods))}

    def client(self) -> Any:
        """boto3's client."""
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
        return boto3.client("s3", endpoint_url=self.url, region_name="us-east-1", **keys)

    def new_bucket(self) -> str:
        """The URL of a bucket of its own, for one test."""
        name = f"test-{uuid.uuid4().hex[:12]}"
        self.client().create_bucket(Bucket=name)
        return f"{self.scheme}://{name}"

    def fill(self, bucket_url: str, keys: Iterable[str], data: bytes = b"") -> None:
        """Put objects without a request for each."""
        backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
        for key in keys:
            backend.put_object(bucket_url[5:], key, data)

    def keys(self, bucket_url: str) -> list[str]:
        """All keys in a bucket."""
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=bucket_url[5:])
        return [each["Key"] for page in pages for each in page.get("Contents", [])]


def answer(start_response: Callable[..., Any], status: int) -> Iterable[bytes]:
    """A failure, as the server words it."""
    code = CODES[status]
    body = f"<Error><Code>{code}</Code></Error>".encode()
    start_response(f"{status} {code}", [("Content-Length", str(len(body)))])
    return [body]


@contextmanager
def running(server: S3) -> Iterator[S3]:
    """Run a server in a thread of this process."""
    http = make_server("127.0.0.1", 0, server, threaded=True, request_handler=_Quiet)
    server.url = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
