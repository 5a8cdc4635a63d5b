"""Object storage: s3://, gs://, az:// and memory:// as a file system of fsspec, by obstore.

obstore brings what a commit needs and fsspec does not have for all of them: a PUT on condition
that nobody changed the object since it was seen, uploads that appear whole or not at all, and
retries with backoff. What goes wrong is an `OSError` of one line that names URL and remedy.
"""

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import IO, Any

import obstore
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
)
from obstore.store import MemoryStore, from_url

SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss", "memory")
BLOCK_BYTES = 1 << 20  # read at once, at least
DOWNLOAD_BYTES = 8 << 20  # held at once while a whole object is downloaded
CONDITIONAL_TRIES = 5  # of a PUT whose answer got lost
FIRST_WAIT_SECONDS = 0.1  # before the second of them, doubled for each other
NO_BUCKET = re.compile(r"NoSuchBucket|bucket does not exist|ContainerNotFound", re.IGNORECASE)
STATUS = re.compile(r"status code: (\d{3}[^:\n]*)")
CODE = re.compile(r"<Code>(\w+)</Code>")
METADATA_HOST = "169.254.169.254"  # asked for credentials where there are none
S3_SCHEMES = ("s3", "s3a")
S3_KEYS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
AZURE_KEYS = "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"
CREDENTIALS = {"gs": "GOOGLE_APPLICATION_CREDENTIALS"} | dict.fromkeys(S3_SCHEMES, S3_KEYS)
REGION_HINTS = ("redirect", "PermanentRedirect", "AuthorizationHeaderMalformed")

Version = dict[str, str]  # what tells two states of an object apart: e_tag, version or both

_memory: dict[str, MemoryStore] = {}  # the buckets of memory://, for this process


class StorageError(OSError):
    """Object storage did not do what was asked; the message says why, and what to do."""


class ChangedError(Exception):
    """An object is not the one that was seen any more."""


def is_object_url(url: str) -> bool:
    """Whether a path is a URL of object storage."""
    scheme, mark, _ = url.partition("://")
    return bool(mark) and scheme in SCHEMES


@contextmanager
def one_line_errors(url: str) -> Iterator[None]:
    """Raise obstore's errors as a `StorageError`; a missing object stays FileNotFoundError."""
    try:
        yield
    except (FileNotFoundError, BaseError) as error:
        if isinstance(error, FileNotFoundError) and not NO_BUCKET.search(str(error)):
            raise FileNotFoundError(f"{url} is missing") from None
        raise StorageError(f"{url}: {_reason(url, error)}") from None


def _reason(url: str, error: Exception) -> str:
    text = str(error)
    status, code = STATUS.search(text), CODE.search(text)
    told = " ".join(match[1].strip() for match in (status, code) if match)
    if NO_BUCKET.search(text):
        bucket = url.partition("://")[2].partition("/")[0]
        return f"there is no bucket {bucket}; make it, or correct the URL or the endpoint"
    if METADATA_HOST in text or isinstance(error, UnauthenticatedError):
        names = CREDENTIALS.get(url.partition("://")[0], AZURE_KEYS)
        return (
            f"no valid credentials ({told or 'none found'}); set them in the environment, such as "
            f"{names}, or give storage_options"
        )
    if isinstance(error, PermissionDeniedError) or told.startswith("403"):
        return (
            f"access was refused ({told}); the credentials need the right to list, read, write and "
            "delete there"
        )
    if any(hint in text for hint in REGION_HINTS):
        return f"the bucket is elsewhere ({told or 'redirected'}); set AWS_REGION to its region"
    reason = told or text.split("\n")[0].rpartition(" - ")[2]
    return (
        f"the storage does not answer as it should ({reason}); check endpoint, region and network, "
        "then run again: what was committed is kept"
    )


class ObjectStorage(AbstractFileSystem):
    """A file system of fsspec over the buckets of one kind of object storage.

    Paths are ``<scheme>://<bucket>/<key>`` or ``<bucket>/<key>``. Objects are put whole; none can
    be opened for writing.

    Parameters
    ----------
    scheme
        One of `SCHEMES`.
    storage_options
        Keywords of `obstore.store.from_url`: ``endpoint``, ``region``, ``access_key_id`` and so
        on, ``client_options`` and ``retry_config`` (times in seconds). What is not given comes
        from the environment.
    """

    def __init__(self, scheme: str, **storage_options: Any):
        super().__init__()
        self.scheme, self._options = scheme, _obstore_options(scheme, storage_options)
        self._stores: dict[str, Any] = {}
        self._has_conditions = scheme == "memory"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        _, mark, rest = str(path).partition("://")
        return (rest if mark else str(path)).rstrip("/")

    def url(self, path: str) -> str:
        """A path with its scheme, as messages name it."""
        return f"{self.scheme}://{self._strip_protocol(path)}"

    def _locate(self, path: str) -> tuple[Any, str]:
        """The bucket's store, and the key in it."""
        bucket, _, key = self._strip_protocol(path).partition("/")
        if bucket not in self._stores:
            self._stores[bucket] = self._connect(bucket)
        return self._stores[bucket], key

    def _connect(self, bucket: str) -> Any:
        if self.scheme == "memory":
            return _memory.setdefault(bucket, MemoryStore())
        try:
            return from_url(f"{self.scheme}://{bucket}", **self._options)
        except UnknownConfigurationKeyError as error:
            raise ValueError(
                f"storage_options: {str(error).splitlines()[0]} Names are those of obstore, such "
                "as endpoint, region, access_key_id; see docs/object_storage.md"
            ) from None
        except (BaseError, TypeError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"{self.scheme}://{bucket}: {reason}; correct storage_options or the environment"
            ) from None

    # --- what fsspec asks for --------------------------------------------------------------------

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """What is right below a path: one request for a thousand names."""
        store, key = self._locate(path)
        with one_line_errors(self.url(path)):
            found = obstore.list_with_delimiter(store, key or None)
        bucket = self._strip_protocol(path).partition("/")[0]
        entries = [self._entry(bucket, meta) for meta in found["objects"]]
        entries += [
            {"name": f"{bucket}/{prefix}", "size": 0, "type": "directory"}
            for prefix in found["common_prefixes"]
        ]
        if not entries:
            raise FileNotFoundError(f"{self.url(path)} is missing")
        return entries if detail else sorted(entry["name"] for entry in entries)

    def find(
        self,
        path: str,
        maxdepth: int | None = None,
        withdirs: bool = False,
        detail: bool = False,
        **kwargs: Any,
    ) -> Any:
        """All objects below a path, however deep: one request for a thousand of them."""
        if maxdepth is not None or withdirs:
            return super().find(path, maxdepth=maxdepth, withdirs=withdirs, detail=detail)
        store, key = self._locate(path)
        bucket = self._strip_protocol(path).partition("/")[0]
        with one_line_errors(self.url(path)):
            pages = list(obstore.list(store, key or None, chunk_size=1000))
        entries = [self._entry(bucket, meta) for page in pages for meta in page]
        found = {entry["name"]: entry for entry in sorted(entries, key=lambda each: each["name"])}
        return found if detail else list(found)

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """An object's size, tag and time; or that there is something below the path."""
        store, key = self._locate(path)
        if key:
            try:
                return self.head(path)
            except FileNotFoundError:
                pass
        with one_line_errors(self.url(path)):
            if next(iter(obstore.list(store, key or None, chunk_size=1)), None):
                return {"name": self._strip_protocol(path), "size": 0, "type": "directory"}
        raise FileNotFoundError(f"{self.url(path)} is missing")

    def head(self, path: str) -> dict[str, Any]:
        """An object's size, tag and time."""
        store, key = self._locate(path)
        with one_line_errors(self.url(path)):
            meta = obstore.head(store, key)
        return self._entry(self._strip_protocol(path).partition("/")[0], meta)

    # fsspec's own take every failure for a missing file.

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Whether there is an object, or something below the path."""
        return self._type(path) is not None

    def isfile(self, path: str) -> bool:
        """Whether there is an object."""
        return self._type(path) == "file"

    def isdir(self, path: str) -> bool:
        """Whether there is something below the path, and no object."""
        return self._type(path) == "directory"

    def _type(self, path: str) -> str | None:
        try:
            return self.info(path)["type"]
        except FileNotFoundError:
            return None

    def walk(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """As fsspec's, but only what is missing is passed over."""
        return super().walk(path, *args, **kwargs | {"on_error": _raise_unless_missing})

    @staticmethod
    def _entry(bucket: str, meta: Any) -> dict[str, Any]:
        return {
            "name": f"{bucket}/{meta['path']}",
            "size": meta["size"],
            "type": "file",
            "etag": meta["e_tag"],
            "last_modified": meta["last_modified"],
        }

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        """The bytes of an object, all or a range."""
        store, key = self._locate(path)
        if start is not None or end is not None:
            size = self.size(path)
            start, end, _ = slice(start, end).indices(size)
            return self.read_range(path, start, max(start, end))
        with one_line_errors(self.url(path)):
            return bytes(obstore.get(store, key).bytes())

    def read_range(self, path: str, start: int, end: int) -> bytes:
        """The bytes from `start` to before `end`, which must both be within the object."""
        if start == end:
            return b""
        store, key = self._locate(path)
        with one_line_errors(self.url(path)):
            return bytes(obstore.get_range(store, key, start=start, end=end))

    def download(self, path: str, out: IO[bytes]) -> None:
        """Write an object to a file, a block at a time; a broken connection is taken up again."""
        store, key = self._locate(path)
        with one_line_errors(self.url(path)):
            for block in obstore.get(store, key).stream(min_chunk_size=DOWNLOAD_BYTES):
                out.write(block)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        """Put an object, whatever was there."""
        assert mode == "overwrite", mode
        store, key = self._locate(path)
        with one_line_errors(self.url(path)):
            obstore.put(store, key, bytes(value), use_multipart=False)

    def rm_file(self, path: str) -> None:
        """Delete an object."""
        store, key = self._locate(path)
        with one_line_errors(self.url(path)):
            obstore.delete(store, key)

    _rm = rm_file

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Copy an object within its bucket."""
        store, key = self._locate(path1)
        with one_line_errors(self.url(path1)):
            obstore.copy(store, key, self._locate(path2)[1])

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Copy an object within its bucket, and delete it where it was."""
        self.cp_file(path1, path2)
        self.rm_file(path1)

    def _open(
        self, path: str, mode: str = "rb", block_size: int | None = None, **kwargs: Any
    ) -> "ObjectFile":
        if mode != "rb":
            raise ValueError(f"{self.url(path)} is opened for reading only; put it whole")
        return ObjectFile(self, path, mode, block_size or BLOCK_BYTES, **kwargs)

    # --- what a commit needs ---------------------------------------------------------------------

    def upload(self, path: str, file: IO[bytes]) -> None:
        """Upload a file; the object appears when all of it has arrived."""
        store, key = self._locate(path)
        with one_line_errors(self.url(path)):
            obstore.put(store, key, file)

    def read_version(self, path: str) -> tuple[bytes, Version]:
        """An object's bytes, and which state of it they are."""
        store, key = self._locate(path)
        with one_line_errors(self.url(path)):
            result = obstore.get(store, key)
            return bytes(result.bytes()), _version(result.meta)

    def replace(self, path: str, data: bytes, seen: Version | None) -> Version:
        """Put an object on condition that it is still what was seen.

        Where an answer got lost, the object is looked at: `data` may have arrived. So `data` must
        tell who wrote it.

        Parameters
        ----------
        seen
            From `read_version` or an earlier `replace`; None where there must be no object.

        Raises
        ------
        ChangedError
            If somebody else has put, changed or deleted it; nothing was written.
        """
        store, key = self._locate(path)
        for attempt in range(CONDITIONAL_TRIES):
            last: Exception
            try:
                return _version(obstore.put(store, key, data, mode=seen or "create"))  # type: ignore[arg-type]
            except (BaseError, FileNotFoundError) as error:
                last = error
            if isinstance(last, (FileNotFoundError, NotSupportedError, PermissionDeniedError)):
                break
            try:
                now, version = self.read_version(path)
                if now == data:
                    return version
            except FileNotFoundError:
                version = None
            if version != seen:
                raise ChangedError(path)
            time.sleep(FIRST_WAIT_SECONDS * 2**attempt)
        with one_line_errors(self.url(path)):
            raise last

    def check_conditions(self, path: str, data: bytes) -> None:
        """Make sure, once a process, that the server heeds conditions.

        Parameters
        ----------
        path, data
            An object that this process has just put; if it is put again, nothing is lost.

        Raises
        ------
        StorageError
            If the server puts the object although the condition does not hold.
        """
        if self._has_conditions:
            return
        store, key = self._locate(path)
        other: Version = {"e_tag": '"0"', "version": "1"}
        for mode, refusal in (("create", AlreadyExistsError), (other, PreconditionError)):
            try:
                obstore.put(store, key, data, mode=mode)  # type: ignore[arg-type]
            except refusal:
                continue
            except NotSupportedError:
                pass
            except BaseError as error:
                raise StorageError(f"{self.url(path)}: {_reason(self.url(path), error)}") from None
            raise StorageError(
                f"{self.url(path)}: the server takes no notice of conditions on a PUT "
                "(If-None-Match, If-Match), so that two writers cannot be kept apart; update it or "
                "use another, such as Amazon S3, Google Cloud Storage, Azure, MinIO or R2"
            )
        self._has_conditions = True


class ObjectFile(AbstractBufferedFile):
    """An object opened for reading, a block at a time."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self.fs.read_range(self.path, start, end)


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _version(result: Any) -> Version:
    return {name: result[name] for name in ("e_tag", "version") if result[name] is not None}


def _obstore_options(scheme: str, options: dict[str, Any]) -> dict[str, Any]:
    """What obstore is to be called with: times as it wants them, credentials of a profile."""
    options = dict(options)
    if retry := options.get("retry_config"):
        backoff = retry.get("backoff", {})
        options["retry_config"] = _with_times(retry | {"backoff": _with_times(backoff)})
    if scheme not in S3_SCHEMES:
        return options
    endpoint = options.get("endpoint") or options.get("endpoint_url")
    endpoint = (
        endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    )
    if endpoint and endpoint.startswith("http://"):  # whoever wrote that allows it
        options["client_options"] = {"allow_http": True, **options.get("client_options", {})}
    if os.environ.get("AWS_PROFILE") and "access_key_id" not in options:
        options.setdefault("credential_provider", _profile_credentials())
    return options


def _with_times(config: dict[str, Any]) -> dict[str, Any]:
    is_time = {"retry_timeout", "init_backoff", "max_backoff"}
    return {
        name: timedelta(seconds=value)
        if name in is_time and isinstance(value, (int, float))
        else value
        for name, value in config.items()
    }


def _profile_credentials() -> Any:
    """The credentials that AWS_PROFILE names, which boto3 reads."""
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise ValueError(
            "AWS_PROFILE is set, and profiles are read by boto3; pip install boto3, or set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in its place"
        ) from None
    return Boto3CredentialProvider()
