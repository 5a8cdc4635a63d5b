"""What `examine` found, as values, as JSON and as text."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from bulk_pipeline.engine.doctor.machine import Machine
from bulk_pipeline.engine.folders import CacheShape, Weights
from bulk_pipeline.engine.memory import GIB

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Problem:
    """One line that ends with the remedy; `stops` says whether a run would fail."""

    text: str
    stops: bool


@dataclass(frozen=True, slots=True)
class EndToken:
    """A token that ends a completion, and the files that name it."""

    id: int
    text: str | None
    named_by: str

    def __str__(self) -> str:
        return f"{self.id} {self.text}" if self.text else str(self.id)


@dataclass(frozen=True, slots=True)
class Rope:
    """Positions: the base, how they are scaled, and the key of config.json that says so."""

    theta: float | None
    scaling: dict[str, Any] | None
    named_by: str | None


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """A LoRA adapter: its largest rank, the matrices that it changes, and its bytes."""

    rank: int
    matrices: int
    num_bytes: int


@dataclass(slots=True)
class Model:
    """What the folder says; None where it does not say, or where the file is not there.

    Attributes
    ----------
    max_length
        Tokens that the model was made for.
    max_seq_len
        The longest sequence of a run with these settings.
    """

    folder: str
    architecture: str | None
    quantization: str | None
    weights: Weights | None
    has_template: bool | None
    end_tokens: list[EndToken]
    rope: Rope
    max_length: int
    vocab_size: int
    cache: CacheShape | None
    max_seq_len: int | None = None
    adapters: dict[str, AdapterInfo] = field(default_factory=dict)
    draft_weights: Weights | None = None
    draft_cache: CacheShape | None = None


@dataclass(frozen=True, slots=True)
class Fit:
    """What a cache of one type holds beside the weights; `rows` by their length in tokens."""

    cache_type: str
    bytes_per_token: int
    tokens: int
    rows: dict[int, int]


@dataclass(frozen=True, slots=True)
class Disk:
    """Where the tables are, and the bytes that are free there; None for a URL."""

    root: str
    free: int | None


@dataclass(slots=True)
class Report:
    """Everything that `examine` found.

    Attributes
    ----------
    attention
        ``flash-attn``, ``bulk_pipeline`` (the project's own) or ``torch``.
    weights_held
        ``float16`` or ``quantized``, on a GPU.
    batch_size, cache_tokens
        What a run with these settings would have.
    """

    machine: Machine
    device: str
    attention: str
    model: Model | None = None
    fits: list[Fit] = field(default_factory=list)
    weights_held: str | None = None
    batch_size: int | None = None
    cache_tokens: int | None = None
    disk: Disk | None = None
    problems: list[Problem] = field(default_factory=list)

    @property
    def stops(self) -> bool:
        """Whether a run would fail."""
        return any(problem.stops for problem in self.problems)

    def to_json(self) -> str:
        """Return all of it as JSON."""
        return json.dumps(asdict(self) | {"stops": self.stops}, indent=1)

    def __str__(self) -> str:
        return f"{self.machine_text}\n{self.model_text}"

    @property
    def machine_text(self) -> str:
        """What is the same for all models that run on this device."""
        return "\n".join(_machine_lines(self))

    @property
    def model_text(self) -> str:
        """The model, what fits, the disk, and the problems."""
        sections = (_model_lines, _fit_lines, _disk_lines, _problem_lines)
        return "\n".join(line for section in sections for line in section(self))

    def note(self, text: str, stops: bool = False) -> None:
        """Add a problem."""
        self.problems.append(Problem(text, stops))

    def tried(self, check: Callable[..., T], *args: Any, stops: bool = True) -> T | None:
        """Return what `check` returns; where it raises, note that and return None."""
        try:
            return check(*args)
        except (ValueError, OSError, RuntimeError) as error:
            self.note(next(iter(str(error).strip().splitlines()), repr(error)), stops)
            return None


def _line(name: str, value: object) -> str:
    return f"  {name:<14} {value}"


def _machine_lines(report: Report) -> Iterator[str]:
    machine = report.machine
    yield "machine"
    for index, gpu in enumerate(machine.gpus):
        capability = ".".join(map(str, gpu.capability))
        free = f"{gpu.free / GIB:.1f} of {gpu.total / GIB:.1f} GiB free"
        yield _line(f"cuda:{index}", f"{gpu.name}, {free}, compute capability {capability}")
    if not machine.gpus:
        yield _line("GPU", "none that PyTorch can use")
    yield _line("driver", machine.driver or "none found")
    yield _line("PyTorch", f"{machine.torch}, {_or(machine.cuda, 'CUDA ', 'without CUDA')}")
    yield _line("exllamav2", machine.exllamav2 or "not installed")
    yield _line("its module", machine.extension)
    yield _line("flash-attn", machine.flash_attn or "not installed")
    yield _line("Triton", machine.triton or "not installed")
    yield _line("memory", f"{machine.memory / GIB:.1f} GiB available")
    yield _line("runs on", f"{report.device}, attention by {report.attention}")


def _or(value: str | None, prefix: str, otherwise: str) -> str:
    return otherwise if value is None else prefix + value


def _model_lines(report: Report) -> Iterator[str]:
    model = report.model
    if model is None:
        return
    yield "model"
    yield _line("folder", model.folder)
    yield _line("architecture", model.architecture or "not known")
    yield _line("quantisation", model.quantization or "none")
    if model.weights is not None:
        yield _line(
            "weights",
            f"{model.weights.num_parameters / 1e6:,.0f} million parameters, "
            f"{model.weights.num_bytes / GIB:.2f} GiB, "
            f"{model.weights.bits_per_weight:.1f} bits a parameter",
        )
    yield _line("chat template", {True: "yes", False: "no", None: "not known"}[model.has_template])
    for end in model.end_tokens:
        yield _line("end token", f"{end} ({end.named_by})")
    rope = model.rope
    scaling = f"scaling {rope.scaling}" if rope.scaling else "no scaling"
    yield _line("rope", f"theta {rope.theta} (from {rope.named_by}), {scaling}")
    yield _line("length", f"{model.max_length} tokens")
    for name, info in model.adapters.items():
        size = f"{info.num_bytes / GIB:.3f} GiB"
        yield _line("adapter", f"{name}: rank {info.rank}, {info.matrices} matrices, {size}")


def _fit_lines(report: Report) -> Iterator[str]:
    if not report.fits:
        return
    yield "what fits beside the weights (an estimate)"
    lengths = list(report.fits[0].rows)
    rows = "".join(f"{f'rows of {n}':>16}" for n in lengths)
    yield f"  {'cache':<10}{'bytes a token':>14}{'tokens':>12}{rows}"
    for fit in report.fits:
        rows = "".join(f"{fit.rows[n]:>16,}" for n in lengths)
        yield f"  {fit.cache_type:<10}{fit.bytes_per_token:>14,}{fit.tokens:>12,}{rows}"
    if report.cache_tokens is not None:
        held = f"weights held {report.weights_held}, " if report.weights_held else ""
        batch = f"batches of up to {report.batch_size}, " if report.batch_size else ""
        cache = f"a cache of {report.cache_tokens:,} tokens"
        yield _line("with these settings:", held + batch + cache)


def _disk_lines(report: Report) -> Iterator[str]:
    if report.disk is not None:
        free = report.disk.free
        yield "disk"
        shown = "not a local folder" if free is None else f"{free / GIB:.1f} GiB free"
        yield _line("output.root", f"{report.disk.root}, {shown}")


def _problem_lines(report: Report) -> Iterator[str]:
    yield "problems" if report.problems else "no problems"
    for problem in sorted(report.problems, key=lambda problem: not problem.stops):
        yield _line("stops a run" if problem.stops else "note", problem.text)
