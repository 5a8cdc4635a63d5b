"""Fixtures that all tests share: the toy model and the small real one."""

from pathlib import Path

import pytest
import torch
from hypothesis import settings

from bulk_pipeline_tests.toy import toy_model

settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
settings.load_profile("untimed")

MODELS = Path(__file__).parent.parent / "data" / "models"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where PyTorch sees none."""
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


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
