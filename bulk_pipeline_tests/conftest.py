"""Fixtures that tests share: the toy model, the small real ones, and an S3 server."""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import settings

from bulk_pipeline_tests.toy import toy_model

if TYPE_CHECKING:
    from bulk_pipeline_tests.google import Google
    from bulk_pipeline_tests.s3 import S3

settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
settings.load_profile("untimed")

MODELS = Path(__file__).parent.parent / "data" / "models"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what takes long first, so that no worker is left with it, and skip what has no GPU."""
    items.sort(key=lambda item: not {"slow", "ui"} & set(item.keywords))
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(params=["local", "object storage"])
def any_root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty folder on each kind of file system: with a lock, and without."""
    return str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4().hex}"


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the toy model in float32."""
    return toy_model(tmp_path_factory.mktemp("toy") / "toy-llama")


@pytest.fixture(scope="session")
def toy_float64(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the toy model in float64, for tests of exactness."""
    return toy_model(tmp_path_factory.mktemp("toy64") / "toy-llama", "float64")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct, prepared once under data/models."""
    from bulk_pipeline.embedded_model import fetch_smollm2

    return fetch_smollm2(MODELS / "smollm2-135m-instruct")


@pytest.fixture(scope="session")
def exl2() -> Path:
    """Folder of SmolLM2-135M-Instruct in EXL2, for tests on a GPU."""
    if "SMOLLM2_EXL2" not in os.environ:
        pytest.skip("SMOLLM2_EXL2 names no model folder")
    return Path(os.environ["SMOLLM2_EXL2"])


@pytest.fixture(scope="session")
def s3_process() -> "Iterator[S3]":
    """An S3 server, and the environment that leads to it."""
    from bulk_pipeline_tests.s3 import ENVIRONMENT, S3, running

    with running(S3()) as server, pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setenv("AWS_ENDPOINT_URL", server.url)
        yield server


@pytest.fixture(scope="session")
def google_process() -> "Iterator[Google]":
    """What stands in for Google Cloud Storage, and the environment that leads to it."""
    from bulk_pipeline_tests.google import ENVIRONMENT, Google
    from bulk_pipeline_tests.s3 import running

    with running(Google()) as server, pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setenv("GOOGLE_BASE_URL", server.url)
        yield server


@pytest.fixture
def s3(s3_process: "S3") -> "Iterator[S3]":
    """The server without faults, and with no request noted."""
    s3_process.requests.clear()
    yield s3_process
    s3_process.stop_faults()


@pytest.fixture
def google(google_process: "Google") -> "Iterator[Google]":
    """The same."""
    google_process.requests.clear()
    yield google_process
    google_process.stop_faults()


@pytest.fixture(params=["s3", "google"])
def server(request: pytest.FixtureRequest) -> "S3":
    """A server of each kind."""
    return request.getfixturevalue(request.param)
