"""Compressed collectives for JAX on hosts whose GPUs talk over PCIe."""

import importlib.metadata
import pkgutil

# Python started in the source folder finds this package there, and the native modules
# only where they were installed: look in both.
__path__ = pkgutil.extend_path(__path__, __name__)

from jax_pcie import mxfp8
from jax_pcie._ffi import PcieError
from jax_pcie.collectives import all_reduce
from jax_pcie.gathers import all_gather_heads, all_gather_pair
from jax_pcie.group import PeerGroup, Plan
from jax_pcie.router import all_gather_topk, topk_route
from jax_pcie.wire import MODES, Codec, Topology, WireMode

try:
    __version__ = importlib.metadata.version("jax_pcie")
except importlib.metadata.PackageNotFoundError:
    __version__ = "unknown"  # of a source folder that nobody installed

__all__ = [
    "MODES",
    "Codec",
    "PcieError",
    "PeerGroup",
    "Plan",
    "Topology",
    "WireMode",
    "__version__",
    "all_gather_heads",
    "all_gather_pair",
    "all_gather_topk",
    "all_reduce",
    "mxfp8",
    "topk_route",
]
