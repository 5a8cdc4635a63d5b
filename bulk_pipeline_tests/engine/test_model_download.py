"""A model from a URL: downloaded once a machine, whole or not at all."""

import io
import json
import signal
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from bulk_pipeline.engine.model_download import CACHE
from bulk_pipeline.engine.model_files import find_model, model_fingerprint, resolve_model
from bulk_pipeline.spec import GeneratorSettings
from bulk_pipeline_tests.s3 import S3

RESOLVE = (
    "import sys; from bulk_pipeline.engine.model_files import *; print(resolve_model(sys.argv[1]))"
)
FILES = {
    "config.json": json.dumps({"model_type": "llama"}).encode(),
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": (2).to_bytes(8, "little") + b"{}" + bytes(100_000),
    "pytorch_model.bin": b"a pickle",
}
KEPT = sorted(name for name in FILES if not name.endswith(".bin"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE, str(tmp_path / "models"))
    return tmp_path / "models"


@pytest.fixture
def url(s3: S3) -> str:
    """A model folder on S3."""
    root = s3.new_bucket()
    for name, data in FILES.items():
        s3.fill(root, [f"models/tiny/{name}"], data)
    s3.fill(root, ["models/tiny/original/model.safetensors"], b"not this one")
    return f"{root}/models/tiny"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def hidden(cache: Path) -> list[str]:
    """What an unfinished download left."""
    return [path.name for path in cache.iterdir() if path.is_dir() and path.name.startswith(".")]


def start(url: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RESOLVE, url]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_folder_on_s3_becomes_a_local_one(url, s3, cache):
    settings = GeneratorSettings(model=url)
    assert find_model(settings) is None
    folder = resolve_model(url)
    assert folder.parent == cache
    assert names(folder) == KEPT
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert find_model(settings) == folder
    s3.requests.clear()
    assert resolve_model(f"{url}/") == folder
    assert [query.count("list-type") for _, _, query in s3.requests] == [1]  # and no download


def test_the_tokenizer_comes_without_the_weights(url, s3):
    folder = resolve_model(url, tokenizer_only=True)
    assert names(folder) == ["chat_template.jinja", "config.json", "tokenizer.json"]
    assert s3.counts("safetensors") == {}
    whole = resolve_model(url)
    assert names(whole) == KEPT
    assert resolve_model(url, tokenizer_only=True) == whole


def test_a_model_that_was_changed_is_another(url, s3, cache):
    before = resolve_model(url)
    bucket, _, key = url[5:].partition("/")
    s3.fill(f"s3://{bucket}", [f"{key}/model.safetensors"], FILES["model.safetensors"] + b"more")
    after = resolve_model(url)
    assert model_fingerprint(before) != model_fingerprint(after)


def test_two_processes_at_once_download_it_once(url, s3):
    has_second_looked = threading.Event()

    def hold_the_weights(method: str, key: str) -> None:
        if len([1 for _, _, query in s3.requests if "list-type" in query]) == 2:
            has_second_looked.set()
        if "safetensors" in key:
            assert has_second_looked.wait(120)

    s3.before = hold_the_weights
    processes = [start(url), start(url)]
    done = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], done
    assert done[0][0] == done[1][0]
    assert names(Path(done[0][0].strip())) == KEPT
    assert s3.counts("model.safetensors") == {"GET": 1}


def test_a_killed_download_leaves_nothing_half(url, s3, cache):
    is_started, is_killed = threading.Event(), threading.Event()

    def wait_for_the_kill(method: str, key: str) -> None:
        if "safetensors" in key:
            is_started.set()
            assert is_killed.wait(120)

    s3.before = wait_for_the_kill
    process = start(url)
    assert is_started.wait(120)
    process.kill()
    process.communicate(timeout=240)
    is_killed.set()
    assert process.returncode == -signal.SIGKILL
    s3.before = lambda method, key: None
    assert find_model(GeneratorSettings(model=url)) is None
    assert len(hidden(cache)) == 1
    assert names(resolve_model(url)) == KEPT
    assert hidden(cache) == []


def test_a_download_that_fails_leaves_nothing(url, s3, cache):
    s3.before = lambda method, key: 403 if "safetensors" in key else None
    with pytest.raises(OSError, match=r"s3://.*/model\.safetensors: access was refused"):
        resolve_model(url)
    assert hidden(cache) == []
    assert not [path for path in cache.iterdir() if path.is_dir()]


# --- archives ------------------------------------------------------------------------------------


@pytest.fixture
def web(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A web server's URL, and the folder that it serves."""
    folder = tmp_path / "web"
    folder.mkdir()

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", folder
    server.shutdown()


def write_archive(path: Path, files: dict[str, bytes]) -> None:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in files.items():
                archive.writestr(name, data)
        return
    with tarfile.open(path, "w:gz" if path.name.endswith("gz") else "w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


@pytest.mark.parametrize("name", ["tiny.tar", "tiny.tar.gz", "tiny.tgz", "tiny.zip"])
@pytest.mark.parametrize("home", ["", "tiny-1.0/"])
def test_an_archive_is_unpacked(web, name, home):
    url, folder = web
    files = {home + name: data for name, data in FILES.items()}
    write_archive(folder / name, files | {"other/config.json/x": b"", "a/b/c/config.json": b"[]"})
    model = resolve_model(f"{url}/{name}", tokenizer_only=True)
    assert model.name.startswith("tiny-")
    assert names(model) == KEPT
    assert resolve_model(f"{url}/{name}") == model


def test_an_archive_cannot_write_elsewhere(web, cache, tmp_path):
    url, folder = web
    evil = {"../evil.json": b"{}", "/evil.json": b"{}", "x/../../evil.json": b"{}"}
    write_archive(folder / "m.tar", FILES | evil)
    assert names(resolve_model(f"{url}/m.tar")) == KEPT
    assert not list(tmp_path.rglob("evil.json"))


def test_an_archive_on_s3(s3, tmp_path):
    write_archive(tmp_path / "m.zip", FILES)
    root = s3.new_bucket()
    s3.fill(root, ["m.zip"], (tmp_path / "m.zip").read_bytes())
    assert names(resolve_model(f"{root}/m.zip")) == KEPT


# --- errors --------------------------------------------------------------------------------------


def test_what_cannot_be_a_model_is_named(url, s3, web, cache):
    address, folder = web
    (folder / "torn.tar.gz").write_bytes(b"\x1f\x8b and no more")
    write_archive(folder / "empty.zip", {"a/readme.json": b"{}"})
    bucket = url.rpartition("/models")[0]
    cases = {
        f"{bucket}/models/none": r"generator\.model: no model files \(\*\.json, .*\) in s3://.*/none;",
        f"{address}/tiny": r"generator\.model: http.*/tiny must end in one of \.tar, .*; a folder",
        f"{address}/torn.tar.gz": r"generator\.model: http.*/torn\.tar\.gz is no whole archive",
        f"{address}/empty.zip": r"generator\.model: no config\.json in http.*/empty\.zip; give a",
        "ftp://host/m.zip": r"ftp://host: .*; correct",
    }
    for model, message in cases.items():
        with pytest.raises(ValueError, match=message):
            resolve_model(model)
    with pytest.raises(FileNotFoundError, match=r"http.*/none\.zip is missing"):
        resolve_model(f"{address}/none.zip")
    with pytest.raises(
        ValueError, match=r"generator\.revision is for models of the hub, and s3://"
    ):
        resolve_model(url, "main")
    assert hidden(cache) == []
