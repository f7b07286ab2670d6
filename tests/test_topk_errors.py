"""What `topk_route` and `all_gather_topk` refuse, by the words that they say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import Ranks, at_one_world_size, at_two_ranks, make_mesh
from jax import P

import jax_pcie
from jax_pcie import PcieError, PeerGroup

EXPERTS = 64

BAD_ARGUMENTS: dict[str, tuple[dict, type[Exception], str]] = {
    "k of 0": ({"k": 0}, ValueError, "k is 0"),
    "k above 32": ({"k": 33}, ValueError, "k is 33.*at most 32"),
    "k above E": ({"experts": 8, "k": 9}, ValueError, "k is 9.*experts, 8"),
    "n_group": ({"n_group": 5}, ValueError, "n_group is 5.*experts, 64"),
    "no group": ({"n_group": 0}, ValueError, "n_group is 0"),
    "topk_group": ({"n_group": 4, "topk_group": 5}, ValueError, "topk_group is 5.*4"),
    "k of another type": ({"k": 4.0}, TypeError, "k must be an integer, not 4.0"),
    "True for k": ({"k": True}, TypeError, "k must be an integer, not True"),
    "renormalize": (
        {"renormalize": "no"},
        TypeError,
        "renormalize must be True or False, not 'no'",
    ),
    "factor that is none": (
        {"routed_scaling_factor": "2"},
        TypeError,
        "routed_scaling_factor must be a number, not '2'",
    ),
    "factor beyond float32": (
        {"routed_scaling_factor": 1e300},
        ValueError,
        r"routed_scaling_factor is 1e\+300",
    ),
    "scoring": ({"scoring": "tanh"}, ValueError, "scoring must be one of.*'tanh'"),
    "factor": (
        {"routed_scaling_factor": float("inf")},
        ValueError,
        "routed_scaling_factor is inf",
    ),
    "bias length": (
        {"bias": np.zeros(63, np.float32)},
        ValueError,
        r"bias has shape \(63,\); it must be \(64,\)",
    ),
    "bias dtype": (
        {"bias": np.zeros(64, np.float16)},
        TypeError,
        "bias has dtype float16",
    ),
    "logits dtype": ({"dtype": np.int32}, TypeError, "logits have dtype int32"),
    "logits of 8 bytes": (
        {"dtype": np.complex64},
        TypeError,
        "(logits|latent) ha.* dtype complex64",
    ),
    "logits rank": ({"shape": (2, 2, 32)}, ValueError, r"logits ha.* shape \(2, 2, "),
}


@at_two_ranks
@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_topk_refuses_bad_arguments_by_name(ranks: Ranks, case: str) -> None:
    arguments, error, pattern = BAD_ARGUMENTS[case]
    arguments = dict(arguments)
    experts = arguments.pop("experts", EXPERTS)
    dtype = arguments.pop("dtype", np.float32)
    shape = arguments.pop("shape", (2, experts))
    logits = jnp.zeros(shape, dtype)
    arguments.setdefault("k", 4)
    with pytest.raises(error, match=f"topk_route: .*{pattern}"):
        jax_pcie.topk_route(logits, **arguments)
    fn = jax.shard_map(
        lambda x: jax_pcie.all_gather_topk(x, x, ranks.group, **arguments),
        mesh=ranks.mesh,
        in_specs=P(*([None] * (logits.ndim - 1)), "tp"),
        out_specs=P(),
    )
    with pytest.raises(error, match=f"all_gather_topk: .*({pattern}|must have 2 axes)"):
        jax.eval_shape(fn, logits)


@at_two_ranks
def test_topk_refuses_bad_latents_and_places(ranks: Ranks) -> None:
    logits = jnp.zeros((2, EXPERTS))

    def refuse(latent: jax.Array, error: type[Exception], pattern: str) -> None:
        fn = jax.shard_map(
            lambda x, y: jax_pcie.all_gather_topk(x, y, ranks.group),
            mesh=ranks.mesh,
            in_specs=(P(), P(None, "tp")),
            out_specs=P(),
        )
        with pytest.raises(error, match=pattern):
            jax.eval_shape(fn, latent, logits)

    refuse(jnp.zeros((2, 4), jnp.complex64), TypeError, "latent has dtype complex64")
    refuse(jnp.zeros((2, 4, 1)), ValueError, "latent has shape")
    refuse(jnp.zeros((3, 4)), ValueError, "latent has 3, logits has 2 rows")
    refuse(jnp.zeros((2, 0)), ValueError, "must have columns")
    with pytest.raises(ValueError, match="must be called inside jax"):
        jax_pcie.all_gather_topk(logits, logits, ranks.group)


@at_one_world_size
@pytest.mark.parametrize("rows", [0, 2])
def test_topk_refuses_a_bias_that_varies_over_the_axis(ranks: Ranks, rows: int) -> None:
    fn = jax.shard_map(
        lambda x, b: jax_pcie.all_gather_topk(x, x, ranks.group, bias=b)[1:],
        mesh=ranks.mesh,
        in_specs=(P(None, "tp"), P("tp")),
        out_specs=P(),
    )
    biases = jnp.zeros(ranks.world * EXPERTS)  # a whole one for each rank
    message = "bias varies over axis 'tp'; it must be the same on every rank"
    with pytest.raises(ValueError, match=f"all_gather_topk: {message}"):
        jax.eval_shape(fn, jnp.zeros((rows, EXPERTS)), biases)


@pytest.mark.parametrize("differing", [(1,), (0,), (1, 3)], ids=str)
def test_topk_of_different_biases_is_an_error_on_cpu(differing: tuple) -> None:
    mesh = make_mesh("cpu", (4,), ("tp",))
    logits = np.zeros((2, EXPERTS), np.float32)
    biases = np.zeros((4, EXPERTS), np.float32)
    biases[list(differing), 7] = -0.0  # bytes are compared
    others = " ".join("123" if differing == (0,) else map(str, differing))
    message = f"4 ranks.*: all_gather_topk: the bias must be the same.*ranks: {others}"
    with PeerGroup(mesh, "tp") as group:
        run = jax.jit(
            jax.shard_map(
                lambda x, b: jax_pcie.all_gather_topk(x, x, group, bias=b[0]),
                mesh=mesh,
                in_specs=(P(None, "tp"), P("tp")),
                out_specs=P(),
                check_vma=False,
            )
        )
        for same in (np.zeros_like(biases), np.full_like(biases, np.nan)):
            jax.block_until_ready(run(logits, same))
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(run(logits, biases))
        with pytest.raises(PcieError, match=message):
            group.check()
