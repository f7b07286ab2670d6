// A collective's types: which topology, over which codec, for which element. Runtime choice becomes
// compile-time choice here, once; below it nobody compares ids.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "codec.h"
#include "error.h"
#include "topology.h"

namespace jax_pcie {

// Calls `body.template operator()<Element>()` with the element type that NumPy names.
template <class Body>
decltype(auto) VisitElementName(const std::string& dtype, Body&& body) {
  if (dtype == "bfloat16") return body.template operator()<Bf16>();
  if (dtype == "float16") return body.template operator()<F16>();
  Require(dtype == "float32", "codecs take bfloat16, float16 and float32, not ", dtype);
  return body.template operator()<F32>();
}

// Calls `body.template operator()<Topology>()` with the collective of two ids on arrays of
// `Element`.
template <class Element, class Body>
decltype(auto) VisitCollective(CodecId codec, TopologyId topology, Body&& body) {
  return VisitCodec<Element>(codec, [&]<class Codec>() {
    return VisitTopology<Codec, Raw<Element>>(
        topology, [&]<class Topology>() { return body.template operator()<Topology>(); });
  });
}

// The larger of the two records that `values` values of a shard may travel as.
template <class Topology>
constexpr int64_t MaxRecordBytes(int64_t values) {
  return std::max(RecordLayout::For<typename Topology::PartialCodec>(values).total_bytes,
                  RecordLayout::For<typename Topology::FinalCodec>(values).total_bytes);
}

}  // namespace jax_pcie
