"""A dataset in Python, between two assets of this project: tickets → answers → answer_lengths."""

import json
from pathlib import Path

import dagster as dg
import polars as pl

from bulk_pipeline import build_bulk_inference_defs, scan_table

ROOT = Path(__file__).parents[2]
TICKETS = ROOT / "data" / "tickets.jsonl"

ANSWERS = {
    "name": "answers",
    "source": {"path": "data/tickets.jsonl", "deps": ["tickets"], "id_column": "number"},
    "prompt": {
        "system": "You answer for a shop that sells lamps and kettles.",
        "template": "{{ subject }}\n\n{{ body }}",
    },
    "sampling": {"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 48},
    "generator": {"model": "data/models/smollm2-135m-instruct", "device": "cpu"},
}


@dg.asset(description="The tickets of a day, as another system would give them.")
def tickets() -> dg.MaterializeResult:
    """Write the file that the dataset reads."""
    rows = [
        {"number": "T-1", "subject": "Return", "body": "How do I send a lamp back?"},
        {"number": "T-2", "subject": "Warranty", "body": "My kettle leaks after a year."},
        {"number": "T-3", "subject": "Delivery", "body": "Where is my parcel?"},
    ]
    TICKETS.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return dg.MaterializeResult(metadata={"rows": len(rows)})


@dg.asset(deps=[dg.AssetKey(["answers", "output"])])
def answer_lengths() -> dg.MaterializeResult:
    """Read what came out, with polars."""
    answers = scan_table(str(ROOT / "data" / "bulk"), "answers")
    lengths = answers.select("number", pl.col("completion").str.len_chars().alias("chars"))
    lengths.collect().write_csv(ROOT / "data" / "answer_lengths.csv")
    return dg.MaterializeResult(metadata={"rows": lengths.select(pl.len()).collect().item()})


@dg.definitions
def defs() -> dg.Definitions:
    """The dataset, the assets around it, and a job over all of them."""
    everything = dg.AssetSelection.assets("answer_lengths").upstream()
    own = dg.Definitions(
        assets=[tickets, answer_lengths],
        jobs=[dg.define_asset_job("answer_tickets", selection=everything)],
    )
    return dg.Definitions.merge(own, build_bulk_inference_defs(ANSWERS, ROOT))
