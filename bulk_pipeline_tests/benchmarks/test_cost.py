import re
from dataclasses import replace
from pathlib import Path

import pytest
from cost import Inputs, estimate, gpus_fed, main, read_inputs, smallest_partition, table

PAGE = Path(__file__).parent.parent.parent / "docs" / "scaling.md"
ROWS, GPUS = 10_000_000, [1, 8, 64]
FREE = Inputs(
    gpu_tokens=1000, row_tokens=100, raw_dataset=1e12, prompts=1e12, completions=1e12, output=1e12,
    run=0, load=0,
)  # fmt: skip


def quoted() -> Inputs:
    """The inputs as the page has them."""
    rows = re.findall(r"^\| `(\w+)` \| ([\d.,]+) ", PAGE.read_text(), re.M)
    values = {name: float(value.replace(",", "")) for name, value in rows}
    return Inputs(**values)


def test_the_page_has_the_tables_of_its_inputs():
    page = PAGE.read_text()
    assert table(quoted(), ROWS, GPUS) in page, "run python benchmarks/cost.py"
    assert f"feeds {gpus_fed(quoted())} GPUs" in page
    assert f"a partition of {smallest_partition(quoted()):,} rows" in page


def test_the_page_has_what_was_measured():
    for name in Inputs.__dataclass_fields__:
        measured = getattr(read_inputs(), name)
        assert getattr(quoted(), name) == pytest.approx(measured, rel=0.1), name


def test_without_overhead_gpus_share_the_work():
    for gpus in GPUS:
        found = estimate(FREE, 64_000, gpus, per_gpu=4)
        assert found.wall == pytest.approx(6400 / gpus)
        assert found.gpu_hours == pytest.approx(6400 / 3600)
        assert found.generation == pytest.approx(1)


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({"load": 60}, "start"),
        ({"run": 60}, "start"),
        ({"completions": 20}, "host"),
        ({"prompts": 20}, "idle"),
        ({"output": 20}, "idle"),
    ],
    ids=str,
)
def test_what_is_slow_is_what_costs(changes, share):
    found = estimate(replace(FREE, **changes), 64_000, 8, per_gpu=4)
    assert getattr(found, share) > 0.02
    assert found.wall > 6400 / 8
    shares = (found.generation, found.start, found.host, found.idle)
    assert sum(shares) == pytest.approx(1)


def test_other_numbers_may_take_the_place_of_those_measured(capsys):
    main(["--rows", "1000", "--gpus", "2", "--gpu-tokens", "100", "--load", "0"])
    text = capsys.readouterr().out
    assert re.search(r"^gpu_tokens +100.0$", text, re.M)
    assert re.search(r"^\| 2 \| 2 \| 500 \|", text, re.M)
