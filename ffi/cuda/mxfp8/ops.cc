// The FFI handlers of the staged linear: buffers and attributes checked and turned into calls, and
// which kernel serves a product, for Python to ask when it lowers one.
#include "ops.h"

#include "../../ops.h"
#include "quantize.h"
#include "route.h"

XLA_FFI_REGISTER_ENUM_ATTR_DECODING(jax_pcie::cuda::mxfp8::Route);

namespace jax_pcie::cuda::mxfp8 {
namespace {

constexpr int64_t kWorkspaceAlignment = 256;

ElementType ElementTypeOf(ffi::DataType type) {
  switch (type) {
    case ffi::BF16:
      return ElementType::kBf16;
    case ffi::F16:
      return ElementType::kF16;
    case ffi::F32:
      return ElementType::kF32;
    default:
      throw Error(Concat("mxfp8: element type ", int(type),
                         " is not one of bfloat16, float16 and float32"));
  }
}

template <class Shaped>
int64_t Size(const Shaped& buffer, size_t dimension) {
  Require(buffer.dimensions().size() == 2, "mxfp8: an operand has ", buffer.dimensions().size(),
          " dimensions instead of 2");
  return buffer.dimensions()[dimension];
}

template <class Values, class Scales>
void RequireOperand(const Values& values, const Scales& scales) {
  Require(Size(values, 1) % kGroup == 0 && Size(scales, 0) == Size(values, 0) &&
              Size(scales, 1) == Size(values, 1) / kGroup,
          "mxfp8: scales of ", Size(scales, 0), " x ", Size(scales, 1), " for values of ",
          Size(values, 0), " x ", Size(values, 1), "; there must be one per ", kGroup, " columns");
}

Operand OperandOf(const ffi::AnyBuffer& values, const ffi::AnyBuffer& scales, int64_t rows) {
  RequireOperand(values, scales);
  Require(rows <= Size(values, 0), "mxfp8: ", rows, " rows of an operand that has ",
          Size(values, 0));
  return {static_cast<const uint8_t*>(values.untyped_data()),
          static_cast<const uint8_t*>(scales.untyped_data()), rows, Size(values, 1)};
}

// Arguments beyond x: the storage, which the results alias, if there is one; and the column, if it
// is not an attribute.
ffi::Error Quantize(ffi::AnyBuffer x, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> values,
                    ffi::Result<ffi::AnyBuffer> scales, int64_t column, int64_t scale_group,
                    cudaStream_t stream) {
  return Guard([&] {
    RequireOperand(*values, *scales);
    const int64_t rows = Size(x, 0), columns = Size(x, 1);
    const int64_t last = column < 0 ? 0 : column;
    Require(rows <= Size(*values, 0) && last + columns <= Size(*values, 1), "mxfp8: a slice of ",
            rows, " x ", columns, " at column ", last, " does not fit into ", Size(*values, 0),
            " x ", Size(*values, 1));
    const int32_t* device_column = nullptr;
    if (column < 0) {
      const auto last_argument = rest.get<ffi::BufferR0<ffi::S32>>(rest.size() - 1);
      Require(last_argument.has_value(), "mxfp8: the column must be an int32 scalar");
      device_column = last_argument->typed_data();
    }
    LaunchQuantize(
        {x.untyped_data(), ElementTypeOf(x.element_type()), rows, columns,
         static_cast<int>(scale_group), static_cast<uint8_t*>(values->untyped_data()),
         static_cast<uint8_t*>(scales->untyped_data()), Size(*values, 1), column, device_column},
        stream);
  });
}

struct Workspace {
  void* address;
  int64_t bytes;
};

// XLA aligns to 128 bytes; what has a workspace at all has room for more.
Workspace WorkspaceOf(const ffi::RemainingRets& rest) {
  if (rest.size() == 0) return {nullptr, 0};
  auto buffer = *rest.get<ffi::AnyBuffer>(0);
  const auto address = reinterpret_cast<uintptr_t>(buffer->untyped_data());
  const int64_t skipped = -static_cast<int64_t>(address) & (kWorkspaceAlignment - 1);
  return {static_cast<char*>(buffer->untyped_data()) + skipped,
          static_cast<int64_t>(buffer->size_bytes()) - skipped};
}

// Arguments beyond the operands: the bias, if there is one; and the array that y aliases, if any.
MultiplyCall CheckedMultiply(const ffi::AnyBuffer& x_values, const ffi::AnyBuffer& x_scales,
                             const ffi::AnyBuffer& w_values, const ffi::AnyBuffer& w_scales,
                             const ffi::RemainingArgs& rest, const ffi::AnyBuffer& y,
                             int64_t num_tokens, bool has_bias) {
  const int64_t num_outputs = Size(y, 1), num_columns = Size(x_values, 1);
  Require(num_tokens <= Size(y, 0), "mxfp8: ", num_tokens, " tokens for ", Size(y, 0), " rows");
  Require(num_columns <= Size(w_values, 1), "mxfp8: x has ", num_columns, " columns, w ",
          Size(w_values, 1));
  const float* bias = nullptr;
  if (has_bias) {
    const auto given = rest.get<ffi::BufferR1<ffi::F32>>(0);
    Require(given.has_value() && static_cast<int64_t>(given->element_count()) == num_outputs,
            "mxfp8: the bias must be float32 [", num_outputs, "]");
    bias = given->typed_data();
  }
  return {OperandOf(x_values, x_scales, num_tokens),
          OperandOf(w_values, w_scales, num_outputs),
          num_columns,
          bias,
          y.untyped_data(),
          ElementTypeOf(y.element_type())};
}

ffi::Error Multiply(ffi::AnyBuffer x_values, ffi::AnyBuffer x_scales, ffi::AnyBuffer w_values,
                    ffi::AnyBuffer w_scales, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> y,
                    ffi::RemainingRets workspace, int64_t num_tokens, bool has_bias, Route route,
                    cudaStream_t stream) {
  return Guard([&] {
    const auto call =
        CheckedMultiply(x_values, x_scales, w_values, w_scales, rest, *y, num_tokens, has_bias);
    const auto [address, bytes] = WorkspaceOf(workspace);
    Launch(route, call, address, bytes, stream);
  });
}

// Before anything of the program runs, and where no graph is being captured.
ffi::Error PrepareMultiply(ffi::AnyBuffer x_values, ffi::AnyBuffer x_scales,
                           ffi::AnyBuffer w_values, ffi::AnyBuffer w_scales,
                           ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> y,
                           ffi::RemainingRets workspace, int64_t num_tokens, bool has_bias,
                           Route route) {
  return Guard([&] {
    LoadKernels();
    const auto call =
        CheckedMultiply(x_values, x_scales, w_values, w_scales, rest, *y, num_tokens, has_bias);
    const auto [address, bytes] = WorkspaceOf(workspace);
    Prepare(route, call, address, bytes);
  });
}

ffi::Error PrepareQuantize(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
  return Guard([] { LoadKernels(); });
}

XLA_FFI_DEFINE_HANDLER(kQuantize, Quantize,
                       ffi::Ffi::Bind()
                           .Arg<ffi::AnyBuffer>()  // x
                           .RemainingArgs()
                           .Ret<ffi::AnyBuffer>()  // values
                           .Ret<ffi::AnyBuffer>()  // scales
                           .Attr<int64_t>("column")
                           .Attr<int64_t>("scale_group")
                           .Ctx<ffi::PlatformStream<cudaStream_t>>(),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(
    kPrepareQuantize, PrepareQuantize,
    ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>().RemainingArgs().RemainingRets().Attrs());

// Both stages of a product see its buffers and attributes.
template <ffi::ExecutionStage kStage>
auto BindMultiply() {
  return ffi::Ffi::Bind<kStage>()
      .template Arg<ffi::AnyBuffer>()  // x_values
      .template Arg<ffi::AnyBuffer>()  // x_scales
      .template Arg<ffi::AnyBuffer>()  // w_values
      .template Arg<ffi::AnyBuffer>()  // w_scales
      .RemainingArgs()
      .template Ret<ffi::AnyBuffer>()  // y
      .RemainingRets()                 // workspace
      .template Attr<int64_t>("num_tokens")
      .template Attr<bool>("has_bias")
      .template Attr<Route>("route");
}

XLA_FFI_DEFINE_HANDLER(
    kMultiply, Multiply,
    BindMultiply<ffi::ExecutionStage::kExecute>().Ctx<ffi::PlatformStream<cudaStream_t>>(),
    {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kPrepareMultiply, PrepareMultiply,
                       BindMultiply<ffi::ExecutionStage::kInitialize>());

}  // namespace

Targets OpTargets() {
  return {{"jax_pcie.mxfp8_quantize", {{"initialize", kPrepareQuantize}, {"execute", kQuantize}}},
          {"jax_pcie.mxfp8_multiply", {{"initialize", kPrepareMultiply}, {"execute", kMultiply}}}};
}

void DefineRoute(nb::module_& m) {
  m.def(
      "mxfp8_route",
      [](int compute_capability, int64_t num_tokens, int64_t num_outputs, int64_t num_columns,
         int scale_group, int output, bool has_bias) {
        const Choice choice = ChooseRoute(
            compute_capability,
            {num_tokens, num_outputs, num_columns, static_cast<ElementType>(output), has_bias},
            scale_group);
        // Room to align it.
        const int64_t bytes =
            choice.workspace_bytes > 0 ? choice.workspace_bytes + kWorkspaceAlignment : 0;
        return nb::make_tuple(static_cast<int32_t>(choice.route), bytes, choice.reason);
      },
      nb::arg("compute_capability"), nb::arg("num_tokens"), nb::arg("num_outputs"),
      nb::arg("num_columns"), nb::kw_only(), nb::arg("scale_group"), nb::arg("output"),
      nb::arg("has_bias"));
}

}  // namespace jax_pcie::cuda::mxfp8
