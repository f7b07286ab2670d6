"""Mode strings: every alias, every refusal, and the values that they become."""

import dataclasses

import pytest

from jax_pcie import Codec, Topology, WireMode

CODEC_WORDS = {
    "i8": Codec.INT8,
    "int8": Codec.INT8,
    "e4m3": Codec.E4M3,
    "fp8": Codec.E4M3,
    "mx": Codec.MXFP8,
    "mxfp8": Codec.MXFP8,
}
TOPOLOGY_WORDS = {"ag": Topology.AG, "ring": Topology.RING, "a2a": Topology.A2A}
OFF_WORDS = ["", "0", "off", "no", "false", "none", "bf16", "raw"]
OFF = WireMode(Codec.RAW, Topology.RING)
CANONICAL = {
    "bf16": OFF,
    "i8": WireMode(Codec.INT8, Topology.AG),
    "i8_ring": WireMode(Codec.INT8, Topology.RING),
    "i8_a2a": WireMode(Codec.INT8, Topology.A2A),
    "e4m3": WireMode(Codec.E4M3, Topology.AG),
    "e4m3_ring": WireMode(Codec.E4M3, Topology.RING),
    "e4m3_a2a": WireMode(Codec.E4M3, Topology.A2A),
    "mx": WireMode(Codec.MXFP8, Topology.AG),
    "mx_ring": WireMode(Codec.MXFP8, Topology.RING),
    "mx_a2a": WireMode(Codec.MXFP8, Topology.A2A),
}


@pytest.mark.parametrize("codec", CODEC_WORDS)
def test_a_bare_codec_means_a_compressed_all_gather(codec: str) -> None:
    assert WireMode.parse(codec) == WireMode(CODEC_WORDS[codec], Topology.AG)


@pytest.mark.parametrize("separator", ["_", "-"])
@pytest.mark.parametrize("topology", TOPOLOGY_WORDS)
@pytest.mark.parametrize("codec", CODEC_WORDS)
def test_codec_and_topology_come_in_either_order(
    codec: str, topology: str, separator: str
) -> None:
    want = WireMode(CODEC_WORDS[codec], TOPOLOGY_WORDS[topology])
    assert WireMode.parse(codec + separator + topology) == want
    assert WireMode.parse(topology + separator + codec) == want


@pytest.mark.parametrize("topology", TOPOLOGY_WORDS)
def test_a_bare_topology_means_e4m3(topology: str) -> None:
    assert WireMode.parse(topology) == WireMode(Codec.E4M3, TOPOLOGY_WORDS[topology])


def test_1_means_the_default_compression() -> None:
    assert WireMode.parse("1") == WireMode(Codec.E4M3, Topology.AG)


@pytest.mark.parametrize("word", OFF_WORDS)
def test_off_has_many_names(word: str) -> None:
    assert WireMode.parse(word) == OFF


def test_none_means_off() -> None:
    assert WireMode.parse(None) == OFF


@pytest.mark.parametrize(
    "text", ["  i8_ring\n", "I8_Ring", "INT8-RING", "\tRing_Int8 "]
)
def test_case_and_surrounding_space_do_not_matter(text: str) -> None:
    assert WireMode.parse(text) == WireMode(Codec.INT8, Topology.RING)


@pytest.mark.parametrize("text", ["  ", " OFF ", "None", "BF16", "False"])
def test_off_too_is_stripped_and_lowered(text: str) -> None:
    assert WireMode.parse(text) == OFF


@pytest.mark.parametrize(
    "text",
    [
        *("mx_rnig", "i9", "int", "fp16", "f32", "8", "2", "true", "yes", "on", "auto"),
        *("i8_i8", "i8_mx", "ring_a2a", "ring_ring", "i8_ring_a2a", "i8_ring_ring"),
        *("bf16_ring", "raw_a2a", "off_ag", "ring_0", "none_ring", "1_ring", "i8_1"),
        *("i8 ring", "i8,ring", "i8/ring", "i8.ring", "i8ring", "_", "i8_", "-ring"),
        *("i8__ring", "off_off", "0_", "i8_bf16"),
        *("i8b64", "int8b64", "i8b64_ring", "i4", "int4_a2a", "i6", "ring_i6"),
    ],
)
def test_anything_else_is_refused_by_name_with_the_modes_listed(text: str) -> None:
    with pytest.raises(ValueError) as refusal:
        WireMode.parse(text)
    message = str(refusal.value)
    assert repr(text) in message or f'"{text}"' in message
    for mode in CANONICAL:
        assert mode in message


@pytest.mark.parametrize("value", [0, 1, 1.0, True, False, b"i8", ["i8"], Codec.INT8])
def test_other_types_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match=type(value).__name__):
        WireMode.parse(value)


@pytest.mark.parametrize("text", CANONICAL)
def test_canonical_strings_survive_a_round_trip(text: str) -> None:
    assert WireMode.parse(text) == CANONICAL[text]
    assert str(CANONICAL[text]) == text
    assert WireMode.parse(str(CANONICAL[text])) == CANONICAL[text]


@pytest.mark.parametrize(
    "mode", [*CANONICAL.values(), WireMode(Codec.RAW, Topology.A2A)]
)
def test_a_wire_mode_is_taken_as_it_is(mode: WireMode) -> None:
    assert WireMode.parse(mode) is mode


def test_a_wire_mode_is_a_value() -> None:
    mode = WireMode(Codec.MXFP8, Topology.RING)
    assert mode == WireMode(codec=Codec.MXFP8, topology=Topology.RING)
    assert len({mode, WireMode(Codec.MXFP8, Topology.RING)}) == 1
    assert mode != WireMode(Codec.MXFP8, Topology.A2A)
    with pytest.raises(dataclasses.FrozenInstanceError):
        mode.codec = Codec.INT8


@pytest.mark.parametrize(
    ("codec", "topology"),
    [("i8", Topology.RING), (Codec.INT8, "ring"), (1, 1), (Topology.RING, Codec.INT8)],
)
def test_a_wire_mode_is_made_of_its_two_enums_only(
    codec: object, topology: object
) -> None:
    with pytest.raises(TypeError):
        WireMode(codec, topology)
