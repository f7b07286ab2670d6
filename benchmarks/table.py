"""The rows and checks of a benchmark, printed as they come and kept for its receipt."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

from harness import Arm, Bursts, median

Row = dict[str, Any]


class Table:
    """Times arms against each other and notes what was checked.

    Attributes:
        rows: one per arm and shape, with raw samples; times in seconds per call.
        checks: what was checked, with what is wrong in words.
        copy_bytes_per_s: rate of the memory, once it was measured; 0 before.
    """

    def __init__(self, bursts: Bursts, heat_s: float = 0.0) -> None:
        self.bursts = bursts
        self.heat_s = heat_s
        self.rows: list[Row] = []
        self.checks: list[Row] = []
        self.copy_bytes_per_s = 0.0

    @property
    def failures(self) -> list[str]:
        return [f"{c['what']}: {wrong}" for c in self.checks for wrong in c["wrong"]]

    def check(self, what: str, wrong: list[str], **facts: Any) -> None:  # noqa: ANN401
        """Notes a check: nothing in `wrong` if it passed."""
        self.checks.append({"what": what, "wrong": wrong, **facts})
        shown = ", ".join(
            f"{key.replace('_', ' ')} {value:.3g}"
            if isinstance(value, float)
            else f"{key.replace('_', ' ')} {value}"
            for key, value in facts.items()
        )
        parts = [part for part in (shown, *wrong) if part]
        print(
            f"  {'WRONG' if wrong else 'ok   '} {what}:", "; ".join(parts), flush=True
        )

    def time(
        self,
        section: str,
        shape: str,
        arms: dict[str, Arm],
        *,
        baseline: str | None = None,
        flops: float = 0.0,
        num_bytes: dict[str, int] | None = None,
        min_samples: int = 0,
        max_pause_s: float = math.inf,
    ) -> dict[str, Row]:
        """Times the arms, interleaved; prints and keeps a row each.

        Args:
            baseline: the arm whose time over another's is the other's ratio.
            flops: of one call of any arm. Only such arms also run hot.
            num_bytes: of one call, by arm.
            max_pause_s: bounds the pause before a sample.

        Returns:
            The rows by arm.
        """
        begin = time.perf_counter()
        bursts = dataclasses.replace(
            self.bursts,
            num_samples=max(min_samples, self.bursts.num_samples),
            pause_s=min(max_pause_s, self.bursts.pause_s),
        )
        rows = bursts.sample(arms)
        heated: dict[str, Row] = {}
        if self.heat_s and flops:
            hot = dataclasses.replace(bursts, num_samples=3, heat_s=self.heat_s)
            heated = hot.sample(arms)
        base = median(rows[baseline]["samples_s"]) if baseline else 0.0
        for name, row in rows.items():
            row |= {"section": section, "shape": shape, "arm": name}
            row["seconds"] = median(row["samples_s"])
            if baseline:
                row["baseline"] = baseline
                row["baseline_over_this"] = base / row["seconds"]
            if flops:
                row["tflops"] = flops / row["seconds"] / 1e12
            if num_bytes:
                row["bytes"] = num_bytes[name]
                row["bytes_per_s"] = num_bytes[name] / row["seconds"]
                if self.copy_bytes_per_s:
                    row["of_copy_rate"] = row["bytes_per_s"] / self.copy_bytes_per_s
            if heated:
                row["sustained"] = heated[name]
                row["sustained_seconds"] = median(heated[name]["samples_s"])
            _print(row)
        self.rows += rows.values()
        print(f"#   timed for {time.perf_counter() - begin:.1f} s", flush=True)
        return rows


def _print(row: Row) -> None:
    low, high = min(row["samples_s"]) * 1e6, max(row["samples_s"]) * 1e6
    parts = [
        f"  {row['shape']:>16} {row['arm']:24} {row['seconds'] * 1e6:10.2f} us",
        f"[{low:.2f} to {high:.2f}]",
    ]
    if "tflops" in row:
        parts.append(f"{row['tflops']:7.1f} TFLOP/s")
    if "bytes_per_s" in row:
        parts.append(f"{row['bytes_per_s'] / 1e9:6.0f} GB/s")
    if "of_copy_rate" in row:
        parts.append(f"{row['of_copy_rate']:5.1%} of copy")
    if "baseline_over_this" in row:
        parts.append(f"{row['baseline_over_this']:5.2f}x")
    if "sustained_seconds" in row:
        parts.append(f"sustained {row['sustained_seconds'] * 1e6:.2f} us")
    if median(row["host_shares"]) > 0.9:
        parts.append("(host-bound: an upper limit)")
    if row.get("of_copy_rate", 0) > 1.05:
        parts.append("(faster than memory: from the cache?)")
    print(*parts, flush=True)
