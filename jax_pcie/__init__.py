"""Compressed collectives for JAX on hosts whose GPUs talk over PCIe."""

from jax_pcie._ffi import PcieError
from jax_pcie.collectives import all_reduce
from jax_pcie.group import PeerGroup, Plan
from jax_pcie.wire import MODES, Codec, Topology, WireMode

__all__ = [
    "MODES",
    "Codec",
    "PcieError",
    "PeerGroup",
    "Plan",
    "Topology",
    "WireMode",
    "all_reduce",
]
