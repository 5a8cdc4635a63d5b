"""How a run's progress is shown: as observations of the asset, and as a bar on a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import dagster as dg

from bulk_pipeline.stages.progress import Progress, watching

# Seconds between two observations: a quarter of the time that has passed, within these bounds.
LEAST_SECONDS, MOST_SECONDS = 10.0, 60.0


def observer(context: dg.AssetExecutionContext) -> Callable[[Progress], None]:
    """Log progress and record it as an observation; at first often, then rarely."""
    due: dict[str, float] = {}

    def observe(progress: Progress) -> None:
        if progress.seconds < due.get(progress.partition, LEAST_SECONDS):
            return
        pause = min(max(progress.seconds / 4, LEAST_SECONDS), MOST_SECONDS)
        due[progress.partition] = progress.seconds + pause
        context.log.info(str(progress))
        context.log_event(
            dg.AssetObservation(
                context.asset_key,
                partition=progress.partition,
                description=str(progress),
                metadata=progress_numbers(progress),
            )
        )

    return observe


def progress_numbers(progress: Progress) -> dict[str, int | float]:
    """Progress under the names that the UI plots."""
    left = progress.seconds_left
    return {
        "rows_done": progress.done,
        "rows_to_do": progress.requests - progress.done,
        "completion_tokens": progress.completion_tokens,
        "tokens_per_second": progress.tokens_per_second,
        "mean_batch": progress.mean_batch,
        **({} if progress.cache_use is None else {"cache_use": progress.cache_use}),
        **(
            {}
            if progress.draft_acceptance is None
            else {"draft_acceptance": progress.draft_acceptance}
        ),
        **({} if left is None else {"seconds_left": left}),
    }


@contextmanager
def progress_bar(dataset: str) -> Iterator[None]:
    """Show a bar on the terminal (standard error) for each partition whose requests run here."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn
    from rich.progress import Progress as Bars

    bars = Bars(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}", markup=False),
        console=Console(stderr=True),
    )
    waiting = bars.add_task(f"{dataset}: reading and formatting", total=None, rate="")
    tasks: dict[str, Any] = {}

    def show(progress: Progress) -> None:
        bars.update(waiting, visible=False)
        if progress.partition not in tasks:
            tasks[progress.partition] = bars.add_task("", total=progress.requests, rate="")
        _, _, rate = str(progress).partition(" requests, ")
        bars.update(
            tasks[progress.partition],
            description=progress.partition,
            completed=progress.done,
            rate=rate,
        )

    with bars, watching(show):
        yield
