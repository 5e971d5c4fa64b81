// What the products with packed weights have in common: reading the weights, and running a call on all threads.
#pragma once

#include "abi/instructions.h"
#include "abi/large_pages.h"
#include "abi/pool.h"
#include "abi/tensor.h"
#include "matmul/cpu.h"
#include "matmul/inputs.h"

namespace graphopt {

// Something done to the rows of x before they are rounded; `to` has room for the rows.
struct Before {
  virtual size_t scratch() const = 0;  // bytes that `run` needs, at a multiple of 64
  virtual void run(const float* rows, size_t count, float* to, void* scratch) const = 0;

 protected:
  ~Before() = default;
};

// The types of a product's tensors; matrices that follow the weights hold signs.
struct ProductTypes {
  static int input_type(size_t index, int scale_type) {
    if (index == kCodes) return kUint8;
    if (index == kScales || index == kZeroPoints) return scale_type;
    return index < kMatMulInputs ? kFloat : kInt8;
  }
  static int output_type(size_t, int) { return kFloat; }
};

struct Product {
  Node node;
  Instructions instructions = Instructions::kScalar;
  const MatMulKernels* kernels = nullptr;
  Weights weights;
  mutable Pool calls, tasks;  // memory of a call, and of a task of it
  LargeCopy copy;  // of the codes

  OrtStatus* prepare(const OrtApi* api, const OrtKernelInfo* info);
  // Multiplies the first input; `before` may be null.
  OrtStatus* run(OrtKernelContext* context, Rounded how, const Before* before) const;
};

}  // namespace graphopt
