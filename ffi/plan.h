// What a call costs, found by running its topology on a backend that only counts.
#pragma once

#include <algorithm>
#include <cstdint>

#include "codec.h"
#include "topology.h"

namespace jax_pcie {

// Adds up the bytes that one rank sends: payload and scales, without the mailbox's own padding.
class CountingBackend {
 public:
  CountingBackend(int world_size, int64_t count)
      : count_(count), shard_values_(ShardValues(count, world_size, kSpanAlign)) {}

  void Wait(int) {}

  template <class Codec>
  void Encode(int shard, Route route) {
    Add<Codec>(shard, route);
  }
  template <class, class Out, class Term>
  void Reduce(int shard, int, Term, Route route, Keep) {
    Add<Out>(shard, route);
  }
  template <class Codec>
  void Decode(int, int shard, Route route) {
    Add<Codec>(shard, route);
  }

  int64_t sent_bytes() const { return sent_bytes_; }

 private:
  template <class Codec>
  void Add(int shard, Route route) {
    const int64_t begin = std::min(shard * shard_values_, count_);
    const int64_t values = std::min(shard_values_, count_ - begin);
    const int64_t spans = RoundUp(values, kSpanAlign) / kSpanAlign;
    const int64_t span_bytes = kSpanAlign * Codec::kPayloadBytes + Codec::kScaleBytesPerSpan;
    sent_bytes_ += route.count * spans * span_bytes;
  }

  int64_t count_, shard_values_, sent_bytes_ = 0;
};

// The most that any rank sends in one all-reduce of `count` elements.
template <class Topology>
int64_t WireBytes(int world_size, int64_t count) {
  int64_t most = 0;
  for (int rank = 0; rank < world_size; ++rank) {
    CountingBackend backend(world_size, count);
    for (int step = 0; step < Topology::NumSteps(world_size); ++step) {
      Topology::Step(backend, rank, step, world_size);
    }
    most = std::max(most, backend.sent_bytes());
  }
  return most;
}

}  // namespace jax_pcie
