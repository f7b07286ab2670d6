// What every peer group has, whatever its platform: who its members are, and an id in a registry.
//
// The id is what compiled programs carry: never a pointer, and never used again, so that a program
// compiled for a closed group fails instead of reaching a newer one. Mailboxes belong to the
// platform's group (`cpu/group.h`, `cuda/group.h`).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "error.h"

namespace jax_pcie {

struct GroupOptions {
  std::string name;                          // as users know it, for messages: axis and world size
  std::vector<std::vector<int64_t>> slices;  // [slice][rank] device ordinals, as FFI reports them
  int64_t max_bytes = 0;                     // staging capacity of one rank
  double timeout_s = 0;
  uint64_t first_generation = 0;
};

// One line of a mesh along the group's axis is a slice: its ranks talk to each other only.
struct Member {
  int slice;
  int rank;
};

class Membership {
 public:
  explicit Membership(const GroupOptions& options) : name_(options.name) {
    Require(!options.slices.empty() && !options.slices[0].empty(), name_, " has no devices");
    world_size_ = static_cast<int>(options.slices[0].size());
    for (int slice = 0; slice < static_cast<int>(options.slices.size()); ++slice) {
      const auto& devices = options.slices[slice];
      Require(static_cast<int>(devices.size()) == world_size_, name_, ": slice ", slice, " has ",
              devices.size(), " ranks, slice 0 has ", world_size_);
      for (int rank = 0; rank < world_size_; ++rank) {
        const bool added = members_.emplace(devices[rank], Member{slice, rank}).second;
        Require(added, name_, ": device ", devices[rank],
                " appears twice; every rank needs its own");
      }
    }
  }

  int world_size() const { return world_size_; }
  const std::string& name() const { return name_; }

  // The device is a key into the group's table and never the rank itself (meshes are permuted).
  Member Find(int64_t ordinal) const {
    const auto found = members_.find(ordinal);
    Require(found != members_.end(), "device ", ordinal, " is not a member of ", name_,
            ": run the program on the devices of the mesh that the group was made for");
    return found->second;
  }

 private:
  std::string name_;
  int world_size_ = 0;
  std::map<int64_t, Member> members_;
};

// What every call on a group says once one of its waits has failed: its ranks no longer agree on
// what comes next, so it cannot go on.
inline std::string BrokenGroup(const std::string& first_failure) {
  return Concat("the peer group is broken and must be made anew; its first failure: ",
                first_failure);
}

template <class Group>
class Registry {
 public:
  static Registry& Instance() {
    static Registry* const registry = new Registry;  // outlives every thread, so never destroyed
    return *registry;
  }

  int64_t Add(std::shared_ptr<Group> group) {
    std::lock_guard lock(mutex_);
    groups_.emplace(next_id_, std::move(group));
    return next_id_++;
  }

  std::shared_ptr<Group> Find(int64_t id) const {
    std::lock_guard lock(mutex_);
    const auto found = groups_.find(id);
    if (found != groups_.end()) return found->second;
    Require(id < 0 || id >= next_id_, "peer group ", id,
            " is closed: a program compiled for it cannot run any more");
    throw Error(Concat("there is no peer group ", id, " in this process"));
  }

  // Takes the group out, so that later calls fail; null if it was closed before. Throws, and leaves
  // it in, where it cannot be closed.
  std::shared_ptr<Group> Remove(int64_t id) {
    std::lock_guard lock(mutex_);
    const auto found = groups_.find(id);
    if (found == groups_.end()) return nullptr;
    found->second->RequireClosable();
    std::shared_ptr<Group> group = std::move(found->second);
    groups_.erase(found);
    return group;
  }

 private:
  mutable std::mutex mutex_;
  std::map<int64_t, std::shared_ptr<Group>> groups_;
  int64_t next_id_ = 0;
};

}  // namespace jax_pcie
