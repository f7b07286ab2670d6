// A peer group of virtual CPU devices in one process: its members and where they meet.
#pragma once

#include <unistd.h>

#include "../peer_group.h"
#include "rendezvous.h"

namespace jax_pcie::cpu {

class Group {
 public:
  explicit Group(const GroupOptions& options)
      : members_(options),
        max_bytes_(options.max_bytes),
        process_(getpid()),
        rendezvous_(options.name, static_cast<int>(options.slices.size()), members_.world_size(),
                    options.timeout_s) {}

  const Membership& members() const { return members_; }
  int64_t max_bytes() const { return max_bytes_; }
  Rendezvous& rendezvous() { return rendezvous_; }

  // Throws the group's first failure, or that this is a forked child: there only the calling thread
  // lives on, and a call would wait for ever.
  void RequireUsable() const {
    Require(getpid() == process_, members_.name(), " was made in process ", process_,
            " and cannot be used after fork in process ", getpid());
    if (const auto broken = rendezvous_.Broken()) throw Error(BrokenGroup(*broken));
  }

  void RequireClosable() const { rendezvous_.RequireClosable(); }
  void Close() { rendezvous_.Close(); }

 private:
  Membership members_;
  int64_t max_bytes_;
  pid_t process_;
  Rendezvous rendezvous_;
};

}  // namespace jax_pcie::cpu
