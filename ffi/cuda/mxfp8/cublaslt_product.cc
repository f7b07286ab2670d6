// Handles and chosen algorithms of the process, and the one path that builds descriptors.
#include "cublaslt_product.h"

#include <map>
#include <mutex>
#include <set>
#include <string>
#include <type_traits>
#include <utility>

#include "../../error.h"
#include "../check.h"

namespace jax_pcie::cuda::cublaslt {
namespace {

const Api& LoadedApi() {
  const Library& library = TheLibrary();
  Require(library.error.empty(), library.error);
  return library.api;
}

template <class... Details>
void CheckStatus(Status status, const char* call, const Details&... details) {
  if (status == kSuccess) return;
  throw Error(Concat(call, " of cuBLASLt ", TheLibrary().version, ": ",
                     LoadedApi().get_status_name(status), details...));
}

template <class T, class... Args>
Owned<T> Make(Status (*create)(T**, Args...), Status (*destroy)(T*), const char* name,
              std::type_identity_t<Args>... args) {
  T* made = nullptr;
  CheckStatus(create(&made, args...), name);
  return {made, destroy};
}

template <class T, class Attribute, class Value>
void Set(Status (*set)(T*, Attribute, const void*, size_t), const Owned<T>& object,
         Attribute attribute, const Value& value) {
  CheckStatus(set(object.get(), attribute, &value, sizeof value), "cuBLASLt's SetAttribute",
              ": attribute ", static_cast<int>(attribute));
}

// Lets this thread do for a scope what a capture of its stream would forbid: a first call may
// create the handle or load a kernel, neither of which is part of the graph.
class RelaxedCapture {
 public:
  RelaxedCapture() { Exchange(); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  void Exchange() {
    CheckCuda(cudaThreadExchangeStreamCaptureMode(&mode_), "cudaThreadExchangeStreamCaptureMode");
  }
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

struct Process {
  std::mutex mutex;
  std::map<int, Context*> handles;                // by device
  std::map<std::pair<int, Product>, Algo> algos;  // by device and problem
  std::set<std::pair<int, Product>> loaded;       // those whose kernel is on the device
};

// Never destroyed: when static destructors run, the driver may be gone already.
Process& TheProcess() {
  static Process* process = new Process;
  return *process;
}

Algo AskHeuristics(Context* handle, const Product& p, const Descriptors& descriptors) {
  const Api& api = LoadedApi();
  const auto preference =
      Make(api.preference_create, api.preference_destroy, "cublasLtMatmulPreferenceCreate");
  using enum PreferenceAttribute;
  Set(api.preference_set, preference, kMaxWorkspaceBytes, static_cast<uint64_t>(kScratchBytes));
  // Split sums may meet in fp32 only: y is rounded once.
  Set(api.preference_set, preference, kReductionSchemeMask, kReduceInComputeType);
  for (const auto operand : {kMinAlignmentA, kMinAlignmentB, kMinAlignmentC, kMinAlignmentD}) {
    Set(api.preference_set, preference, operand, kAlignment);
  }
  HeuristicResult result{};
  int num_results = 0;
  const Status status = api.get_heuristic(
      handle, descriptors.operation.get(), descriptors.w.get(), descriptors.x.get(),
      descriptors.y.get(), descriptors.y.get(), preference.get(), 1, &result, &num_results);
  const std::string problem =
      Concat(": no algorithm for x [", p.m, ", ", p.k, "] and w [", p.n, ", ", p.k, "] with rows ",
             p.x_stride, " and ", p.w_stride, " apart, scale modes ",
             static_cast<int>(p.x_scale_mode), " and ", static_cast<int>(p.w_scale_mode),
             ", output type ", static_cast<int>(p.y_type), " with rows ", p.y_stride, " apart");
  CheckStatus(status, "cublasLtMatmulAlgoGetHeuristic", problem);
  Require(num_results > 0, "cublasLtMatmulAlgoGetHeuristic", problem);
  CheckStatus(result.state, "cublasLtMatmulAlgoGetHeuristic", problem);
  return result.algo;
}

Algo ChosenAlgo(Context* handle, const Product& product, const Descriptors& descriptors) {
  Process& process = TheProcess();
  const std::lock_guard lock(process.mutex);
  const std::pair key{CurrentDevice(), product};
  const auto found = process.algos.find(key);
  if (found != process.algos.end()) return found->second;
  return process.algos.emplace(key, AskHeuristics(handle, product, descriptors)).first->second;
}

// The current device's, made unless there is one. May allocate device memory.
Context* DeviceHandle() {
  Process& process = TheProcess();
  const Api& api = LoadedApi();
  const std::lock_guard lock(process.mutex);
  Context*& handle = process.handles[CurrentDevice()];
  if (handle == nullptr) {
    const RelaxedCapture relaxed;
    CheckStatus(api.create(&handle), "cublasLtCreate");
  }
  return handle;
}

// Loads the kernels that `launch(stream)` launches: a graph of them is made, and never run.
template <class Launch>
void LoadCaptured(Launch&& launch) {
  cudaStream_t made = nullptr;
  CheckCuda(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  const Owned<CUstream_st, cudaError_t> stream(made, cudaStreamDestroy);
  CheckCuda(cudaStreamBeginCapture(made, cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture");
  cudaGraph_t captured = nullptr;
  try {
    launch(made);
  } catch (...) {
    cudaStreamEndCapture(made, &captured);
    if (captured != nullptr) cudaGraphDestroy(captured);
    throw;
  }
  CheckCuda(cudaStreamEndCapture(made, &captured), "cudaStreamEndCapture");
  const Owned<CUgraph_st, cudaError_t> graph(captured, cudaGraphDestroy);
  cudaGraphExec_t executable = nullptr;
  CheckCuda(cudaGraphInstantiate(&executable, captured, 0), "cudaGraphInstantiate");
  CheckCuda(cudaGraphExecDestroy(executable), "cudaGraphExecDestroy");
}

}  // namespace

Descriptors::Descriptors(const Product& p, const ProductPointers& at)
    : operation(Make(LoadedApi().desc_create, LoadedApi().desc_destroy, "cublasLtMatmulDescCreate",
                     ComputeType::kF32, DataType::kF32)),
      w(Make(LoadedApi().layout_create, LoadedApi().layout_destroy, "cublasLtMatrixLayoutCreate",
             DataType::kE4m3, p.k, p.n, p.w_stride)),
      x(Make(LoadedApi().layout_create, LoadedApi().layout_destroy, "cublasLtMatrixLayoutCreate",
             DataType::kE4m3, p.k, p.m, p.x_stride)),
      y(Make(LoadedApi().layout_create, LoadedApi().layout_destroy, "cublasLtMatrixLayoutCreate",
             p.y_type, p.n, p.m, p.y_stride)) {
  const auto set = [&](DescAttribute attribute, auto value) {
    Set(LoadedApi().desc_set, operation, attribute, value);
  };
  set(DescAttribute::kTransposeA, kTransposed);
  set(DescAttribute::kFastAccumulation, int8_t{0});
  set(DescAttribute::kAScaleMode, p.w_scale_mode);
  set(DescAttribute::kBScaleMode, p.x_scale_mode);
  set(DescAttribute::kAScalePointer, at.w_scales);
  set(DescAttribute::kBScalePointer, at.x_scales);
}

void Prepare(const Product& product, const ProductPointers& at) {
  Process& process = TheProcess();
  const std::pair key{CurrentDevice(), product};
  {
    const std::lock_guard lock(process.mutex);
    if (process.loaded.contains(key)) return;
  }
  LoadCaptured([&](cudaStream_t stream) { Multiply(product, at, stream); });
  const std::lock_guard lock(process.mutex);
  process.loaded.insert(key);
}

void Multiply(const Product& product, const ProductPointers& at, cudaStream_t stream) {
  const Descriptors descriptors(product, at);
  Context* const handle = DeviceHandle();
  const RelaxedCapture relaxed;
  const Algo algo = ChosenAlgo(handle, product, descriptors);
  const float one = 1.f, zero = 0.f;
  CheckStatus(
      LoadedApi().matmul(handle, descriptors.operation.get(), &one, at.w, descriptors.w.get(), at.x,
                         descriptors.x.get(), &zero, at.y, descriptors.y.get(), at.y,
                         descriptors.y.get(), &algo, at.scratch, kScratchBytes, stream),
      "cublasLtMatmul");
}

}  // namespace jax_pcie::cuda::cublaslt
