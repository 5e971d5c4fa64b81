// ai.graphopt::GatherTable as onnxruntime sees it: one operator per type of scales. A column is a few hundred bytes
// from all over a tile, so a call waits for memory, and plain code is fast enough for every set of instructions.
#include <atomic>

#include "abi/convert.h"
#include "abi/custom_op.h"
#include "abi/register.h"
#include "matmul_table/shared/inputs.h"

namespace graphopt {
namespace {

constexpr size_t kIds = 0;
static_assert(kX == kIds, "the inputs behind ids are those behind a product's x");

// The least numbers of y that are worth a task of their own.
constexpr size_t kTaskNumbers = 16384;

// Where the codes of one column lie in a unit: one plane of bits of each.
struct Plane {
  size_t begin;  // of the plane in a unit, in bytes
  int width, first_bit;
};

struct Planes {
  Plane planes[4];
  int count = 0;

  explicit Planes(int bits) {
    for (int width = 8; width >= 1; width /= 2) {
      const int first_bit = bits / (2 * width) * 2 * width;
      if (first_bit + width <= bits) planes[count++] = {32 * static_cast<size_t>(first_bit), width, first_bit};
    }
  }

  // The code in row 4 j + i and column `lane` of a unit.
  int code(const uint8_t* unit, size_t lane, size_t j, size_t i) const {
    const size_t position = 64 * j + 4 * lane + i;
    int code = 0;
    for (int k = 0; k < count; ++k) {
      const Plane& plane = planes[k];
      const size_t line = plane.width > 1 ? 64 : 32, per_line = line * 8 / static_cast<size_t>(plane.width);
      const size_t inside = position % per_line;
      const uint8_t byte = unit[plane.begin + position / per_line * line + inside % line];
      const size_t shift = inside / line * static_cast<size_t>(plane.width);
      code |= (byte >> shift & ((1 << plane.width) - 1)) << plane.first_bit;
    }
    return code;
  }
};

// The value of a code of a trellis: the codes of the window are those of the next `width` columns, in a circle.
float trellis_value(const Weights& weights, const TableInput& table, const Planes& planes, const uint8_t* unit,
                    size_t lane, size_t width, size_t j, size_t i) {
  const int field = trellis_field(weights.bits), codes = (2 * field + weights.bits - 1) / weights.bits;
  int stream = 0;
  for (int k = 0; k < codes; ++k) {
    stream = stream << weights.bits | planes.code(unit, (lane + static_cast<size_t>(k)) % width, j, i);
  }
  const int window = stream >> (codes * weights.bits - 2 * field);
  return table.values[window >> field] + table.values[table.entries + (window & ((1 << field) - 1))];
}

// Scales and zero points of a column.
template <typename Scale>
struct StoredNumbers {
  const Scale *scales, *zero_points;  // of the tile and lane, 16 apart; no zero points: null

  float scale(size_t group) const { return number<float>(scales[16 * group]); }
  float zero(size_t group) const { return zero_points ? number<float>(zero_points[16 * group]) : 0; }
};

struct LeveledNumbers {
  const Weights& weights;
  size_t tile, lane;

  float scale(size_t group) const { return of(weights.levels, group); }
  float zero(size_t group) const { return weights.zero_levels.bytes ? of(weights.zero_levels, group) : 0; }
  float of(const Leveled& levels, size_t group) const {
    return levels.number(tile, group, lane, weights.span_bits, weights.low);
  }
};

template <typename Numbers>
struct Column {
  Numbers numbers;
  const uint8_t* codes;  // of the tile
  size_t lane, width;    // of the tile

  // Returns the largest code that has no entry in the table, 0 where all have one.
  int write(const Weights& weights, const TableInput& table, const Planes& planes, float* y) const {
    int unknown_code = 0;
    for (size_t row = 0; row < weights.rows; ++row) {
      const uint8_t* const unit = codes + row / 16 * weights.unit_bytes();
      const size_t j = row % 16 / 4, i = row % 4;
      float value = 0;
      if (table.is_trellis) {
        value = trellis_value(weights, table, planes, unit, lane, width, j, i);
      } else {
        const int code = weights.digits ? digit(unit, 64 * j + 4 * lane + i) : planes.code(unit, lane, j, i);
        if (static_cast<size_t>(code) >= table.entries) {
          unknown_code = code > unknown_code ? code : unknown_code;
          continue;
        }
        value = table.values[code];
      }
      const size_t group = row / weights.group;
      const float zero = numbers.zero(group), scale = numbers.scale(group);
      y[row] = weights.minimums ? value * scale + zero : (value - zero) * scale;
    }
    return unknown_code;
  }
};

struct Kernel {
  static constexpr const char* kName = "GatherTable";
  static constexpr size_t kInputs = kBias, kOutputs = 1;
  static int input_type(size_t index, int scales) {
    return index == kIds ? kInt64 : ProductTypes::input_type(index, ProductTypes::of(kFloat, scales));
  }
  static int output_type(size_t, int) { return kFloat; }

  Node node;
  Weights weights;
  TableInput table = {};
  bool computed = false;  // scales and zero points are given by each call

  OrtStatus* prepare(const OrtApi* api, const OrtKernelInfo* info, int) {
    GRAPHOPT_RETURN_IF_ERROR(node.read(api, info));
    GRAPHOPT_RETURN_IF_ERROR(read_matrix(node, info, &weights, &computed));
    return read_table(node, info, weights, &table);
  }

  OrtStatus* compute(OrtKernelContext* context) const;
};

// One call, cut into tasks; they share nothing that they write but the flags, so their number changes no bit.
struct Call {
  const Kernel* kernel;
  const Weights& weights;
  const char* ids;  // of int64 at any address
  float* y;
  size_t count, columns_of_task;
  Planes planes;
  std::atomic<int> unknown_code{0};
  std::atomic<bool> out_of_range{false};
  std::atomic<int64_t> wrong_id{0};

  static void task(void* call, size_t index) {
    Call& self = *static_cast<Call*>(call);
    const size_t first = index * self.columns_of_task, left = self.count - first;
    const size_t end = first + (left < self.columns_of_task ? left : self.columns_of_task);
    for (size_t at = first; at < end; ++at) self.write_column(at);
  }

  void write_column(size_t at) {
    int64_t id = 0;
    std::memcpy(&id, ids + at * sizeof id, sizeof id);
    const auto columns = static_cast<int64_t>(weights.columns);
    if (id < -columns || id >= columns) {
      wrong_id = id;
      out_of_range = true;
      return;
    }
    const auto column = static_cast<size_t>(id < 0 ? id + columns : id);
    float* const to = y + at * weights.rows;
    const int code = weights.levels.bytes ? write_column(column, LeveledNumbers{weights, column / 16, column % 16}, to)
                     : weights.scales ? write_column(column, weights.scales, weights.zero_points, to)
                                      : write_column(column, weights.half_scales, weights.half_zero_points, to);
    if (code) unknown_code = code;
  }

  template <typename Scale>
  int write_column(size_t column, const Scale* scales, const Scale* zero_points, float* to) const {
    const size_t offset = 16 * (column / 16) * weights.groups() + column % 16;
    return write_column(column, StoredNumbers<Scale>{scales + offset, zero_points ? zero_points + offset : nullptr}, to);
  }

  template <typename Numbers>
  int write_column(size_t column, const Numbers& numbers, float* to) const {
    const size_t tile = column / 16, lane = column % 16;
    const uint8_t* const codes = weights.codes + tile * weights.tile_bytes();
    const size_t remaining_columns = weights.columns - 16 * tile;
    const size_t width = remaining_columns < 16 ? remaining_columns : 16;
    const Column<Numbers> source{numbers, codes, lane, width};
    return source.write(weights, kernel->table, planes, to);
  }
};

OrtStatus* Kernel::compute(OrtKernelContext* context) const {
  const OrtApi* api = node.api;
  const OrtValue* value = nullptr;
  Weights of_call = weights;
  if (computed) {  // where neighbours compute in float32, onnxruntime may cast scales in the graph
    Tensor scales, zero_points;
    GRAPHOPT_RETURN_IF_ERROR(KernelContextGetInput::call(api, context, kScales, &value));
    GRAPHOPT_RETURN_IF_ERROR(node.read_numbers(value, "scales", &scales));
    GRAPHOPT_RETURN_IF_ERROR(KernelContextGetInput::call(api, context, kZeroPoints, &value));
    GRAPHOPT_RETURN_IF_ERROR(node.read_numbers(value, "zero_points", &zero_points));
    GRAPHOPT_RETURN_IF_ERROR(set_scales(node, scales, zero_points, &of_call));
  }
  Tensor ids;
  GRAPHOPT_RETURN_IF_ERROR(KernelContextGetInput::call(api, context, kIds, &value));
  GRAPHOPT_RETURN_IF_ERROR(ids.read(api, value));
  size_t count = 1;
  for (size_t axis = 0; axis < ids.rank; ++axis) count *= static_cast<size_t>(ids.shape[axis]);
  std::unique_ptr<int64_t[]> shape(new (std::nothrow) int64_t[ids.rank + 1]);
  if (!shape) return node.error("no memory for a shape");
  for (size_t axis = 0; axis < ids.rank; ++axis) shape[axis] = ids.shape[axis];
  shape[ids.rank] = static_cast<int64_t>(weights.rows);
  OrtValue* output = nullptr;
  GRAPHOPT_RETURN_IF_ERROR(KernelContextGetOutput::call(api, context, 0, shape.get(), ids.rank + 1, &output));
  if (!count) return nullptr;
  void* y = nullptr;
  GRAPHOPT_RETURN_IF_ERROR(GetTensorMutableData::call(api, output, &y));
  const size_t columns_of_task = (kTaskNumbers + weights.rows - 1) / weights.rows;
  const size_t tasks = (count + columns_of_task - 1) / columns_of_task;
  Call call{this,  of_call, static_cast<const char*>(ids.data), static_cast<float*>(y), count, columns_of_task,
            Planes(weights.bits)};
  if (tasks == 1) {
    Call::task(&call, 0);
  } else {
    GRAPHOPT_RETURN_IF_ERROR(KernelContextParallelFor::call(api, context, Call::task, tasks, 0, &call));
  }
  if (call.out_of_range) {
    return node.error("ids must be from -%zu to %zu, one is %lld", weights.columns, weights.columns - 1,
                      static_cast<long long>(call.wrong_id.load()));
  }
  return check_codes(node, table, call.unknown_code);
}

const OrtCustomOp kOps[3] = {custom_op<Kernel, kFloat>(), custom_op<Kernel, kFloat16>(), custom_op<Kernel, kUint8>()};

const Operators kRegistered(kOps);

}  // namespace
}  // namespace graphopt
