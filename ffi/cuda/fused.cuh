// The fused backend: one launch carries out a whole collective on one device.
//
// A resident grid of CTAs; each owns a channel and takes every gridDim-th piece of the shards
// through the topology's steps. Step s works on the piece that step s - 1 worked on one iteration
// earlier (the *lag pipeline*), so that wire, codec and output overlap. Worker warps write records
// straight into the peers' mailboxes; a signal warp follows with one fence and a few flag words an
// iteration. When a wait fails the CTA fills its part of the output with NaN and says why.
#pragma once

#include "../topology.h"
#include "channel.cuh"
#include "rows.cuh"

namespace jax_pcie::cuda {

constexpr int kUnitRows = kUnitValues / kRowValues;
constexpr int kUnitWords = kUnitValues / kSpanAlign;  // 32-bit scale words
constexpr int kWorkerBarrier = 1;                     // hardware barrier 0 is __syncthreads

template <class Topology>
struct RegionOf;
template <class Partial, class Final>
struct RegionOf<Ring<Partial, Final>> {
  static constexpr Region value = Region::kRing;
};
template <class Codec>
struct RegionOf<AllToAll<Codec>> {
  static constexpr Region value = Region::kAllToAll;
};

// One collective on one rank.
template <class Element>
struct Call {
  const Element* x;
  Element* y;
  int64_t count;         // elements
  int64_t shard_values;  // per shard; the last shards may have fewer or none
  int piece_values;      // per piece of every shard, whole units
  int num_pieces;        // of every shard
  uint32_t call_site;
};

// The verbs, carried out by all worker warps of a CTA on one piece.
template <class Element, Region kRegion>
class FusedBackend {
 public:
  __device__ FusedBackend(const Channel<kRegion>& channel, const Call<Element>& call)
      : channel_(channel),
        call_(call),
        aligned_((reinterpret_cast<uintptr_t>(call.x) | reinterpret_cast<uintptr_t>(call.y)) %
                     sizeof(uint4) ==
                 0),
        warp_(threadIdx.x / 32),
        lane_(threadIdx.x % 32) {}

  __device__ void Enter(Piece piece) { piece_ = piece; }
  __device__ bool ok() const { return ok_; }
  __device__ void Abandon() { ok_ = false; }

  // One thread polls: more pollers take the link's bandwidth. The barrier hands on what it
  // acquired.
  __device__ void Wait(int lane) {
    if (!ok_) return;
    ok_ = ptx::BarrierAnd(kWorkerBarrier, kWorkerThreads, threadIdx.x != 0 || Poll(lane));
  }

  template <class Codec>
  __device__ void Encode(int shard, Route route) {
    if (!ok_) return;
    const Span span = SpanOf(shard);
    ForEachUnit(span, [&](int unit) {
      Chunk<Element> own[kUnitRows];
      WireRow<Codec> rows[kUnitRows];
      LoadOwn(span, unit, own);
#pragma unroll
      for (int i = 0; i < kUnitRows; ++i) {
        if constexpr (Limited<Codec>) {
          Values v;
          Unpack(own[i], v);
          rows[i] = EncodeRow<Codec, Element>(v, lane_);
        } else {
          rows[i].payload = own[i];
        }
      }
      Send(route, unit, rows);
    });
  }

  template <class In, class Out, class Term>
  __device__ void Reduce(int shard, int count, Term term, Route route, Keep keep) {
    if (!ok_) return;
    const Span span = SpanOf(shard);
    ForEachUnit(span, [&](int unit) {
      Chunk<Element> own[kUnitRows];
      LoadOwn(span, unit, own);
      Values sum[kUnitRows];
#pragma unroll 1  // unrolled it spills
      for (int t = 0; t < count; ++t) {
        const int inbox = term(t);
        WireRow<In> received[kUnitRows];
        if (inbox != kOwn) Receive(inbox, unit, received);
#pragma unroll
        for (int i = 0; i < kUnitRows; ++i) {
          Values v;
          if (inbox == kOwn) {
            Unpack(own[i], v);
          } else {
            DecodeRow<In>(received[i], lane_, v);
          }
          // The sum starts from the first term, not from +0, so that -0 survives.
#pragma unroll
          for (int j = 0; j < kLaneValues; ++j) {
            sum[i][j] = t == 0 ? v[j] : AddRn(sum[i][j], v[j]);
          }
        }
      }
      WireRow<Out> rows[kUnitRows];
#pragma unroll
      for (int i = 0; i < kUnitRows; ++i) rows[i] = EncodeRow<Out, Element>(sum[i], lane_);
      Send(route, unit, rows);
      if (keep == Keep::kDecoded) StoreOwn(span, unit, rows);
    });
  }

  template <class Codec>
  __device__ void Decode(int inbox, int shard, Route route) {
    if (!ok_) return;
    const Span span = SpanOf(shard);
    ForEachUnit(span, [&](int unit) {
      WireRow<Codec> rows[kUnitRows];
      Receive(inbox, unit, rows);
      Send(route, unit, rows);
      StoreOwn(span, unit, rows);
    });
  }

 private:
  struct Span {
    int64_t begin;  // in the array
    int values;     // that exist; at most a piece
  };

  __device__ Span SpanOf(int shard) const {
    const int64_t begin = shard * call_.shard_values + piece_.begin;
    const int64_t values = min(min(int64_t{call_.piece_values}, call_.shard_values - piece_.begin),
                               call_.count - begin);
    return {begin, static_cast<int>(max(values, int64_t{0}))};
  }

  template <class Body>
  __device__ void ForEachUnit(Span span, Body&& body) const {
    for (int unit = warp_; unit * kUnitValues < span.values; unit += kWorkerWarps) body(unit);
  }

  __device__ int ValueIndex(int unit, int row) const {
    return unit * kUnitValues + row * kRowValues + lane_ * kLaneValues;
  }

  __device__ void LoadOwn(Span span, int unit, Chunk<Element> (&own)[kUnitRows]) const {
#pragma unroll
    for (int i = 0; i < kUnitRows; ++i) {
      const int index = ValueIndex(unit, i);
      own[i] = LoadChunk(call_.x + span.begin + index, span.values - index, aligned_);
    }
  }

  template <class Codec>
  __device__ void StoreOwn(Span span, int unit, const WireRow<Codec> (&rows)[kUnitRows]) const {
#pragma unroll
    for (int i = 0; i < kUnitRows; ++i) {
      const int index = ValueIndex(unit, i);
      StoreChunk(call_.y + span.begin + index, DecodeRowToElements<Codec, Element>(rows[i], lane_),
                 span.values - index, aligned_);
    }
  }

  // Scales follow the payload of a whole piece, so that their place does not depend on its length.
  template <class Codec>
  __device__ int64_t WordOffset(int unit) const {
    return call_.piece_values * Codec::kPayloadBytes +
           (unit * kUnitWords + lane_ % kUnitWords) * int64_t{sizeof(uint32_t)};
  }

  template <class Codec>
  __device__ void Receive(int inbox, int unit, WireRow<Codec> (&rows)[kUnitRows]) const {
    const std::byte* const record = channel_.Record(channel_.group.rank, inbox, piece_.slot);
#pragma unroll
    for (int i = 0; i < kUnitRows; ++i) {
      const std::byte* const payload = record + int64_t{ValueIndex(unit, i)} * Codec::kPayloadBytes;
      if constexpr (Limited<Codec>) {
        rows[i].payload = ptx::LoadRelaxedSys(reinterpret_cast<const uint2*>(payload));
      } else {
#pragma unroll
        for (int j = 0; j < Chunk<Element>::kVectors; ++j) {
          rows[i].payload.vectors[j] =
              ptx::LoadRelaxedSys(reinterpret_cast<const uint4*>(payload) + j);
        }
      }
    }
    if constexpr (Limited<Codec>) {
      const uint32_t word =
          ptx::LoadRelaxedSys(reinterpret_cast<const uint32_t*>(record + WordOffset<Codec>(unit)));
#pragma unroll
      for (int i = 0; i < kUnitRows; ++i) {
        rows[i].scale_word = __shfl_sync(kFullWarp, word, i * 2 + lane_ / 16);
      }
    }
  }

  // Payloads, and one 32-byte store of the unit's scale words: scattered 4-byte stores cost 8 to 12
  // us in 400.
  template <class Codec>
  __device__ void Send(Route route, int unit, const WireRow<Codec> (&rows)[kUnitRows]) const {
    uint32_t word = 0;
    if constexpr (Limited<Codec>) {
#pragma unroll
      for (int i = 0; i < kUnitRows; ++i) {
        const uint32_t of_row = __shfl_sync(kFullWarp, rows[i].scale_word, lane_ % 2 * 16);
        if (lane_ / 2 == i) word = of_row;
      }
    }
#pragma unroll 1
    for (int peer = 0; peer < route.count; ++peer) {
      std::byte* const record = Outbox(route, peer);
#pragma unroll
      for (int i = 0; i < kUnitRows; ++i) {
        std::byte* const payload = record + int64_t{ValueIndex(unit, i)} * Codec::kPayloadBytes;
        if constexpr (Limited<Codec>) {
          *reinterpret_cast<uint2*>(payload) = rows[i].payload;
        } else {
#pragma unroll
          for (int j = 0; j < Chunk<Element>::kVectors; ++j) {
            reinterpret_cast<uint4*>(payload)[j] = rows[i].payload.vectors[j];
          }
        }
      }
      if constexpr (Limited<Codec>) {
        if (lane_ < kUnitWords) {
          *reinterpret_cast<uint32_t*>(record + WordOffset<Codec>(unit)) = word;
        }
      }
    }
  }

  __device__ std::byte* Outbox(Route route, int i) const {
    const int peer = Mod(route.first_peer + i, channel_.group.world_size);
    return channel_.Record(peer, route.lane + i, piece_.slot);
  }

  __device__ bool Poll(int lane) const {
    const uint64_t* const flag = channel_.Flag(channel_.group.rank, lane, piece_.slot);
    const uint64_t want = FlagWord(piece_.tick, call_.call_site);
    Deadline deadline(channel_.group.timeout_ns);
    while (true) {
      const uint64_t seen = ptx::LoadAcquireSys(flag);  // pairs with the fence before Signals
      if (seen == want) return true;
      if (TickOf(seen) == TickOf(want)) {
        channel_.Fail(FailureKind::kCallSite, lane, want, seen);
        return false;
      }
      if (IsAfter(TickOf(seen), TickOf(want))) {
        channel_.Fail(FailureKind::kOverrun, lane, want, seen);
        return false;
      }
      if (deadline.Passed()) {
        channel_.Fail(FailureKind::kTimeout, lane, want, seen);
        return false;
      }
      if (channel_.HasFailed()) return false;
    }
  }

  const Channel<kRegion>& channel_;
  const Call<Element>& call_;
  Piece piece_ = {};
  const bool aligned_;
  const int warp_, lane_;
  bool ok_ = true;
};

// What a failed call leaves of a channel's part of the output, by the worker warps.
template <class Element, class PieceAt>
__device__ void FillWithNan(const Call<Element>& call, int world_size, int num_pieces,
                            const PieceAt& piece) {
  for (int i = 0; i < num_pieces; ++i) {
    for (int shard = 0; shard < world_size; ++shard) {
      const int64_t shard_begin = shard * call.shard_values;
      const int64_t begin = shard_begin + piece(i).begin;
      const int64_t end =
          min(min(begin + call.piece_values, shard_begin + call.shard_values), call.count);
      for (int64_t j = begin + threadIdx.x; j < end; j += kWorkerThreads) {
        call.y[j] = Narrow<Element>(QuietNan());
      }
    }
  }
}

template <class Topology, class Element>
__global__ void __launch_bounds__(kThreads, 1)
    AllReduceKernel(const __grid_constant__ GroupView group,
                    const __grid_constant__ Call<Element> call) {
  constexpr Region kRegion = RegionOf<Topology>::value;
  const Channel<kRegion> channel{group, static_cast<int>(blockIdx.x)};
  const int n = group.world_size;
  const int num_steps = Topology::NumSteps(n);
  const int num_slots = NumSlots(kRegion, n);
  const int num_ctas = static_cast<int>(gridDim.x);
  const int num_pieces = (call.num_pieces - channel.index + num_ctas - 1) / num_ctas;
  const int num_iterations = num_pieces + num_steps - 1;
  const int num_sending = num_iterations - 1;  // the last step sends nothing

  __shared__ HandOver hand_over;
  if (threadIdx.x == 0) {
    hand_over = {channel.HasFailed() ? kBusyTick : ClaimTick(channel, TryTick(channel)), 0, 0};
  }
  __syncthreads();
  const uint64_t first_tick = hand_over.first_tick;

  const int first_slot = static_cast<int>(first_tick % num_slots);
  const auto piece = [&](int i) {
    return Piece{(channel.index + int64_t{i} * num_ctas) * call.piece_values,
                 static_cast<uint32_t>(first_tick) + i, (first_slot + i) % num_slots};
  };
  // Steps [first, last) of iteration t, in the reading of `verbs`.
  const auto for_steps = [&](int t, int first, int last, auto& verbs) {
    for (int s = first; s < last; ++s) {
      if (t - s < 0 || t - s >= num_pieces) continue;
      verbs.Enter(piece(t - s));
      Topology::Step(verbs, group.rank, s, n);
    }
  };

  if (threadIdx.x >= kWorkerThreads) {
    Signals<kRegion> signals(channel, call.call_site);
    for (int t = 0; threadIdx.x == kWorkerThreads && t < num_sending; ++t) {
      if (!hand_over.AwaitWorkers(t + 1)) break;
      ptx::FenceAcqRelSys();  // pairs with the acquire in Poll
      for_steps(t, 0, num_steps - 1, signals);
    }
  } else {
    FusedBackend<Element, kRegion> backend(channel, call);
    if (first_tick == kBusyTick) backend.Abandon();
    for (int t = 0; t < num_iterations; ++t) {
      for_steps(t, 0, num_steps - 1, backend);
      if (t < num_sending) hand_over.Arrive(backend.ok());
      if (!backend.ok()) break;
      for_steps(t, num_steps - 1, num_steps, backend);  // sends nothing, so it follows the flags
    }
    if (!backend.ok()) FillWithNan(call, n, num_pieces, piece);
  }
  __syncthreads();
  if (threadIdx.x == 0 && first_tick != kBusyTick) {
    __threadfence();
    atomicExch(reinterpret_cast<unsigned long long*>(channel.Tick()), first_tick + num_pieces);
  }
}

}  // namespace jax_pcie::cuda
