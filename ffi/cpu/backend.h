// The verbs of `topology.h` on host memory, and the loop that drives all ranks through them.
//
// Inside one process nobody waits: whoever arrives last runs `for step: for rank: Step(rank, step)`
// over every rank's buffers (see `rendezvous.h`), so a wait is only a check that its record is
// there. Mailboxes are process memory of bounded size; longer messages go through in segments, cut
// inside shards, so that results do not depend on the capacity.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "../codec.h"
#include "../collective.h"
#include "../error.h"
#include "../topology.h"
#include "codec_loops.h"

namespace jax_pcie::cpu {

// One rank's operands and results, of which most ops have one each.
class RankBuffers {
 public:
  RankBuffers() = default;
  RankBuffers(const void* x, void* y) { Add(x, y); }

  void Add(const void* operand, void* result) { pairs_.emplace_back(operand, result); }
  const void* operand(int index) const { return pairs_[index].first; }
  void* result(int index) const { return pairs_[index].second; }

 private:
  std::vector<std::pair<const void*, void*>> pairs_;
};

// All inboxes of all ranks: [rank][lane] records of one segment, and whether each was filled.
class Mailboxes {
 public:
  Mailboxes(int world_size, int lanes, int64_t record_bytes)
      : lanes_(lanes),
        record_bytes_(record_bytes),
        bytes_(int64_t{world_size} * lanes * record_bytes),
        filled_(int64_t{world_size} * lanes) {}

  std::byte* Record(int rank, int lane) {
    return bytes_.data() + (int64_t{rank} * lanes_ + lane) * record_bytes_;
  }
  void Fill(int rank, int lane) { filled_[rank * lanes_ + lane] = true; }
  bool Filled(int rank, int lane) const { return filled_[rank * lanes_ + lane]; }
  void Clear() { filled_.assign(filled_.size(), false); }

 private:
  int64_t lanes_, record_bytes_;
  std::vector<std::byte> bytes_;
  std::vector<bool> filled_;
};

// The part of every shard that one pass over the topology handles.
struct Segment {
  int64_t begin;   // within the shard
  int64_t values;  // at most this many; shards at the array's end have fewer or none
};

template <class Element>
class Backend {
 public:
  Backend(int rank, int world_size, const RankBuffers& buffers, int64_t count, Mailboxes& mailboxes)
      : rank_(rank),
        world_size_(world_size),
        x_(static_cast<const Element*>(buffers.operand(0))),
        y_(static_cast<Element*>(buffers.result(0))),
        count_(count),
        shard_values_(ShardValues(count, world_size, kSpanAlign)),
        mailboxes_(mailboxes) {}

  void Enter(Segment segment) { segment_ = segment; }

  void Wait(int lane) const {
    Require(mailboxes_.Filled(rank_, lane), "rank ", rank_, " read inbox ", lane,
            " before its record was sent: the topology's steps are out of order");
  }

  template <class Codec>
  void Encode(int shard, Route route) {
    const Span span = SpanOf(shard);
    Produce<Codec>(span, route, [&](std::byte* record) {
      if constexpr (Limited<Codec>) {
        EncodeSpan<Codec, Element>(Widened(span), span.values, record);
      } else {
        std::copy_n(x_ + span.begin, span.values, reinterpret_cast<Element*>(record));
      }
    });
  }

  template <class In, class Out, class Term>
  void Reduce(int shard, int count, Term term, Route route, Keep keep) {
    const Span span = SpanOf(shard);
    // The accumulator starts from the first term, not from +0, so that -0 survives.
    sum_.resize(span.values);
    for (int i = 0; i < count; ++i) {
      const float* values;
      if (term(i) == kOwn) {
        values = Widened(span);
      } else {
        values_.resize(span.values);
        DecodeSpan<In>(mailboxes_.Record(rank_, term(i)), span.values, values_.data());
        values = values_.data();
      }
      if (i == 0) {
        std::copy_n(values, span.values, sum_.data());
      } else {
        for (int64_t j = 0; j < span.values; ++j) sum_[j] = AddRn(sum_[j], values[j]);
      }
    }
    const std::byte* const record = Produce<Out>(span, route, [&](std::byte* to) {
      EncodeSpan<Out, Element>(sum_.data(), span.values, to);
    });
    if (keep == Keep::kDecoded) {
      DecodeToElements<Out>(record, span.values, y_ + span.begin);
    }
  }

  template <class Codec>
  void Decode(int lane, int shard, Route route) {
    const Span span = SpanOf(shard);
    const std::byte* const record = mailboxes_.Record(rank_, lane);
    DecodeToElements<Codec>(record, span.values, y_ + span.begin);
    const int64_t bytes = RecordLayout::For<Codec>(span.values).total_bytes;
    Produce<Codec>(span, route, [&](std::byte* to) { std::copy_n(record, bytes, to); });
  }

 private:
  struct Span {
    int64_t begin;  // in the array
    int64_t values;
  };

  Span SpanOf(int shard) const {
    const int64_t begin = std::min(shard * shard_values_ + segment_.begin, count_);
    return {begin, std::min(segment_.values, count_ - begin)};
  }

  const float* Widened(Span span) {
    values_.resize(span.values);
    for (int64_t i = 0; i < span.values; ++i) values_[i] = Widen(x_[span.begin + i]);
    return values_.data();
  }

  // Makes one record in the first peer's inbox and copies it to the others; returns the first.
  template <class Codec, class Make>
  const std::byte* Produce(Span span, Route route, Make&& make) {
    const std::byte* first = nullptr;
    for (int i = 0; i < route.count; ++i) {
      const int peer = Mod(route.first_peer + i, world_size_);
      std::byte* const record = mailboxes_.Record(peer, route.lane + i);
      if (first == nullptr) {
        make(record);
        first = record;
      } else {
        std::copy_n(first, RecordLayout::For<Codec>(span.values).total_bytes, record);
      }
      mailboxes_.Fill(peer, route.lane + i);
    }
    return first;
  }

  int rank_, world_size_;
  const Element* x_;
  Element* y_;
  int64_t count_, shard_values_;
  Mailboxes& mailboxes_;
  Segment segment_{0, 0};
  std::vector<float> values_, sum_;  // scratch of the verb that runs
};

// Values of a shard per pass: small enough that all inboxes of a pass stay in the cache.
constexpr int64_t kSegmentValues = 16 * 1024;

// How an array's shards are cut into passes that fit the staging capacity.
struct Segmentation {
  int64_t shard_values, segment_values, record_bytes;

  template <class Topology>
  static Segmentation For(int world_size, int64_t count, int64_t max_bytes) {
    const int64_t shard_values = ShardValues(count, world_size, kSpanAlign);
    const int64_t spans_that_fit =
        max_bytes / (Topology::NumLanes(world_size) * MaxRecordBytes<Topology>(kSpanAlign));
    const int64_t segment_values =
        std::clamp(spans_that_fit * kSpanAlign, int64_t{kSpanAlign}, kSegmentValues);
    return {shard_values, segment_values,
            MaxRecordBytes<Topology>(std::min(segment_values, shard_values))};
  }
  int64_t count() const { return (shard_values + segment_values - 1) / segment_values; }
  Segment operator[](int64_t index) const {
    const int64_t begin = index * segment_values;
    return {begin, std::min(segment_values, shard_values - begin)};
  }
};

// Sums `count` elements over all ranks of `buffers`, which is in rank order.
template <class Element, class Topology>
void RunAllRanks(const std::vector<RankBuffers>& buffers, int64_t count, int64_t max_bytes) {
  const int n = static_cast<int>(buffers.size());
  const auto segments = Segmentation::For<Topology>(n, count, max_bytes);
  Mailboxes mailboxes(n, Topology::NumLanes(n), segments.record_bytes);
  std::vector<Backend<Element>> ranks;
  for (int rank = 0; rank < n; ++rank) {
    ranks.emplace_back(rank, n, buffers[rank], count, mailboxes);
  }
  for (int64_t i = 0; i < segments.count(); ++i) {
    mailboxes.Clear();
    for (auto& rank : ranks) rank.Enter(segments[i]);
    for (int step = 0; step < Topology::NumSteps(n); ++step) {
      for (int rank = 0; rank < n; ++rank) Topology::Step(ranks[rank], rank, step, n);
    }
  }
}

}  // namespace jax_pcie::cpu
