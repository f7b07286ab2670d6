"""A mailbox slot is never written before its last record was read, whatever the timing.

The fused kernel has no acknowledgements; the number of slots alone makes reuse safe.
Random timing does not show one slot too few for large worlds, so this asks for proof:
the read must come before the write in the order that program order and flags enforce.
"""

import dataclasses
from collections.abc import Iterator

import pytest

from jax_pcie import _ffi

RING, ALL_TO_ALL = 0, 1


@dataclasses.dataclass(frozen=True)
class Sends:
    """What a step sends: to which rank, into which of its inboxes."""

    peer: int
    lane: tuple[int, int]  # (phase or hop, source): one inbox of the peer


def num_steps(region: int, world: int) -> int:
    return 2 * world - 1 if region == RING else 3


def sends(region: int, world: int, rank: int, step: int) -> Iterator[Sends]:
    if step == num_steps(region, world) - 1:
        return
    if region == RING:
        yield Sends((rank + 1) % world, (step, rank))
    else:
        for distance in range(1, world):
            yield Sends((rank + distance) % world, (step, rank))


def inboxes(region: int, world: int, rank: int, step: int) -> list[tuple[int, int]]:
    """Which inboxes a step waits for and reads."""
    if step == 0:
        return []
    if region == RING:
        return [(step - 1, (rank - 1) % world)]
    return [(step - 1, (rank + d) % world) for d in range(1, world)]


def first_unsafe_write(
    region: int, world: int, num_slots: int, calls: list[int]
) -> str | None:
    """Runs `calls` (pieces of a channel in each) and checks every write.

    What must have happened before an event is a bit mask of events. A CTA does its
    steps in order; iteration t's flags follow all its sending steps, and the steps of
    iteration t + 1 wait for flags of iteration t of others.
    """
    steps = num_steps(region, world)
    ranks = range(world)
    worker = [0] * world  # what each CTA's workers have seen, their own steps included
    signals = [0] * world
    flags: dict[
        tuple, int
    ] = {}  # (peer, lane, tick) -> what its flag says has happened
    reads: dict[tuple, int] = {}  # (rank, lane, tick) -> the event that read the record
    num_events = 0
    first_tick = 0
    for num_pieces in calls:
        for t in range(num_pieces + steps - 1):
            active = [s for s in range(steps) if 0 <= t - s < num_pieces]
            sent: list[list[tuple]] = [[] for _ in ranks]
            before_last = list(worker)
            for rank in ranks:
                for step in active:
                    tick = first_tick + t - step
                    event = 1 << num_events
                    num_events += 1
                    for lane in inboxes(region, world, rank, step):
                        worker[rank] |= flags[rank, lane, tick]
                        reads[rank, lane, tick] = event
                    for send in sends(region, world, rank, step):
                        old = (send.peer, send.lane, tick - num_slots)
                        if old in reads or tick >= num_slots:
                            read = reads.get(old)
                            if read is None or not worker[rank] & read:
                                return f"rank {rank} step {step} piece {tick}: {send}"
                        sent[rank].append((send.peer, send.lane, tick))
                    worker[rank] |= event
                    if step < steps - 1:
                        before_last[rank] = worker[rank]
            for rank in ranks:
                signals[rank] |= before_last[rank]
                for key in sent[rank]:
                    flags[key] = signals[rank]
        for rank in ranks:  # a kernel ends when all its warps have
            worker[rank] |= signals[rank]
        first_tick += num_pieces
    return None


CALLS = [[1] * 12, [9, 9], [2, 1, 5, 1, 1, 12], [3, 4, 1, 2, 2, 7]]


@pytest.mark.parametrize("world", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("region", [RING, ALL_TO_ALL], ids=["ring", "all-to-all"])
def test_slots_are_as_many_as_are_needed_and_no_more(region: int, world: int) -> None:
    num_slots = _ffi._cpu.num_slots(region, world)
    for calls in CALLS:
        assert first_unsafe_write(region, world, num_slots, calls) is None
    long_call = [3 * num_slots]
    assert first_unsafe_write(region, world, num_slots, long_call) is None
    assert first_unsafe_write(region, world, num_slots - 1, long_call) is not None
