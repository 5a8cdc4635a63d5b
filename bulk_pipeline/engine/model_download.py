"""Models from a URL: a folder on object storage or an archive in, a local folder out.

A machine downloads a model once. The first process that wants it holds a lock while it downloads
into a folder beside the final one, which then appears whole; others wait and use it. The final
folder's name depends on what the URL holds, so that a model that was changed there is another.
"""

import hashlib
import os
import posixpath
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any

import filelock

from bulk_pipeline.storage.objects import ObjectStorage

CACHE = "BULK_PIPELINE_MODELS"  # the environment's name for the folder that holds the models
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".zip")
DOWNLOADS = 8  # files at once


def is_model_url(model: str) -> bool:
    """Whether `generator.model` is a URL."""
    return "://" in model


def is_archive(url: str) -> bool:
    """Whether a URL names one file that holds the model."""
    return url.endswith(ARCHIVES)


def cache_folder() -> Path:
    """Where downloaded models are, for all processes of the machine."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "bulk_pipeline" / "models"
    return Path(os.environ.get(CACHE) or default).expanduser()


def download_model(url: str, patterns: Sequence[str]) -> Path:
    """The local folder of the model at a URL; downloads it where it is not there yet.

    Parameters
    ----------
    patterns
        Names of the files that count; of an archive all files that do are unpacked.

    Raises
    ------
    OSError
        If the storage does not give the files.
    ValueError
        If there are none, or the URL is neither a folder on object storage nor an archive.
    """
    remote = _Remote(url, patterns)
    final = remote.folder
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(final.parent / f".{final.name}.lock"):
        if not final.is_dir():  # nobody else downloaded it meanwhile
            with _new_folder(final) as folder:
                remote.download(folder)
    return final


def find_downloaded(url: str, patterns: Sequence[str]) -> Path | None:
    """The local folder of the model at a URL as it is there now, if this machine has it."""
    try:
        folder = _Remote(url, patterns).folder
    except (OSError, ValueError):
        return None
    return folder if folder.is_dir() else None


@contextmanager
def _new_folder(final: Path) -> Iterator[Path]:
    """A folder that becomes `final` when the block ends without error."""
    prefix = f".{final.name}-"
    for left in final.parent.glob(f"{prefix}*"):  # by a process that was killed; we hold the lock
        shutil.rmtree(left)
    work = Path(tempfile.mkdtemp(dir=final.parent, prefix=prefix))
    try:
        yield work
        work.chmod(0o755)
        os.replace(work, final)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


class _Remote:
    """What a URL holds: the files that count, or one archive."""

    def __init__(self, url: str, patterns: Sequence[str]):
        self.url, self.patterns = url.rstrip("/"), patterns
        scheme = url.partition("://")[0]
        self.is_archive = is_archive(self.url)
        if scheme in ("http", "https") and not self.is_archive:
            raise ValueError(
                f"generator.model: {url} must end in one of {', '.join(ARCHIVES)}; a folder cannot "
                "be listed by HTTP, give an archive or a folder on s3://, gs:// or az://"
            )
        options = {"client_options": {"allow_http": True}} if scheme == "http" else {}
        self.storage = ObjectStorage(scheme, **options)
        self.files = [self.storage.head(self.url)] if self.is_archive else self._list()

    def _list(self) -> list[dict[str, Any]]:
        try:
            entries = self.storage.ls(self.url)
        except FileNotFoundError:
            entries = []
        files = [e for e in entries if e["type"] == "file" and self._counts(e["name"])]
        if not files:
            raise ValueError(
                f"generator.model: no model files ({', '.join(self.patterns)}) in {self.url}; "
                "correct the URL, or upload them there"
            )
        return files

    def _counts(self, name: str) -> bool:
        return any(fnmatch(posixpath.basename(name), pattern) for pattern in self.patterns)

    @property
    def folder(self) -> Path:
        """Where the model is on this machine, once it is downloaded."""
        told = [
            (posixpath.basename(file["name"]), file["size"], file["etag"] or file["last_modified"])
            for file in self.files
        ]
        digest = hashlib.blake2b(repr((self.url, sorted(told))).encode(), digest_size=8).hexdigest()
        name = posixpath.basename(self.url)
        for ending in ARCHIVES:
            name = name.removesuffix(ending)
        return cache_folder() / f"{name}-{digest}"

    def download(self, folder: Path) -> None:
        """Write the files into a folder."""
        if self.is_archive:
            archive = folder / "archive"
            self._fetch(self.files[0], archive)
            unpack(archive, folder, self._counts, self.url)
            archive.unlink()
            return
        with ThreadPoolExecutor(DOWNLOADS) as pool:
            targets = [folder / posixpath.basename(file["name"]) for file in self.files]
            list(pool.map(self._fetch, self.files, targets))

    def _fetch(self, file: dict[str, Any], target: Path) -> None:
        with open(target, "wb") as out:
            self.storage.download(file["name"], out)
        if target.stat().st_size != file["size"]:
            raise OSError(
                f"{self.storage.url(file['name'])} changed while it was downloaded; run again"
            )


def unpack(archive: Path, folder: Path, counts: Callable[[str], bool], url: str) -> None:
    """Write the files beside an archive's config.json into a folder, by their bare names.

    Raises
    ------
    ValueError
        If it is no archive, or has no config.json.
    """
    try:
        with _members(archive) as (names, open_member):
            configs = [name for name in names if posixpath.basename(name) == "config.json"]
            if not configs:
                raise ValueError(f"generator.model: no config.json in {url}; give a whole model")
            home = posixpath.dirname(min(configs, key=lambda name: name.count("/")))
            for name in names:
                if posixpath.dirname(name) == home and counts(name):
                    with open_member(name) as source, open(folder / Path(name).name, "wb") as out:
                        shutil.copyfileobj(source, out, 1 << 20)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"generator.model: {url} is no whole archive ({error})") from None


@contextmanager
def _members(archive: Path) -> Iterator[tuple[list[str], Callable[[str], IO[bytes]]]]:
    """The regular files of a tar or zip file, and how to read one."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as opened:
            yield [info.filename for info in opened.infolist() if not info.is_dir()], opened.open
        return
    with tarfile.open(archive) as tar:
        files = {member.name: member for member in tar.getmembers() if member.isreg()}

        def read(name: str) -> IO[bytes]:
            stream = tar.extractfile(files[name])
            assert stream is not None
            return stream

        yield list(files), read
