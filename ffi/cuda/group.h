// A peer group of GPUs in one process: a slab on each, which the others write into.
//
// Everything that could block behind a waiting kernel, or that must not happen under graph capture,
// is done when the group is made: peer access, allocation, kernel loading, a write-and-read-back
// check of every pair. Slabs are freed by `Close`, which is collective, and never by a destructor.
#pragma once

#include <optional>
#include <shared_mutex>
#include <string>
#include <vector>

#include "../peer_group.h"
#include "launch.h"

namespace jax_pcie::cuda {

class Group {
 public:
  explicit Group(const GroupOptions& options);

  const Membership& members() const { return members_; }

  // Calls `body(view)` with what a member's kernels need; the group cannot close meanwhile.
  template <class Body>
  auto WithView(Member member, Body&& body) const {
    const std::shared_lock lock(lifetime_);
    Require(!views_.empty(), members_.name(), " is closed");
    return body(views_[member.slice * members_.world_size() + member.rank]);
  }

  // The first failed wait of any rank, in words.
  std::optional<std::string> Broken() const;

  void RequireUsable() const;  // throws what `Broken` says, or that this is a forked child

  void RequireClosable() const {}

  // Waits for the devices, then frees everything. No program may be replaying a graph of the group.
  void Close();

 private:
  int PeerOf(const Failure& failure) const;  // whom the failed wait was for
  void Open(const std::vector<int64_t>& devices, const GroupOptions& options);
  std::string Describe(const Failure& failure) const;

  mutable std::shared_mutex lifetime_;  // shared by calls, exclusive to `Close`
  Membership members_;
  double timeout_s_;
  pid_t process_;
  std::vector<GroupView> views_;  // [slice * world size + rank]
  std::vector<int> devices_;      // likewise: the CUDA device of each
};

}  // namespace jax_pcie::cuda
