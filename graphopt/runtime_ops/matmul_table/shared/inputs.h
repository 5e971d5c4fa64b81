// The inputs of products with packed weights, read and checked, the same for every device. Constant inputs must be in
// host memory.
#pragma once

#include "abi/tensor.h"
#include "matmul_table/shared/weights.h"

namespace graphopt {

// Positions of the inputs that both products have. Those from codes to zero points are a lookup's too.
enum MatMulInput : size_t { kX, kCodes, kScales, kTable, kZeroPoints, kBias, kMatMulInputs };

// The types of a product's tensors, from those of x and of scales; matrices that follow the weights hold signs.
struct ProductTypes {
  static constexpr int of(int x, int scales) { return x << 8 | scales; }
  static constexpr int x_of(int types) { return types >> 8; }
  static constexpr int scales_of(int types) { return types & 255; }
  static int input_type(size_t index, int types) {
    if (index == kX) return x_of(types);
    if (index == kCodes) return kUint8;
    if (index == kScales || index == kZeroPoints) return scales_of(types);
    return index < kMatMulInputs ? kFloat : kInt8;
  }
  static int output_type(size_t, int types) { return x_of(types); }
};

// Sizes, codes, scales and zero points, stacked where `stacked` says so: [experts, ...] each. Where scales or zero points are no constants, a call has to read them:
// `computed` is set, or, where it is null, that is an error.
OrtStatus* read_matrix(const Node& node, const OrtKernelInfo* info, Weights* weights, bool* computed,
                       bool stacked = false);
// The same and the bias: every input but x and the table.
OrtStatus* read_weights(const Node& node, const OrtKernelInfo* info, Weights* weights, bool* computed = nullptr,
                        bool stacked = false);
OrtStatus* set_scales(const Node& node, const Tensor& scales, const Tensor& zero_points, Weights* weights);

struct TableInput {
  const float* values;
  size_t entries;
  bool is_trellis;  // values: [2, entries]
};
OrtStatus* read_table(const Node& node, const OrtKernelInfo* info, const Weights& weights, TableInput* table);
// The tables of a trellis as kernels read them; others than the sums of bytes are an error.
OrtStatus* make_trellis(const Node& node, const TableInput& input, int bits, Table* table);
// largest: of all codes.
OrtStatus* check_codes(const Node& node, const TableInput& table, int largest);

// MatMulTable's attribute.
OrtStatus* read_activations(const Node& node, const OrtKernelInfo* info, Activations* activations);
// MatMulDynamic's attributes, and whether its matrices fit the weights.
OrtStatus* read_token_rounding(const Node& node, const OrtKernelInfo* info, int* levels, float* clip);
OrtStatus* check_rotation(const Node& node, const Weights& weights, size_t left, size_t right);

// Rows of x, whose last axis is K.
OrtStatus* count_rows(const Node& node, const Weights& weights, const Tensor& x, size_t* rows);

}  // namespace graphopt
