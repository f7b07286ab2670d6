// The CUDA module: the all-reduce handler, the router's (`router.cc`) and the group's life cycle,
// as Python sees them.
#include "../module.h"

#include "../collective.h"
#include "gather_topk.h"
#include "handlers.h"
#include "mxfp8/ops.h"
#include "router.h"

namespace jax_pcie {

ffi::TypeId CallSite::id = {};

namespace cuda {
namespace {

// Tokens only put calls of one program into an order (`lower_in_order` in `_ffi.py`).
ffi::Error AllReduce(ffi::AnyBuffer x, ffi::RemainingArgs /*token*/, ffi::Result<ffi::AnyBuffer> y,
                     ffi::RemainingRets /*token*/, int64_t group_id, CodecId codec,
                     TopologyId topology, CallSite* call_site, int32_t device,
                     cudaStream_t stream) {
  return Guard([&] {
    const auto group = Groups::Instance().Find(group_id);
    group->RequireUsable();
    const auto call = AllReduceCall::Checked(x, *y, codec, topology);
    const AllReduceLaunch launch{call.x,        call.y,
                                 call.count,    call.codec,
                                 call.topology, static_cast<uint32_t>(call_site->number)};
    group->WithView(group->members().Find(device), [&](const GroupView& view) {
      VisitElement(call.element,
                   [&]<class Element>() { LaunchAllReduce<Element>(view, launch, stream); });
    });
  });
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, ffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER(
    kInitialize, Initialize,
    ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>().RemainingArgs().RemainingRets().Attrs());

XLA_FFI_DEFINE_HANDLER(kAllReduce, AllReduce,
                       ffi::Ffi::Bind()
                           .Arg<ffi::AnyBuffer>()  // x
                           .RemainingArgs()
                           .Ret<ffi::AnyBuffer>()  // y
                           .RemainingRets()
                           .Attr<int64_t>("group")
                           .Attr<CodecId>("codec")
                           .Attr<TopologyId>("topology")
                           .Ctx<ffi::State<CallSite>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>(),
                       {ffi::Traits::kCmdBufferCompatible});

NB_MODULE(_cuda, m) {
  DefineVersion(m);
  TranslateErrors(m);
  DefineGroupLifetime<Group>(m);
  DefineHandlers(
      m,
      Targets{
          {"jax_pcie.all_reduce",
           {{"instantiate", kInstantiate}, {"initialize", kInitialize}, {"execute", kAllReduce}}}} +
          RouterTargets() + mxfp8::OpTargets());
  mxfp8::DefineRoute(m);
  m.def("num_segments", [](int64_t id, int codec, int topology, std::string dtype, int64_t count) {
    const auto group = Groups::Instance().Find(id);
    return group->WithView({0, 0}, [&](const GroupView& view) {
      return VisitElementName(dtype, [&]<class Element>() {
        return NumSegments<Element>(view, CodecId(codec), TopologyId(topology), count);
      });
    });
  });
  m.def("gather_segments", [](int64_t id, int64_t selected_rows, const RowsOfArrays& arrays) {
    std::vector<GatherCall> calls;
    for (const auto& [num_rows, row_bytes] : arrays) {
      calls.push_back({nullptr, nullptr, num_rows, row_bytes});
    }
    return Groups::Instance().Find(id)->WithView(
        {0, 0}, [&](const GroupView& view) { return GatherSegments(view, selected_rows, calls); });
  });
}

}  // namespace
}  // namespace cuda
}  // namespace jax_pcie
