"""Runs the GPU tests with and without CUDA graphs, and leaves a receipt.

    python benchmarks/gpu_tests.py --receipt benchmarks/results/NAME.json [ARGUMENTS]

ARGUMENTS are pytest's. XLA reads its flags once a process, so each setting is a run of
`pytest -m cuda`: with graphs from one kernel up, without graphs, and with graphs whose
branches run concurrently.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import subprocess
import sys

import harness

SETTINGS = {
    "graphs": "--xla_gpu_graph_min_graph_size=1",
    "no-graphs": "--xla_gpu_enable_command_buffer=",
    "concurrent-graphs": (
        "--xla_gpu_graph_min_graph_size=1"
        " --xla_gpu_command_buffer_scheduling_mode=CONCURRENT"
    ),
}


def run(flags: str, arguments: list[str]) -> dict[str, object]:
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "-q", *arguments]
    result = subprocess.run(
        command,
        cwd=harness.ROOT,
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    print(result.stdout[-2000:], flush=True)
    summary = result.stdout.strip().splitlines()[-1]
    passed = re.search(r"(\d+) passed", summary)
    return {
        "xla_flags": flags,
        "exit_code": result.returncode,
        "passed": int(passed[1]) if passed else 0,
        "summary": summary,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--receipt", type=pathlib.Path, required=True)
    parser.add_argument(
        "--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS)
    )
    options, arguments = parser.parse_known_args()
    runs = {name: run(SETTINGS[name], arguments) for name in options.settings}
    passed = all(r["exit_code"] == 0 and r["passed"] for r in runs.values())
    receipt = {**harness.facts(), "verdict": "pass" if passed else "FAIL", "runs": runs}
    harness.write_receipt(options.receipt, receipt)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
