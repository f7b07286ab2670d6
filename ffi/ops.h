// FFI ops: what a custom call's buffers and attributes must be, checked once and turned into types.
//
// Only this file and its includers see `xla/ffi`. An op looks up,
// checks and calls; it contains no algorithm. Errors are exceptions inside and a status outside.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "codec.h"
#include "error.h"
#include "topology.h"
#include "xla/ffi/api/ffi.h"

XLA_FFI_REGISTER_ENUM_ATTR_DECODING(jax_pcie::CodecId);
XLA_FFI_REGISTER_ENUM_ATTR_DECODING(jax_pcie::TopologyId);

namespace jax_pcie {

namespace ffi = ::xla::ffi;

// Made once per call instruction and executable and shared by all its local devices, so its number
// tells two independent calls of one program apart, which attributes cannot.
struct CallSite {
  static ffi::TypeId id;
  int64_t number;

  static std::unique_ptr<CallSite> Make() {
    static std::atomic<int64_t> next{1};
    return std::make_unique<CallSite>(CallSite{next.fetch_add(1)});
  }
};

// The instantiate stage of every op. Accepts whatever attributes the call has: it only gives the
// call its number.
inline ffi::ErrorOr<std::unique_ptr<CallSite>> Instantiate(ffi::Dictionary) {
  return CallSite::Make();
}

// Runs a handler's body and turns what it throws into a status.
template <class Body>
ffi::Error Guard(Body&& body) {
  try {
    body();
    return ffi::Error::Success();
  } catch (const std::exception& failure) {
    return ffi::Error::Internal(failure.what());
  }
}

struct AllReduceCall {
  const void* x;
  void* y;
  int64_t count;  // elements
  ffi::DataType element;
  CodecId codec;
  TopologyId topology;

  static AllReduceCall Checked(const ffi::AnyBuffer& x, const ffi::AnyBuffer& y, CodecId codec,
                               TopologyId topology) {
    Require(x.element_type() == y.element_type() && x.element_count() == y.element_count(),
            "all_reduce: x has ", x.element_count(), " elements of type ", int(x.element_type()),
            ", y ", y.element_count(), " of type ", int(y.element_type()), "; they must be equal");
    return {x.untyped_data(),
            y.untyped_data(),
            static_cast<int64_t>(x.element_count()),
            x.element_type(),
            codec,
            topology};
  }
};

// Calls `body.template operator()<Element>()` with the element type that XLA names.
template <class Body>
void VisitElement(ffi::DataType element, Body&& body) {
  switch (element) {
    case ffi::BF16:
      return body.template operator()<Bf16>();
    case ffi::F16:
      return body.template operator()<F16>();
    case ffi::F32:
      return body.template operator()<F32>();
    default:
      throw Error(
          Concat("element type ", int(element), " is not one of bfloat16, float16 and float32"));
  }
}

}  // namespace jax_pcie
