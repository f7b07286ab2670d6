"""One decode step of a mixture-of-experts layer, tensor- and expert-parallel.

Every rank computes a slice of the latent and of the router's logits; one
`all_gather_topk` gives all ranks the whole latent and each token's experts. A rank runs
the experts that it owns, and an all-reduce adds up what the chosen ones said. The
output equals that of the same layer in plain JAX on one device. Runs anywhere:
``python examples/moe_decode.py``.
"""

from __future__ import annotations

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P

import jax_pcie

TOKENS, HIDDEN, LATENT, EXPERTS, CHOSEN = 4, 256, 128, 64, 6
NUM_CPU_DEVICES = 4
Params = dict[str, Array]

SPECS = {
    "latent": P(None, "tp"),
    "router": P(None, "tp"),
    "correction": P(),
    "up": P("tp"),
    "down": P("tp"),
}


def init(key: Array) -> Params:
    shapes = {
        "latent": (HIDDEN, LATENT),
        "router": (HIDDEN, EXPERTS),
        "up": (EXPERTS, LATENT, LATENT),
        "down": (EXPERTS, LATENT, HIDDEN),
    }
    keys = jax.random.split(key, len(shapes) + 1)
    params = {
        name: jax.random.normal(k, shape) * shape[-2] ** -0.5
        for k, (name, shape) in zip(keys, shapes.items(), strict=False)
    }
    params["correction"] = 0.1 * jax.random.normal(keys[-1], (EXPERTS,))
    return params


def apply_experts(params: Params, latent: Array, gates: Array) -> Array:
    """``sum_e gates[:, e] * expert_e(latent)``; gates [tokens, experts], mostly 0."""
    hidden = jax.nn.silu(jnp.einsum("tl,elm->tem", latent, params["up"]))
    return jnp.einsum("te,tem,emh->th", gates, hidden, params["down"])


def gates_of(weights: Array, ids: Array, num_experts: int) -> Array:
    """[tokens, experts]: each chosen expert's weight at its place."""
    rows = jnp.arange(len(ids))[:, None]
    return jnp.zeros((len(ids), num_experts)).at[rows, ids].add(weights)


def layer(params: Params, x: Array, group: jax_pcie.PeerGroup) -> Array:
    """A rank's part, inside `shard_map`; x [tokens, hidden] is the same on all."""
    latent, weights, ids = jax_pcie.all_gather_topk(
        x @ params["latent"],  # [tokens, latent / n]
        x @ params["router"],  # [tokens, experts / n]
        group,
        bias=params["correction"],
        k=CHOSEN,
    )
    own = EXPERTS // group.world_size
    first = lax.axis_index(group.axis) * own
    gates = lax.dynamic_slice_in_dim(gates_of(weights, ids, EXPERTS), first, own, 1)
    return jax_pcie.all_reduce(apply_experts(params, latent, gates), group)


def plain_layer(params: Params, x: Array) -> Array:
    scores = jax.nn.sigmoid(x @ params["router"])
    _, ids = lax.top_k(scores + params["correction"], CHOSEN)
    weights = jnp.take_along_axis(scores, ids, axis=1)
    weights = weights / (weights.sum(axis=1, keepdims=True) + 1e-20)
    gates = gates_of(weights, ids, EXPERTS)
    return apply_experts(params, x @ params["latent"], gates)


def main() -> None:
    jax.config.update("jax_num_cpu_devices", NUM_CPU_DEVICES)
    jax.config.update("jax_default_matmul_precision", "highest")
    mesh = jax.make_mesh((len(jax.devices()),), ("tp",), (jax.sharding.AxisType.Auto,))
    params_key, x_key = jax.random.split(jax.random.key(0))
    params, x = init(params_key), jax.random.normal(x_key, (TOKENS, HIDDEN))
    with jax_pcie.PeerGroup(mesh, "tp") as group:
        run = jax.jit(
            jax.shard_map(
                partial(layer, group=group),
                mesh=mesh,
                in_specs=(SPECS, P()),
                out_specs=P(),
            )
        )
        y = np.asarray(run(params, x))
        shapes = (
            (TOKENS, LATENT // group.world_size),
            (TOKENS, EXPERTS // group.world_size),
        )
        plan = group.plan("all_gather_topk", shapes, ("float32", "float32"))
    want = np.asarray(plain_layer(params, x))
    error = np.abs(y - want).max() / np.abs(want).max()
    print(f"ranks                 {mesh.size} {jax.default_backend()} devices")
    print(f"gather and selection  {plan.path}: {plan.wire_bytes} bytes a rank")
    print(f"difference            {error:.1e} of the largest output")
    if not error < 1e-5:
        raise SystemExit("the layer differs from plain JAX")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
