// ai.graphopt::MatMulExperts as onnxruntime sees it. Rows are sorted by their expert, and each expert is a product of
// MatMulTable with the rows that are its own: its weights are read once, whatever their order.
#include <atomic>
#include <cstring>

#include "abi/convert.h"
#include "abi/register.h"
#include "matmul_table/cpu/product.h"

namespace graphopt {
namespace {

constexpr size_t kExperts = kMatMulInputs, kExpertsInputs = kMatMulInputs + 1;

// Rows of y that one task copies.
constexpr size_t kCopyRows = 16;

struct ExpertTypes : ProductTypes {
  static int input_type(size_t index, int types) {
    return index == kExperts ? static_cast<int>(kInt64) : ProductTypes::input_type(index, types);
  }
};

// What a call asks of the experts.
struct Routing {
  const int64_t* experts;  // of each slot, negative for none
  size_t slots, slots_of_row;  // a row of x is read by so many slots
};

// One expert with the rows of a call that are its own.
struct Share {
  Weights weights;
  Rounded rounded;
  Layout layout;
  size_t first_row;  // among all rows, sorted by expert
  size_t panels_of_task, tiles_of_task;
};

// A part of a share: panels that are rounded, or tiles that are multiplied.
struct Task {
  size_t share, first, end;
};

// Lists one behind the other in a piece of memory, each at a multiple of 64.
class Shelf {
 public:
  template <typename T>
  size_t add(size_t count) {
    const size_t begin = bytes_;
    bytes_ += (count * sizeof(T) + Pool::kAlignment - 1) / Pool::kAlignment * Pool::kAlignment;
    return begin;
  }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_ = 0;
};

// One call, cut into tasks that share nothing they write but a flag; so their number changes no bit.
struct Call {
  const Product* product;
  const Routing* routing;
  const Share* shares;
  const Task* tasks;
  const size_t* order;  // the slots of all rows, sorted by expert; null where that is how they stand
  size_t rows;          // that have an expert
  size_t columns;
  const void* x;
  void* y;
  float* sorted_y;  // y itself where slots are in order
  bool is_half;     // x and y are float16
  std::atomic<bool> no_memory{false};

  static void round(void* call, size_t index) { static_cast<Call*>(call)->round(index); }
  static void multiply(void* call, size_t index) { static_cast<Call*>(call)->multiply(index); }
  static void copy(void* call, size_t index) { static_cast<Call*>(call)->copy(index); }

  void round(size_t index) {
    const Task& task = tasks[index];
    const Share& share = shares[task.share];
    const size_t length = share.weights.rows, panel_rows = share.rounded.panel / share.rounded.rows_of_one();
    if (!order && routing->slots_of_row == 1) {
      const float* const from = static_cast<const float*>(x) + share.first_row * length;
      for (size_t panel = task.first; panel < task.end; ++panel) {
        product->kernels->round(share.weights, share.rounded, from + panel * panel_rows * length, panel);
      }
      return;
    }
    // Rows of a panel are gathered and rounded while they are near, and those of the next one take their place.
    const Pool::Loan loan(product->tasks, panel_rows * length * sizeof(float));
    if (!loan.memory) {
      no_memory = true;
      return;
    }
    auto* const expert_rows = reinterpret_cast<float*>(loan.memory);
    for (size_t panel = task.first; panel < task.end; ++panel) {
      const size_t first = panel * panel_rows, left = share.rounded.rows_of_x - first;
      const size_t count = left < panel_rows ? left : panel_rows;
      for (size_t row = 0; row < count; ++row) {
        const size_t at = share.first_row + first + row, slot = order ? order[at] : at;
        const size_t from = slot / routing->slots_of_row * length;
        float* const to = expert_rows + row * length;
        if (is_half) widen(static_cast<const Half*>(x) + from, length, to);
        if (!is_half) std::memcpy(to, static_cast<const float*>(x) + from, length * sizeof(float));
      }
      product->kernels->round(share.weights, share.rounded, expert_rows, panel);
    }
  }

  void multiply(size_t index) {
    const Task& task = tasks[index];
    const Share& share = shares[task.share];
    const auto kernel = share.layout.is_small_m ? product->kernels->small_m : product->kernels->gemm;
    kernel(share.weights, share.rounded, sorted_y + share.first_row * columns, task.first, task.end);
  }

  // Puts rows of products where their slots are.
  void copy(size_t index) {
    const size_t first = index * kCopyRows, end = first + kCopyRows < rows ? first + kCopyRows : rows;
    for (size_t at = first; at < end; ++at) {
      const float* const from = sorted_y + at * columns;
      const size_t to = (order ? order[at] : at) * columns;
      if (is_half) narrow(from, columns, static_cast<Half*>(y) + to);
      if (!is_half) std::memcpy(static_cast<float*>(y) + to, from, columns * sizeof(float));
    }
  }
};

struct Kernel : ExpertTypes {
  static constexpr const char* kName = "MatMulExperts";
  static constexpr size_t kInputs = kExpertsInputs;
  static constexpr size_t kOutputs = 1;
  Product product;
  Rounded rounded;
  mutable Pool lists, sums;  // memory of a call: lists of rows, shares and tasks, and y in the order of experts

  OrtStatus* prepare(const OrtApi* api, const OrtKernelInfo* info, int) {
    GRAPHOPT_RETURN_IF_ERROR(product.prepare(api, info, true));
    const Weights& weights = product.weights;
    if (weights.table.is_trellis && weights.columns % 16) {
      return product.node.error("experts of a trellis have a multiple of 16 columns, not %zu", weights.columns);
    }
    return read_rounding(product.node, info, &rounded);
  }

  OrtStatus* compute(OrtKernelContext* context) const {
    Weights storage;
    const Weights* weights = nullptr;
    GRAPHOPT_RETURN_IF_ERROR(product.weights_of(context, &storage, &weights));
    const Node& node = product.node;
    const OrtValue *value = nullptr, *chosen = nullptr;
    Tensor x, experts;
    GRAPHOPT_RETURN_IF_ERROR(KernelContextGetInput::call(node.api, context, kX, &value));
    GRAPHOPT_RETURN_IF_ERROR(node.read_numbers(value, "x", &x));
    GRAPHOPT_RETURN_IF_ERROR(KernelContextGetInput::call(node.api, context, kExperts, &chosen));
    Routing routing = {};
    GRAPHOPT_RETURN_IF_ERROR(read_routing(*weights, x, chosen, &experts, &routing));
    experts.shape[experts.rank] = static_cast<int64_t>(weights->columns);  // a shape has room for one more
    OrtValue* output = nullptr;
    GRAPHOPT_RETURN_IF_ERROR(
        KernelContextGetOutput::call(node.api, context, 0, experts.shape.get(), experts.rank + 1, &output));
    if (!routing.slots) return nullptr;
    void* y = nullptr;
    GRAPHOPT_RETURN_IF_ERROR(GetTensorMutableData::call(node.api, output, &y));
    return run(context, *weights, routing, x.data, y, x.type == kFloat16);
  }

 private:
  // Checks the expert of each slot, and that x has a row for each of them, or for all of the last axis together.
  OrtStatus* read_routing(const Weights& weights, const Tensor& x, const OrtValue* chosen, Tensor* experts,
                          Routing* routing) const {
    const Node& node = product.node;
    size_t rows = 0;
    GRAPHOPT_RETURN_IF_ERROR(count_rows(node, weights, x, &rows));
    GRAPHOPT_RETURN_IF_ERROR(experts->read(node.api, chosen));
    if (reinterpret_cast<uintptr_t>(experts->data) % sizeof(int64_t)) {
      return node.error("experts lies at no multiple of 8 bytes; if that is external data, save the file again");
    }
    const bool for_each = x.rank == experts->rank + 1, shared = x.rank == experts->rank;
    bool fits = for_each || shared;
    for (size_t axis = 0; fits && axis + 1 < x.rank; ++axis) fits = x.shape[axis] == experts->shape[axis];
    if (!fits) {
      return node.error("experts must have the shape of x without its last axis, or with another last one");
    }
    routing->experts = static_cast<const int64_t*>(experts->data);
    routing->slots_of_row = shared ? static_cast<size_t>(experts->shape[experts->rank - 1]) : 1;
    routing->slots = rows * routing->slots_of_row;
    const auto count = static_cast<int64_t>(weights.experts);
    for (size_t slot = 0; slot < routing->slots; ++slot) {
      if (routing->experts[slot] < count) continue;
      return node.error("expert %lld of slot %zu, of %lld experts", static_cast<long long>(routing->experts[slot]), slot,
                        static_cast<long long>(count));
    }
    return nullptr;
  }

  OrtStatus* run(OrtKernelContext* context, const Weights& weights, const Routing& routing, const void* x, void* y,
                 bool is_half) const {
    const Node& node = product.node;
    const size_t experts = weights.experts, most = experts < routing.slots ? experts : routing.slots;
    Shelf shelf;
    const size_t starts_at = shelf.add<size_t>(experts + 1), order_at = shelf.add<size_t>(routing.slots);
    const size_t shares_at = shelf.add<Share>(most);
    const Pool::Loan of_lists(lists, shelf.bytes());
    if (!of_lists.memory) return node.error("no memory to sort %zu rows by expert", routing.slots);
    auto* const starts = reinterpret_cast<size_t*>(of_lists.memory + starts_at);
    auto* const order = reinterpret_cast<size_t*>(of_lists.memory + order_at);
    auto* const shares = reinterpret_cast<Share*>(of_lists.memory + shares_at);
    const size_t rows = sort(routing, experts, starts, order);
    const size_t size = weights.columns * (is_half ? sizeof(Half) : sizeof(float));
    if (rows < routing.slots) std::memset(y, 0, routing.slots * size);  // slots without an expert
    if (!rows) return nullptr;
    bool in_order = rows == routing.slots;
    for (size_t at = 0; in_order && at < rows; ++at) in_order = order[at] == at;

    size_t count = 0, bytes = 0, code_bytes = 0;
    for (size_t expert = 0; expert < experts; ++expert) {
      if (starts[expert] == starts[expert + 1]) continue;
      Share& share = *new (shares + count++) Share{weights.of_expert(expert), rounded, {}, starts[expert], 1, 1};
      share.rounded.rows_of_x = starts[expert + 1] - starts[expert];
      share.layout = lay_out(*product.kernels, share.weights, &share.rounded);
      bytes += share.layout.bytes();
      code_bytes += weights.tiles() * weights.tile_bytes();
    }
    const Pool::Loan words(product.calls, bytes);
    if (!words.memory) return node.error("no memory to round %zu rows of x", rows);
    size_t round_tasks = 0, multiply_tasks = 0;
    char* memory = words.memory;
    for (Share* share = shares; share < shares + count; ++share) {
      assign_memory(share->layout, memory, &share->rounded);
      memory += share->layout.bytes();
      share->panels_of_task = panels_of_task(share->rounded, weights);
      share->tiles_of_task = tiles_of_task(weights, share->layout.is_small_m, code_bytes);
      round_tasks += parts(share->rounded.panels(), share->panels_of_task);
      multiply_tasks += parts(weights.tiles(), share->tiles_of_task);
    }

    const size_t tasks_of_call = round_tasks > multiply_tasks ? round_tasks : multiply_tasks;
    const bool is_direct = in_order && !is_half;
    Shelf of_sums;
    const size_t tasks_at = of_sums.add<Task>(tasks_of_call);
    const size_t sums_at = of_sums.add<float>(is_direct ? 0 : rows * weights.columns);
    const Pool::Loan loan(sums, of_sums.bytes());
    if (!loan.memory) return node.error("no memory for %zu rows of products", rows);
    auto* const tasks = reinterpret_cast<Task*>(loan.memory + tasks_at);
    float* const sorted_y = is_direct ? static_cast<float*>(y) : reinterpret_cast<float*>(loan.memory + sums_at);
    const bool gathers = !in_order || is_half;
    Call call{&product, &routing, shares, tasks, gathers ? order : nullptr, rows, weights.columns, x, y, sorted_y,
              is_half};

    cut(shares, count, [](const Share& share) { return share.rounded.panels(); }, &Share::panels_of_task, tasks);
    GRAPHOPT_RETURN_IF_ERROR(in_parallel(node.api, context, Call::round, round_tasks, &call));
    if (call.no_memory) return node.error("no memory to gather rows of x");
    cut(shares, count, [](const Share& share) { return share.weights.tiles(); }, &Share::tiles_of_task, tasks);
    GRAPHOPT_RETURN_IF_ERROR(in_parallel(node.api, context, Call::multiply, multiply_tasks, &call));
    if (is_direct) return nullptr;
    return in_parallel(node.api, context, Call::copy, parts(rows, kCopyRows), &call);
  }

  // Sorts the slots that have an expert by it, each expert's in order; those of expert e are order[starts[e]] up to
  // order[starts[e + 1]]. Returns how many there are.
  static size_t sort(const Routing& routing, size_t experts, size_t* starts, size_t* order) {
    std::memset(starts, 0, (experts + 1) * sizeof(size_t));
    for (size_t slot = 0; slot < routing.slots; ++slot) {
      if (routing.experts[slot] >= 0) ++starts[routing.experts[slot]];
    }
    size_t rows = 0;
    for (size_t expert = 0; expert <= experts; ++expert) {
      rows += starts[expert];
      starts[expert] = rows;  // its end, from which it is filled backwards
    }
    for (size_t slot = routing.slots; slot-- > 0;) {
      if (routing.experts[slot] >= 0) order[--starts[routing.experts[slot]]] = slot;
    }
    return rows;
  }

  static size_t parts(size_t all, size_t part) { return (all + part - 1) / part; }

  // Writes the tasks of all shares, of so many parts each.
  template <typename PartsOf>
  static void cut(const Share* shares, size_t count, const PartsOf& parts_of, size_t Share::*part, Task* task) {
    for (size_t share = 0; share < count; ++share) {
      const size_t part_count = parts_of(shares[share]), step = shares[share].*part;
      for (size_t first = 0; first < part_count; first += step) {
        *task++ = {share, first, first + step < part_count ? first + step : part_count};
      }
    }
  }
};

const Operators kRegistered(kProductOps<Kernel>);

}  // namespace
}  // namespace graphopt
