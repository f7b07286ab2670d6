// The router's handlers on GPUs: gathers of rows, and the selection of experts from them.
#include "router.h"

#include "../router_ops.h"
#include "gather_topk.h"
#include "handlers.h"

namespace jax_pcie::cuda {
namespace {

ffi::Error Gather(ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t group_id,
                  int32_t num_arrays, CallSite* call_site, int32_t device, cudaStream_t stream) {
  return Guard([&] {
    const auto group = Groups::Instance().Find(group_id);
    group->RequireUsable();
    const auto calls = CheckedGathers(args, rets, num_arrays, group->members().world_size());
    group->WithView(group->members().Find(device), [&](const GroupView& view) {
      LaunchGather(view, calls, static_cast<uint32_t>(call_site->number), stream);
    });
  });
}

ffi::Error GatherTopk(ffi::AnyBuffer latent, ffi::AnyBuffer logits, ffi::RemainingArgs rest,
                      ffi::Result<ffi::AnyBuffer> all_latent, ffi::Result<ffi::AnyBuffer> weights,
                      ffi::Result<ffi::AnyBuffer> ids, ffi::RemainingRets /*token*/,
                      ffi::Dictionary attributes, CallSite* call_site, int32_t device,
                      cudaStream_t stream) {
  return Guard([&] {
    const auto group = Groups::Instance().Find(GroupOf(attributes));
    group->RequireUsable();
    const int n = group->members().world_size();
    const auto gather = CheckedGather(latent, *all_latent, n);
    const auto route = CheckedRoute(logits, n, rest, *weights, *ids, attributes);
    group->WithView(group->members().Find(device), [&](const GroupView& view) {
      VisitElement(logits.element_type(), [&]<class Element>() {
        LaunchGatherTopk<Element>(view, gather, route, static_cast<uint32_t>(call_site->number),
                                  stream);
      });
    });
  });
}

// A call without a group may be the first on its device, and its kernels must be loaded before
// another kernel waits there.
ffi::Error LoadRoute(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
  return Guard([] { LoadRouterKernels(); });
}

ffi::Error TopkRoute(ffi::AnyBuffer logits, ffi::RemainingArgs rest,
                     ffi::Result<ffi::AnyBuffer> weights, ffi::Result<ffi::AnyBuffer> ids,
                     ffi::RemainingRets more, ffi::Dictionary attributes, cudaStream_t stream) {
  return Guard([&] {
    const auto route = CheckedRoute(logits, 1, rest, *weights, *ids, attributes);
    void* scratch = nullptr;
    const int64_t row_bytes = RouteScratchBytes(route.rule.num_experts);
    if (row_bytes > 0) {
      auto buffer = more.get<ffi::AnyBuffer>(0);
      Require(buffer.has_value() &&
                  static_cast<int64_t>((*buffer)->size_bytes()) >= row_bytes * route.num_rows,
              "topk_route of ", route.rule.num_experts, " experts needs ", row_bytes,
              " bytes of scratch memory a row");
      scratch = (*buffer)->untyped_data();
    }
    VisitElement(logits.element_type(),
                 [&]<class Element>() { LaunchRoute<Element>(route, scratch, stream); });
  });
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, ffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER(
    kInitialize, Initialize,
    ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>().RemainingArgs().RemainingRets().Attrs());

XLA_FFI_DEFINE_HANDLER(kGather, Gather,
                       ffi::Ffi::Bind()
                           .RemainingArgs()  // arrays, then a token
                           .RemainingRets()
                           .Attr<int64_t>("group")
                           .Attr<int32_t>("num_arrays")
                           .Ctx<ffi::State<CallSite>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>(),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kGatherTopk, GatherTopk,
                       ffi::Ffi::Bind()
                           .Arg<ffi::AnyBuffer>()  // latent
                           .Arg<ffi::AnyBuffer>()  // logits
                           .RemainingArgs()        // bias, token
                           .Ret<ffi::AnyBuffer>()  // latent
                           .Ret<ffi::AnyBuffer>()  // weights
                           .Ret<ffi::AnyBuffer>()  // ids
                           .RemainingRets()        // token
                           .Attrs()
                           .Ctx<ffi::State<CallSite>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>(),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(
    kLoadRoute, LoadRoute,
    ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>().RemainingArgs().RemainingRets().Attrs());

XLA_FFI_DEFINE_HANDLER(kTopkRoute, TopkRoute,
                       ffi::Ffi::Bind()
                           .Arg<ffi::AnyBuffer>()  // logits
                           .RemainingArgs()        // bias
                           .Ret<ffi::AnyBuffer>()  // weights
                           .Ret<ffi::AnyBuffer>()  // ids
                           .RemainingRets()        // scratch
                           .Attrs()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

Targets RouterTargets() {
  return {{"jax_pcie.gather",
           {{"instantiate", kInstantiate}, {"initialize", kInitialize}, {"execute", kGather}}},
          {"jax_pcie.all_gather_topk",
           {{"instantiate", kInstantiate}, {"initialize", kInitialize}, {"execute", kGatherTopk}}},
          {"jax_pcie.topk_route", {{"initialize", kLoadRoute}, {"execute", kTopkRoute}}}};
}

}  // namespace jax_pcie::cuda
