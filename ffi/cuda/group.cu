// What a group does with its GPUs when it is made and closed, and what it says of a failed wait.
#include <unistd.h>

#include <array>
#include <cstring>

#include "../error.h"
#include "check.h"
#include "gather_topk.h"
#include "group.h"
#include "mxfp8/route.h"

namespace jax_pcie::cuda {
namespace {

constexpr int kProbeWords = 32;

// Makes `device` current for a scope.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    CheckCuda(cudaGetDevice(&saved_), "cudaGetDevice");
    CheckCuda(cudaSetDevice(device), "cudaSetDevice");
  }
  ~DeviceScope() { cudaSetDevice(saved_); }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int saved_ = 0;
};

void EnablePeerAccess(int device, int peer) {
  int can_access = 0;
  CheckCuda(cudaDeviceCanAccessPeer(&can_access, device, peer), "cudaDeviceCanAccessPeer");
  Require(can_access, "GPU ", device, " cannot access the memory of GPU ", peer,
          ": the platform has no peer access between them");
  const DeviceScope scope(device);
  const cudaError_t status = cudaDeviceEnablePeerAccess(peer, 0);
  if (status == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();  // XLA has done it; the error would otherwise surface at the next launch
    return;
  }
  CheckCuda(status, "cudaDeviceEnablePeerAccess");
}

__global__ void ProbeKernel(uint32_t* peer, uint32_t seed) {
  peer[threadIdx.x] = seed * 2654435761u + threadIdx.x;
}

// A driver can promise peer access and drop the data: every pair writes a pattern and reads it
// back.
void ProbePair(int writer, const GroupView& writer_view, int reader, const GroupView& reader_view) {
  const uint32_t seed = 1 + writer_view.rank * kMaxWorldSize + reader_view.rank;
  const int64_t offset = writer_view.layout.mailboxes[0] + writer_view.rank * kFlagStride;
  {
    const DeviceScope scope(writer);
    ProbeKernel<<<1, kProbeWords>>>(
        reinterpret_cast<uint32_t*>(writer_view.slabs[reader_view.rank] + offset), seed);
    CheckCuda(cudaGetLastError(), "ProbeKernel");
    CheckCuda(cudaDeviceSynchronize(), "ProbeKernel");
  }
  const DeviceScope scope(reader);
  std::array<uint32_t, kProbeWords> seen;
  CheckCuda(cudaMemcpy(seen.data(), reader_view.slabs[reader_view.rank] + offset, sizeof seen,
                       cudaMemcpyDeviceToHost),
            "cudaMemcpy");
  for (uint32_t i = 0; i < kProbeWords; ++i) {
    Require(seen[i] == seed * 2654435761u + i, "GPU ", writer, " wrote to GPU ", reader,
            " and the data did not arrive, although the driver reports peer access. On PCIe hosts "
            "this is often the IOMMU or ACS: see the platform's documentation");
  }
}

std::byte* AllocateSlab(const SlabLayout& layout) {
  void* slab = nullptr;
  const std::string hint =
      Concat(layout.total_bytes, " bytes asked for. XLA takes most of the memory when it starts: ",
             "lower XLA_PYTHON_CLIENT_MEM_FRACTION or the group's max_bytes");
  CheckCuda(cudaMalloc(&slab, layout.total_bytes), "cudaMalloc", hint.c_str());
  return static_cast<std::byte*>(slab);
}

// Before any peer learns the address: what kernels expect to find.
void InitialiseSlab(std::byte* slab, const SlabLayout& layout, int world_size,
                    uint64_t first_generation) {
  // Flags begin one tick before the first, without a call site; ticks at the first.
  std::vector<std::byte> head(layout.mailboxes[0]);
  const auto fill = [&](int64_t begin, int64_t count, uint64_t word) {
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(head.data() + begin + i * kFlagStride, &word, sizeof word);
    }
  };
  const uint64_t before_first = FlagWord(static_cast<uint32_t>(first_generation - 1), 0);
  fill(layout.flags[0], layout.ticks[0] / kFlagStride, before_first);
  fill(layout.flags[1], (layout.ticks[1] - layout.flags[1]) / kFlagStride, before_first);
  for (const int64_t ticks : layout.ticks) fill(ticks, layout.num_channels, first_generation);
  fill(layout.failed, 1, 0);
  const std::array<uint64_t, 2> packet = {0, PacketFlag(first_generation - 1, 0)};
  for (int64_t i = 0; i < layout.NumPackets(world_size); ++i) {
    std::memcpy(head.data() + layout.mailboxes[int(Region::kPackets)] + i * kPacketBytes,
                packet.data(), kPacketBytes);
  }
  CheckCuda(cudaMemcpy(slab, head.data(), head.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
  CheckCuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

Failure* AllocateFailure() {
  void* failure = nullptr;
  CheckCuda(cudaHostAlloc(&failure, sizeof(Failure), cudaHostAllocPortable | cudaHostAllocMapped),
            "cudaHostAlloc");
  return new (failure) Failure{};
}

}  // namespace

Group::Group(const GroupOptions& options)
    : members_(options), timeout_s_(options.timeout_s), process_(getpid()) {
  Require(members_.world_size() <= kMaxWorldSize, options.name, ": at most ", kMaxWorldSize,
          " ranks");
  try {
    for (const auto& devices : options.slices) Open(devices, options);
  } catch (...) {
    Close();
    throw;
  }
}

void Group::Open(const std::vector<int64_t>& devices, const GroupOptions& options) {
  const int n = static_cast<int>(devices.size());
  int num_sms = INT32_MAX;
  for (const int64_t device : devices) {
    int sms = 0;
    CheckCuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, int(device)),
              "cudaDeviceGetAttribute");
    num_sms = std::min(num_sms, sms);
  }
  // One CTA an SM at most: a grid that waits for peers must be resident as a whole.
  const SlabLayout layout = SlabLayout::For(n, num_sms, options.max_bytes, kSlotBytes);

  const size_t base = views_.size();
  for (int rank = 0; rank < n; ++rank) {
    const int device = static_cast<int>(devices[rank]);
    const DeviceScope scope(device);
    LoadKernels<Bf16>();
    LoadKernels<F16>();
    LoadKernels<F32>();
    LoadRouterKernels();
    mxfp8::LoadKernels();
    GroupView view = {};
    view.layout = layout;
    view.timeout_ns = static_cast<uint64_t>(options.timeout_s * 1e9);
    view.rank = rank;
    view.world_size = n;
    views_.push_back(view);
    devices_.push_back(device);
    views_.back().slabs[rank] = AllocateSlab(layout);
    InitialiseSlab(views_.back().slabs[rank], layout, n, options.first_generation);
    views_.back().failure = AllocateFailure();
  }
  for (int rank = 0; rank < n; ++rank) {
    for (int peer = 0; peer < n; ++peer) {
      if (peer == rank) continue;
      EnablePeerAccess(devices_[base + rank], devices_[base + peer]);
      views_[base + rank].slabs[peer] = views_[base + peer].slabs[peer];
    }
  }
  for (int rank = 0; rank < n; ++rank) {
    for (int peer = 0; peer < n; ++peer) {
      if (peer == rank) continue;
      ProbePair(devices_[base + rank], views_[base + rank], devices_[base + peer],
                views_[base + peer]);
    }
  }
}

std::optional<std::string> Group::Broken() const {
  const std::shared_lock lock(lifetime_);
  const int n = members_.world_size();
  const auto failed = [&](size_t index) {
    return const_cast<const volatile Failure*>(views_[index].failure)->kind != FailureKind::kNone;
  };
  std::optional<size_t> first;
  for (size_t i = 0; i < views_.size(); ++i) {
    if (!failed(i)) continue;
    __sync_synchronize();  // the fields were written before `kind`
    if (!first) first = i;
    // Around a ring all wait for one another; the one to name is who did not even wait.
    if (!failed(i / n * n + PeerOf(*views_[i].failure))) first = i;
  }
  if (!first) return std::nullopt;
  return Describe(*views_[*first].failure);
}

int Group::PeerOf(const Failure& failure) const {
  const int n = members_.world_size();
  const int distance = failure.region == Region::kRing ? 1 : failure.lane % (n - 1) + 1;
  return Mod(failure.rank - distance, n);
}

std::string Group::Describe(const Failure& failure) const {
  const int peer = PeerOf(failure);
  const std::string where = Concat(members_.name(), ": rank ", failure.rank, ", channel ",
                                   failure.channel, ", lane ", failure.lane, ": ");
  const std::string words =
      Concat(" (expected call ", failure.expected >> 32, " piece ", TickOf(failure.expected),
             ", found call ", failure.observed >> 32, " piece ", TickOf(failure.observed), ")");
  switch (failure.kind) {
    case FailureKind::kTimeout:
      return Concat(where, "waited ", timeout_s_, " s; missing ranks: ", peer, words);
    case FailureKind::kCallSite:
      return Concat(where, "rank ", peer, " is in another collective of the program", words,
                    ". All ranks must run the same collectives in the same order");
    case FailureKind::kOverrun:
      return Concat(where, "rank ", peer, " is ahead of this rank", words);
    case FailureKind::kBusy:
      return Concat(where,
                    "two collectives of the group ran at once on this GPU and the first did "
                    "not end in ",
                    timeout_s_, " s");
    case FailureKind::kNone:
      break;
  }
  return where;
}

void Group::RequireUsable() const {
  Require(getpid() == process_, members_.name(), " was made in process ", process_,
          " and cannot be used after fork in process ", getpid());
  if (const auto broken = Broken()) throw Error(BrokenGroup(*broken));
}

void Group::Close() {
  const std::unique_lock lock(lifetime_);
  for (const int device : devices_) {
    const DeviceScope scope(device);
    cudaDeviceSynchronize();  // drain all before any slab goes
  }
  for (size_t i = 0; i < views_.size(); ++i) {
    const DeviceScope scope(devices_[i]);
    if (views_[i].failure) cudaFreeHost(views_[i].failure);
    cudaFree(views_[i].slabs[views_[i].rank]);
  }
  views_.clear();
  devices_.clear();
}

}  // namespace jax_pcie::cuda
