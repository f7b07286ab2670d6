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

// Left in place of the tick once a packet has not come: the channel never sends again, because a
// peer that is elsewhere in its calls could take the next tile for another of the same call site.
// In the counter itself, because nothing else passes in order from call to call.
constexpr uint64_t kFailedTick = kBusyTick - 1;

// What a CTA knows of its channel, once one of its threads has claimed it.
struct Claim {
  uint64_t first_tick;
  uint32_t has_failed;
};

// Where one packet lies in slot 0: in the mailbox of the peer `distance` ranks after this one,
// which it is sent to, and in this rank's, where that of the peer as far before arrives.
struct PacketLine {
  int distance;
  ulonglong2* to;
  const ulonglong2* from;
};

// A channel of packets: its tick counter and its failures.
struct PacketChannel {
  static constexpr bool kTickGuardsMemory = false;  // nothing else passes from call to call

  const PacketView& view;
  int index;

  __device__ uint64_t* Tick() const {
    return reinterpret_cast<uint64_t*>(view.ticks + SlabLayout::TickOffset(index));
  }
  __device__ bool HasFailed() const { return ptx::LoadRelaxedSys(view.failed) != 0; }
  __device__ uint64_t timeout_ns() const { return view.timeout_ns; }
  __device__ void Fail(FailureKind kind, int lane, uint64_t expected, uint64_t observed) const {
    LeaveFailure(view.failed, view.failure,
                 {expected, observed, Region::kPackets, view.rank, index, lane, kind});
  }
};

// A CTA's end of its channel. Tiles are exchanged in turn, one tick each.
//
// What a packet needs but for its tick is made before `Enter`, while the claim is under way:
// between the tick and the packets' departure every rank waits for every other. All else comes
// later.
class PacketMailbox {
 public:
  // Begins the claim, and does not wait for its result: that would hold up the warp's own loads.
  __device__ PacketMailbox(const PacketView& view, uint32_t call_site, Claim& claim)
      : channel_{view, static_cast<int>(blockIdx.x)}, call_site_(call_site), claim_(claim) {
    if (threadIdx.x == 0) {
      first_attempt_ = TryTick(channel_);
      has_failed_ = ptx::LoadRelaxedSys(view.failed);
    }
  }

  __device__ PacketLine LineOf(int distance, int index) const {
    const PacketView& view = channel_.view;
    const uint32_t offset = SlabLayout::PacketOffset(view.world_size, view.lane_bytes,
                                                     channel_.index, /*slot=*/0, distance - 1) +
                            static_cast<uint32_t>(index * kPacketBytes);
    return {distance, reinterpret_cast<ulonglong2*>(view.packets[distance] + offset),
            reinterpret_cast<const ulonglong2*>(view.packets[0] + offset)};
  }

  // Called by all threads of the CTA before tile number `tile`, in order from 0; false if the
  // channel is unusable.
  __device__ bool Enter(int64_t tile) {
    if (tile == 0 && threadIdx.x == 0) {
      const uint64_t tick = ClaimTick(channel_, first_attempt_);
      claim_ = {tick, has_failed_ != 0 || tick >= kFailedTick};
    }
    __syncthreads();
    tick_ = claim_.first_tick + tile;
    return !claim_.has_failed;
  }

  // Called by all threads of the CTA after a tile; whether it has arrived for all of them.
  __device__ bool Leave(bool ok) const {
    const bool has_arrived = __syncthreads_and(ok);
    if (!has_arrived && threadIdx.x == 0) claim_.has_failed = true;
    return has_arrived;
  }

  __device__ void Send(const PacketLine& line, uint64_t data) const {
    ptx::StoreRelaxedSysB128(line.to + SlotOffset(),
                             make_ulonglong2(data, PacketFlag(tick_, call_site_)));
  }

  // False if the packet does not come.
  __device__ bool Receive(const PacketLine& line, uint64_t& data) const {
    const ulonglong2* const from = line.from + SlotOffset();
    const uint64_t want = PacketFlag(tick_, call_site_);
    Deadline deadline(channel_.timeout_ns());
    for (uint32_t misses = 1;; ++misses) {
      const ulonglong2 packet = ptx::LoadRelaxedSysB128(from);
      if (packet.y == want) {
        data = packet.x;
        return true;
      }
      if (misses % kMissesPerCheck == 0 && !MayStillCome(packet.y, line.distance, deadline)) {
        return false;
      }
    }
  }

  // After the last tile, by all threads; every one of them has received what it waited for.
  __device__ void Release(int64_t num_tiles) const {
    if (threadIdx.x == 0 && claim_.first_tick != kBusyTick) {
      ptx::StoreRelaxedSys(channel_.Tick(),
                           claim_.has_failed ? kFailedTick : claim_.first_tick + num_tiles);
    }
  }

  __device__ const PacketView& view() const { return channel_.view; }

 private:
  // From slot 0 to the slot of this tile's tick, in packets.
  __device__ uint32_t SlotOffset() const {
    static_assert(kPacketSlots == 2);
    const PacketView& view = channel_.view;
    const uint32_t slot_bytes = SlabLayout::PacketSlotBytes(view.world_size, view.lane_bytes);
    return tick_ % 2 ? slot_bytes / kPacketBytes : 0;
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

  const PacketChannel channel_;
  const uint32_t call_site_;
  Claim& claim_;
  uint64_t first_attempt_ = 0;  // of thread 0, as is the next
  uint32_t has_failed_ = 0;
  uint64_t tick_ = 0;
};

// The thread's number, as a value that the compiler does not know to be the same in every tile:
// it would compute what it can before the loop over tiles, for all kinds of tiles, and every warp
// would do that work before its first packet leaves.
__device__ __forceinline__ int ThreadOfTile() { return ptx::Kept(threadIdx.x); }

// --- Rows as packets: each row is cut anew, so that its last packet may be short.

constexpr int kPacketData = 8;  // bytes

// A divisor that the host knows, so that the device need not divide: a division takes about as long
// as a load from L2, and which packet a thread loads would take several in turn.
class Divisor {
 public:
  Divisor() = default;
  HD constexpr explicit Divisor(int value) : value_(value), reciprocal_(UINT32_MAX / value) {}
  HD constexpr int value() const { return value_; }
  // Of x >= 0. `reciprocal_` is less than 2^32 / value by 1 at most, so that the product is less
  // than x / value by x / 2^32 < 1 / 2 at most, and its integer part less than the quotient by 1.
  HD constexpr int Quotient(int x) const {
    const int low = static_cast<int>(uint64_t{static_cast<uint32_t>(x)} * reciprocal_ >> 32);
    return low + (x - low * value_ >= value_);
  }

 private:
  int value_ = 1;
  uint32_t reciprocal_ = UINT32_MAX;
};
static_assert(Divisor(1).Quotient(INT32_MAX) == INT32_MAX && Divisor(7).Quotient(48) == 6);
static_assert(Divisor(INT32_MAX).Quotient(INT32_MAX) == 1 && Divisor(3).Quotient(0) == 0);

struct PacketRows {
  const std::byte* x;  // [rows, row_bytes]
  std::byte* y;        // [rows, world size, row_bytes]
  int64_t row_bytes;
  Divisor row_packets;   // packets of a row
  Divisor tile_packets;  // of each rank in a tile; all ranks' together are one to a thread
  int num_packets;
  bool aligned;  // all packets are whole, and lie at multiples of their size
};

// One packet of an array: which row, and where in it.
struct PacketPlace {
  int64_t row, begin;
};

// Packet `packet` of the array.
__device__ __forceinline__ PacketPlace PlaceOf(const PacketRows& rows, int packet) {
  const int row = rows.row_packets.Quotient(packet);
  return {row, int64_t{packet - row * rows.row_packets.value()} * kPacketData};
}

__device__ __forceinline__ int BytesOf(const PacketRows& rows, PacketPlace place) {
  return static_cast<int>(min(int64_t{kPacketData}, rows.row_bytes - place.begin));
}

__device__ __forceinline__ uint64_t LoadPacket(const PacketRows& rows, PacketPlace place) {
  const std::byte* const from = rows.x + place.row * rows.row_bytes + place.begin;
  if (rows.aligned) return *reinterpret_cast<const uint64_t*>(from);
  const int num_bytes = BytesOf(rows, place);
  uint64_t data = 0;
#pragma unroll 1
  for (int i = 0; i < num_bytes; ++i) data |= static_cast<uint64_t>(from[i]) << (8 * i);
  return data;
}

__device__ __forceinline__ void StorePacket(const PacketRows& rows, PacketPlace place, int source,
                                            int world_size, uint64_t data) {
  std::byte* const to = rows.y + (place.row * world_size + source) * rows.row_bytes + place.begin;
  if (rows.aligned) {
    *reinterpret_cast<uint64_t*>(to) = data;
    return;
  }
  const int num_bytes = BytesOf(rows, place);
#pragma unroll 1
  for (int i = 0; i < num_bytes; ++i) to[i] = static_cast<std::byte>(data >> (8 * i));
}

// Gathers tile `tile` of `rows`, the CTA's number `number`. If a packet does not come, the tile is
// filled with ones. That is NaN in float formats, but the lowest number in float8's `fnuz` ones,
// whose NaN is 0x80, and -1 in signed integers.
__device__ inline void ExchangeTile(PacketMailbox& mailbox, const PacketRows& rows, int tile,
                                    int64_t number) {
  const int n = mailbox.view().world_size;
  const int per_rank = rows.tile_packets.value();
  const int thread = ThreadOfTile();
  const int distance = rows.tile_packets.Quotient(thread);  // 0 is this rank itself
  const int index = thread - distance * per_rank;
  const int packet = tile * per_rank + index;
  const bool takes_part = distance < n && packet < rows.num_packets;
  PacketPlace place = {};
  uint64_t data = 0;
  if (takes_part) {
    place = PlaceOf(rows, packet);
    data = LoadPacket(rows, place);
  }
  const bool is_sent = takes_part && distance > 0;
  PacketLine line = {};
  if (is_sent) line = mailbox.LineOf(distance, index);
  bool ok = mailbox.Enter(number);
  if (ok && is_sent) {
    mailbox.Send(line, data);
    ok = mailbox.Receive(line, data);
  }
  if (!mailbox.Leave(ok)) data = ~uint64_t{0};
  if (takes_part) {
    const int source = mailbox.view().rank - distance;
    StorePacket(rows, place, source < 0 ? source + n : source, n, data);
  }
}

}  // namespace jax_pcie::cuda
