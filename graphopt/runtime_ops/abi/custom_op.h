// A kernel as onnxruntime sees it: one operator for each type that it takes.
#pragma once

#include <memory>
#include <new>

#include "abi/tensor.h"

namespace graphopt {

// The inputs of a kernel that its nodes may leave out, the last ones: kOptionalInputs of them, or none.
template <typename Kernel, typename = void>
constexpr size_t kOptionalInputsOf = 0;
template <typename Kernel>
constexpr size_t kOptionalInputsOf<Kernel, decltype(void(Kernel::kOptionalInputs))> = Kernel::kOptionalInputs;

// Kernel: kName; kInputs and kOutputs, and kOptionalInputs where not all are required; input_type(index, type) and output_type(index, type);
// prepare(api, info, type) and compute(context).
template <typename Kernel, int Type>
OrtCustomOp custom_op() {
  OrtCustomOp op = {};
  op.version = kApiVersion;
  op.GetName = [](const OrtCustomOp*) { return Kernel::kName; };
  op.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
  op.GetInputType = [](const OrtCustomOp*, size_t index) -> int { return Kernel::input_type(index, Type); };
  op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return Kernel::kInputs; };
  op.GetOutputType = [](const OrtCustomOp*, size_t index) -> int { return Kernel::output_type(index, Type); };
  op.GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return Kernel::kOutputs; };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t index) {
    return index + kOptionalInputsOf<Kernel> < Kernel::kInputs ? kRequired : kOptional;
  };
  op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t) { return kRequired; };
  op.GetInputMemoryType = [](const OrtCustomOp*, size_t) { return kDefaultMemory; };
  op.CreateKernelV2 = [](const OrtCustomOp*, const OrtApi* api, const OrtKernelInfo* info, void** result) {
    std::unique_ptr<Kernel> kernel(new (std::nothrow) Kernel);
    if (!kernel) return CreateStatus::call(api, kFail, "no memory for a kernel of ai.graphopt");
    OrtStatus* failure = kernel->prepare(api, info, Type);
    *result = failure ? nullptr : kernel.release();
    return failure;
  };
  op.KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
    return static_cast<Kernel*>(kernel)->compute(context);
  };
  op.KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  op.GetStartVersion = [](const OrtCustomOp*) { return 1; };
  op.GetEndVersion = [](const OrtCustomOp*) { return 1; };
  return op;
}

}  // namespace graphopt
