"""A plan as text, JSON, Markdown and picture."""

from collections.abc import Mapping, Sequence
from typing import Any

from bulk_pipeline.charts import Chart, bar_chart, share_chart, stack
from bulk_pipeline.lengths import Lengths
from bulk_pipeline.plan import PartitionPlan, Plan
from bulk_pipeline.spec import PAGE_TOKENS
from bulk_pipeline.stages.sampling_changes import describe
from bulk_pipeline.wording import counted

BAR_WIDTH = 40  # characters of the histogram's longest bar
MAX_PARTITIONS = 30  # in a text; the rest are added up
MAX_BAD_ROWS = 30  # named in a text
PARTITION_NUMBERS = (
    "partition",
    "state",
    "rows",
    "has_prompts",
    "statuses",
    "cannot_run",
    "longest_request",
    "requests",
    "not_ready",
    "duplicates",
    "answered",
    "in_others",
    "to_run",
    "later_turns",
    "reasons",
    "run_prompt_tokens",
    "shared_prefix_tokens",
    "most_new_tokens",
    "changed_sampling",
    "adapters",
    "notes",
)
TOTALS = (
    "rows",
    "requests",
    "not_ready",
    "duplicates",
    "answered",
    "in_others",
    "to_run",
    "later_turns",
    "run_prompt_tokens",
    "shared_prefix_tokens",
    "most_new_tokens",
)


def to_json(plan: Plan) -> dict[str, Any]:
    """Every number of the plan, as plain values."""
    estimate, rate = plan.estimate, plan.rate
    return {
        "dataset": plan.dataset,
        **{name: plan.total(name) for name in TOTALS},
        "statuses": plan.counts("statuses"),
        "reasons": plan.counts("reasons"),
        "adapters": plan.counts("adapters"),
        "prompt_tokens": _lengths_json(plan.lengths),
        "engine": plan.engine,
        "last_run": plan.last_run
        and {name: value for name, value in plan.last_run.items() if name != "points"},
        "estimate": {
            "requests": estimate.requests,
            "tokens_per_second": rate and rate.tokens_per_second,
            "rate_source": rate and rate.source,
            "price_per_hour": plan.price_per_hour,
            "expected_tokens": estimate.expected_tokens,
            "most_tokens": estimate.most_tokens,
            "seconds": estimate.seconds,
            "most_seconds": estimate.most_seconds,
            "cost": estimate.cost,
            "most_cost": estimate.most_cost,
        },
        "problems": plan.problems,
        "notes": plan.notes,
        "partitions": [
            {name: getattr(partition, name) for name in PARTITION_NUMBERS}
            | {"prompt_tokens": _lengths_json(partition.lengths)}
            for partition in plan.partitions
        ],
    }


def to_text(plan: Plan, max_bad_rows: int | None = MAX_BAD_ROWS) -> str:
    """The plan for a terminal."""
    blocks = [
        f"{plan.dataset}: {counted(len(plan.partitions), 'partition')}, {plan.total('rows')} rows, "
        f"{plan.total('requests')} requests, {plan.estimate.requests} to run",
        _partition_table(plan),
        _histogram(plan.lengths),
        _cannot_run(plan, max_bad_rows),
        _changed_sampling(plan),
        _adapters(plan.counts("adapters")),
        _requests(plan),
        _engine(plan),
        _estimate(plan),
        "\n".join(f"note: {note}" for note in _notes(plan)),
        "\n".join(f"problem: {problem}" for problem in plan.problems),
    ]
    return "\n\n".join(block for block in blocks if block)


def to_markdown(plan: PartitionPlan) -> str:
    """One partition's plan, for the metadata of its prompts."""
    lengths = plan.lengths.numbers()
    shared = _share(plan.shared_prefix_tokens, plan.run_prompt_tokens)
    lines = [
        f"**{plan.to_run} of {plan.requests} requests to run** ({_listed(plan.reasons)}); "
        f"{plan.answered} answered, {plan.duplicates} equal to another.",
        "",
        f"Rows: {_listed(plan.statuses)}. Prompt tokens: {lengths['min']} to {lengths['max']}, "
        f"median {lengths['p50']}, 95 % up to {lengths['p95']}. Shared leading pages: {shared}. "
        f"At most {plan.most_new_tokens} new tokens.",
        "",
        *(
            [f"Sampling changed: {describe(plan.changed_sampling)}.", ""]
            if plan.changed_sampling
            else []
        ),
        *([f"{_adapters(plan.adapters)}.", ""] if plan.adapters else []),
        "| tokens | rows |",
        "| ---: | ---: |",
        *(f"| {first}–{last} | {rows} |" for first, last, rows in plan.lengths.bins()),
    ]
    return "\n".join(lines)


def numbers(plan: PartitionPlan) -> dict[str, int | float]:
    """One partition's plan under the names that the UI plots."""
    lengths = plan.lengths.numbers()
    return {
        "requests_to_run": plan.to_run,
        "requests_answered": plan.answered,
        "requests_duplicate": plan.duplicates,
        "prompt_tokens_p50": lengths["p50"],
        "prompt_tokens_p95": lengths["p95"],
        "shared_prefix_tokens": plan.shared_prefix_tokens,
        "most_new_tokens": plan.most_new_tokens,
    }


def picture(plan: Plan) -> Chart:
    """Prompt lengths, and what becomes of the requests."""
    known = ("to_run", "answered", "in_others", "not_ready")
    shared = plan.total("requests") - sum(map(plan.total, known))
    return stack(
        f"Plan of {plan.dataset}",
        [
            bar_chart(
                f"{plan.dataset}: prompt lengths",
                [(str(last), rows) for _, last, rows in plan.lengths.bins()],
                "tokens, up to",
            ),
            share_chart(
                "requests",
                [
                    ("to run", plan.total("to_run")),
                    ("run with an equal one", shared),
                    ("answered", plan.total("answered")),
                    ("answered elsewhere", plan.total("in_others")),
                    ("cannot run", plan.total("not_ready")),
                ],
            ),
        ],
    )


def format_seconds(seconds: float) -> str:
    """A duration in its two largest units."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    return f"{hours // 24} d {hours % 24} h"


def text_table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns side by side: texts to the left, numbers to the right."""
    cells = [list(head), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[place]) for row in cells) for place in range(len(head))]
    is_number = [
        all(isinstance(row[place], int | float) or row[place] is None for row in rows)
        for place in range(len(head))
    ]
    lines = (
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_number, strict=True)
        ).rstrip()
        for row in cells
    )
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _lengths_json(lengths: Lengths) -> dict[str, Any]:
    bins = [{"from": first, "to": last, "rows": rows} for first, last, rows in lengths.bins()]
    return lengths.numbers() | {"histogram": bins}


def _partition_table(plan: Plan) -> str:
    head = ("partition", "rows", "ready", "requests", "answered", "to run", "why")
    shown = plan.partitions[:MAX_PARTITIONS]
    rows: list[tuple[Any, ...]] = [
        (
            each.partition,
            each.rows,
            each.statuses.get("ready", 0) if each.has_prompts else None,
            each.requests if each.has_prompts else None,
            each.answered + each.in_others if each.has_prompts else None,
            each.to_run if each.has_prompts else None,
            _listed(each.reasons) if each.has_prompts else "no prompts yet",
        )
        for each in shown
    ]
    if len(plan.partitions) > 1:
        rest = len(plan.partitions) - len(shown)
        rows.append(
            (
                f"all (with {rest} not shown)" if rest else "all",
                plan.total("rows"),
                plan.counts("statuses").get("ready", 0),
                plan.total("requests"),
                plan.total("answered") + plan.total("in_others"),
                plan.total("to_run"),
                _listed(plan.counts("reasons")),
            )
        )
    return text_table(head, rows)


def _histogram(lengths: Lengths) -> str:
    bins, found = lengths.bins(), lengths.numbers()
    if not bins:
        return ""
    most = max(rows for _, _, rows in bins)
    lines = [
        f"prompt tokens: {found['total']:,}; of a row {found['min']} to {found['max']}, median "
        f"{found['p50']}, 95% up to {found['p95']}, 99% up to {found['p99']}"
    ]
    for first, last, rows in bins:
        bar = "#" * -(-rows * BAR_WIDTH // most)
        lines.append(f"  {first:>6} - {last:<6} {rows:>9,}  {bar}".rstrip())
    return "\n".join(lines)


def _cannot_run(plan: Plan, most: int | None) -> str:
    counts = {name: count for name, count in plan.counts("statuses").items() if name != "ready"}
    if not counts:
        return ""
    examples = [
        f"  {each.partition} row {row['row_index']}{_id_of(row, plan)}: {row['status']}: "
        f"{row['error']}"
        for each in plan.partitions
        for row in each.cannot_run
    ]
    lines = [f"rows that cannot run: {_listed(counts)}", *examples[:most]]
    if rest := sum(counts.values()) - len(lines) + 1:
        lines.append(f"  {rest:,} more; --bad-rows 0 names all")
    return "\n".join(lines)


def _id_of(row: Mapping[str, Any], plan: Plan) -> str:
    """A row's name in the user's own column, where there is one and texts are shown."""
    return f" ({plan.id_column} {row['row_id']})" if plan.id_column and "row_id" in row else ""


def _changed_sampling(plan: Plan) -> str:
    return "\n".join(
        f"sampling changed for {each.partition}: {describe(each.changed_sampling)}"
        for each in plan.partitions
        if each.changed_sampling
    )


def _adapters(counts: Mapping[str, int]) -> str:
    return f"requests by adapter: {_listed(counts)}" if counts else ""


def _requests(plan: Plan) -> str:
    lines = []
    if duplicates := plan.total("duplicates"):
        lines.append(f"{duplicates:,} requests ask the same as another one and run with it")
    if later := plan.total("later_turns"):
        lines.append(
            f"{later:,} of the requests to run are later turns of a conversation, which go on from "
            "the answers before them"
        )
    if plan.total("run_prompt_tokens"):
        shared = _share(plan.total("shared_prefix_tokens"), plan.total("run_prompt_tokens"))
        lines.append(
            f"of the prompts to run, {shared} stand in leading pages of {PAGE_TOKENS} tokens that "
            "an earlier one has too, and need not be computed again"
        )
    return "\n".join(lines)


def _engine(plan: Plan) -> str:
    engine = plan.engine
    most = engine["most_cache_tokens_used"]
    lines = [
        f"model {engine['model']} on {engine['device']}: batch {engine['max_batch_size']}, cache "
        f"{engine['cache_tokens']} ({engine['cache_type']})"
    ]
    if engine["longest_request"]:
        lines.append(
            f"the longest request has {engine['longest_request']:,} tokens and takes "
            f"{engine['cache_tokens_of_longest']:,} of the cache"
            f"{'' if most is None else f', a batch of such {most:,}'}"
        )
    if sizes := engine.get("sizes"):
        lines.append(_sizes(sizes))
    if plan.last_run and plan.last_run["settings"]:
        shown = ", ".join(f"{name} {value}" for name, value in plan.last_run["settings"].items())
        lines.append(f"last run: {shown}")
    return "\n".join(lines)


def _sizes(sizes: dict[str, Any]) -> str:
    if sizes["cache_tokens"] is None:
        return f"sizes on this machine ({sizes['device']}): not known"
    held = f", weights held {sizes['weights_held']}" if sizes["weights_held"] else ""
    at_once = sizes["longest_requests_at_once"]
    return (
        f"sizes on this machine ({sizes['device']}): batches of up to {sizes['max_batch_size']:,}, "
        f"a cache of {sizes['cache_tokens']:,} tokens"
        f"{'' if at_once is None else f', {at_once:,} of the longest requests at once'}{held}"
    )


def _estimate(plan: Plan) -> str:
    estimate, rate = plan.estimate, plan.rate
    if not estimate.requests:
        return "nothing to run"
    tokens = f"{estimate.expected_tokens:,.0f} new tokens (at most {estimate.most_tokens:,})"
    if rate is None:
        return (
            f"expected: {tokens}; no rate was measured yet, give one with --tokens-per-second to "
            "know the time"
        )
    assert estimate.seconds is not None
    assert estimate.most_seconds is not None
    text = (
        f"expected: {tokens}, {format_seconds(estimate.seconds)} (at most "
        f"{format_seconds(estimate.most_seconds)}) at {rate.tokens_per_second:,.1f} tokens/s, "
        f"{rate.source}"
    )
    if estimate.cost is None:
        return text
    return f"{text}; cost {estimate.cost:,.2f} (at most {estimate.most_cost:,.2f})"


def _notes(plan: Plan) -> list[str]:
    """The notes of the plan and of its partitions, equal ones once."""
    by_note: dict[str, list[str]] = {}
    for partition in plan.partitions:
        for note in partition.notes:
            by_note.setdefault(note, []).append(partition.partition)
    grouped = [
        f"{', '.join(keys[:5])}{', ...' if len(keys) > 5 else ''}: {note}"
        for note, keys in by_note.items()
    ]
    return [*plan.notes, *grouped]


def _share(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} tokens ({part / max(whole, 1):.0%})"


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items()) or "none"
