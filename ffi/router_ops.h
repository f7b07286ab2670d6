// The router's ops: what the buffers and attributes of a gather and of a selection must be.
#pragma once

#include <cstdint>
#include <vector>

#include "error.h"
#include "ops.h"
#include "router_calls.h"

XLA_FFI_REGISTER_ENUM_ATTR_DECODING(jax_pcie::Scoring);

namespace jax_pcie {

inline GatherCall CheckedGather(const ffi::AnyBuffer& x, const ffi::AnyBuffer& y, int world_size) {
  Require(x.dimensions().size() >= 2 && x.dimensions()[0] > 0,
          "a gather takes arrays of at least one row, not of rank ", x.dimensions().size());
  Require(y.size_bytes() == x.size_bytes() * world_size, "a gather of ", x.size_bytes(),
          " bytes from each of ", world_size, " ranks does not make ", y.size_bytes());
  const int64_t num_rows = x.dimensions()[0];
  return {x.untyped_data(), y.untyped_data(), num_rows,
          static_cast<int64_t>(x.size_bytes()) / num_rows};
}

// One array of each pair of an operand and a result; what follows them are tokens.
inline std::vector<GatherCall> CheckedGathers(const ffi::RemainingArgs& args,
                                              const ffi::RemainingRets& rets, int32_t num_arrays,
                                              int world_size) {
  Require(num_arrays >= 1 && num_arrays <= kMaxArrays, "a gather moves 1 or 2 arrays, not ",
          num_arrays);
  std::vector<GatherCall> calls;
  for (int i = 0; i < num_arrays; ++i) {
    auto x = args.get<ffi::AnyBuffer>(i);
    auto y = rets.get<ffi::AnyBuffer>(i);
    Require(x.has_value() && y.has_value(), "a gather lacks its array ", i);
    calls.push_back(CheckedGather(*x, **y, world_size));
  }
  return calls;
}

template <class T>
T Attribute(const ffi::Dictionary& attributes, const char* name) {
  const auto value = attributes.get<T>(name);
  Require(value.has_value(), "the call has no attribute `", name, "` of its type");
  return *value;
}

// The id of the call's group, or one that no group has.
inline int64_t GroupOf(const ffi::Dictionary& attributes) {
  const auto id = attributes.get<int64_t>("group");
  return id.has_value() ? *id : -1;
}

// `logits` has one of `parts` equal parts of the rows' experts in it. `rest` begins with the bias,
// if there is one.
inline RouteCall CheckedRoute(const ffi::AnyBuffer& logits, int parts,
                              const ffi::RemainingArgs& rest, const ffi::AnyBuffer& weights,
                              const ffi::AnyBuffer& ids, const ffi::Dictionary& attributes) {
  Require(logits.dimensions().size() == 2, "logits have rank ", logits.dimensions().size(),
          ", not 2");
  const int64_t num_rows = logits.dimensions()[0];
  const int64_t num_experts = logits.dimensions()[1] * parts;
  Require(num_rows > 0, "there are no rows of logits");
  Require(num_experts <= INT32_MAX / 2, num_experts, " experts are too many");
  RouteRule rule{static_cast<int>(num_experts),
                 Attribute<int32_t>(attributes, "k"),
                 Attribute<Scoring>(attributes, "scoring"),
                 Attribute<int32_t>(attributes, "n_group"),
                 Attribute<int32_t>(attributes, "topk_group"),
                 Attribute<bool>(attributes, "has_bias"),
                 Attribute<bool>(attributes, "renormalize"),
                 Attribute<float>(attributes, "routed_scaling_factor")};
  rule.Complete();
  const float* bias = nullptr;
  if (rule.has_bias) {
    const auto buffer = rest.get<ffi::AnyBuffer>(0);
    Require(buffer.has_value() && buffer->element_type() == ffi::F32 &&
                static_cast<int64_t>(buffer->element_count()) == num_experts,
            "the bias is not float32 of ", num_experts, " experts");
    bias = buffer->typed_data<float>();
  }
  const int64_t chosen = num_rows * rule.num_chosen;
  Require(weights.element_type() == ffi::F32 && ids.element_type() == ffi::S32 &&
              static_cast<int64_t>(weights.element_count()) == chosen &&
              static_cast<int64_t>(ids.element_count()) == chosen,
          "weights and ids are not float32 and int32 of ", chosen, " values");
  return {logits.untyped_data(),     bias,     weights.typed_data<float>(),
          ids.typed_data<int32_t>(), num_rows, rule};
}

}  // namespace jax_pcie
