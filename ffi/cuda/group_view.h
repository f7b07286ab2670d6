// What a kernel is told about its group, and what it leaves behind when a wait fails.
//
// Plain structs that cross to the device; also read by host code that has no CUDA compiler.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "../slab.h"

namespace jax_pcie::cuda {

// A CTA of the fused kernel: warps that work, and one that waits for their stores to arrive and
// then raises the flags, so that nobody else stands behind that fence.
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kWorkerWarps = kWarps - 1;
constexpr int kWorkerThreads = kWorkerWarps * 32;

// The largest record: two units of 1-byte values for each worker warp, with their scales.
constexpr int64_t kSlotBytes = RecordLayout::For<Int8>(2 * kWorkerWarps * kUnitValues).total_bytes;

enum class FailureKind : uint32_t { kNone = 0, kTimeout, kCallSite, kOverrun, kBusy };

// The first failed wait of a rank, in pinned host memory. `kind` is written last.
struct Failure {
  uint64_t expected, observed;  // {call site, tick} packed as in a flag
  Region region;
  int32_t rank, channel, lane;
  FailureKind kind;
};
static_assert(std::is_trivially_copyable_v<Failure>);

// What every kernel reads first comes first: arguments reach an SM by the cache line.
struct GroupView {
  int rank, world_size;
  std::byte* slabs[kMaxWorldSize];  // [rank], as this device addresses them
  SlabLayout layout;
  uint64_t timeout_ns;
  Failure* failure;
};
static_assert(std::is_trivially_copyable_v<GroupView>);

// What the kernels of small messages are told instead: addresses rather than offsets, because every
// look at an argument that depends on another one takes its time before the first packet leaves.
struct PacketView {
  std::byte* ticks;  // of this rank's channels
  unsigned* failed;  // set once a wait of this rank has failed
  int rank, world_size;
  uint32_t lane_bytes;
  std::byte* packets[kMaxWorldSize];  // [distance] of the rank so many after this one
  uint64_t timeout_ns;
  Failure* failure;

  explicit PacketView(const GroupView& group)
      : rank(group.rank),
        world_size(group.world_size),
        lane_bytes(static_cast<uint32_t>(group.layout.lane_bytes)),
        packets{},
        timeout_ns(group.timeout_ns),
        failure(group.failure) {
    const SlabLayout& layout = group.layout;
    std::byte* const slab = group.slabs[rank];
    ticks = slab + layout.ticks[int(Region::kPackets)];
    failed = reinterpret_cast<unsigned*>(slab + layout.failed);
    for (int distance = 0; distance < world_size; ++distance) {
      packets[distance] =
          group.slabs[(rank + distance) % world_size] + layout.mailboxes[int(Region::kPackets)];
    }
  }
};
static_assert(std::is_trivially_copyable_v<PacketView>);

// A flag says which call's record lies in its slot. The tick counts pieces, the call site keeps two
// different calls from ever being summed with each other.
HD constexpr uint64_t FlagWord(uint32_t tick, uint32_t call_site) {
  return uint64_t{call_site} << 32 | tick;
}
HD constexpr uint32_t TickOf(uint64_t flag) { return static_cast<uint32_t>(flag); }

// Whether tick `seen` comes after `want`. Peers are a few pieces apart at most, so the distance
// fits in 31 bits even where the 32-bit part wraps.
HD constexpr bool IsAfter(uint32_t seen, uint32_t want) { return int32_t(seen - want) > 0; }
static_assert(IsAfter(0u, 0xffffffffu) && !IsAfter(0xffffffffu, 0u) && !IsAfter(7u, 7u));

// Likewise for a packet, which has room for more of the tick: some packets of a channel are used
// only by long calls, and what is left in them may be billions of short calls old.
constexpr int kPacketCallSiteBits = 16;
HD constexpr uint64_t PacketFlag(uint64_t tick, uint32_t call_site) {
  return tick << kPacketCallSiteBits | (call_site & ((1u << kPacketCallSiteBits) - 1));
}
// Less than, equal to or greater than 0: whether the packet's tick is before, at or after another.
HD constexpr int64_t TicksBetween(uint64_t packet_flag, uint64_t tick) {
  const uint64_t site = packet_flag & ((1u << kPacketCallSiteBits) - 1);
  return static_cast<int64_t>((packet_flag - site) - (tick << kPacketCallSiteBits));
}
static_assert(TicksBetween(PacketFlag(7, 0xffff), 7) == 0);
static_assert(TicksBetween(PacketFlag(~uint64_t{0}, 1), 0) < 0);

}  // namespace jax_pcie::cuda
