// The common part of products with packed weights: reading the weights, and running a call on all threads.
#pragma once

#include <atomic>
#include <mutex>

#include "abi/custom_op.h"
#include "abi/instructions.h"
#include "abi/large_pages.h"
#include "abi/pool.h"
#include "abi/tensor.h"
#include "matmul_table/cpu/kernels.h"
#include "matmul_table/shared/inputs.h"

namespace graphopt {

// Something done to the rows of x before they are rounded; `to` has room for the rows.
struct RowTransform {
  virtual size_t scratch() const = 0;  // bytes that `run` needs, at a multiple of 64
  virtual void run(const float* rows, size_t count, float* to, void* scratch) const = 0;

 protected:
  ~RowTransform() = default;
};

// A product's operators, one for each pair of types that x and scales may have.
template <typename Kernel>
const OrtCustomOp kProductOps[4] = {
    custom_op<Kernel, ProductTypes::of(kFloat, kFloat)>(), custom_op<Kernel, ProductTypes::of(kFloat, kFloat16)>(),
    custom_op<Kernel, ProductTypes::of(kFloat16, kFloat)>(), custom_op<Kernel, ProductTypes::of(kFloat16, kFloat16)>()};

struct Product {
  Node node;
  Instructions instructions = Instructions::kScalar;
  const MatMulKernels* kernels = nullptr;
  mutable Weights weights;  // the first call moves the codes
  bool computed = false;    // scales and zero points are given by each call
  mutable Pool calls, tasks, floats;  // memory of a call, of a task of it, and for x and y that are float16

  OrtStatus* prepare(const OrtApi* api, const OrtKernelInfo* info);
  // Multiplies the first input; `transform` may be null.
  OrtStatus* run(OrtKernelContext* context, Rounded rounded, const RowTransform* transform) const;

 private:
  OrtStatus* move_codes(OrtKernelContext* context) const;
  OrtStatus* run(OrtKernelContext* context, const Weights& weights, Rounded rounded,
                 const RowTransform* transform) const;
  OrtStatus* multiply(OrtKernelContext* context, const Weights& weights, Rounded rounded, const RowTransform* transform,
                      const float* x, float* y) const;

  mutable LargeCopy copy;  // of the codes
  mutable std::mutex moving;
  mutable std::atomic<bool> moved{false};
};

}  // namespace graphopt
