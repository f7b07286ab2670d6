// A channel of the fused kernel: its mailboxes, its flags and its tick counter.
//
// Whatever orders one CTA's work against its peers' and against other calls on the same GPU, and
// what it leaves behind when a wait fails. Knows no codec and no topology's arithmetic: `fused.cuh`
// has the work itself.
#pragma once

#include "../topology.h"
#include "group_view.h"
#include "ptx.cuh"

namespace jax_pcie::cuda {

constexpr uint64_t kBusyTick = ~uint64_t{0};

// Where one piece of a channel lies, in the shards and in the mailboxes.
struct Piece {
  int64_t begin;  // within every shard
  uint32_t tick;  // the low bits, which are what flags carry
  int slot;
};

// Leaves the first failure of a rank for the host; `kind` last, so that it is never half read.
__device__ inline void LeaveFailure(unsigned* failed, Failure* to, const Failure& what) {
  if (atomicCAS(failed, 0u, 1u) != 0u) return;
  volatile Failure& failure = *to;
  failure.expected = what.expected;
  failure.observed = what.observed;
  failure.region = what.region;
  failure.rank = what.rank;
  failure.channel = what.channel;
  failure.lane = what.lane;
  ptx::FenceAcqRelSys();
  failure.kind = what.kind;
}

// Addresses of a channel's inboxes and flags, on any rank.
template <Region kRegion>
struct Channel {
  static constexpr bool kTickGuardsMemory = true;
  const GroupView& group;
  int index;

  __device__ std::byte* Record(int rank, int lane, int slot) const {
    return group.slabs[rank] + group.layout.Record(kRegion, group.world_size, index, lane, slot);
  }
  __device__ uint64_t* Flag(int rank, int lane, int slot) const {
    return reinterpret_cast<uint64_t*>(
        group.slabs[rank] + group.layout.Flag(kRegion, group.world_size, index, lane, slot));
  }
  __device__ uint64_t* Tick() const {
    return reinterpret_cast<uint64_t*>(group.slabs[group.rank] + group.layout.Tick(kRegion, index));
  }
  __device__ unsigned* Failed() const {
    return reinterpret_cast<unsigned*>(group.slabs[group.rank] + group.layout.failed);
  }
  __device__ bool HasFailed() const { return ptx::LoadRelaxedSys(Failed()) != 0; }

  __device__ uint64_t timeout_ns() const { return group.timeout_ns; }

  __device__ void Fail(FailureKind kind, int lane, uint64_t expected, uint64_t observed) const {
    LeaveFailure(Failed(), group.failure,
                 {expected, observed, kRegion, group.rank, index, lane, kind});
  }
};

// A bounded wait; the clock is only read after a miss.
class Deadline {
 public:
  __device__ explicit Deadline(uint64_t timeout_ns) : timeout_ns_(timeout_ns) {}
  __device__ bool Passed() {
    const uint64_t now = ptx::GlobalTimerNs();
    if (end_ == 0) end_ = now + timeout_ns_;
    return now >= end_;
  }

 private:
  uint64_t timeout_ns_, end_ = 0;
};

// One attempt at this channel's tick counter: `kBusyTick` while another call holds it. The counter
// lives on the device because a captured graph replays the same arguments; it doubles as a lock, so
// that calls which XLA runs at once take turns.
template <class Channel>
__device__ uint64_t TryTick(const Channel& channel) {
  return atomicExch(reinterpret_cast<unsigned long long*>(channel.Tick()), kBusyTick);
}

// Takes the counter, given what a first attempt made of it; or `kBusyTick` if another call holds it
// past the deadline.
template <class Channel>
__device__ uint64_t ClaimTick(const Channel& channel, uint64_t tick) {
  Deadline deadline(channel.timeout_ns());
  for (; tick == kBusyTick; tick = TryTick(channel)) {
    if (deadline.Passed()) {
      channel.Fail(FailureKind::kBusy, /*lane=*/0, 0, 0);
      return kBusyTick;
    }
  }
  // Pairs with the one before the tick is given back.
  if constexpr (Channel::kTickGuardsMemory) __threadfence();
  return tick;
}

// A second reading of the same steps, by one thread: every record that a step sent gets its flag.
template <Region kRegion>
class Signals {
 public:
  __device__ Signals(const Channel<kRegion>& channel, uint32_t call_site)
      : channel_(channel), call_site_(call_site) {}

  __device__ void Enter(Piece piece) { piece_ = piece; }
  __device__ void Wait(int) {}
  template <class Codec>
  __device__ void Encode(int, Route route) {
    Send(route);
  }
  template <class In, class Out, class Term>
  __device__ void Reduce(int, int, Term, Route route, Keep) {
    Send(route);
  }
  template <class Codec>
  __device__ void Decode(int, int, Route route) {
    Send(route);
  }

 private:
  __device__ void Send(Route route) {
    for (int i = 0; i < route.count; ++i) {
      const int peer = Mod(route.first_peer + i, channel_.group.world_size);
      ptx::StoreRelaxedSys(channel_.Flag(peer, route.lane + i, piece_.slot),
                           FlagWord(piece_.tick, call_site_));
    }
  }

  const Channel<kRegion>& channel_;
  uint32_t call_site_;
  Piece piece_ = {};
};

// One iteration's hand-over from the worker warps to the signal warp.
struct HandOver {
  uint64_t first_tick;
  uint32_t arrivals;  // of worker warps, over all iterations
  uint32_t failed;

  // Everything that the warp stored comes before the flags of iteration `arrivals / kWorkerWarps`.
  __device__ void Arrive(bool ok) {
    if (!ok) *const_cast<volatile uint32_t*>(&failed) = 1;
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::AddReleaseCta(&arrivals, 1);
  }
  // Waits until all worker warps arrived `iterations` times; returns whether all waits succeeded.
  // The sum of arrivals says so because no warp can be two ahead: between the arrivals of two
  // iterations that send lies a step with a Wait, and that is a barrier of all worker warps.
  __device__ bool AwaitWorkers(int iterations) const {
    const auto want = static_cast<uint32_t>(iterations * kWorkerWarps);
    while (static_cast<int32_t>(ptx::LoadAcquireCta(&arrivals) - want) < 0) {
    }
    return *const_cast<const volatile uint32_t*>(&failed) == 0;
  }
};

}  // namespace jax_pcie::cuda
