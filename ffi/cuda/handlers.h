// What the CUDA handlers of groups share: the registry, and the stage that reports earlier
// failures.
#pragma once

#include "../ops.h"
#include "../peer_group.h"
#include "group.h"

namespace jax_pcie::cuda {

using Groups = Registry<Group>;

// Runs at every execution, also when a graph is replayed: the place where a wait that failed in an
// earlier call can still become an error.
inline ffi::Error Initialize(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary attributes) {
  return Guard([&] {
    const auto group_id = attributes.get<int64_t>("group");
    Require(group_id.has_value(), "the call has no attribute `group`");
    Groups::Instance().Find(*group_id)->RequireUsable();
  });
}

}  // namespace jax_pcie::cuda
