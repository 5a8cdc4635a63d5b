"""The results of the throughput benchmark as Markdown tables and a chart.

Of several lines of one setting the last one counts. A run that was stopped early is marked in the
table; the chart takes its rate in the second half, which is the higher one.
"""

import json
from pathlib import Path
from typing import Any

Line = dict[str, Any]
FLOOR, PLAIN, PRODUCT = "forward_pass", "plain_loop", "bulk_pipeline"
ORDER = (FLOOR, PLAIN, PRODUCT)
COLOURS = {PLAIN: "tab:orange", PRODUCT: "tab:blue"}
MARKERS = "osD^v"
MOST_ROWS, ROWS_PER_PLACE = 1024, 8
MOST_CHART_BYTES = 100_000


def read_results(path: Path) -> list[Line]:
    """Return the measurements of a file."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def tables(lines: list[Line]) -> str:
    """Return one Markdown table for each model and machine."""
    texts = []
    for group in _groups(lines):
        model, machine = group[-1]["model"], group[-1]["machine"]
        dates = sorted(line["date"][:10] for line in group)
        where = f"{machine['gpus']} x {machine['gpu']}" if machine["gpu"] else "CPU"
        title = (
            f"{model['name']}, {model['quantisation']}; {where}, {machine['cores']} cores; "
            f"{dates[0]} to {dates[-1]}. Completion tokens/s:"
        )
        texts.append(f"{title}\n\n{_table(group)}")
    notes = (
        "`*` stopped before the end: the rate so far, and in brackets that of the second half of "
        "its time; the higher one counts in the ratio. A batch of n runs 8 n rows, at most 1,024, "
        "where no other number is given."
    )
    return "\n\n".join([*texts, notes])


def _table(lines: list[Line]) -> str:
    cells = {(*_row(line), line["batch"]): line for line in lines}
    batches = sorted({line["batch"] for line in lines}, key=_batch_order)
    rows = sorted({_row(line) for line in lines}, key=_row_order)
    out = [
        f"| workload | sampling | generator | {' | '.join(f'batch {b}' for b in batches)} |",
        f"| --- | --- | --- |{' --- |' * len(batches)}",
    ]
    for row in rows:
        workload, sampling, generator, label = row
        name = f"{generator} ({label})" if label else generator
        values = [_cell(cells.get((*row, batch))) for batch in batches]
        out.append(f"| {workload} | {sampling} | {name} | {' | '.join(values)} |")
        plain = [cells.get((workload, sampling, PLAIN, "", batch)) for batch in batches]
        if generator == PRODUCT and any(plain):
            ours = [cells.get((*row, batch)) for batch in batches]
            ratios = [_ratio(a, b) for a, b in zip(ours, plain, strict=True)]
            out.append(f"| | | times the plain loop | {' | '.join(ratios)} |")
    return "\n".join(out)


def _cell(line: Line | None) -> str:
    if line is None:
        return ""
    text = f"{line['tokens_per_second']:,.0f}"
    if not line.get("whole_run", True):
        second_half = line.get("second_half_tokens_per_second")
        text += f"* ({second_half:,.0f})" if second_half else "*"
    if line.get("rows", usual_rows(line["batch"])) != usual_rows(line["batch"]):
        text += f" ({line['rows']} rows)"
    return text


def _ratio(ours: Line | None, plain: Line | None) -> str:
    if ours is None or plain is None:
        return ""
    return f"{ours['tokens_per_second'] / charted_rate(plain):.1f}"


def usual_rows(batch: int | str) -> int:
    """Return the rows of a run where the command line does not say otherwise."""
    return MOST_ROWS if batch == "auto" else min(MOST_ROWS, ROWS_PER_PLACE * int(batch))


def charted_rate(line: Line) -> float:
    """Return a line's rate; of a run that was stopped, the higher one."""
    return max(line["tokens_per_second"], line.get("second_half_tokens_per_second") or 0)


def draw_chart(lines: list[Line], path: Path, workload: str, model: str) -> str:
    """Draw tokens/s against the batch, for the model and machine with most lines; say for which."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = [
        group
        for group in _groups(lines)
        if model in group[-1]["model"]["name"] and any(_is_charted(x, workload) for x in group)
    ]
    if not groups:
        return f"not drawn, no results of {workload}" + (f" with {model}" if model else "")
    group = max(groups, key=lambda lines: sum(_is_charted(x, workload) for x in lines))
    figure, axes = pyplot.subplots(figsize=(8, 5.8), layout="constrained")
    labels = sorted({line.get("label") or "" for line in group})
    for row in sorted({_row(line) for line in group}, key=_row_order):
        if row[2] == FLOOR or row[0] == workload:
            _draw_row(axes, [line for line in group if _row(line) == row], row, labels)
    axes.set(xscale="log", yscale="log", xlabel="batch (rows in generation)")
    axes.set_ylabel("completion tokens/s")
    axes.set_title(_chart_title(group[-1], workload), fontsize=10)
    ticks = sorted({place for line in group if (place := _place(line))})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, fontsize=7)
    figure.savefig(path, dpi=85)
    pyplot.close(figure)
    size = path.stat().st_size
    assert size < MOST_CHART_BYTES, f"{path}: {size} bytes"
    return f"{_chart_title(group[-1], workload)}, {size} bytes"


def _draw_row(axes: Any, lines: list[Line], row: tuple[str, ...], labels: list[str]) -> None:
    _, sampling, generator, label = row
    newest = {place: line for line in lines if (place := _place(line))}
    points = [(place, charted_rate(newest[place])) for place in sorted(newest)]
    if generator == FLOOR:
        axes.plot(
            *zip(*points, strict=True), color="grey", ls=":", label="exllamav2's forward pass alone"
        )
        return
    name = generator + (f" ({label})" if label else "")
    axes.plot(
        *zip(*points, strict=True),
        color=COLOURS[generator],
        ls="-" if sampling == "sampled" else "--",
        marker=MARKERS[labels.index(label) % len(MARKERS)],
        ms=5,
        label=f"{name}, {sampling}",
    )


def _chart_title(line: Line, workload: str) -> str:
    where = line["machine"]["gpu"] or "CPU"
    return f"{line['model']['name']}, {line['model']['quantisation']}, {where}: {workload}"


def _is_charted(line: Line, workload: str) -> bool:
    return line["generator"] != FLOOR and line["workload"] == workload


def _place(line: Line) -> int | None:
    """Return a line's place on the batch axis; auto stands where it came out."""
    batch = line["batch"]
    if batch == "auto":
        batch = line.get("settings", {}).get("max_batch_size")
    return batch if isinstance(batch, int) else None


def _groups(lines: list[Line]) -> list[list[Line]]:
    """Return the lines by model and machine, in the order of the file."""
    groups: dict[str, list[Line]] = {}
    for line in lines:
        model, machine = line["model"], line["machine"]
        key = (model["shape"], model["quantisation"], machine["gpu"], machine["gpus"])
        groups.setdefault(json.dumps(key, sort_keys=True), []).append(line)
    return list(groups.values())


def _row(line: Line) -> tuple[str, str, str, str]:
    sampling, label = line.get("sampling") or "", line.get("label") or ""
    return line["workload"], sampling, line["generator"], label


def _row_order(row: tuple[str, str, str, str]) -> tuple[bool, str, str, int, str]:
    workload, sampling, generator, label = row
    return generator != FLOOR, workload, sampling, ORDER.index(generator), label


def _batch_order(batch: int | str) -> tuple[bool, int]:
    return batch == "auto", 0 if batch == "auto" else int(batch)
