// Topologies: who sends which record to whom, and when.
//
// A topology is one function of (rank, step), written in the verbs of a backend: Encode, Reduce,
// Decode and Wait. It names no codec's arithmetic and no platform. The CPU drives it step by step
// over all ranks; a CTA of the fused kernel runs the same steps of its own rank, piece by piece.
// What a step reads was sent in earlier steps, so the step-by-step order can never block.
//
// The verbs (`shard` is an index of the array's n equal spans, `lane` one of a rank's inboxes):
//   Wait(lane)                                        until the record in `lane` has arrived
//   Encode<Codec>(shard, route)                       own values -> record -> route
//   Reduce<In, Out>(shard, count, term, route, keep)  sum of terms in order -> record -> route
//   Decode<Codec>(lane, shard, route)                 record -> own output (and on, as it is)
#pragma once

#include "error.h"
#include "numerics.h"

namespace jax_pcie {

enum class TopologyId : int32_t { kRing = 0, kAllToAll = 1, kAllGather = 2 };

// Non-negative remainder.
HD constexpr int Mod(int value, int n) { return ((value % n) + n) % n; }
static_assert(Mod(-1, 4) == 3 && Mod(4, 4) == 0 && Mod(-8, 8) == 0);

// Where a record goes: peer `(first_peer + i) % n` finds it in its inbox `lane + i`, i < count.
struct Route {
  int first_peer;
  int count;
  int lane;
};
HD constexpr Route Nowhere() { return {0, 0, 0}; }

constexpr int kOwn = -1;  // a term of a sum that is this rank's own raw values, not an inbox

// Whether the rank also writes the record that it sends to its own output. It must decode the
// record and not keep the better sum it had before, or ranks would differ in the last bits.
enum class Keep : bool { kNo, kDecoded };

// Ring all-reduce (Patarasuk and Yuan 2009). In step s rank r handles shard r - 1 - s, so shard c
// starts at rank c + 1, is summed in the order c + 1, c + 2, …, c, and its owner's record is the
// very one that the remaining hops forward. `Partial` carries sums, `Final` the finished shards.
template <class Partial, class Final>
struct Ring {
  using PartialCodec = Partial;
  using FinalCodec = Final;
  HD static constexpr int NumSteps(int n) { return 2 * n - 1; }
  HD static constexpr int NumLanes(int n) { return 2 * n - 2; }

  template <class Backend>
  HD static void Step(Backend& b, int r, int s, int n) {
    const int shard = Mod(r - 1 - s, n);
    const Route next{Mod(r + 1, n), 1, /*lane=*/s};
    if (s == 0) return b.template Encode<Partial>(shard, next);
    const int inbox = s - 1;
    const auto inbox_then_own = [inbox](int i) { return i == 0 ? inbox : kOwn; };
    b.Wait(inbox);
    if (s < n - 1) {
      b.template Reduce<Partial, Partial>(shard, 2, inbox_then_own, next, Keep::kNo);
    } else if (s == n - 1) {
      b.template Reduce<Partial, Final>(shard, 2, inbox_then_own, next, Keep::kDecoded);
    } else {
      b.template Decode<Final>(inbox, shard, s < 2 * n - 2 ? next : Nowhere());
    }
  }
};

// Two-phase direct exchange: every rank sends each foreign shard to its owner once; the owner sums
// in absolute rank order and sends one record to all. Two roundings, whatever n is.
template <class Codec>
struct AllToAll {
  using PartialCodec = Codec;
  using FinalCodec = Codec;
  HD static constexpr int NumSteps(int) { return 3; }
  HD static constexpr int NumLanes(int n) { return 2 * (n - 1); }

  // The inbox in which a rank finds the record of the peer `distance` ranks before it.
  HD static constexpr int Lane(int phase, int distance, int n) {
    return phase * (n - 1) + distance - 1;
  }

  template <class Backend>
  HD static void Step(Backend& b, int r, int s, int n) {
    if (s == 0) {
      for (int d = 1; d < n; ++d) {
        const int owner = Mod(r + d, n);
        b.template Encode<Codec>(owner, Route{owner, 1, Lane(0, d, n)});
      }
    } else if (s == 1) {
      const auto rank_order = [r, n](int rank) {
        return rank == r ? kOwn : Lane(0, Mod(r - rank, n), n);
      };
      for (int d = 1; d < n; ++d) b.Wait(Lane(0, d, n));
      const Route everyone{Mod(r + 1, n), n - 1, Lane(1, 1, n)};
      b.template Reduce<Codec, Codec>(r, n, rank_order, everyone, Keep::kDecoded);
    } else {
      for (int d = 1; d < n; ++d) {
        b.Wait(Lane(1, d, n));
        b.template Decode<Codec>(Lane(1, d, n), Mod(r - d, n), Nowhere());
      }
    }
  }
};

// Calls `body.template operator()<Topology>()`. `kAllGather` compresses only what the all-gather
// half moves: the ring's sums travel in the array's dtype.
template <class Codec, class RawCodec, class Body>
decltype(auto) VisitTopology(TopologyId id, Body&& body) {
  switch (id) {
    case TopologyId::kAllToAll:
      return body.template operator()<AllToAll<Codec>>();
    case TopologyId::kAllGather:
      return body.template operator()<Ring<RawCodec, Codec>>();
    case TopologyId::kRing:
      return body.template operator()<Ring<Codec, Codec>>();
  }
  throw Error(Concat("topology ", int(id), " is not known"));
}

// Values per shard of an array of `count` values: n equal spans, cut where blocks are cut.
constexpr int64_t ShardValues(int64_t count, int64_t n, int64_t align) {
  return (count + align * n - 1) / (align * n) * align;
}
static_assert(ShardValues(1000, 4, 128) == 256 && ShardValues(0, 4, 128) == 0);

}  // namespace jax_pcie
