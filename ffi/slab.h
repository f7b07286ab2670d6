// Where everything lies in one rank's slab.
//
// A *channel* is one CTA of the fused kernel; it has inboxes, flags and a tick counter of its own,
// so that no two CTAs ever share a word. A *lane* is one inbox (`topology.h`), a *slot* one of the
// records that an inbox holds in turn. Ring and all-to-all have separate regions: within one,
// having seen a peer's flags proves that its older slots are free again, and a mixture would break
// that. Packets (small messages that carry their flag with them, `cuda/packets.cuh`) have a region
// that never holds anything else, on top of `max_bytes`: at most 16 KiB a channel.
#pragma once

#include <algorithm>
#include <cstdint>

#include "codec.h"
#include "collective.h"
#include "error.h"
#include "topology.h"

namespace jax_pcie {

enum class Region : int { kRing = 0, kAllToAll = 1, kPackets = 2 };
constexpr int kNumRegions = 3;

constexpr int kMaxWorldSize = 16;     // ranks whose mailboxes kernels are told of
constexpr int64_t kFlagStride = 128;  // bytes; one flag word to a cache line

// What a channel receives at a time, from all ranks together; each writes into a lane of its own.
constexpr int kChannelPackets = 512;
constexpr int64_t kPacketBytes = 16;
HD constexpr int LanePackets(int world_size) {
  return (kChannelPackets + world_size - 1) / world_size;
}

// Packets of two calls in turn: a rank sends those of call c + 2 after it has received those of
// call c + 1, which every peer sends after it has read those of call c.
constexpr int kPacketSlots = 2;

// What one warp handles at a time: 4 rows of 32 lanes of 8 values, whose scales are one 32-byte
// store. Pieces are whole units, so that slots need no masks.
constexpr int kUnitValues = 1024;

// Slots per inbox: how many pieces must pass before a slot is free again, with no acknowledgement.
// In iteration t a CTA does step s on piece t - s, and flags follow all steps but the last.
// - All-to-all, 3: before phase 0 of piece p this rank finished p - 3, for which it saw phase 1 of
//   every peer, so they had read its phase 0. Before phase 1 of p it saw every peer's phase 0 of p,
//   which they flag after finishing p - 3 themselves.
// - Ring, n + 1: hop h of piece p overwrites what the next rank reads in its step h + 1 on piece
//   p - n - 1. If h >= n - 1, the record that this rank forwards has come from that very rank n - 1
//   hops ago, in its iteration t - n + 1, after it had ended iteration t - n, in which it read.
//   Otherwise this rank's step h + n on piece p - n - 1, one iteration ago, waited for a record
//   that went through the next rank's step h + 1 on that piece.
// A call that begins a region anew finds the same: having ended the last call proves at least this.
HD constexpr int NumSlots(Region region, int world_size) {
  if (region == Region::kPackets) return kPacketSlots;
  return region == Region::kRing ? world_size + 1 : 3;
}

struct SlabLayout {
  int num_channels;
  int num_lanes;
  int64_t slot_bytes;
  int64_t lane_bytes;              // of packets, in one slot
  int64_t mailboxes[kNumRegions];  // byte offsets in the slab
  int64_t flags[kNumRegions];      // of records; packets carry theirs
  int64_t ticks[kNumRegions];
  int64_t failed;
  int64_t total_bytes;

  // Fits the mailboxes into `max_bytes`: slots of at most `wanted_slot_bytes`, and fewer channels
  // if `max_channels` of them could not hold a unit each.
  static SlabLayout For(int world_size, int max_channels, int64_t max_bytes,
                        int64_t wanted_slot_bytes) {
    SlabLayout layout = {};
    layout.num_lanes = Ring<Int8, Int8>::NumLanes(world_size);
    Require(AllToAll<Int8>::NumLanes(world_size) == layout.num_lanes, "regions differ in lanes");
    layout.lane_bytes = LanePackets(world_size) * kPacketBytes;
    const int64_t slots_per_channel =
        int64_t{layout.num_lanes} *
        (NumSlots(Region::kRing, world_size) + NumSlots(Region::kAllToAll, world_size));
    // The widest unit is fp32 as it is.
    const int64_t unit_bytes = RecordLayout::For<Raw<F32>>(kUnitValues).total_bytes;
    const int64_t channels_that_fit = max_bytes / (slots_per_channel * unit_bytes);
    Require(channels_that_fit > 0, "max_bytes is ", max_bytes, "; ", world_size,
            " ranks need at least ", slots_per_channel * unit_bytes);
    layout.num_channels = static_cast<int>(std::min<int64_t>(max_channels, channels_that_fit));
    const int64_t slot_that_fits = max_bytes / (slots_per_channel * layout.num_channels);
    layout.slot_bytes = std::min(slot_that_fits / kFlagStride * kFlagStride, wanted_slot_bytes);

    int64_t offset = 0;
    const auto take = [&](int64_t bytes) { return std::exchange(offset, offset + bytes); };
    for (const Region region : {Region::kRing, Region::kAllToAll}) {
      const int64_t count = layout.NumSlotsOf(region, world_size);
      layout.flags[int(region)] = take(count * kFlagStride);
      layout.ticks[int(region)] = take(layout.num_channels * kFlagStride);
    }
    layout.ticks[int(Region::kPackets)] = take(layout.num_channels * kFlagStride);
    layout.failed = take(kFlagStride);
    layout.mailboxes[int(Region::kPackets)] = take(layout.NumPackets(world_size) * kPacketBytes);
    offset = RoundUp(offset, kFlagStride);
    for (const Region region : {Region::kRing, Region::kAllToAll}) {
      const int64_t count = layout.NumSlotsOf(region, world_size);
      layout.mailboxes[int(region)] = take(count * layout.slot_bytes);
    }
    layout.total_bytes = offset;
    return layout;
  }

  HD int64_t NumSlotsOf(Region region, int world_size) const {
    return int64_t{num_channels} * num_lanes * NumSlots(region, world_size);
  }

  // Offset of a record or of its flag; `slot` < NumSlots(region, world_size).
  HD int64_t Record(Region region, int world_size, int channel, int lane, int slot) const {
    return mailboxes[int(region)] + SlotIndex(region, world_size, channel, lane, slot) * slot_bytes;
  }
  HD int64_t Flag(Region region, int world_size, int channel, int lane, int slot) const {
    return flags[int(region)] + SlotIndex(region, world_size, channel, lane, slot) * kFlagStride;
  }
  HD int64_t NumPackets(int world_size) const {
    return int64_t{num_channels} * kPacketSlots * (world_size - 1) * LanePackets(world_size);
  }
  // From a region's first tick, and from the first packet, on: for kernels that are told addresses.
  // In 32 bits, which a GPU multiplies in one instruction. `slot` < kPacketSlots, `lane` <
  // world_size - 1.
  HD static uint32_t TickOffset(int channel) {
    return static_cast<uint32_t>(channel * kFlagStride);
  }
  HD static uint32_t PacketSlotBytes(int world_size, uint32_t lane_bytes) {
    return static_cast<uint32_t>(world_size - 1) * lane_bytes;
  }
  HD static uint32_t PacketOffset(int world_size, uint32_t lane_bytes, int channel, int slot,
                                  int lane) {
    return static_cast<uint32_t>(channel * kPacketSlots + slot) *
               PacketSlotBytes(world_size, lane_bytes) +
           static_cast<uint32_t>(lane) * lane_bytes;
  }
  HD int64_t Tick(Region region, int channel) const {
    return ticks[int(region)] + channel * kFlagStride;
  }

 private:
  HD int64_t SlotIndex(Region region, int world_size, int channel, int lane, int slot) const {
    return (int64_t{channel} * num_lanes + lane) * NumSlots(region, world_size) + slot;
  }
};

// The largest piece of a shard, in values, whose records fit in a slot.
template <class Topology>
constexpr int64_t MaxPieceValues(int64_t slot_bytes) {
  int64_t values = 0;
  while (MaxRecordBytes<Topology>(values + kUnitValues) <= slot_bytes) {
    values += kUnitValues;
  }
  return values;
}
static_assert(MaxPieceValues<AllToAll<Int8>>(33 * 1024) == 32 * kUnitValues);
static_assert(MaxPieceValues<Ring<Raw<Bf16>, Mxfp8>>(33 * 1024) == 16 * kUnitValues);

}  // namespace jax_pcie
