#include "matmul_table/shared/inputs.h"

#include <cmath>
#include <initializer_list>

namespace graphopt {
namespace {

constexpr int64_t kLargestSize = int64_t{1} << 31;
constexpr int64_t kMostExperts = int64_t{1} << 20;

OrtStatus* check_finite(const Node& node, const float* values, int64_t entries) {
  for (int64_t i = 0; i < entries; ++i) {
    if (std::isfinite(values[i])) continue;
    return node.error("entry %lld of the table is no finite number", static_cast<long long>(i));
  }
  return nullptr;
}

OrtStatus* read_span(const Node& node, const OrtKernelInfo* info, Weights* weights) {
  int64_t span = 0, low = 0;
  GRAPHOPT_RETURN_IF_ERROR(node.read_optional(info, "span", &span));
  if (!span) return nullptr;
  GRAPHOPT_RETURN_IF_ERROR(node.read_attribute(info, "low", &low));
  if (span != 8 && span != 16) return node.error("span must be 0, 8 or 16, it is %lld", static_cast<long long>(span));
  if (low < -128 || low > 0) return node.error("low must be from -128 to 0, it is %lld", static_cast<long long>(low));
  weights->span_bits = span == 8 ? 3 : 4;
  weights->low = static_cast<float>(low);
  return nullptr;
}

bool is_neutral(const Tensor& tensor) {
  for (size_t axis = 0; axis < tensor.rank; ++axis) {
    if (tensor.shape[axis] != 1) return false;
  }
  return !*static_cast<const uint8_t*>(tensor.data);
}

// Numbers in two levels, [experts, tiles, bytes].
OrtStatus* read_levels(const Node& node, const char* input, const Weights& weights, const Tensor& tensor, Leveled* to) {
  const size_t first = weights.experts ? 1 : 0, groups = weights.groups();
  const size_t steps = 32 * (((groups - 1) >> weights.span_bits) + 1), unit = 32 * ((groups + 15) / 16);
  const bool has_axes = tensor.rank == first + 2 && (!first || tensor.shape[0] == static_cast<int64_t>(weights.experts));
  const bool has_tiles = has_axes && tensor.shape[first] == static_cast<int64_t>(weights.tiles());
  const size_t bytes = has_tiles ? static_cast<size_t>(tensor.shape[first + 1]) : 0;
  for (int bits = 4; bits <= 8; bits += 2) {
    if (bytes != unit * static_cast<size_t>(bits) + steps) continue;
    if (reinterpret_cast<uintptr_t>(tensor.data) % 2) {
      return node.error("%s lies at an odd address; if that is external data, save the file again", input);
    }
    *to = {static_cast<const uint8_t*>(tensor.data), bytes, bytes - steps, bits};
    return nullptr;
  }
  return node.error("%s in two levels must have the shape [%s%zu, %zu, %zu or %zu]", input, first ? "experts, " : "",
                    weights.tiles(), 4 * unit + steps, 6 * unit + steps, 8 * unit + steps);
}

OrtStatus* read_trellis(const Node& node, const Weights& weights, const Tensor& table, TableInput* to) {
  if (weights.bits < 2 || weights.bits > 6) return node.error("codes of a trellis have 2 to 6 bits, not %d", weights.bits);
  const int64_t entries = int64_t{1} << trellis_field(weights.bits);
  if (table.rank != 2 || table.shape[0] != 2 || table.shape[1] != entries) {
    return node.error("table must have the shape [2, %lld], for a trellis of %d bits", static_cast<long long>(entries),
                      weights.bits);
  }
  const auto* const values = static_cast<const float*>(table.data);
  GRAPHOPT_RETURN_IF_ERROR(check_finite(node, values, 2 * entries));
  *to = {values, static_cast<size_t>(entries), true};
  return nullptr;
}

}  // namespace

OrtStatus* read_matrix(const Node& node, const OrtKernelInfo* info, Weights* to, bool* computed, bool stacked) {
  Weights& weights = *to;
  int64_t rows = 0, columns = 0, group = 0;
  GRAPHOPT_RETURN_IF_ERROR(node.read_attribute(info, "rows", &rows));
  GRAPHOPT_RETURN_IF_ERROR(node.read_attribute(info, "columns", &columns));
  GRAPHOPT_RETURN_IF_ERROR(node.read_attribute(info, "group", &group));
  if (rows < 1 || rows > kLargestSize || columns < 1 || columns > kLargestSize) {
    return node.error("rows and columns must be from 1 to 2^31, they are %lld and %lld", static_cast<long long>(rows),
                      static_cast<long long>(columns));
  }
  if (group < 1 || group > kLargestSize || (group % 16 && group != rows)) {
    return node.error("group must be a multiple of 16, or all %lld rows, it is %lld", static_cast<long long>(rows),
                      static_cast<long long>(group));
  }
  weights.rows = static_cast<size_t>(rows);
  weights.columns = static_cast<size_t>(columns);
  weights.group = static_cast<size_t>(group);
  int64_t minimums = 0;
  GRAPHOPT_RETURN_IF_ERROR(node.read_optional(info, "minimums", &minimums));
  if (minimums != 0 && minimums != 1) {
    return node.error("minimums must be 0 or 1, it is %lld", static_cast<long long>(minimums));
  }
  weights.minimums = minimums;
  int64_t trellis = 0;
  GRAPHOPT_RETURN_IF_ERROR(node.read_optional(info, "trellis", &trellis));
  if (trellis != 0 && trellis != 1) {
    return node.error("trellis must be 0 or 1, it is %lld", static_cast<long long>(trellis));
  }
  if (trellis && minimums) return node.error("a trellis has no minimums");
  weights.table.is_trellis = trellis;
  int64_t base = 0;
  GRAPHOPT_RETURN_IF_ERROR(node.read_optional(info, "base", &base));
  if (base != 0 && (base != 3 || trellis)) {
    return node.error("base must be 0, or 3 for codes that are no trellis, it is %lld", static_cast<long long>(base));
  }
  weights.digits = base == 3;
  GRAPHOPT_RETURN_IF_ERROR(read_span(node, info, to));
  Tensor codes, scales, zero_points;
  GRAPHOPT_RETURN_IF_ERROR(node.read_constant(info, kCodes, "codes", &codes));
  bool constant = true;
  for (MatMulInput index : {kScales, kZeroPoints}) {
    bool is_constant = false;
    GRAPHOPT_RETURN_IF_ERROR(node.find_constant(info, index, &is_constant));
    constant = constant && is_constant;
  }
  if (computed) *computed = !constant;
  const bool reads_scales = constant || !computed;
  if (reads_scales) {
    GRAPHOPT_RETURN_IF_ERROR(node.read_constant(info, kScales, "scales", &scales));
    GRAPHOPT_RETURN_IF_ERROR(node.read_constant(info, kZeroPoints, "zero_points", &zero_points));
  }
  const auto tiles = static_cast<int64_t>(weights.tiles()), units = static_cast<int64_t>(weights.units());
  const size_t first = stacked ? 1 : 0;  // of the axes of a matrix
  const bool has_axes = codes.rank == first + 3;
  const int64_t* const shape = codes.shape.get() + first;
  const int64_t unit = has_axes ? shape[2] : 0, experts = has_axes && stacked ? codes.shape[0] : 1;
  const bool fits = has_axes && shape[0] == tiles && shape[1] == units;
  const bool has_bytes = weights.digits ? unit == Weights::kDigitBytes : unit % 32 == 0 && unit >= 32 && unit <= 256;
  if (!fits || !has_bytes || experts < 1 || experts > kMostExperts) {
    return node.error("codes must have the shape [%s%lld, %lld, %s] for %lld rows and %lld columns",
                      stacked ? "experts, " : "", static_cast<long long>(tiles), static_cast<long long>(units),
                      weights.digits ? "52" : "32 * bits", static_cast<long long>(rows),
                      static_cast<long long>(columns));
  }
  weights.experts = stacked ? static_cast<size_t>(experts) : 0;
  weights.bits = weights.digits ? 2 : static_cast<int>(unit / 32);
  weights.codes = static_cast<const uint8_t*>(codes.data);
  return reads_scales ? set_scales(node, scales, zero_points, to) : nullptr;
}

OrtStatus* read_weights(const Node& node, const OrtKernelInfo* info, Weights* to, bool* computed, bool stacked) {
  GRAPHOPT_RETURN_IF_ERROR(read_matrix(node, info, to, computed, stacked));
  const auto columns = static_cast<int64_t>(to->columns), experts = static_cast<int64_t>(to->experts);
  Tensor bias;
  GRAPHOPT_RETURN_IF_ERROR(node.read_constant(info, kBias, "bias", &bias));
  const bool no_bias = bias.rank == 1 && bias.shape[0] == 1 && *static_cast<const float*>(bias.data) == 0;
  if (!no_bias && stacked && (bias.rank != 2 || bias.shape[0] != experts || bias.shape[1] != columns)) {
    return node.error("bias must be [0], or have the shape [%lld, %lld], a row for each expert",
                      static_cast<long long>(experts), static_cast<long long>(columns));
  }
  if (!no_bias && !stacked && (bias.rank != 1 || bias.shape[0] != columns)) {
    return node.error("bias must be [0], or have %lld numbers, one for each column", static_cast<long long>(columns));
  }
  if (!no_bias) to->bias = static_cast<const float*>(bias.data);
  return nullptr;
}

OrtStatus* set_scales(const Node& node, const Tensor& scales, const Tensor& zero_points, Weights* to) {
  Weights& weights = *to;
  if ((scales.type == kUint8) != (weights.span_bits > 0)) {
    return node.error("scales of bytes, and no others, have a span");
  }
  if (scales.type == kUint8) {
    GRAPHOPT_RETURN_IF_ERROR(read_levels(node, "scales", weights, scales, &weights.levels));
    if (is_neutral(zero_points)) return nullptr;
    return read_levels(node, "zero_points", weights, zero_points, &weights.zero_levels);
  }
  const auto tiles = static_cast<int64_t>(weights.tiles()), groups = static_cast<int64_t>(weights.groups());
  const size_t first = weights.experts ? 1 : 0;
  const auto one_for_each_group = [&](const Tensor& tensor) {
    if (tensor.rank != first + 3 || (first && tensor.shape[0] != static_cast<int64_t>(weights.experts))) return false;
    const int64_t* const shape = tensor.shape.get() + first;
    return shape[0] == tiles && shape[1] == groups && shape[2] == 16;
  };
  if (!one_for_each_group(scales)) {
    return node.error("scales must have the shape [%s%lld, %lld, 16]", first ? "experts, " : "",
                      static_cast<long long>(tiles), static_cast<long long>(groups));
  }
  const bool half = scales.type == kFloat16;
  if (half) weights.half_scales = static_cast<const Half*>(scales.data);
  if (!half) weights.scales = static_cast<const float*>(scales.data);
  bool is_single = zero_points.rank == first + 3;
  for (size_t axis = 0; axis < zero_points.rank; ++axis) is_single = is_single && zero_points.shape[axis] == 1;
  const bool neutral = is_single && (half ? !(static_cast<const Half*>(zero_points.data)->bits & 0x7fff)
                                    : *static_cast<const float*>(zero_points.data) == 0);
  if (!neutral) {
    if (!one_for_each_group(zero_points)) {
      return node.error("zero_points must be [[[%s]]], or have the shape of scales, [%s%lld, %lld, 16]",
                        first ? "[0]" : "0", first ? "experts, " : "", static_cast<long long>(tiles),
                        static_cast<long long>(groups));
    }
    if (half) weights.half_zero_points = static_cast<const Half*>(zero_points.data);
    if (!half) weights.zero_points = static_cast<const float*>(zero_points.data);
  }
  return nullptr;
}

OrtStatus* read_table(const Node& node, const OrtKernelInfo* info, const Weights& weights, TableInput* to) {
  Tensor table;
  GRAPHOPT_RETURN_IF_ERROR(node.read_constant(info, kTable, "table", &table));
  if (weights.table.is_trellis) return read_trellis(node, weights, table, to);
  const int64_t size = int64_t{1} << weights.bits, entries = table.rank == 1 ? table.shape[0] : 0;
  if (entries < 1 || entries > size) {
    return node.error("table must have from 1 to %lld numbers, for codes of %d bits", static_cast<long long>(size),
                      weights.bits);
  }
  if (weights.digits && entries < 3) {
    return node.error("table must have 3 numbers at least for codes in base 3, it has %lld",
                      static_cast<long long>(entries));
  }
  const auto* const values = static_cast<const float*>(table.data);
  GRAPHOPT_RETURN_IF_ERROR(check_finite(node, values, entries));
  *to = {values, static_cast<size_t>(entries), false};
  return nullptr;
}

OrtStatus* make_trellis(const Node& node, const TableInput& input, int bits, Table* table) {
  if (table->make_trellis(input.values, input.entries, bits)) return nullptr;
  return node.error("the sums of a trellis must be multiples of one power of two, from -127 to 127 of it");
}

OrtStatus* check_codes(const Node& node, const TableInput& table, int largest) {
  if (largest < static_cast<int>(table.entries)) return nullptr;
  return node.error("a code is %d, in a table of %zu numbers", largest, table.entries);
}

OrtStatus* read_activations(const Node& node, const OrtKernelInfo* info, Activations* to) {
  char text[16] = {};
  GRAPHOPT_RETURN_IF_ERROR(node.read_attribute(info, "activations", text, sizeof text));
  constexpr const char* kKinds[] = {"float32", "bfloat16", "int8", "int16", "uint4"};
  for (int kind = 0; kind < 5; ++kind) {
    *to = static_cast<Activations>(kind);
    if (!std::strcmp(text, kKinds[kind])) return nullptr;
  }
  return node.error("activations must be float32, bfloat16, int8, int16 or uint4, not '%s'", text);
}

OrtStatus* read_token_rounding(const Node& node, const OrtKernelInfo* info, int* levels, float* clip) {
  int64_t bits = 0;
  GRAPHOPT_RETURN_IF_ERROR(node.read_attribute(info, "bits", &bits));
  if (bits != 8 && bits != 4) return node.error("bits must be 8 or 4, not %lld", static_cast<long long>(bits));
  GRAPHOPT_RETURN_IF_ERROR(node.read_attribute(info, "clip", clip));
  if (!(*clip > 0 && *clip <= 1)) return node.error("clip must be above 0 and at most 1, it is %g", *clip);
  *levels = bits == 8 ? 127 : 7;
  return nullptr;
}

OrtStatus* check_rotation(const Node& node, const Weights& weights, size_t left, size_t right) {
  if (weights.rows % (left * right) == 0) return nullptr;
  return node.error("the %zu rows of the weights are no multiple of %zu x %zu", weights.rows, left, right);
}

OrtStatus* count_rows(const Node& node, const Weights& weights, const Tensor& x, size_t* rows) {
  if (x.rank < 1 || x.shape[x.rank - 1] != static_cast<int64_t>(weights.rows)) {
    return node.error("the last axis of x must have %zu numbers, as there are rows of weights", weights.rows);
  }
  *rows = 1;
  for (size_t axis = 0; axis + 1 < x.rank; ++axis) *rows *= static_cast<size_t>(x.shape[axis]);
  return nullptr;
}

}  // namespace graphopt
