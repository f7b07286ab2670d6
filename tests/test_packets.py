"""Packets are never overwritten unread nor taken for others, whatever the timing.

Packets have no acknowledgements: two slots in turn, and a flag that names tick and call
site, must do. So this asks for proof: it visits every state that the ranks of a small
world can reach, with one channel, where any of them may fall behind anywhere.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import pytest

from jax_pcie import _ffi

PACKETS = 2  # the region


@dataclasses.dataclass(frozen=True)
class Tile:
    """One tick of a rank: a tile of a call that it runs."""

    site: int
    call: int  # of the site
    number: int  # in its call
    packets: int  # to each peer


@dataclasses.dataclass(frozen=True)
class Rank:
    """Where a rank is: its tick, and the (distance, index) it has sent and received."""

    tick: int = 0
    sent: frozenset = frozenset()
    received: frozenset = frozenset()
    stopped: bool = False  # a packet did not come; no more are sent


def program(*calls: tuple[int, Sequence[int]]) -> list[Tile]:
    """Tiles of calls, each given as its site and the packets of its tiles."""
    sites = [site for site, _ in calls]
    return [
        Tile(site, sites[:i].count(site), number, packets)
        for i, (site, tiles) in enumerate(calls)
        for number, packets in enumerate(tiles)
    ]


@dataclasses.dataclass
class Model:
    """Ranks that run one program of tiles each, and what becomes of their packets."""

    programs: list[list[Tile]]
    num_slots: int
    may_fail: bool = False  # a wait may end at any time
    stops_on_failure: bool = True

    def outcomes(self) -> set[str]:
        """How any schedule can go wrong; nothing if none does."""
        world = len(self.programs)
        begin = ((Rank(),) * world, frozenset())
        found, seen, todo = set(), {begin}, [begin]
        while todo:
            state = todo.pop()
            after = list(self.steps(*state, found))
            if not after and not all(map(self.is_done, range(world), state[0])):
                found.add("hang")
            fresh = set(after) - seen
            seen |= fresh
            todo += fresh
        return found

    def is_done(self, rank: int, at: Rank) -> bool:
        return at.tick == len(self.programs[rank])

    def steps(
        self, ranks: tuple, mailboxes: frozenset, found: set[str]
    ) -> Iterator[tuple]:
        """Every state that one step of one thread leads to.

        A mailbox is {(rank, distance, index, slot): (tick, the sender's tile)}.
        """
        world = len(ranks)
        inboxes = dict(mailboxes)
        for rank, at in enumerate(ranks):
            if self.is_done(rank, at):
                continue
            tile = self.programs[rank][at.tick]
            slot = at.tick % self.num_slots

            def moved(to: Rank, rank: int = rank) -> tuple:
                return (*ranks[:rank], to, *ranks[rank + 1 :])

            lines = set(itertools.product(range(1, world), range(tile.packets)))
            if at.stopped or at.received == lines:  # the barrier after a tile
                yield moved(Rank(at.tick + 1, stopped=at.stopped)), mailboxes
                continue
            for distance, index in lines - at.sent:
                place = ((rank + distance) % world, distance, index, slot)
                sent = at.sent | {(distance, index)}
                yield (
                    moved(dataclasses.replace(at, sent=sent)),
                    frozenset({**inboxes, place: (at.tick, tile)}.items()),
                )
            for line in at.sent - at.received:
                tick, theirs = inboxes.get((rank, *line, slot), (-1, None))
                if self.may_fail:
                    failed = Rank(at.tick + 1, stopped=self.stops_on_failure)
                    yield moved(failed), mailboxes
                if tick > at.tick:
                    found.add("overwritten before it was read")
                if tick == at.tick and theirs.site == tile.site:
                    if theirs != tile:
                        found.add("taken for another")
                    received = at.received | {line}
                    yield moved(dataclasses.replace(at, received=received)), mailboxes


# Long calls leave packets that short ones do not touch.
CALLS = {
    2: [(1, [2, 1]), (2, [1]), (1, [2, 1]), (3, [2, 2])],
    3: [(1, [1, 1]), (2, [1, 1])],
}


@pytest.mark.parametrize("world", CALLS)
def test_packet_slots_are_as_many_as_are_needed_and_no_more(world: int) -> None:
    num_slots = _ffi._cpu.num_slots(PACKETS, world)
    programs = [program(*CALLS[world])] * world
    assert Model(programs, num_slots).outcomes() == set()
    assert Model(programs, num_slots - 1).outcomes()


LONG, SHORT = (1, [2, 1, 1]), (2, [1])
ORDERS = {
    "another tile": ([LONG, SHORT, LONG], [SHORT, LONG, LONG]),
    "another call": ([SHORT, SHORT, LONG], [LONG, SHORT, SHORT]),
}


@pytest.mark.parametrize("orders", ORDERS.values(), ids=ORDERS)
def test_a_channel_that_failed_sends_nothing_that_is_taken_for_another(
    orders: Sequence[list],
) -> None:
    """Calls that a GPU runs at once may take a channel in an order of its own."""
    programs = [program(*calls) for calls in orders]
    model = Model(programs, _ffi._cpu.num_slots(PACKETS, 2), may_fail=True)
    assert "taken for another" not in model.outcomes()
    model.stops_on_failure = False
    assert "taken for another" in model.outcomes()
