"""What every benchmark shares: facts about the machine, samples, receipts.

A receipt is one JSON document with everything needed to repeat or doubt a figure. Arms
alternate within each sample, so that a drifting clock hits all of them alike.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax

ROOT = pathlib.Path(__file__).resolve().parent.parent


def _run(*command: str) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    except FileNotFoundError:
        return ""
    return result.stdout.strip()


def _checksum(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _link() -> str:
    """How the first two GPUs are connected, as `nvidia-smi topo` names it."""
    rows = [line.split() for line in _run("nvidia-smi", "topo", "-m").splitlines()]
    for row in rows:
        if row and row[0] == "GPU0" and len(row) > 2:
            return row[2]
    return "unknown"


def facts() -> dict[str, Any]:
    """Command, commit, devices, link, driver, versions and the extension's checksum."""
    query = "index,name,uuid,driver_version,clocks.sm,clocks.max.sm,power.limit"
    packages = ("jax", "jaxlib", "jax-cuda13-plugin", "jax_pcie", "numpy")
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    native = sorted((ROOT / "jax_pcie").glob("_c*.so"))
    return {
        "command": " ".join([pathlib.Path(sys.executable).name, *sys.argv]),
        # On a machine that has the files without their history, the caller names it.
        "commit": os.environ.get("COMMIT") or _run("git", "rev-parse", "HEAD"),
        "tree": os.environ.get("TREE")
        or _run("git", "status", "--porcelain")
        or "clean",
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "devices": [str(device) for device in jax.devices()],
        "gpus": _run("nvidia-smi", f"--query-gpu={query}", "--format=csv").splitlines(),
        "link": _link(),
        "compiler": _run("nvcc", "--version").splitlines()[-1:],
        "python": sys.version.split()[0],
        "versions": versions,
        "extensions": {path.name: _checksum(path) for path in native},
    }


def alternate(
    arms: dict[str, Callable[[], Any]], num_samples: int
) -> dict[str, list[float]]:
    """Seconds per call of each arm: `num_samples` rounds, every other one reversed."""
    for call in arms.values():
        jax.block_until_ready(call())
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for sample in range(num_samples):
        names = list(arms) if sample % 2 == 0 else list(reversed(arms))
        for name in names:
            start = time.perf_counter()
            jax.block_until_ready(arms[name]())
            samples[name].append(time.perf_counter() - start)
    return samples


def median(samples: list[float]) -> float:
    return statistics.median(samples)


def write_receipt(path: pathlib.Path, receipt: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(receipt, indent=1) + "\n")
