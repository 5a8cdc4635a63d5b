"""The model as a Dagster resource: loaded on first use, once a run, freed at the run's end."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import PrivateAttr

from bulk_pipeline.gpu_lock import check_taken, take_gpus
from bulk_pipeline.spec import GeneratorSettings

if TYPE_CHECKING:
    from bulk_pipeline.engine.generator import BulkGenerator

log = logging.getLogger(__name__)


class ExLlamaV2Resource(GeneratorSettings, dg.ConfigurableResource):
    """A model behind exllamav2's DynamicGenerator; its fields are `GeneratorSettings`.

    Several datasets may share one, by naming its key as their ``generator_resource``.
    """

    _generator: Any = PrivateAttr(default=None)
    _gpus: ExitStack = PrivateAttr(default_factory=ExitStack)
    _num_loads: int = PrivateAttr(default=0)
    _run: str = PrivateAttr(default="a script")

    @contextmanager
    def yield_for_execution(self, context: dg.InitResourceContext) -> Iterator["ExLlamaV2Resource"]:
        """Free the model when the step's process, or an in-process run, is done with it."""
        if context.run_id:
            self._run = f"run {context.run_id}"
        try:
            yield self
        finally:
            self.close()

    @property
    def num_loads(self) -> int:
        """How often the model was loaded."""
        return self._num_loads

    def generator(self, dataset: str | None = None) -> "BulkGenerator":
        """The engine; the first call loads the model.

        On a GPU it waits until one is free that no other process of this machine holds.

        Parameters
        ----------
        dataset
            What it is for, as a process that waits for the GPU will read it.
        """
        from bulk_pipeline.engine.loading import load_generator, resolve_device

        if self._generator is None:
            taken: list[str] = []
            if resolve_device(self) == "cuda":
                user = f"{self._run} of {dataset}" if dataset else self._run
                take = take_gpus(self.gpu_count, user, self.gpu_wait_seconds)
                taken = self._gpus.enter_context(take)
            try:
                if taken:
                    check_taken(taken)
                self._generator = load_generator(self)
            except BaseException:
                self._gpus.close()
                raise
            self._num_loads += 1
        return self._generator

    def close(self) -> None:
        """Free the model, if it was loaded, and the GPU."""
        try:
            if self._generator is not None:
                self._generator.close()
                self._generator = None
        finally:
            self._gpus.close()
