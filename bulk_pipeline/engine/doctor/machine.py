"""The hardware and libraries that a run would find. Nothing is compiled, and no model is loaded."""

import importlib
import re
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch

from bulk_pipeline.engine.folders import OWN_ATTENTION
from bulk_pipeline.engine.loading import check_extension
from bulk_pipeline.engine.stand_in import EXTENSION

MIN_FLASH_ATTN = (2, 5, 7)  # the first with pages
DRIVER_SECONDS = 30  # nvidia-smi can hang where a driver does


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that PyTorch can use; memory in bytes."""

    name: str
    free: int
    total: int
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Machine:
    """Hardware and libraries; a version is None where there is none.

    Attributes
    ----------
    driver, driver_gpus
        What nvidia-smi says: the driver's version, and the names of the GPUs.
    cuda
        The CUDA version that PyTorch was built with.
    extension
        exllamav2's compiled module: its file, or how it would be had.
    extension_error
        Why it cannot be used; None where it can, or can be built.
    memory
        Bytes of main memory that are available.
    """

    gpus: list[Gpu]
    driver: str | None
    driver_gpus: list[str]
    torch: str
    cuda: str | None
    exllamav2: str | None
    extension: str
    extension_error: str | None
    flash_attn: str | None
    triton: str | None
    memory: int

    def attention(self, device: str) -> str:
        """Return whose attention a model on `device` uses."""
        if device == "cpu":
            return "torch"
        numbers = re.findall(r"\d+", self.flash_attn or "")[:3]
        is_usable = tuple(map(int, numbers)) >= MIN_FLASH_ATTN
        return "flash-attn" if is_usable else OWN_ATTENTION


def examine_machine() -> Machine:
    """Find out what is here; initialises CUDA where there is a GPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [
        Gpu(
            torch.cuda.get_device_name(i),
            *torch.cuda.mem_get_info(i),
            torch.cuda.get_device_capability(i),
        )
        for i in range(count)
    ]
    driver, names = _ask_driver()
    extension, error = _examine_extension()
    return Machine(
        gpus=gpus,
        driver=driver,
        driver_gpus=names,
        torch=torch.__version__,
        cuda=torch.version.cuda,
        exllamav2=_version("exllamav2"),
        extension=extension,
        extension_error=error,
        flash_attn=_version("flash-attn") if find_spec("flash_attn") else None,
        triton=_version("triton") if find_spec("triton") else None,
        memory=psutil.virtual_memory().available,
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _ask_driver() -> tuple[str | None, list[str]]:
    command = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DRIVER_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None, []
    rows = [line.split(", ", 1) for line in done.stdout.splitlines() if ", " in line]
    return (rows[0][0] if rows else None), [name for _, name in rows]


def _examine_extension() -> tuple[str, str | None]:
    """Where exllamav2's compiled module is or comes from, and why it cannot be used."""
    try:
        place = check_extension()
    except RuntimeError as error:
        return "not installed, and no CUDA to compile it with (needed on GPUs only)", str(error)
    if Path(place).is_dir():
        return f"not installed; would be compiled on first use with CUDA in {place}", None
    try:
        importlib.import_module(EXTENSION)
    except ImportError as error:
        return place, (
            f"generator.device: cuda cannot load exllamav2's compiled module {place} ({error}); "
            f"install an exllamav2 wheel built for PyTorch {torch.__version__}, or set "
            "generator.device: cpu"
        )
    return place, None
