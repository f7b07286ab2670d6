// Launches of products of few tokens: the table of forms, and what each is given.
#include "../../codec.h"
#include "../../error.h"
#include "../check.h"
#include "small.h"
#include "small_sm90.cuh"
#include "tensor_map.h"

namespace jax_pcie::cuda::mxfp8 {
namespace {

// Tiles of fewer rows than the form's reach more SMs: 112 rows instead of 128 are 128 CTAs instead
// of 112 at N = 7168. Not where that takes more rounds of CTAs, as each begins and ends anew. In
// steps of a warp's part of a product.
template <class Form>
int TileRows(int64_t num_outputs) {
  // That clusters find room for at once on an H200; elsewhere this only costs time.
  constexpr int kRoundCtas = Form::kRanks == 4 ? 120 : 132;
  auto num_rounds = [&](int rows) {
    return CeilDiv(CeilDiv(num_outputs, rows) * Form::kRanks, kRoundCtas);
  };
  int rows = Form::kRows;
  while (rows > Form::kRows / 2 && num_rounds(rows - 16) == num_rounds(Form::kRows)) rows -= 16;
  return rows;
}

// What is launched, and how often.
struct SmallPlan {
  CUtensorMap x_map, w_map;
  SmallArgs args;
  int num_ctas;

  template <class Form>
  static SmallPlan For(const MultiplyCall& call) {
    const int64_t k = call.num_columns, n = call.w.rows;
    const auto num_words = static_cast<int>(CeilDiv(k, kTile));
    const int rank_words = static_cast<int>(CeilDiv(num_words, Form::kRanks));
    const auto load_bytes = [&](const Operand& operand) {
      const auto is_aligned = [&](int bytes) {
        return operand.stride % (bytes * kGroup) == 0 &&
               reinterpret_cast<uintptr_t>(operand.scales) % bytes == 0;
      };
      if (k % (4 * kTile) == 0 && rank_words % 4 == 0 && is_aligned(16)) return 16;
      return is_aligned(4) ? 4 : 1;
    };
    SmallPlan plan{};
    plan.x_map = MapOfBytes(call.x.values, call.x.rows, k, call.x.stride, Form::kTokens);
    plan.args.tile_rows = TileRows<Form>(n);
    plan.w_map = MapOfBytes(call.w.values, n, k, call.w.stride, plan.args.tile_rows);
    plan.args.call = call;
    plan.args.num_groups = static_cast<int>(k / kGroup);
    plan.args.rank_words = rank_words;
    plan.args.x_load_bytes = load_bytes(call.x);
    plan.args.w_load_bytes = load_bytes(call.w);
    plan.args.has_vector_stores = n % 4 == 0 && reinterpret_cast<uintptr_t>(call.y) % 16 == 0;
    plan.num_ctas = static_cast<int>(CeilDiv(n, plan.args.tile_rows)) * Form::kRanks;
    return plan;
  }

  // `kernel` takes what `SmallKernel` takes.
  template <class Form>
  void Launch(void (*kernel)(CUtensorMap, CUtensorMap, SmallArgs), cudaStream_t stream) const {
    constexpr int kSharedBytes = sizeof(SmallShared<Form>) + 1024;  // room to align it
    static_assert(kSharedBytes <= kSmallSharedBytes);
    CheckCuda(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
        "cudaFuncSetAttribute(SmallKernel)");
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {Form::kRanks, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(num_ctas);
    config.blockDim = dim3(Form::kThreads);
    config.dynamicSmemBytes = kSharedBytes;
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = 1;
    CheckCuda(cudaLaunchKernelEx(&config, kernel, x_map, w_map, args), "SmallKernel");
  }
};

template <class Form>
void LaunchSmallForm(const MultiplyCall& call, cudaStream_t stream) {
  SmallPlan::For<Form>(call).template Launch<Form>(SmallKernel<Form>, stream);
}

// Few outputs are spread over more CTAs, in clusters of four.
constexpr int64_t kFewOutputs = 28 * 64, kSomeOutputs = 28 * 128;

template <int kTokens, class Visitor>
void VisitRows(int64_t num_outputs, Visitor&& visit) {
  if (num_outputs <= kFewOutputs) return visit.template operator()<SmallForm<kTokens, 1, 4>>();
  if (num_outputs <= kSomeOutputs) return visit.template operator()<SmallForm<kTokens, 2, 4>>();
  visit.template operator()<SmallForm<kTokens, 2, 2>>();
}

// Which form multiplies how many tokens. How the columns are shared out does not depend on their
// number, so neither do a token's bits.
template <class Visitor>
void VisitForm(int64_t num_tokens, int64_t num_outputs, Visitor&& visit) {
  if (num_tokens <= 8) return VisitRows<8>(num_outputs, visit);
  if (num_tokens <= 16) return VisitRows<16>(num_outputs, visit);
  if (num_tokens <= 32) return VisitRows<32>(num_outputs, visit);
  return VisitRows<64>(num_outputs, visit);
}

constexpr int64_t kMaxExtent = int64_t{1} << 28;  // of 32-bit index arithmetic

}  // namespace

bool SmallSupports(int64_t num_tokens, int64_t num_outputs, int64_t num_columns) {
  return num_tokens >= 1 && num_tokens <= kMaxSmallTokens && num_outputs >= 1 &&
         num_outputs <= kMaxExtent && num_columns >= kGroup && num_columns <= kMaxExtent &&
         num_columns % kGroup == 0;
}

void LoadSmallKernels() {
  for (const int64_t num_tokens : {8, 16, 32, 64}) {
    for (const int64_t num_outputs : {kFewOutputs, kSomeOutputs, kSomeOutputs + 1}) {
      VisitForm(num_tokens, num_outputs, [&]<class Form>() { LoadKernel(SmallKernel<Form>); });
    }
  }
}

void LaunchSmall(const MultiplyCall& call, cudaStream_t stream) {
  for (const Operand& operand : {call.x, call.w}) {
    Require(operand.stride % kGroup == 0 && operand.stride <= kMaxExtent &&
                reinterpret_cast<uintptr_t>(operand.values) % 16 == 0,
            "an MXFP8 operand of stride ", operand.stride,
            " is too wide for few tokens, or not aligned to 16 bytes");
  }
  VisitForm(call.x.rows, call.w.rows, [&]<class Form>() { LaunchSmallForm<Form>(call, stream); });
}

}  // namespace jax_pcie::cuda::mxfp8
