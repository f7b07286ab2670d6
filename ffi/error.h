// Errors of the core: one exception type whose message names the value and the rule.
//
// Thrown inside; turned into a status exactly once, at the FFI edge (`ops.h`) or by nanobind's
// translator (`module.h`). Never `assert`, `printf` + `exit` or a silent fallback.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace jax_pcie {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <class... Parts>
std::string Concat(Parts&&... parts) {
  std::ostringstream out;
  (out << ... << std::forward<Parts>(parts));
  return out.str();
}

// Throws an `Error` made of `parts` unless `condition` holds.
template <class... Parts>
void Require(bool condition, Parts&&... parts) {
  if (!condition) throw Error(Concat(std::forward<Parts>(parts)...));
}

}  // namespace jax_pcie
