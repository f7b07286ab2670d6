// The CUDA module: the all-reduce handler and the group's life cycle, as Python sees them.
#include "../module.h"

#include "../collective.h"
#include "group.h"
#include "mxfp8/ops.h"

namespace jax_pcie {

ffi::TypeId CallSite::id = {};

namespace cuda {
namespace {

using Groups = Registry<Group>;

// Runs at every execution, also when a graph is replayed: the place where a wait that failed in an
// earlier call can still become an error.
ffi::Error Initialize(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary attributes) {
  return Guard([&] {
    const auto group_id = attributes.get<int64_t>("group");
    Require(group_id.has_value(), "the call has no attribute `group`");
    Groups::Instance().Find(*group_id)->RequireUsable();
  });
}

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
      m, {{"instantiate", kInstantiate}, {"initialize", kInitialize}, {"execute", kAllReduce}});
  mxfp8::DefineOps(m);
  m.def("num_segments", [](int64_t id, int codec, int topology, std::string dtype, int64_t count) {
    const auto group = Groups::Instance().Find(id);
    return group->WithView({0, 0}, [&](const GroupView& view) {
      return VisitElementName(dtype, [&]<class Element>() {
        return NumSegments<Element>(view, CodecId(codec), TopologyId(topology), count);
      });
    });
  });
}

}  // namespace
}  // namespace cuda
}  // namespace jax_pcie
