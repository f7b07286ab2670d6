"""MXFP8 products and the staged linear on one device: right first, then how fast.

    python benchmarks/mxfp8.py [--sections copy gemm mm small quantise staged memory]
                               [--receipt benchmarks/results/NAME.json]
                               [--plot benchmarks/results/NAME.png]

Times are device time per call, medians of bursts (`harness.Bursts`), with the lowest
and the highest sample; the arms of a section run interleaved in this process. On a
machine without a GPU the sizes are small, and the figures say only that everything
runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import time
from typing import Any

import harness
import jax
import mxfp8_cases as cases
import mxfp8_memory as memory
from harness import Bursts
from mxfp8_sections import FULL, LAPTOP, Sections
from table import Table

SECTIONS = ("copy", "gemm", "mm", "small", "quantise", "staged", "memory")


def _shape(text: str) -> cases.Shape:
    m, n, k = map(int, text.split("x"))
    return m, n, k


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument(
        "--shapes", nargs="+", type=_shape, help="MxNxK of gemm, K a multiple of 128"
    )
    parser.add_argument(
        "--scale-groups", nargs="+", type=int, choices=(32, 128), default=None
    )
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--pause", type=float, default=0.3, help="seconds")
    parser.add_argument("--burst", type=float, default=0.03, help="seconds")
    parser.add_argument(
        "--sustained",
        type=float,
        nargs="?",
        const=0.4,
        default=0.0,
        metavar="SECONDS",
        help="also time each arm after it ran for so long (0.4)",
    )
    parser.add_argument("--quick", action="store_true", help="three short samples")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument(
        "--xla-autotune",
        action="store_true",
        help="let XLA choose between cuBLAS and Triton for its products",
    )
    parser.add_argument("--receipt", type=pathlib.Path)
    parser.add_argument("--plot", type=pathlib.Path, help="of memory; PNG or SVG")
    return parser.parse_args()


def main() -> int:
    # Memory taken up front would leave PyTorch and the memory arms too little.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    options = _options()
    on_gpu = jax.default_backend() == "gpu"
    bursts = Bursts(options.samples, options.pause, options.burst)
    if options.quick or not on_gpu:
        bursts = Bursts(3, 0.05 if on_gpu else 0.0, 0.005)
    sizes = FULL if on_gpu else LAPTOP
    if options.shapes:
        sizes = dataclasses.replace(sizes, gemm=tuple(options.shapes))
    if options.scale_groups:
        sizes = dataclasses.replace(sizes, scale_groups=tuple(options.scale_groups))

    facts = harness.facts()
    for key in ("gpus", "devices", "commit", "versions"):
        print(f"# {key}: {facts[key]}")
    table = Table(bursts, options.sustained)
    compiler = cases.Compiler({} if options.xla_autotune else cases.CUBLAS_ONLY)
    use_torch = not options.no_torch and cases.has_torch()
    sections = Sections(sizes, table, compiler, use_torch)
    measured: dict[str, Any] = {}

    def leave_receipt(verdict: str) -> None:
        if not options.receipt:
            return
        receipt = {
            **facts,
            "verdict": verdict,
            "failures": table.failures,
            "sections": list(measured),
            "bursts": dataclasses.asdict(bursts),
            "compiler_options": compiler.options,
            "torch": use_torch,
            "copy_bytes_per_s": table.copy_bytes_per_s,
            "checks": table.checks,
            "rows": table.rows,
            "memory": measured.get("memory"),
            "compiled_to": sections.compiled_to,
        }
        harness.write_receipt(options.receipt, receipt)

    for section in SECTIONS:
        if section in options.sections:
            begin = time.perf_counter()
            measured[section] = getattr(sections, section)()
            print(f"# {section} took {time.perf_counter() - begin:.1f} s", flush=True)
            leave_receipt("unfinished")
    if options.plot and "memory" in measured:
        memory.plot(measured["memory"], options.plot)
    verdict = "FAIL" if table.failures else "pass"
    leave_receipt(verdict)
    print(f"# {verdict}", *table.failures, sep="\n#   ")
    return 1 if table.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
