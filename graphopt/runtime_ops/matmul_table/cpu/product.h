// The common part of products with packed weights: reading the weights, and running a call on all threads.
#pragma once

#include <atomic>
#include <memory>
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
const OrtCustomOp kProductOps[6] = {
    custom_op<Kernel, ProductTypes::of(kFloat, kFloat)>(), custom_op<Kernel, ProductTypes::of(kFloat, kFloat16)>(),
    custom_op<Kernel, ProductTypes::of(kFloat16, kFloat)>(), custom_op<Kernel, ProductTypes::of(kFloat16, kFloat16)>(),
    custom_op<Kernel, ProductTypes::of(kFloat, kUint8)>(), custom_op<Kernel, ProductTypes::of(kFloat16, kUint8)>()};

// How the rounded rows of x lie in memory for a product.
struct Layout {
  bool is_small_m;
  size_t words, numbers;  // bytes of the words, and of each of the four lists with a number for each segment and row

  size_t bytes() const { return words + 4 * numbers; }
};
// Sets all of `rounded` that depends on `weights` and on how many rows of x there are, but where it lies.
Layout lay_out(const MatMulKernels& kernels, const Weights& weights, Rounded* rounded);
// Lets `rounded` lie at `memory`, a multiple of 64, in layout.bytes().
void assign_memory(const Layout& layout, char* memory, Rounded* rounded);

// Tasks that share nothing they write run on all threads, a single one at once.
OrtStatus* in_parallel(const OrtApi* api, OrtKernelContext* context, void (*task)(void*, size_t), size_t tasks,
                       void* call);

// How a product is cut into tasks: panels of rows that are rounded, tiles of columns that are multiplied.
size_t panels_of_task(const Rounded& rounded, const Weights& weights);
// bytes: of all codes that the call reads.
size_t tiles_of_task(const Weights& weights, bool is_small_m, size_t bytes);

// What the attribute `activations` of a node rounds x to.
OrtStatus* read_rounding(const Node& node, const OrtKernelInfo* info, Rounded* rounded);

struct Product {
  Node node;
  Instructions instructions = Instructions::kScalar;
  const MatMulKernels* kernels = nullptr;
  mutable Weights weights;  // the first call moves the codes
  bool computed = false;    // scales and zero points are given by each call
  mutable Pool calls, tasks, floats;  // memory of a call, of a task of it, and for x and y that are float16

  // stacked: the weights are those of several experts.
  OrtStatus* prepare(const OrtApi* api, const OrtKernelInfo* info, bool stacked = false);
  // The weights of a call: those that were read, or `storage`, with scales that the call gives.
  OrtStatus* weights_of(OrtKernelContext* context, Weights* storage, const Weights** weights) const;
  // Multiplies the first input; `transform` may be null.
  OrtStatus* run(OrtKernelContext* context, Rounded rounded, const RowTransform* transform) const;

 private:
  OrtStatus* move_codes(OrtKernelContext* context) const;
  OrtStatus* run(OrtKernelContext* context, const Weights& weights, Rounded rounded,
                 const RowTransform* transform) const;
  OrtStatus* multiply(OrtKernelContext* context, const Weights& weights, Rounded rounded, const RowTransform* transform,
                      const float* x, float* y) const;

  mutable LargeCopy copy;  // of the codes
  mutable std::unique_ptr<uint8_t[]> small_pages;  // the copy where there are no large ones and codes were digits
  mutable std::mutex moving;
  mutable std::atomic<bool> moved{false};
};

}  // namespace graphopt
