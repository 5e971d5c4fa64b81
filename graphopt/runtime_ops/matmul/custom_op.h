// A product with packed weights as onnxruntime sees it: one operator per type of the scales.
#pragma once

#include <new>

#include "matmul/product.h"

namespace graphopt {

// Kernel: prepare(api, info) and compute(context).
template <typename Kernel, int ScaleType>
OrtCustomOp matmul_op() {
  OrtCustomOp op = {};
  op.version = kApiVersion;
  op.GetName = [](const OrtCustomOp*) { return Kernel::kName; };
  op.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
  op.GetInputType = [](const OrtCustomOp*, size_t index) -> int {
    if (index == kCodes) return kUint8;
    if (index == kScales || index == kZeroPoints) return ScaleType;
    return index < kMatMulInputs ? kFloat : kInt8;
  };
  op.GetInputTypeCount = [](const OrtCustomOp*) { return Kernel::kInputs; };
  op.GetOutputType = [](const OrtCustomOp*, size_t) -> int { return kFloat; };
  op.GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return 1; };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t) { return kRequired; };
  op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t) { return kRequired; };
  op.GetInputMemoryType = [](const OrtCustomOp*, size_t) { return kDefaultMemory; };
  op.CreateKernelV2 = [](const OrtCustomOp*, const OrtApi* api, const OrtKernelInfo* info, void** made) {
    std::unique_ptr<Kernel> kernel(new (std::nothrow) Kernel);
    if (!kernel) return CreateStatus::call(api, kFail, "no memory for a kernel of ai.graphopt");
    OrtStatus* failure = kernel->prepare(api, info);
    *made = failure ? nullptr : kernel.release();
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
