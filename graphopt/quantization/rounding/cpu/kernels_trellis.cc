// Compiled once for each set of instructions. Arithmetic is that of graphopt/numerics/formats/trellis.py, operation by
// operation, so that both choose the same codes, bit by bit. A lane is a tile: 16 tiles are searched together.
#include "cpu/trellis.h"

#include "abi/instructions.h"
#include "arch/vector.h"
#include GRAPHOPT_FAMILY_HEADER(cpu/arch, lanes.h)

namespace graphopt {
namespace {

constexpr size_t kTile = kTrellisTile, kLanes = kColumns;

// States behind a column that are computed together: their costs stay in registers.
constexpr size_t kTogether = 4;

// What an error counts at least, in units of costs.
constexpr float kLeastCount = 1.0f / 16;

GRAPHOPT_FORCE_INLINE Floats times(const Floats& a, float b) {
  return by_parts<Floats>([&](size_t i) { return a.part[i] * b; });
}

GRAPHOPT_FORCE_INLINE Floats plus(const Floats& a, float b) {
  return by_parts<Floats>([&](size_t i) { return a.part[i] + b; });
}

// The nearest integers of numbers below 2^22; those in the middle become even.
GRAPHOPT_FORCE_INLINE Floats round_to_even(const Floats& a) {
  constexpr float kMagic = 12582912.0f;  // 1.5 x 2^23
  return by_parts<Floats>([&](size_t i) { return (a.part[i] + kMagic) - kMagic; });
}

GRAPHOPT_FORCE_INLINE Floats least_of(const Floats& a, const Floats& b) {
  return by_parts<Floats>([&](size_t i) { return minimum(a.part[i], b.part[i]); });
}

// Costs without the codes that their last bits are.
GRAPHOPT_FORCE_INLINE Floats without_code(const Floats& costs, size_t bits) {
  const int mask = -(1 << bits);
  return by_parts<Floats>([&](size_t i) {
    const Integers::Part numbers = __builtin_convertvector(costs.part[i], Integers::Part) & mask;
    return __builtin_convertvector(numbers, Floats::Part);
  });
}

// Lanes of `b` where `a` is less than `least`, else those of `c`.
GRAPHOPT_FORCE_INLINE Integers choose(const Floats& a, const Floats& least, const Integers& b, const Integers& c) {
  return by_parts<Integers>([&](size_t i) { return a.part[i] < least.part[i] ? b.part[i] : c.part[i]; });
}

// 16 tiles of one width, a column after the other, and what is known of their paths.
//
// Costs are integers, times 2^bits; the rest, up to 2^bits - 1, is the code that the best path chose. All are below 2^24,
// so sums are exact, and the minimum of paths is that of their costs, then that of their codes.
struct Batch {
  size_t width;
  size_t bits, field, choices, states;
  const float *values, *head, *tail;  // of each window; of each half of one, in steps
  float farthest, worst;              // in steps; in costs, times 2^bits
  Floats *units, *counts;             // [width], in steps and in costs
  Integers *codes, *before;           // [width], [width + 1]: the code of a column, and the state before it
  Floats* costs;                      // [width + 1][states], behind each column; the first is never read
  Floats *slopes, *offsets, *squares;  // [2^field]
  Floats* costs_before;               // [states], costs before a column, for the best of them 0
};

// What costs are made of, c (u - h - t)^2 = q^2 / 4c + q t + c t^2, each rounded to an integer: q, its square with the
// number of the code that belongs to h, and c t^2, all times 2^bits.
GRAPHOPT_FORCE_INLINE void make_terms(const Batch& batch, const Floats& unit, const Floats& count, size_t bits,
                                      size_t field) {
  const float scale = static_cast<float>(size_t{1} << bits);
  const Floats double_count = count + count, number = unit * double_count;
  const Floats inverse = by_parts<Floats>([&](size_t i) { return 0.25f / count.part[i]; });
  for (size_t entry = 0; entry < size_t{1} << field; ++entry) {
    const Floats slope = round_to_even(times(double_count, batch.head[entry]) - number);
    const Floats offset = round_to_even(slope * slope * inverse);
    batch.slopes[entry] = times(slope, scale);
    batch.offsets[entry] = plus(times(offset, scale), static_cast<float>(entry >> (field - bits)));
    batch.squares[entry] = times(round_to_even(times(count, batch.tail[entry] * batch.tail[entry])), scale);
  }
}

// The least costs of all paths to each state behind each column. The first column is `turn`, the others follow in a
// circle. Paths begin with the state `ends`, or with any where there is none.
template <size_t kBits, size_t kField>
void advance(const Batch& batch, size_t turn, const Integers* ends) {
  const size_t bits = kBits ? kBits : batch.bits, field = kBits ? kField : batch.field;
  const size_t states = size_t{1} << (2 * field - bits), choices = size_t{1} << bits, lows = states >> bits;
  const size_t step = choices < kTogether ? choices : kTogether;
  for (size_t state = 0; state < states; ++state) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const bool starts = !ends || reinterpret_cast<const int32_t*>(ends)[lane] == static_cast<int32_t>(state);
      reinterpret_cast<float*>(batch.costs_before + state)[lane] = starts ? 0.0f : batch.worst;
    }
  }
  Floats* next = batch.costs + states;
  for (size_t column = 0; column < batch.width; ++column, next += states) {
    const size_t turned_column = column + turn < batch.width ? column + turn : column + turn - batch.width;
    make_terms(batch, batch.units[turned_column], batch.counts[turned_column], bits, field);
    // the window's first half is the first bits of the state before it
    for (size_t state = 0; state < states; ++state) {
      batch.costs_before[state] = batch.costs_before[state] + batch.offsets[state >> (field - bits)];
    }
    Floats best = all_lanes(__builtin_inff());
    for (size_t low = 0; low < lows; ++low) {
      for (size_t first = 0; first < choices; first += step) {
        const size_t next_state = low << bits | first;
        const float* tail = batch.tail + (next_state & ((size_t{1} << field) - 1));
        const Floats* squares = batch.squares + (next_state & ((size_t{1} << field) - 1));
#pragma GCC unroll 2
        for (size_t part = 0; part < kParts; ++part) {
          Floats::Part least_costs[kTogether];
          const auto path = [&](size_t choice, size_t i) {
            const size_t state = choice * lows + low;
            const Floats& slope = batch.slopes[state >> (field - bits)];
            return add_product(batch.costs_before[state].part[part], slope.part[part], tail[i]);
          };
#pragma GCC unroll 4
          for (size_t i = 0; i < kTogether; ++i) {
            if (i < step) least_costs[i] = path(0, i);
          }
          for (size_t choice = 1; choice < choices; ++choice) {
#pragma GCC unroll 4
            for (size_t i = 0; i < kTogether; ++i) {
              if (i < step) least_costs[i] = minimum(path(choice, i), least_costs[i]);
            }
          }
#pragma GCC unroll 4
          for (size_t i = 0; i < kTogether; ++i) {
            if (i < step) {
              least_costs[i] = least_costs[i] + squares[i].part[part];
              next[next_state + i].part[part] = least_costs[i];
              best.part[part] = minimum(least_costs[i], best.part[part]);
            }
          }
        }
      }
    }
    best = without_code(best, bits);
    for (size_t state = 0; state < states; ++state) {
      batch.costs_before[state] = least_of(without_code(next[state], bits) - best, all_lanes(batch.worst));
    }
  }
}

// Goes back along the best paths, from behind the last column to the state before column `stop`.
void go_back(const Batch& batch, const Integers* ends, size_t stop) {
  Integers state = all_lanes<int32_t>(0);
  if (ends) {
    state = *ends;
  } else {
    Floats least_cost = batch.costs_before[0];
    for (size_t candidate = 1; candidate < batch.states; ++candidate) {
      state = choose(batch.costs_before[candidate], least_cost, all_lanes(static_cast<int32_t>(candidate)), state);
      least_cost = least_of(batch.costs_before[candidate], least_cost);
    }
  }
  batch.before[batch.width] = state;
  Integers lanes;
  for (size_t lane = 0; lane < kLanes; ++lane) {
    reinterpret_cast<int32_t*>(&lanes)[lane] = static_cast<int32_t>(lane);
  }
  const int bits = static_cast<int>(batch.bits), mask = static_cast<int>(batch.choices) - 1;
  for (size_t column = batch.width; column-- > stop;) {
    const float* costs = reinterpret_cast<const float*>(batch.costs + (column + 1) * batch.states);
    const Integers indices =
        by_parts<Integers>([&](size_t i) { return state.part[i] * int32_t{kLanes} + lanes.part[i]; });
    const Floats cost = gather(costs, indices);
    const Integers code =
        by_parts<Integers>([&](size_t i) { return __builtin_convertvector(cost.part[i], Integers::Part) & mask; });
    batch.codes[column] = code;
    state = by_parts<Integers>(
        [&](size_t i) { return (code.part[i] * static_cast<int32_t>(batch.states) + state.part[i]) >> bits; });
    batch.before[column] = state;
  }
}

void search(const Batch& batch, size_t turn, const Integers* ends, size_t stop) {
  const auto kernel = batch.field == 4 && batch.bits == 2   ? advance<2, 4>
                      : batch.field == 4 && batch.bits == 3 ? advance<3, 4>
                      : batch.field == 4 && batch.bits == 4 ? advance<4, 4>
                      : batch.field == 5 && batch.bits == 5 ? advance<5, 5>
                                                            : advance<0, 0>;
  kernel(batch, turn, ends);
  go_back(batch, ends, stop);
}

// Codes of whole tiles that close in a circle: what the best path that is cut in the middle begins and ends with.
void close(const Batch& batch, Integers* best) {
  const size_t width = batch.width, half = width / 2;
  search(batch, half, nullptr, width - half);
  Integers ends = batch.before[width - half];
  search(batch, 0, &ends, half);
  ends = batch.before[half];
  search(batch, half, &ends, 0);
  for (size_t i = 0; i < width; ++i) best[(i + half) % width] = batch.codes[i];
}

// Codes of narrow tiles: the best of the paths from each state.
void close_exactly(const Batch& batch, Integers* best) {
  const size_t width = batch.width, window = 2 * batch.field;
  Floats lowest = all_lanes(__builtin_inff());
  for (size_t i = 0; i < width; ++i) best[i] = all_lanes<int32_t>(0);
  for (size_t state = 0; state < batch.states; ++state) {
    const Integers ends = all_lanes(static_cast<int32_t>(state));
    search(batch, 0, &ends, 0);
    Floats error = all_lanes(0.0f);
    for (size_t column = 0; column < width; ++column) {
      Integers stream = all_lanes<int32_t>(0);
      size_t stream_bits = 0;
      for (size_t i = 0; stream_bits < window; ++i, stream_bits += batch.bits) {
        const Integers& code = batch.codes[(column + i) % width];
        stream = by_parts<Integers>(
            [&](size_t p) { return (stream.part[p] << static_cast<int>(batch.bits)) | code.part[p]; });
      }
      stream = by_parts<Integers>([&](size_t p) { return stream.part[p] >> static_cast<int>(stream_bits - window); });
      const int field = static_cast<int>(batch.field), mask = (1 << batch.field) - 1;
      const Integers upper = by_parts<Integers>([&](size_t p) { return stream.part[p] >> field; });
      const Integers lower = by_parts<Integers>([&](size_t p) { return stream.part[p] & mask; });
      const Floats difference = gather(batch.head, upper) + gather(batch.tail, lower) - batch.units[column];
      error = error + batch.counts[column] * (difference * difference);
    }
    for (size_t i = 0; i < width; ++i) best[i] = choose(error, lowest, batch.codes[i], best[i]);
    lowest = least_of(error, lowest);
  }
}

// Where a tile begins: its first weight, the scale of that, and the importance of its row.
struct TileStart {
  size_t weight, scale;
  double importance;
};

// Puts a tile into a lane: its numbers in steps, and what their squared errors cost.
void load(const TrellisWork& work, const TileStart& tile, size_t width, size_t lane, const Batch& batch) {
  float units[kTile] = {};
  double counts[kTile] = {}, largest = 0;
  const double* scales = work.scales + tile.scale;
  if (work.units) {
    for (size_t i = 0; i < width; ++i) units[i] = work.units[tile.weight + i];
  } else {
    for (size_t i = 0; i < width; ++i) units[i] = static_cast<float>(work.numbers[tile.weight + i] / scales[i]);
  }
  for (size_t i = 0; i < width; ++i) counts[i] = tile.importance * scales[i] * scales[i];
  for (size_t i = 0; i < width; ++i) largest = counts[i] > largest ? counts[i] : largest;
  const double inverse = 1.0 / largest;
  const float farthest = batch.farthest, steps = static_cast<float>(work.steps), costs = static_cast<float>(work.costs);
  for (size_t i = 0; i < width; ++i) {
    const float step = units[i] * steps, bounded = step < -farthest ? -farthest : step;
    const float count = static_cast<float>(largest > 0 ? counts[i] * inverse : 1.0) * costs;
    reinterpret_cast<float*>(batch.units + i)[lane] = bounded > farthest ? farthest : bounded;
    reinterpret_cast<float*>(batch.counts + i)[lane] = count > kLeastCount ? count : kLeastCount;
  }
}

// Searches up to 16 tiles, and writes codes, or what free paths mean.
void search_tiles(const TrellisWork& work, const Batch& batch, const TileStart* tile_starts, size_t tiles,
                  Integers* best) {
  const size_t width = batch.width, half = width / 2;
  for (size_t lane = 0; lane < kLanes; ++lane) load(work, tile_starts[lane < tiles ? lane : 0], width, lane, batch);
  if (!work.units) {
    (width < kTile ? close_exactly : close)(batch, best);
    for (size_t lane = 0; lane < tiles; ++lane) {
      for (size_t i = 0; i < width; ++i) {
        const int32_t code = reinterpret_cast<const int32_t*>(best + i)[lane];
        work.codes[tile_starts[lane].weight + i] = static_cast<uint8_t>(code);
      }
    }
    return;
  }
  search(batch, half, nullptr, 0);
  for (size_t i = 0; i < width; ++i) {
    const Floats values = gather(batch.values, by_parts<Integers>([&](size_t p) {
      return batch.codes[i].part[p] * static_cast<int32_t>(batch.states) + batch.before[i + 1].part[p];
    }));
    for (size_t lane = 0; lane < tiles; ++lane) {
      work.units[tile_starts[lane].weight + (i + half) % width] = reinterpret_cast<const float*>(&values)[lane];
    }
  }
}

void search_trellis(const TrellisWork& work) {
  Batch batch;
  batch.bits = work.bits;
  batch.field = work.window / 2;
  batch.choices = size_t{1} << work.bits;
  batch.states = size_t{1} << (work.window - work.bits);
  const size_t entries = size_t{1} << batch.field;
  batch.values = work.values;
  batch.head = work.tables;
  batch.tail = work.tables + entries;
  batch.farthest = static_cast<float>(work.farthest);
  batch.worst = static_cast<float>(work.worst * work.costs * static_cast<double>(batch.choices));
  batch.units = static_cast<Floats*>(work.scratch);
  batch.counts = batch.units + kTile;
  batch.codes = reinterpret_cast<Integers*>(batch.counts + kTile);
  batch.before = batch.codes + kTile;
  Integers* best = batch.before + 2 * kTile;
  batch.slopes = reinterpret_cast<Floats*>(best + kTile);
  batch.offsets = batch.slopes + entries;
  batch.squares = batch.offsets + entries;
  batch.costs_before = batch.squares + entries;
  batch.costs = batch.costs_before + batch.states;
  const size_t whole = work.columns / kTile * kTile;
  for (int narrow = 0; narrow < 2; ++narrow) {
    const size_t begin = narrow ? whole : 0, end = narrow ? work.columns : whole;
    batch.width = narrow ? end - begin : kTile;
    TileStart tile_starts[kLanes];
    size_t tiles = 0;
    for (size_t row = 0; begin < end && row < work.groups * work.size; ++row) {
      const size_t group = row / work.size;
      for (size_t column = begin; column < end; column += kTile) {
        tile_starts[tiles++] = {row * work.columns + column, group * work.columns + column,
                           work.importance ? work.importance[row] : 1.0};
        if (tiles < kLanes) continue;
        search_tiles(work, batch, tile_starts, tiles, best);
        tiles = 0;
      }
    }
    if (tiles) search_tiles(work, batch, tile_starts, tiles, best);
  }
}

// The values of codes [columns], in circles of 16 columns.
void decode(const TrellisWork& work, const uint8_t* codes, const double* scales, double* values) {
  for (size_t begin = 0; begin < work.columns; begin += kTile) {
    const size_t width = work.columns - begin < kTile ? work.columns - begin : kTile;
    for (size_t i = 0; i < width; ++i) {
      size_t stream = 0, bits = 0;
      for (size_t next = i; bits < work.window; bits += work.bits) {
        stream = stream << work.bits | codes[begin + next];
        next = next + 1 < width ? next + 1 : 0;
      }
      values[begin + i] = static_cast<double>(work.values[stream >> (bits - work.window)]) * scales[begin + i];
    }
  }
}

// The scratch of a search behind bytes that come first.
void* scratch_behind(void* scratch, size_t bytes) {
  return static_cast<char*>(scratch) + (bytes + kLine - 1) / kLine * kLine;
}

void try_scales(const TrialWork& work) {
  const size_t columns = work.search.columns;
  TrellisWork rows = work.search;
  rows.scratch = scratch_behind(work.search.scratch, trial_scratch(columns));
  rows.units = static_cast<float*>(work.search.scratch);
  rows.numbers = rows.importance = nullptr;
  rows.codes = nullptr;
  rows.groups = 1;
  for (size_t group = 0; group < work.search.groups; ++group) {
    const size_t offset = group * columns, size = work.search.size;
    const float* steps = work.steps + offset;
    float *errors = work.errors + offset, *products = work.products + offset, *squares = work.squares + offset;
    for (size_t i = 0; i < columns; ++i) errors[i] = products[i] = squares[i] = 0;
    rows.scales = work.search.scales + offset;
    for (size_t begin = 0; begin < size; begin += kTrialRows) {
      rows.size = size - begin < kTrialRows ? size - begin : kTrialRows;
      const float* numbers = work.numbers + (group * size + begin) * columns;
      for (size_t row = 0; row < rows.size; ++row) {
        for (size_t i = 0; i < columns; ++i) rows.units[row * columns + i] = numbers[row * columns + i] / steps[i];
      }
      search_trellis(rows);
      for (size_t row = 0; row < rows.size; ++row) {
        const float weight = work.weights ? work.weights[group * size + begin + row] : 1.0f;
        for (size_t i = 0; i < columns; ++i) {
          const float value = rows.units[row * columns + i], number = numbers[row * columns + i];
          const float error = value * steps[i] - number, weighted = weight * value;
          errors[i] += error * error * weight;
          products[i] += weighted * number;
          squares[i] += weighted * value;
        }
      }
    }
  }
}

void feed_back(const FeedbackWork& work) {
  constexpr size_t kStrip = 32;  // columns whose sums stay in registers
  const size_t columns = work.search.columns;
  TrellisWork row = work.search;
  double* goal = static_cast<double*>(work.search.scratch);
  row.scratch = scratch_behind(work.search.scratch, feedback_scratch(columns));
  row.groups = row.size = 1;
  row.units = nullptr;
  row.importance = nullptr;
  row.numbers = goal;
  for (size_t number = 0; number < work.rows; ++number) {
    const double* factors = work.upper + number * work.upper_rows;
    for (size_t begin = 0; begin < columns; begin += kStrip) {
      const size_t width = columns - begin < kStrip ? columns - begin : kStrip;
      double sums[kStrip] = {};
      if (width == kStrip) {
        for (size_t j = 0; j < number; ++j) {
          const double factor = factors[j];
          const double* errors = work.errors + j * columns + begin;
          for (size_t i = 0; i < kStrip; ++i) sums[i] = sums[i] + factor * errors[i];
        }
      } else {
        for (size_t j = 0; j < number; ++j) {
          const double* errors = work.errors + j * columns + begin;
          for (size_t i = 0; i < width; ++i) sums[i] = sums[i] + factors[j] * errors[i];
        }
      }
      for (size_t i = 0; i < width; ++i) {
        goal[begin + i] = work.targets[number * columns + begin + i] + sums[i];
      }
    }
    const size_t position = static_cast<size_t>(work.order[number]);
    row.scales = work.scales + position / work.group * work.scale_columns;
    row.codes = work.codes + position * work.code_columns;
    search_trellis(row);
    decode(row, row.codes, row.scales, goal);
    double* errors = work.errors + number * columns;
    for (size_t i = 0; i < columns; ++i) errors[i] = work.matrix[position * columns + i] - goal[i];
  }
}

}  // namespace

extern const FeedbackKernel GRAPHOPT_NAME(kFeedback);
const FeedbackKernel GRAPHOPT_NAME(kFeedback) = feed_back;

extern const TrialKernel GRAPHOPT_NAME(kTrial);
const TrialKernel GRAPHOPT_NAME(kTrial) = try_scales;

extern const TrellisKernel GRAPHOPT_NAME(kTrellis);
const TrellisKernel GRAPHOPT_NAME(kTrellis) = search_trellis;

}  // namespace graphopt
