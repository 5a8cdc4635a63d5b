"""What this machine and a model folder are, what fits, and what would stop a run.

Nothing is loaded, compiled or downloaded but a hub model's small files. `examine` gives a report;
each problem in it is one line with its remedy.
"""

import os
import shutil
from pathlib import Path

from bulk_pipeline.engine.doctor.fit import examine_fit
from bulk_pipeline.engine.doctor.machine import Gpu, Machine, examine_machine
from bulk_pipeline.engine.doctor.model import examine_model
from bulk_pipeline.engine.doctor.report import Disk, Problem, Report
from bulk_pipeline.engine.folders import OWN_ATTENTION
from bulk_pipeline.engine.loading import resolve_device
from bulk_pipeline.engine.memory import GIB
from bulk_pipeline.spec import GeneratorSettings

__all__ = ["Gpu", "Machine", "Problem", "Report", "examine", "examine_machine"]

MIN_CAPABILITY = (8, 0)  # of a GPU; flash-attn and PyTorch's own Flash Attention need it
LOW_DISK_BYTES = 1 * GIB


def examine(
    settings: GeneratorSettings | None = None,
    root: str | None = None,
    machine: Machine | None = None,
) -> Report:
    """Look at the machine, at the model of `settings` and at the disk that holds `root`.

    Parameters
    ----------
    settings
        None leaves out the model and what fits.
    root
        Folder or URL of the tables; None leaves out the disk.
    machine
        Default: this one.
    """
    machine = machine or examine_machine()
    report = Report(machine, "cuda" if machine.gpus else "cpu", "")
    if settings is not None:
        report.device = report.tried(resolve_device, settings) or report.device
    report.attention = machine.attention(report.device)
    _check_machine(report)
    if settings is not None:
        examine_model(report, settings)
        examine_fit(report, settings)
    if root is not None:
        _examine_disk(report, root)
    return report


def _check_machine(report: Report) -> None:
    machine = report.machine
    if machine.exllamav2 is None:
        report.note("exllamav2 is not installed; pip install exllamav2==0.3.2", stops=True)
    if machine.driver_gpus and not machine.gpus:
        remedy = (
            "update the driver, or look at CUDA_VISIBLE_DEVICES"
            if machine.cuda
            else "install a PyTorch built for CUDA"
        )
        report.note(
            f"the driver shows a GPU ({machine.driver_gpus[0]}) that PyTorch {machine.torch} "
            f"cannot use, so that everything runs on the CPU; {remedy}"
        )
    if report.device == "cuda":
        _check_gpus(report)


def _check_gpus(report: Report) -> None:
    machine = report.machine
    if machine.extension_error is not None:
        report.note(machine.extension_error, stops=True)
    if report.attention == OWN_ATTENTION and machine.triton is None:
        report.note(
            "generator.device: cuda needs paged attention, and neither flash-attn 2.5.7 nor "
            "Triton is installed; pip install triton, or set generator.device: cpu",
            stops=True,
        )
    for index, gpu in enumerate(machine.gpus):
        if gpu.capability < MIN_CAPABILITY:
            report.note(
                f"generator.device: cuda:{index} ({gpu.name}) has compute capability "
                f"{'.'.join(map(str, gpu.capability))}, and paged attention needs "
                f"{'.'.join(map(str, MIN_CAPABILITY))}; hide it with CUDA_VISIBLE_DEVICES, or set "
                "generator.device: cpu",
                stops=True,
            )


def _examine_disk(report: Report, root: str) -> None:
    if "://" in root:
        report.disk = Disk(root, None)
        return
    path = Path(root).expanduser().absolute()
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        report.note(f"output.root: cannot write in {existing}; choose another folder", stops=True)
    free = shutil.disk_usage(existing).free
    report.disk = Disk(root, free)
    if free < LOW_DISK_BYTES:
        report.note(
            f"output.root: {free / GIB:.2f} GiB are free in {existing}; make room, or choose "
            "another disk"
        )
