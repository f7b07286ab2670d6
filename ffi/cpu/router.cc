// The router's handlers on CPU devices: gathers of rows, and the selection of experts from them.
//
// The last rank to arrive copies all ranks' rows and selects once, for all of them.
#include "router.h"

#include <cstring>
#include <string>

#include "../router_ops.h"
#include "float_environment.h"
#include "handlers.h"
#include "route.h"

namespace jax_pcie::cpu {
namespace {

// Puts the ranks' rows `from(rank)` side by side in `y`.
template <class From>
void GatherRows(int world_size, int64_t num_rows, int64_t row_bytes, const From& from, void* y) {
  auto* to = static_cast<std::byte*>(y);
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int rank = 0; rank < world_size; ++rank) {
      std::memcpy(to, static_cast<const std::byte*>(from(rank)) + row * row_bytes, row_bytes);
      to += row_bytes;
    }
  }
}

// The array `index` of all ranks, gathered for all of them.
void GatherForAll(const std::vector<RankBuffers>& buffers, int index, int64_t num_rows,
                  int64_t row_bytes) {
  const int n = static_cast<int>(buffers.size());
  for (const RankBuffers& to : buffers) {
    GatherRows(
        n, num_rows, row_bytes, [&](int rank) { return buffers[rank].operand(index); },
        to.result(index));
  }
}

// Throws unless all ranks have the bytes of rank 0's bias, operand 2: the work would be done with
// whichever came last.
void RequireSameBias(const std::vector<RankBuffers>& all, int num_experts) {
  std::string others;
  for (size_t rank = 1; rank < all.size(); ++rank) {
    const bool same =
        std::memcmp(all[rank].operand(2), all[0].operand(2), num_experts * sizeof(float)) == 0;
    if (!same) others += Concat(" ", rank);
  }
  Require(others.empty(),
          "all_gather_topk: the bias must be the same on every rank; rank 0's differs from that "
          "of ranks:",
          others);
}

// Rows of whole logits, which `call.logits` need not be.
void RouteRows(ffi::DataType element, const void* logits, const RouteCall& call) {
  VisitElement(element, [&]<class Element>() {
    const int experts = call.rule.num_experts;
    const int k = call.rule.num_chosen;
    RowRouter router(call.rule);
    std::vector<float> row(experts);
    for (int64_t i = 0; i < call.num_rows; ++i) {
      const auto* from = static_cast<const Element*>(logits) + i * experts;
      for (int id = 0; id < experts; ++id) row[id] = Widen(from[id]);
      router.Route(row.data(), call.bias, call.weights + i * k, call.ids + i * k);
    }
  });
}

ffi::Future Gather(ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t group_id,
                   int32_t num_arrays, CallSite* call_site, ffi::RunId run, int64_t device) {
  return Join(group_id, [&](Group& group, OnDone done) {
    const Member member = group.members().Find(device);
    const auto calls = CheckedGathers(args, rets, num_arrays, group.members().world_size());
    RankBuffers buffers;
    int64_t total_bytes = 0;
    for (const GatherCall& call : calls) {
      buffers.Add(call.x, call.y);
      total_bytes += call.num_rows * call.row_bytes;
    }
    group.rendezvous().Arrive(
        {call_site->number, run.run_id, member.slice}, member.rank, buffers,
        {total_bytes, num_arrays, 0, 0},
        [calls](const std::vector<RankBuffers>& all) {
          for (size_t i = 0; i < calls.size(); ++i) {
            GatherForAll(all, static_cast<int>(i), calls[i].num_rows, calls[i].row_bytes);
          }
        },
        std::move(done));
  });
}

ffi::Future GatherTopk(ffi::AnyBuffer latent, ffi::AnyBuffer logits, ffi::RemainingArgs rest,
                       ffi::Result<ffi::AnyBuffer> all_latent, ffi::Result<ffi::AnyBuffer> weights,
                       ffi::Result<ffi::AnyBuffer> ids, ffi::Dictionary attributes,
                       CallSite* call_site, ffi::RunId run, int64_t device) {
  return Join(GroupOf(attributes), [&](Group& group, OnDone done) {
    const Member member = group.members().Find(device);
    const int n = group.members().world_size();
    const auto gather = CheckedGather(latent, *all_latent, n);
    const auto route = CheckedRoute(logits, n, rest, *weights, *ids, attributes);
    RankBuffers buffers;
    buffers.Add(gather.x, gather.y);
    buffers.Add(route.logits, route.weights);
    buffers.Add(route.bias, route.ids);
    const int64_t logits_bytes = static_cast<int64_t>(logits.size_bytes()) / route.num_rows;
    const ffi::DataType element = logits.element_type();
    group.rendezvous().Arrive(
        {call_site->number, run.run_id, member.slice}, member.rank, buffers,
        {gather.num_rows * gather.row_bytes, int64_t(element), route.rule.num_experts,
         route.rule.num_chosen},
        [=](const std::vector<RankBuffers>& all) {
          if (route.bias != nullptr) RequireSameBias(all, route.rule.num_experts);
          GatherForAll(all, 0, gather.num_rows, gather.row_bytes);
          std::vector<std::byte> whole(n * logits_bytes * route.num_rows);
          GatherRows(
              n, route.num_rows, logits_bytes, [&](int rank) { return all[rank].operand(1); },
              whole.data());
          RouteRows(element, whole.data(), route);
          const size_t count = route.num_rows * route.rule.num_chosen;
          for (const RankBuffers& to : all) {
            if (to.result(1) == route.weights) continue;
            std::memcpy(to.result(1), route.weights, count * sizeof(float));
            std::memcpy(to.result(2), route.ids, count * sizeof(int32_t));
          }
        },
        std::move(done));
  });
}

ffi::Error TopkRoute(ffi::AnyBuffer logits, ffi::RemainingArgs rest,
                     ffi::Result<ffi::AnyBuffer> weights, ffi::Result<ffi::AnyBuffer> ids,
                     ffi::Dictionary attributes) {
  const FloatScope keep_subnormals(FloatControl::Standard());
  try {
    const auto call = CheckedRoute(logits, 1, rest, *weights, *ids, attributes);
    RouteRows(logits.element_type(), call.logits, call);
    return ffi::Error::Success();
  } catch (const std::exception& failure) {
    return ffi::Error::Internal(failure.what());
  }
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, ffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER(kGather, Gather,
                       ffi::Ffi::Bind()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<int64_t>("group")
                           .Attr<int32_t>("num_arrays")
                           .Ctx<ffi::State<CallSite>>()
                           .Ctx<ffi::RunId>()
                           .Ctx<ffi::DeviceOrdinal>());

XLA_FFI_DEFINE_HANDLER(kGatherTopk, GatherTopk,
                       ffi::Ffi::Bind()
                           .Arg<ffi::AnyBuffer>()  // latent
                           .Arg<ffi::AnyBuffer>()  // logits
                           .RemainingArgs()        // bias
                           .Ret<ffi::AnyBuffer>()  // latent
                           .Ret<ffi::AnyBuffer>()  // weights
                           .Ret<ffi::AnyBuffer>()  // ids
                           .Attrs()
                           .Ctx<ffi::State<CallSite>>()
                           .Ctx<ffi::RunId>()
                           .Ctx<ffi::DeviceOrdinal>());

XLA_FFI_DEFINE_HANDLER(kTopkRoute, TopkRoute,
                       ffi::Ffi::Bind()
                           .Arg<ffi::AnyBuffer>()  // logits
                           .RemainingArgs()        // bias
                           .Ret<ffi::AnyBuffer>()  // weights
                           .Ret<ffi::AnyBuffer>()  // ids
                           .Attrs());

}  // namespace

Targets RouterTargets() {
  return {{"jax_pcie.gather", {{"instantiate", kInstantiate}, {"execute", kGather}}},
          {"jax_pcie.all_gather_topk", {{"instantiate", kInstantiate}, {"execute", kGatherTopk}}},
          {"jax_pcie.topk_route", {{"execute", kTopkRoute}}}};
}

}  // namespace jax_pcie::cpu
