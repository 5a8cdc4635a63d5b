"""The model as a Dagster resource: loaded on first use, once a run, freed at the run's end."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import PrivateAttr

from bulk_pipeline.spec import GeneratorSettings

if TYPE_CHECKING:
    from bulk_pipeline.engine.generator import BulkGenerator

log = logging.getLogger(__name__)


class ExLlamaV2Resource(GeneratorSettings, dg.ConfigurableResource):
    """A model behind exllamav2's DynamicGenerator; its fields are `GeneratorSettings`.

    Several datasets may share one, by naming its key as their ``generator_resource``.
    """

    _generator: Any = PrivateAttr(default=None)
    _num_loads: int = PrivateAttr(default=0)

    @contextmanager
    def yield_for_execution(self, context: dg.InitResourceContext) -> Iterator["ExLlamaV2Resource"]:
        """Free the model when the step's process, or an in-process run, is done with it."""
        try:
            yield self
        finally:
            self.close()

    @property
    def num_loads(self) -> int:
        """How often the model was loaded."""
        return self._num_loads

    def generator(self) -> "BulkGenerator":
        """The engine; the first call loads the model."""
        from bulk_pipeline.engine.loading import load_generator

        if self._generator is None:
            self._generator = load_generator(self)
            self._num_loads += 1
        return self._generator

    def close(self) -> None:
        """Free the model, if it was loaded."""
        if self._generator is not None:
            self._generator.close()
            self._generator = None
