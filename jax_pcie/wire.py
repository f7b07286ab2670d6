"""Wire modes: which codec and which topology a collective uses.

The only place that knows mode strings. Users may type ``"i8_ring"``; below this file
a mode is a `WireMode` of two enums, whose values are those of `ffi/codec.h` and
`ffi/topology.h`.
"""

from __future__ import annotations

import dataclasses
import enum
import re


class Codec(enum.IntEnum):
    """How a span of values becomes bytes on the wire.

    INT8 and E4M3 carry one fp32 scale per 128 values, MXFP8 one power of two per 32:
    132 bytes per 128 values each. RAW is the array's own dtype.
    """

    RAW = 0
    INT8 = 1
    E4M3 = 2
    MXFP8 = 3


class Topology(enum.IntEnum):
    """Who sends which record to whom.

    RING passes shards around, A2A sends each shard to its owner and back, AG is a ring
    that compresses only its all-gather half.
    """

    RING = 0
    A2A = 1
    AG = 2


_CODEC_WORDS = {
    "i8": Codec.INT8,
    "int8": Codec.INT8,
    "e4m3": Codec.E4M3,
    "fp8": Codec.E4M3,
    "mx": Codec.MXFP8,
    "mxfp8": Codec.MXFP8,
}
_TOPOLOGY_WORDS = {"ring": Topology.RING, "a2a": Topology.A2A, "ag": Topology.AG}
_OFF_WORDS = {"", "0", "off", "no", "false", "none", "bf16", "raw"}
_CANONICAL_CODEC = {
    Codec.RAW: "bf16",
    Codec.INT8: "i8",
    Codec.E4M3: "e4m3",
    Codec.MXFP8: "mx",
}


@dataclasses.dataclass(frozen=True)
class WireMode:
    """A codec and a topology, such as ``WireMode(Codec.INT8, Topology.RING)``.

    ``str(mode)`` is the canonical string, which `parse` reads, and every alias besides.
    (RAW with A2A can only be made as a value.)

    Example:
        >>> str(WireMode.parse("INT8-ring"))
        'i8_ring'
    """

    codec: Codec
    topology: Topology

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec):
            raise TypeError(f"codec must be a Codec, not {self.codec!r}")
        if not isinstance(self.topology, Topology):
            raise TypeError(f"topology must be a Topology, not {self.topology!r}")
        if self.codec is Codec.RAW and self.topology is Topology.AG:
            raise ValueError(
                "Topology.AG compresses the all-gather half, and Codec.RAW compresses "
                "nothing: use Topology.RING"
            )

    @property
    def compresses(self) -> bool:
        """Whether values are rounded to a smaller format on their way."""
        return self.codec is not Codec.RAW

    def __str__(self) -> str:
        codec = _CANONICAL_CODEC[self.codec]
        default = Topology.AG if self.compresses else Topology.RING
        if self.topology is default:
            return codec
        return f"{codec}_{self.topology.name.lower()}"

    @classmethod
    def parse(cls, mode: str | WireMode | None) -> WireMode:
        """Reads a wire mode; `None` means off.

        Args:
            mode: one codec word (``i8``/``int8``, ``e4m3``/``fp8``, ``mx``/``mxfp8``)
                and at most one topology word (``ag``, ``ring``, ``a2a``; default
                ``ag``) in either order, joined by ``_`` or ``-``; a bare topology word
                or ``1`` means E4M3; ``off``, ``bf16``, ``raw`` and the like mean no
                compression. Case does not matter. A `WireMode` is taken as it is.
        Raises:
            ValueError: the string is not a mode (a typo never selects a format).
            TypeError: `mode` has another type.
        """
        if mode is None:
            return OFF
        if isinstance(mode, WireMode):
            return mode
        if not isinstance(mode, str):
            raise TypeError(
                f"wire must be a string, a WireMode or None, not {type(mode).__name__}"
            )
        text = mode.strip().lower()
        if text in _OFF_WORDS:
            return OFF
        if text == "1":
            return cls(Codec.E4M3, Topology.AG)
        words = re.split("[_-]", text)
        codecs = [_CODEC_WORDS[word] for word in words if word in _CODEC_WORDS]
        topologies = [_TOPOLOGY_WORDS[w] for w in words if w in _TOPOLOGY_WORDS]
        known = len(codecs) + len(topologies) == len(words)
        if not known or len(codecs) > 1 or len(topologies) > 1:
            raise ValueError(
                f"{mode!r} is not a wire mode; the modes are {', '.join(MODES)}"
            )
        codec = codecs[0] if codecs else Codec.E4M3
        return cls(codec, topologies[0] if topologies else Topology.AG)


OFF = WireMode(Codec.RAW, Topology.RING)

MODES: tuple[str, ...] = (
    str(OFF),
    *(
        str(WireMode(codec, topology))
        for codec in (Codec.E4M3, Codec.INT8, Codec.MXFP8)
        for topology in (Topology.AG, Topology.RING, Topology.A2A)
    ),
)
"""The canonical string of every mode."""
