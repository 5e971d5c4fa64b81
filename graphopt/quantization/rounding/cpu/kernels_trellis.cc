// Compiled once for each set of instructions. Arithmetic is that of graphopt/numerics/formats/trellis.py, operation by
// operation, so that both choose the same codes, bit by bit. A lane is a tile: 16 tiles are searched together.
#include "cpu/trellis.h"

#include "abi/instructions.h"
#include "arch/vector.h"
#include GRAPHOPT_FAMILY_HEADER(cpu/arch, lanes.h)

namespace graphopt {
namespace {

constexpr size_t kTile = kTrellisTile, kLanes = kColumns;

GRAPHOPT_FORCE_INLINE Floats times(const Floats& a, float b) {
  return by_parts<Floats>([&](size_t i) { return a.part[i] * b; });
}

GRAPHOPT_FORCE_INLINE Floats plus(const Floats& a, float b) {
  return by_parts<Floats>([&](size_t i) { return a.part[i] + b; });
}

// Lanes of `b` where `a` is less than `least`, else those of `c`.
GRAPHOPT_FORCE_INLINE Integers choose(const Floats& a, const Floats& least, const Integers& b, const Integers& c) {
  return by_parts<Integers>([&](size_t i) { return a.part[i] < least.part[i] ? b.part[i] : c.part[i]; });
}

// 16 tiles of one width, a column after the other, and what is known of their paths.
struct Batch {
  size_t width;
  const float *values, *linear, *square;  // of each window: its value, -2 value, value^2
  size_t bits, choices, states;
  Floats *units, *counts;     // [width]
  Integers *codes, *before;   // [width], [width + 1]: the code of a column, and the state before it
  Floats* costs;              // [width + 1][states]

  // What it costs that a window stands for a column, and all before it.
  GRAPHOPT_FORCE_INLINE Floats cost(const Floats& unit, const Floats& count, size_t window, const Floats& sum) const {
    return plus(times(unit, linear[window]), square[window]) * count + sum;
  }
};

// The least costs of all paths to each state behind each column. The first column is `turn`, the others follow in a
// circle. Paths begin with the state `ends`, or with any where there is none.
template <size_t kBits, size_t kWindow>
void advance(const Batch& batch, size_t turn, const Integers* ends) {
  const size_t bits = kBits ? kBits : batch.bits;
  const size_t states = kBits ? size_t{1} << (kWindow - kBits) : batch.states, choices = size_t{1} << bits;
  Floats* now = batch.costs;
  for (size_t state = 0; state < states; ++state) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      reinterpret_cast<float*>(now + state)[lane] =
          ends && reinterpret_cast<const int32_t*>(ends)[lane] != static_cast<int32_t>(state) ? __builtin_inff() : 0.0f;
    }
  }
  for (size_t column = 0; column < batch.width; ++column, now += states) {
    const size_t at = column + turn < batch.width ? column + turn : column + turn - batch.width;
    const Floats unit = batch.units[at], count = batch.counts[at];
    for (size_t state = 0; state < states; ++state) {
      Floats least = batch.cost(unit, count, state, now[state >> bits]);
      for (size_t choice = 1; choice < choices; ++choice) {
        const size_t window = choice * states + state;
        least = minimum(batch.cost(unit, count, window, now[window >> bits]), least);
      }
      now[states + state] = least;
    }
  }
}

// Goes back along the best paths, from behind the last column to the state before column `stop`.
void go_back(const Batch& batch, size_t turn, const Integers* ends, size_t stop) {
  Integers state = all_lanes<int32_t>(0);
  if (ends) {
    state = *ends;
  } else {
    const Floats* last = batch.costs + batch.width * batch.states;
    Floats least = last[0];
    for (size_t other = 1; other < batch.states; ++other) {
      state = choose(last[other], least, all_lanes(static_cast<int32_t>(other)), state);
      least = minimum(last[other], least);
    }
  }
  batch.before[batch.width] = state;
  Integers lanes;
  for (size_t lane = 0; lane < kLanes; ++lane) {
    reinterpret_cast<int32_t*>(&lanes)[lane] = static_cast<int32_t>(lane);
  }
  const int bits = static_cast<int>(batch.bits);
  for (size_t column = batch.width; column-- > stop;) {
    const size_t at = column + turn < batch.width ? column + turn : column + turn - batch.width;
    const Floats unit = batch.units[at], count = batch.counts[at];
    const float* costs = reinterpret_cast<const float*>(batch.costs + column * batch.states);
    Floats least = all_lanes(0.0f);
    Integers code = all_lanes<int32_t>(0);
    for (size_t choice = 0; choice < batch.choices; ++choice) {
      const int32_t head = static_cast<int32_t>(choice * batch.states);
      const Integers window = by_parts<Integers>([&](size_t i) { return state.part[i] + head; });
      const Integers place =
          by_parts<Integers>([&](size_t i) { return (window.part[i] >> bits) * int32_t{kLanes} + lanes.part[i]; });
      const Floats value = gather(batch.values, window);
      const Floats path = (unit * times(value, -2.0f) + value * value) * count + gather(costs, place);
      if (choice) code = choose(path, least, all_lanes(static_cast<int32_t>(choice)), code);
      least = choice ? minimum(path, least) : path;
    }
    batch.codes[column] = code;
    state = by_parts<Integers>(
        [&](size_t i) { return (code.part[i] * static_cast<int32_t>(batch.states) + state.part[i]) >> bits; });
    batch.before[column] = state;
  }
}

void search(const Batch& batch, size_t turn, const Integers* ends, size_t stop) {
  const size_t window = batch.bits + static_cast<size_t>(__builtin_ctzll(batch.states));
  const auto kernel = window == 8 && batch.bits == 2   ? advance<2, 8>
                      : window == 8 && batch.bits == 3 ? advance<3, 8>
                      : window == 8 && batch.bits == 4 ? advance<4, 8>
                                                       : advance<0, 0>;
  kernel(batch, turn, ends);
  go_back(batch, turn, ends, stop);
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
  const size_t width = batch.width, window = batch.bits + static_cast<size_t>(__builtin_ctzll(batch.states));
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
      const Floats difference = gather(batch.values, stream) - batch.units[column];
      error = error + batch.counts[column] * (difference * difference);
    }
    for (size_t i = 0; i < width; ++i) best[i] = choose(error, lowest, batch.codes[i], best[i]);
    lowest = minimum(error, lowest);
  }
}

// Where a tile lies: its first weight, the scale of that, and the importance of its row.
struct Place {
  size_t weight, scale;
  double importance;
};

// Puts a tile into a lane: its numbers in units of scales, and what their squared errors count.
void load(const TrellisWork& work, const Place& place, size_t width, size_t lane, const Batch& batch) {
  float units[kTile];
  double counts[kTile], largest = 0;
  const double* scales = work.scales + place.scale;
  if (work.units) {
    for (size_t i = 0; i < width; ++i) {
      units[i] = static_cast<float>(
          static_cast<double>(work.units[place.weight + i] * static_cast<float>(scales[i])) / scales[i]);
    }
  } else {
    for (size_t i = 0; i < width; ++i) units[i] = static_cast<float>(work.numbers[place.weight + i] / scales[i]);
  }
  for (size_t i = 0; i < width; ++i) {
    counts[i] = place.importance * scales[i] * scales[i];
    largest = counts[i] > largest ? counts[i] : largest;
  }
  for (size_t i = 0; i < width; ++i) {
    reinterpret_cast<float*>(batch.units + i)[lane] = units[i];
    reinterpret_cast<float*>(batch.counts + i)[lane] = static_cast<float>(largest > 0 ? counts[i] / largest : 1.0);
  }
}

// Searches up to 16 tiles, and writes codes, or what free paths mean.
void search_tiles(const TrellisWork& work, const Batch& batch, const Place* places, size_t tiles, Integers* best) {
  const size_t width = batch.width, half = width / 2;
  for (size_t lane = 0; lane < kLanes; ++lane) load(work, places[lane < tiles ? lane : 0], width, lane, batch);
  if (!work.units) {
    (width < kTile ? close_exactly : close)(batch, best);
    for (size_t lane = 0; lane < tiles; ++lane) {
      for (size_t i = 0; i < width; ++i) {
        work.codes[places[lane].weight + i] = static_cast<uint8_t>(reinterpret_cast<const int32_t*>(best + i)[lane]);
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
      work.units[places[lane].weight + (i + half) % width] = reinterpret_cast<const float*>(&values)[lane];
    }
  }
}

void search_trellis(const TrellisWork& work) {
  const size_t windows = size_t{1} << work.window;
  Batch batch;
  batch.bits = work.bits;
  batch.choices = size_t{1} << work.bits;
  batch.states = windows >> work.bits;
  float* tables = static_cast<float*>(work.scratch);
  for (size_t window = 0; window < windows; ++window) {
    tables[window] = -2.0f * work.values[window];
    tables[windows + window] = work.values[window] * work.values[window];
  }
  batch.values = work.values;
  batch.linear = tables;
  batch.square = tables + windows;
  batch.units = reinterpret_cast<Floats*>(tables + 2 * windows);
  batch.counts = batch.units + kTile;
  batch.codes = reinterpret_cast<Integers*>(batch.counts + kTile);
  batch.before = batch.codes + kTile;
  Integers* best = batch.before + 2 * kTile;
  batch.costs = reinterpret_cast<Floats*>(best + 3 * kTile);
  const size_t whole = work.columns / kTile * kTile;
  for (int narrow = 0; narrow < 2; ++narrow) {
    const size_t begin = narrow ? whole : 0, end = narrow ? work.columns : whole;
    batch.width = narrow ? end - begin : kTile;
    Place places[kLanes];
    size_t tiles = 0;
    for (size_t row = 0; begin < end && row < work.groups * work.size; ++row) {
      const size_t group = row / work.size;
      for (size_t column = begin; column < end; column += kTile) {
        places[tiles++] = {row * work.columns + column, group * work.columns + column,
                           work.importance ? work.importance[row] : 1.0};
        if (tiles < kLanes) continue;
        search_tiles(work, batch, places, tiles, best);
        tiles = 0;
      }
    }
    if (tiles) search_tiles(work, batch, places, tiles, best);
  }
}

}  // namespace

extern const TrellisKernel GRAPHOPT_NAME(kTrellis);
const TrellisKernel GRAPHOPT_NAME(kTrellis) = search_trellis;

}  // namespace graphopt
