// The CPU module: the all-reduce handler, the router's (`router.cc`) and the group's life cycle, as
// Python sees them.
#include "../module.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>

#include "../collective.h"
#include "../plan.h"
#include "../slab.h"
#include "../topk.h"
#include "codec_loops.h"
#include "handlers.h"
#include "router.h"

namespace jax_pcie {

ffi::TypeId CallSite::id = {};

namespace cpu {
namespace {

ffi::Future AllReduce(ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y, int64_t group_id,
                      CodecId codec, TopologyId topology, CallSite* call_site, ffi::RunId run,
                      int64_t device) {
  return Join(group_id, [&](Group& group, OnDone done) {
    const auto call = AllReduceCall::Checked(x, *y, codec, topology);
    const Member member = group.members().Find(device);
    const int64_t max_bytes = group.max_bytes();
    group.rendezvous().Arrive(
        {call_site->number, run.run_id, member.slice}, member.rank, {call.x, call.y},
        {call.count, int64_t(call.element), int64_t(codec), int64_t(topology)},
        [call, max_bytes](const std::vector<RankBuffers>& buffers) {
          VisitElement(call.element, [&]<class Element>() {
            VisitCollective<Element>(call.codec, call.topology, [&]<class Topology>() {
              RunAllRanks<Element, Topology>(buffers, call.count, max_bytes);
            });
          });
        },
        std::move(done));
  });
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, ffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER(kAllReduce, AllReduce,
                       ffi::Ffi::Bind()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Ret<ffi::AnyBuffer>()  // y
                           .Attr<int64_t>("group")
                           .Attr<CodecId>("codec")
                           .Attr<TopologyId>("topology")
                           .Ctx<ffi::State<CallSite>>()
                           .Ctx<ffi::RunId>()
                           .Ctx<ffi::DeviceOrdinal>());

// --- The codecs themselves, for tests: what a span becomes in a record, and back.

using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using NewBytes = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>;

NewBytes ToNumpy(const std::byte* data, int64_t size) {
  auto* copy = new uint8_t[size];
  std::memcpy(copy, data, size);
  nb::capsule owner(copy, [](void* p) noexcept { delete[] static_cast<uint8_t*>(p); });
  return NewBytes(copy, {static_cast<size_t>(size)}, owner);
}

template <class Codec>
int64_t NumScaleBytes(int64_t count) {
  if constexpr (Limited<Codec>) {
    return RoundUp(count, Codec::kBlock) / Codec::kBlock * sizeof(typename Codec::Scale);
  } else {
    return 0;
  }
}

std::tuple<NewBytes, NewBytes> EncodeForTests(int codec, const std::string& dtype, Bytes x) {
  return VisitElementName(dtype, [&]<class Element>() {
    return VisitCodec<Element>(CodecId(codec), [&]<class Codec>() {
      const int64_t count = x.size() / sizeof(Element);
      const auto* elements = reinterpret_cast<const Element*>(x.data());
      const RecordLayout layout = RecordLayout::For<Codec>(count);
      std::vector<std::byte> record(layout.total_bytes);
      if constexpr (Limited<Codec>) {
        std::vector<float> values(count);
        for (int64_t i = 0; i < count; ++i) values[i] = Widen(elements[i]);
        EncodeSpan<Codec, Element>(values.data(), count, record.data());
      } else {
        std::copy_n(reinterpret_cast<const std::byte*>(elements), x.size(), record.data());
      }
      return std::make_tuple(
          ToNumpy(record.data(), count * Codec::kPayloadBytes),
          ToNumpy(record.data() + layout.scales_offset, NumScaleBytes<Codec>(count)));
    });
  });
}

NewBytes DecodeForTests(int codec, const std::string& dtype, Bytes payload, Bytes scales) {
  return VisitElementName(dtype, [&]<class Element>() {
    return VisitCodec<Element>(CodecId(codec), [&]<class Codec>() {
      const int64_t count = payload.size() / Codec::kPayloadBytes;
      const RecordLayout layout = RecordLayout::For<Codec>(count);
      Require(int64_t(scales.size()) == NumScaleBytes<Codec>(count), "a record of ", count,
              " values has ", NumScaleBytes<Codec>(count), " bytes of scales, not ", scales.size());
      std::vector<std::byte> record(layout.total_bytes);
      std::memcpy(record.data(), payload.data(), payload.size());
      std::memcpy(record.data() + layout.scales_offset, scales.data(), scales.size());
      std::vector<Element> y(count);
      DecodeToElements<Codec>(record.data(), count, y.data());
      return ToNumpy(reinterpret_cast<const std::byte*>(y.data()), count * sizeof(Element));
    });
  });
}

NB_MODULE(_cpu, m) {
  DefineVersion(m);
  TranslateErrors(m);
  DefineGroupLifetime<Group>(m);
  DefineHandlers(m, Targets{{"jax_pcie.all_reduce",
                             {{"instantiate", kInstantiate}, {"execute", kAllReduce}}}} +
                        RouterTargets());
  m.def("num_segments", [](int64_t id, int codec, int topology, std::string dtype, int64_t count) {
    const auto group = Groups::Instance().Find(id);
    const int n = group->members().world_size();
    return VisitElementName(dtype, [&]<class Element>() {
      return VisitCollective<Element>(CodecId(codec), TopologyId(topology), [&]<class Topology>() {
        return Segmentation::For<Topology>(n, count, group->max_bytes()).count();
      });
    });
  });
  m.def("wire_bytes", [](int codec, int topology, std::string dtype, int64_t count, int n) {
    return VisitElementName(dtype, [&]<class Element>() {
      return VisitCollective<Element>(CodecId(codec), TopologyId(topology), [&]<class Topology>() {
        return WireBytes<Topology>(n, count);
      });
    });
  });
  m.def("num_slots", [](int region, int n) { return NumSlots(Region(region), n); });
  m.def("gather_segments", [](int64_t, int64_t, const RowsOfArrays&) { return 1; });
  m.attr("max_world_size") = kMaxWorldSize;
  m.attr("max_fused_experts") = kFusedExperts;
  m.attr("max_chosen_experts") = kMaxChosen;
  m.def("codec_encode", &EncodeForTests);
  m.def("codec_decode", &DecodeForTests);
}

}  // namespace
}  // namespace cpu
}  // namespace jax_pcie
