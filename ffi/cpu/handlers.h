// What the CPU's handlers share: a rank's part in a round, as the future that XLA waits for.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "../ops.h"
#include "group.h"

namespace jax_pcie::cpu {

using Groups = Registry<Group>;

// Calls `arrive(group, done)`, which takes part in a round of the group and hands `done` on.
template <class Arrive>
ffi::Future Join(int64_t group_id, Arrive&& arrive) {
  ffi::Promise promise;
  ffi::Future future(promise);
  try {
    const auto group = Groups::Instance().Find(group_id);
    group->RequireUsable();
    arrive(*group, [promise](const std::optional<std::string>& error) mutable {
      if (error) {
        promise.SetError(ffi::Error::Internal(*error));
      } else {
        promise.SetAvailable();
      }
    });
  } catch (const std::exception& failure) {
    promise.SetError(ffi::Error::Internal(failure.what()));
  }
  return future;
}

}  // namespace jax_pcie::cpu
