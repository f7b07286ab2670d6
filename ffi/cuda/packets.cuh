// Packets: small messages whose every 16 bytes carry 8 of data and a flag (LL, as NCCL calls it).
//
// A packet is stored and loaded as one 128-bit access, so that whoever sees its flag has its data:
// no fence, no flag word, one crossing of the link. A thread sends one packet to one peer and then
// polls the same place of its own mailbox. Two slots in turn make reuse safe (`slab.h`); the tick
// that chooses the slot lives on the device and is claimed as a channel's is (`channel.cuh`).
#pragma once

#include "channel.cuh"

namespace jax_pcie::cuda {

constexpr int kPacketThreads = kChannelPackets;  // one packet a thread: a CTA that loops is slower

// Misses between looks at the clock and at other CTAs' failures, which would slow the polling.
constexpr int kMissesPerCheck = 32;

// What a CTA knows of its channel, once one of its threads has claimed it.
struct Claim {
  uint64_t first_tick;
  uint32_t has_failed;
};

// A CTA's end of its channel. Tiles are exchanged in turn, one tick each.
class PacketMailbox {
 public:
  // Begins the claim. `Enter` ends it, and what a thread loads in between comes for nothing.
  __device__ PacketMailbox(const GroupView& group, uint32_t call_site, Claim& claim)
      : channel_{group, static_cast<int>(blockIdx.x)}, call_site_(call_site), claim_(claim) {
    if (threadIdx.x == 0) claim.first_tick = ClaimTick(channel_);
    if (threadIdx.x == 32) claim.has_failed = channel_.HasFailed();
  }

  // Called by all threads of the CTA before tile number `tile`; false if the channel is unusable.
  __device__ bool Enter(int64_t tile) {
    __syncthreads();
    tick_ = claim_.first_tick + tile;
    return claim_.first_tick != kBusyTick && !claim_.has_failed;
  }

  // To the peer `distance` ranks after this one.
  __device__ void Send(int distance, int index, uint64_t data) const {
    const int peer = Mod(channel_.group.rank + distance, channel_.group.world_size);
    ptx::StoreRelaxedSysB128(Lane(peer, distance) + index,
                             make_ulonglong2(data, PacketFlag(tick_, call_site_)));
  }

  // From the peer `distance` ranks before this one; false if it does not come.
  __device__ bool Receive(int distance, int index, uint64_t& data) const {
    const ulonglong2* const from = Lane(channel_.group.rank, distance) + index;
    const uint64_t want = PacketFlag(tick_, call_site_);
    Deadline deadline(channel_.group.timeout_ns);
    for (uint32_t misses = 1;; ++misses) {
      const ulonglong2 packet = ptx::LoadRelaxedSysB128(from);
      if (packet.y == want) {
        data = packet.x;
        return true;
      }
      if (misses % kMissesPerCheck == 0 && !MayStillCome(packet.y, distance, deadline)) {
        return false;
      }
    }
  }

  // After the last tile, by all threads; every one of them has received what it waited for.
  __device__ void Release(int64_t num_tiles) const {
    if (threadIdx.x == 0 && claim_.first_tick != kBusyTick) {
      ptx::StoreRelaxedSys(channel_.Tick(), claim_.first_tick + num_tiles);
    }
  }

  __device__ const GroupView& group() const { return channel_.group; }

 private:
  __device__ ulonglong2* Lane(int rank, int distance) const {
    const GroupView& group = channel_.group;
    const auto slot = static_cast<int>(tick_ % kPacketSlots);
    return reinterpret_cast<ulonglong2*>(
        group.slabs[rank] +
        group.layout.Packets(group.world_size, channel_.index, slot, distance - 1));
  }

  __device__ bool MayStillCome(uint64_t seen, int distance, Deadline& deadline) const {
    const int64_t ticks = TicksBetween(seen, tick_);
    FailureKind kind = FailureKind::kNone;
    if (ticks == 0) kind = FailureKind::kCallSite;
    if (ticks > 0) kind = FailureKind::kOverrun;
    if (kind == FailureKind::kNone && deadline.Passed()) kind = FailureKind::kTimeout;
    if (kind == FailureKind::kNone) return !channel_.HasFailed();
    const auto as_flag_word = [](uint64_t flag) {
      return FlagWord(static_cast<uint32_t>(flag >> kPacketCallSiteBits),
                      static_cast<uint32_t>(flag) & ((1u << kPacketCallSiteBits) - 1));
    };
    channel_.Fail(kind, distance - 1, as_flag_word(PacketFlag(tick_, call_site_)),
                  as_flag_word(seen));
    return false;
  }

  const Channel<Region::kPackets> channel_;
  const uint32_t call_site_;
  const Claim& claim_;
  uint64_t tick_ = 0;
};

// --- Rows as packets: each row is cut anew, so that its last packet may be short.

constexpr int kPacketData = 8;  // bytes

struct PacketRows {
  const std::byte* x;  // [rows, row_bytes]
  std::byte* y;        // [rows, world size, row_bytes]
  int64_t row_bytes;
  int packets_per_row;
  int num_packets;
  bool aligned;  // all packets are whole, and lie at multiples of their size
};

// One packet of an array: which row, and which bytes of it.
struct PacketPlace {
  int64_t row, begin;
  int bytes;
};

__device__ __forceinline__ PacketPlace PlaceOf(const PacketRows& rows, int packet) {
  const int row = packet / rows.packets_per_row;
  const int64_t begin = int64_t{packet - row * rows.packets_per_row} * kPacketData;
  return {row, begin, static_cast<int>(min(int64_t{kPacketData}, rows.row_bytes - begin))};
}

__device__ __forceinline__ uint64_t LoadPacket(const PacketRows& rows, PacketPlace place) {
  const std::byte* const from = rows.x + place.row * rows.row_bytes + place.begin;
  if (rows.aligned) return *reinterpret_cast<const uint64_t*>(from);
  uint64_t data = 0;
#pragma unroll 1
  for (int i = 0; i < place.bytes; ++i) data |= static_cast<uint64_t>(from[i]) << (8 * i);
  return data;
}

__device__ __forceinline__ void StorePacket(const PacketRows& rows, PacketPlace place, int source,
                                            int world_size, uint64_t data) {
  std::byte* const to = rows.y + (place.row * world_size + source) * rows.row_bytes + place.begin;
  if (rows.aligned) {
    *reinterpret_cast<uint64_t*>(to) = data;
    return;
  }
#pragma unroll 1
  for (int i = 0; i < place.bytes; ++i) to[i] = static_cast<std::byte>(data >> (8 * i));
}

// Packets of each rank in a tile of a copied array; all ranks' together are one to a thread.
HD constexpr int TilePackets(int world_size) { return kChannelPackets / world_size; }

// Gathers tile `tile` of `rows`, the CTA's number `number`. If a packet does not come, the tile is
// filled with ones, which is NaN in every float format that has one.
__device__ inline void ExchangeTile(PacketMailbox& mailbox, const PacketRows& rows, int tile,
                                    int64_t number) {
  const int n = mailbox.group().world_size;
  const int per_rank = TilePackets(n);
  const int distance = static_cast<int>(threadIdx.x) / per_rank;  // 0 is this rank itself
  const int index = static_cast<int>(threadIdx.x) % per_rank;
  const int packet = tile * per_rank + index;
  const bool takes_part = distance < n && packet < rows.num_packets;
  PacketPlace place = {};
  uint64_t data = 0;
  if (takes_part) {
    place = PlaceOf(rows, packet);
    data = LoadPacket(rows, place);
  }
  bool ok = mailbox.Enter(number);
  if (ok && takes_part && distance > 0) {
    mailbox.Send(distance, index, data);
    ok = mailbox.Receive(distance, index, data);
  }
  if (!__syncthreads_and(ok)) data = ~uint64_t{0};
  if (takes_part) {
    StorePacket(rows, place, Mod(mailbox.group().rank - distance, n), n, data);
  }
}

}  // namespace jax_pcie::cuda
