"""Prints what `measure` found: a table for people, one JSON document for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from jax_pcie.demo.measure import SECONDS_OF_RUNS, Row

_NOTES = (
    "wire: what a rank sends for a batch; for psum, what a ring all-reduce of "
    "bf16 would send, 2(n-1)/n of the array.",
    "drift: 1 - cosine to the float32 embedding computed on one device.",
    "time: of a batch, the median of the runs that fit in "
    f"{SECONDS_OF_RUNS} s after a warm-up; tokens/s counts real tokens.",
)
_CPU_NOTE = (
    "These are virtual devices that share one CPU's memory: the time is that of the "
    "model and of the codec's arithmetic on this CPU, not of a link. The wire column "
    "is what a link would carry. XLA's psum widens bf16 to float32 on a CPU."
)


def notes(platform: str) -> list[str]:
    """Returns what a reader has to know about the numbers."""
    return [*_NOTES, _CPU_NOTE] if platform == "cpu" else list(_NOTES)


def print_json(header: dict[str, Any], rows: Sequence[Row]) -> None:
    """Prints ``{"header": ..., "rows": [...]}`` and nothing else."""
    rows_as_dicts = [dataclasses.asdict(row) for row in rows]
    print(json.dumps({"header": header, "rows": rows_as_dicts}, indent=2))


def print_table(header: dict[str, Any], rows: Sequence[Row]) -> None:
    """Prints the header's lines, a row a mode, and the notes."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    for key, value in header.items():
        if key != "notes":
            console.print(f"# {key.replace('_', ' ')}: {_text(value)}", markup=False)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("mode", no_wrap=True)
    for title in ("wire MB", "worst drift", "mean drift", "time ms", "tokens/s"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("same bits", no_wrap=True)
    for row in rows:
        table.add_row(
            row.mode,
            f"{row.wire_bytes / 1e6:.2f}",
            f"{row.worst_drift:.1e}",
            f"{row.mean_drift:.1e}",
            f"{row.time_ms:.1f}",
            f"{row.tokens_per_s:.0f}",
            "yes" if row.same_bits else "NO",
        )
    console.print(table)
    for note in header["notes"]:
        console.print(note, markup=False)


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(part)}" for key, part in value.items())
    return f"{value:.1e}" if isinstance(value, float) else str(value)
