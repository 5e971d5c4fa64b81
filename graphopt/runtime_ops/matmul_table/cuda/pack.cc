#include "matmul_table/cuda/pack.h"

#include <pthread.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <thread>

#include "cuda/numbers.h"

namespace graphopt {
namespace {

constexpr unsigned kTableWords = 256;

Decoder decoder_of(const GraphoptMatMulCodec& codec) { return static_cast<Decoder>(codec.decoder); }

// The power of two that `values` are `expected` times of; 0 where they are not. Nothing is expected of codes past the
// table.
template <typename Expected>
float multiple_of(const float* values, size_t entries, unsigned bits, const Expected& expected) {
  if (entries != size_t{1} << bits) return 0;
  double factor = 0;
  for (size_t code = 0; code < entries; ++code) {
    const double value = values[code], of = expected(static_cast<int>(code));
    if (of != 0 && factor == 0) factor = value / of;
    if (value != of * factor) return 0;
  }
  int exponent = 0;
  const bool power = std::frexp(factor, &exponent) == 0.5, fits = exponent > -120 && exponent < 120;
  return power && fits ? static_cast<float>(factor) : 0;
}

int as_signed(int code, unsigned bits) { return code < 1 << (bits - 1) ? code : code - (1 << bits); }

// A sign, Exponent bits and Mantissa bits, with subnormal numbers and nothing reserved.
template <int Exponent, int Mantissa>
double as_floating(int code) {
  constexpr int kBias = (1 << (Exponent - 1)) - 1;
  const int fraction = code & ((1 << Mantissa) - 1), exponent = code >> Mantissa & ((1 << Exponent) - 1);
  const double magnitude = exponent ? std::ldexp((1 << Mantissa) + fraction, exponent - kBias - Mantissa)
                                    : std::ldexp(fraction, 1 - kBias - Mantissa);
  return code >> (Exponent + Mantissa) ? -magnitude : magnitude;
}

uint32_t twice(float value) {
  const Half half = half_of(value);
  return half2_of(half, half);
}

// Floats for tables in float16 are scaled so that the largest is near the maximum: then small ones stay normal longest.
float step_for_halves(const float* values, size_t entries) {
  float largest = 0;
  for (size_t i = 0; i < entries; ++i) largest = std::fmax(largest, std::fabs(values[i]));
  int exponent = 0;
  std::frexp(largest, &exponent);
  return largest > 0 ? std::ldexp(1.0f, exponent - 15) : 1.0f;
}

int integer_of(const Table& table, unsigned code) {
  return table.wide ? table.low.table[code] + 256 * (table.high.table[code] - table.high.offset)
                    : table.low.table[code] - table.low.offset;
}

// The entry of a code in a table in shared memory or registers: float bits, 16 bits, a byte, or low and high bytes.
uint32_t entry_of(const GraphoptMatMulCodec& codec, const Table& table, float value, unsigned code) {
  switch (static_cast<Operands>(codec.operands)) {
    case Operands::kFloat32: return bits_of_float(value);
    case Operands::kFloat16: return half_of(static_cast<float>(static_cast<double>(value) / codec.step)).bits;
    case Operands::kBFloat16: return bfloat16_of(value).bits;
    default: break;
  }
  const int integer = integer_of(table, code);
  if (decoder_of(codec) != Decoder::kWide) return static_cast<uint32_t>(integer - codec.offset) & 255;
  return (static_cast<uint32_t>(integer - codec.offset) & 255) | (static_cast<uint32_t>(integer >> 8) & 255) << 8;
}

struct Analysis {
  unsigned bits;
  const float* values;
  size_t entries;

  float signed_step() const {
    return multiple_of(values, entries, bits, [&](int code) { return static_cast<double>(as_signed(code, bits)); });
  }
  float unsigned_step() const {
    return multiple_of(values, entries, bits, [](int code) { return static_cast<double>(code); });
  }
  float value(unsigned code) const { return values[code < entries ? code : 0]; }
};

void choose(GraphoptMatMulCodec* codec, Decoder decoder, Order order, float step) {
  codec->decoder = static_cast<int32_t>(decoder);
  codec->order = static_cast<int32_t>(order);
  codec->step = step;
}

void choose_for_halves(GraphoptMatMulCodec* codec, const Analysis& analysis) {
  const float of_signed = analysis.signed_step(), step = of_signed != 0 ? of_signed : analysis.unsigned_step();
  if (step != 0 && (analysis.bits == 4 || analysis.bits == 8)) {
    // packed as what a signed code exceeds the least one by, which is put behind the 1024 of a float16 and taken off
    codec->flips = of_signed != 0 ? 1u << (analysis.bits - 1) : 0;
    const float bias = static_cast<float>(codec->flips);
    codec->lookup[0] = twice(-1024 - bias);
    codec->lookup[1] = twice(-64 - bias);
    return choose(codec, analysis.bits == 4 ? Decoder::kInt4 : Decoder::kInt8, Order::kHalves, step);
  }
  if (analysis.bits == 6) {
    // the exponents of a float16 are biased by 15
    const float e3m2 = multiple_of(analysis.values, analysis.entries, 6, as_floating<3, 2>);
    if (e3m2 != 0) return choose(codec, Decoder::kE3M2, Order::kHalves, std::ldexp(e3m2, 15 - 3));
    const float e2m3 = multiple_of(analysis.values, analysis.entries, 6, as_floating<2, 3>);
    if (e2m3 != 0) return choose(codec, Decoder::kE2M3, Order::kHalves, std::ldexp(e2m3, 15 - 1));
  }
  const bool four = analysis.bits == 4;
  choose(codec, four ? Decoder::kTable4 : Decoder::kTable, four ? Order::kNeighbours16 : Order::kHalves,
         step_for_halves(analysis.values, analysis.entries));
}

void choose_for_bytes(GraphoptMatMulCodec* codec, const Analysis& analysis, const Table& table) {
  const float of_signed = analysis.signed_step(), of_unsigned = analysis.unsigned_step();
  if (analysis.bits == 4 && (of_signed != 0 || of_unsigned != 0)) {
    // a signed code as the upper half of a byte is 16 times its value: shifts and a mask
    codec->lookup[0] = of_signed != 0 ? 4 : 0;
    codec->lookup[1] = of_signed != 0 ? 0xf0f0f0f0u : 0x0f0f0f0fu;
    return choose(codec, Decoder::kInt4, Order::kBytes, of_signed != 0 ? of_signed / 16 : of_unsigned);
  }
  if (analysis.bits == 8 && (of_signed != 0 || of_unsigned != 0)) {
    codec->flips = of_signed != 0 ? 0 : 128;
    codec->offset = of_signed != 0 ? 0 : 128;
    return choose(codec, Decoder::kInt8, Order::kBytes, of_signed != 0 ? of_signed : of_unsigned);
  }
  const float step = static_cast<float>(table.step);
  if (table.wide) {
    codec->offset = 128;
    return choose(codec, Decoder::kWide, Order::kBytes, step);
  }
  int smallest = 0, greatest = 0;
  for (unsigned code = 0; code < analysis.entries; ++code) {
    const int integer = integer_of(table, code);
    smallest = integer < smallest || !code ? integer : smallest;
    greatest = integer > greatest || !code ? integer : greatest;
  }
  codec->offset = smallest < -128 || greatest > 127 ? smallest + 128 : 0;
  if (analysis.bits == 4) return choose(codec, Decoder::kTable4, Order::kNeighbours8, step);
  choose(codec, Decoder::kTable, Order::kBytes, step);
}

// The tables of a trellis as integers, and what their sums are multiples of.
struct TrellisTables {
  int head[64], tail[64];  // as files order them
  Table table;             // as kernels do, modulo 256
  int least_tail = 0, greatest_tail = 0;

  explicit TrellisTables(const GraphoptMatMulWeights& weights) {
    const size_t entries = static_cast<size_t>(weights.entries);
    table.make_trellis(weights.table, entries, weights.bits);
    for (size_t i = 0; i < entries; ++i) {
      head[i] = static_cast<int>(std::llrint(weights.table[i] / table.step));
      tail[i] = static_cast<int>(std::llrint(weights.table[entries + i] / table.step));
      if (!i || tail[i] < least_tail) least_tail = tail[i];
      if (!i || tail[i] > greatest_tail) greatest_tail = tail[i];
    }
  }

  // Bytes of the tables whose sums are 128 more than their integers, those of the tail from 0 on; see trellis.h.
  void fill(uint32_t (&lookup)[8]) const {
    for (unsigned i = 0; i < 16; ++i) {
      const uint32_t of_head = static_cast<uint8_t>(table.signed_head[i] + least_tail + 128);
      const uint32_t of_tail = static_cast<uint8_t>(table.tail[i] - least_tail);
      lookup[i / 4] |= of_head << 8 * (i % 4);
      lookup[4 + i / 4] |= of_tail << 8 * (i % 4);
    }
  }
};

// Columns to the right that a window reads.
unsigned reach_of(unsigned bits) { return (2 * static_cast<unsigned>(trellis_field(static_cast<int>(bits))) - 1) / bits; }

unsigned width_of_tile(size_t columns, size_t tile) {
  const size_t remaining_columns = columns - tile * kTileColumns;
  return static_cast<unsigned>(remaining_columns < kTileColumns ? remaining_columns : kTileColumns);
}

// Whether a decoder reads it: its last tile, a smaller circle, is continued to one of 16 columns, as far as windows read.
bool has_decoder(Operands operands, const GraphoptMatMulWeights& weights, const TrellisTables& tables) {
  const unsigned bits = static_cast<unsigned>(weights.bits);
  if (bits > 4 || (operands != Operands::kFloat16 && operands != Operands::kInt8)) return false;
  const unsigned width = width_of_tile(weights.columns, (weights.columns - 1) / kTileColumns);
  return tables.greatest_tail - tables.least_tail < 128 && (width == kTileColumns || width + reach_of(bits) <= kTileColumns);
}

// The byte that stands for an integer of a trellis where no decoder reads it: a signed one.
uint8_t byte_of_integer(int integer) { return static_cast<uint8_t>(integer); }

GraphoptMatMulCodec codec_of_table(Operands operands, unsigned bits, const float* values, size_t entries) {
  GraphoptMatMulCodec codec = {};
  codec.operands = static_cast<int32_t>(operands);
  codec.bits = static_cast<int32_t>(bits);
  Table table;
  table.make(values, entries, static_cast<int>(bits));
  const Analysis analysis = {bits, values, entries};
  choose(&codec, Decoder::kTable, Order::kHalves, 1.0f);
  if (operands == Operands::kFloat16) choose_for_halves(&codec, analysis);
  if (operands == Operands::kInt8) choose_for_bytes(&codec, analysis, table);
  if (decoder_of(codec) != Decoder::kTable4) return codec;
  // byte k of entry i is byte i of the four words from 4 k on
  for (unsigned code = 0; code < 16; ++code) {
    const uint32_t entry = entry_of(codec, table, analysis.value(code), code);
    for (unsigned k = 0; k < 2; ++k) codec.lookup[4 * k + code / 4] |= (entry >> 8 * k & 255) << 8 * (code % 4);
  }
  return codec;
}

struct ByteTable {
  float values[256];

  explicit ByteTable(double step) {
    for (int integer = -128; integer < 128; ++integer) {
      values[byte_of_integer(integer)] = static_cast<float>(integer * step);
    }
  }
};

}  // namespace

namespace {

GraphoptMatMulCodec choose_codec(Operands operands, const GraphoptMatMulWeights& weights) {
  const unsigned bits = static_cast<unsigned>(weights.bits);
  if (!weights.trellis) {
    return codec_of_table(operands, bits, weights.table, static_cast<size_t>(weights.entries));
  }
  const TrellisTables tables(weights);
  if (!has_decoder(operands, weights, tables)) {
    return codec_of_table(operands, 8, ByteTable(tables.table.step).values, 256);
  }
  constexpr Decoder kDecoders[] = {Decoder::kTrellis2, Decoder::kTrellis3, Decoder::kTrellis4};
  GraphoptMatMulCodec codec = {};
  codec.operands = static_cast<int32_t>(operands);
  codec.bits = weights.bits;
  choose(&codec, kDecoders[bits - 2], Order::kTrellis, static_cast<float>(tables.table.step));
  tables.fill(codec.lookup);
  return codec;
}

// The largest magnitude of a weight before its scale; of a trellis at most, the sum of both tables' largest.
float largest_value(const GraphoptMatMulWeights& weights) {
  const size_t entries = static_cast<size_t>(weights.entries);
  const auto largest = [&](const float* values) {
    float largest = 0;
    for (size_t i = 0; i < entries; ++i) largest = std::fmax(largest, std::fabs(values[i]));
    return largest;
  };
  return largest(weights.table) + (weights.trellis ? largest(weights.table + entries) : 0);
}

}  // namespace

GraphoptMatMulCodec codec_of(Operands operands, const GraphoptMatMulWeights& weights) {
  GraphoptMatMulCodec codec = choose_codec(operands, weights);
  codec.largest = largest_value(weights) / std::fabs(codec.step);
  return codec;
}

size_t packed_bytes(const GraphoptMatMulCodec& codec, size_t rows, size_t columns) {
  const size_t tiles = (columns + kTileColumns - 1) / kTileColumns;
  return tiles * blocks_of(rows) * block_bytes(static_cast<unsigned>(codec.bits)) + kTableWords * sizeof(uint32_t);
}

namespace {

static_assert(kSlots * kWarp == 256, "the codes of a unit");

// Bits of a slot that follow one another in a word.
struct Field {
  unsigned slot, bit, count, word, at;
};
struct Fields {
  Field entries[kSlots * 8];
  unsigned count = 0;

  void make(const GraphoptMatMulCodec& codec, unsigned unit) {
    const unsigned bits = static_cast<unsigned>(codec.bits);
    count = 0;
    for (unsigned slot = 0; slot < kSlots; ++slot) {
      for (unsigned bit = 0; bit < bits; ++bit) {
        const BitPosition position = bit_position(decoder_of(codec), bits, unit, slot, bit);
        Field* const last = bit ? &entries[count - 1] : nullptr;
        if (last && last->word == position.word && last->at + last->count == position.bit) {
          ++last->count;
        } else {
          entries[count++] = {slot, bit, 1, position.word, position.bit};
        }
      }
    }
  }
};

// The codes of a unit of a file in the order of matmul_table/packing.py: plane by plane and line by line.
void unpack_unit(const uint8_t* unit, unsigned bits, uint8_t* codes) {
  std::memset(codes, 0, 256);
  for (unsigned width = 8; width; width /= 2) {
    const unsigned start = bits / (2 * width) * 2 * width, line = width > 1 ? 64 : 32;
    if (start + width > bits) continue;
    for (unsigned position = 0; position < 256; position += line) {
      const unsigned of_line = line * (8 / width), shift = position % of_line / line * width;
      const uint8_t* const from = unit + 32 * start + position / of_line * line;
      const unsigned mask = (1u << width) - 1;
      for (unsigned i = 0; i < line; ++i) {
        codes[position + i] = static_cast<uint8_t>(codes[position + i] | (from[i] >> shift & mask) << start);
      }
    }
  }
}

// Where column r of row k of a unit is among its codes.
unsigned position_of(unsigned k, unsigned r) { return 64 * (k / 4) + 4 * r + k % 4; }

// Codes of a trellis to what is packed: a tile of fewer columns is continued, or each code becomes the byte of its
// integer, where there are `tables`.
void convert_trellis(uint8_t* codes, unsigned bits, unsigned width, const TrellisTables* tables) {
  const unsigned field = static_cast<unsigned>(trellis_field(static_cast<int>(bits)));
  for (unsigned k = 0; k < kUnitRows; ++k) {
    uint8_t row[kTileColumns];
    for (unsigned r = 0; r < kTileColumns; ++r) row[r] = codes[position_of(k, r % width)];
    for (unsigned r = 0; r < kTileColumns; ++r) {
      uint32_t stream = 0;
      for (unsigned i = 0; i < 4; ++i) stream = stream << bits | row[(r % width + i) % width];
      const uint32_t window = stream >> (4 * bits - 2 * field), mask = (1u << field) - 1;
      codes[position_of(k, r)] =
          tables ? byte_of_integer(tables->head[window >> field & mask] + tables->tail[window & mask]) : row[r];
    }
  }
}

}  // namespace

namespace {

// Blocks that are worth a thread: two milliseconds or so.
constexpr size_t kLeastPart = 256, kMostThreads = 64;

// The largest of what `of_part(first, end)` returns for parts of `count`, each on a core of its own: a model of 8 billion
// weights took half a minute on one. A thread that the system refuses is run by this one.
template <typename OfPart>
unsigned largest_of_parts(size_t count, const OfPart& of_part) {
  struct Part {
    const OfPart* of_part;
    size_t first, end;
    unsigned largest;
    pthread_t thread;
    bool runs;

    static void* run(void* argument) {
      Part& part = *static_cast<Part*>(argument);
      part.largest = (*part.of_part)(part.first, part.end);
      return nullptr;
    }
  };
  const size_t cores = std::thread::hardware_concurrency(), wanted = count / kLeastPart;
  size_t threads = wanted < cores ? wanted : cores;
  threads = threads < 1 ? 1 : threads > kMostThreads ? kMostThreads : threads;
  Part parts[kMostThreads];
  for (size_t i = 0; i < threads; ++i) {
    parts[i] = {&of_part, i * count / threads, (i + 1) * count / threads, 0, {}, false};
    parts[i].runs = i + 1 < threads && pthread_create(&parts[i].thread, nullptr, Part::run, &parts[i]) == 0;
    if (!parts[i].runs) Part::run(&parts[i]);
  }
  unsigned largest = 0;
  for (size_t i = 0; i < threads; ++i) {
    if (parts[i].runs) pthread_join(parts[i].thread, nullptr);
    largest = parts[i].largest > largest ? parts[i].largest : largest;
  }
  return largest;
}

}  // namespace

unsigned pack_codes(const GraphoptMatMulCodec& codec, const GraphoptMatMulWeights& weights, uint8_t* to) {
  const unsigned bits = static_cast<unsigned>(codec.bits), given_bits = static_cast<unsigned>(weights.bits);
  const size_t rows = weights.rows, columns = weights.columns;
  const size_t tiles = (columns + kTileColumns - 1) / kTileColumns, units = (rows + kUnitRows - 1) / kUnitRows;
  std::unique_ptr<TrellisTables> tables;
  const bool becomes_bytes = weights.trellis && bits != given_bits;
  if (becomes_bytes) tables.reset(new TrellisTables(weights));
  const size_t blocks = blocks_of(rows), of_block = block_bytes(bits);
  Fields fields[kBlockUnits];
  for (unsigned unit = 0; unit < kBlockUnits; ++unit) fields[unit].make(codec, unit);
  // which position of a unit a slot of a lane holds
  uint8_t positions[kSlots][kWarp];
  for (unsigned position = 0; position < 256; ++position) {
    const Order order = static_cast<Order>(codec.order);
    const ColumnPosition of_column = column_position(order, position / 4 % 16);
    const RowPosition of_row = row_position(static_cast<Operands>(codec.operands), position / 64 * 4 + position % 4);
    positions[slot_of(order, of_column.half, of_row.k)][4 * of_column.g + of_row.t] = static_cast<uint8_t>(position);
  }
  const auto pack_blocks = [&](size_t first_block, size_t end) {
    unsigned largest = 0;
    for (size_t block = first_block; block < end; ++block) {
      const size_t tile = block / blocks, first = block % blocks * kBlockUnits;
      uint32_t words[16][kWarp] = {}, slots[kSlots][kWarp];
      for (unsigned unit = 0; unit < kBlockUnits; ++unit) {
        uint8_t of_unit[256] = {};
        if (first + unit < units) {
          unpack_unit(weights.codes + (tile * units + first + unit) * 32 * given_bits, given_bits, of_unit);
        }
        for (const uint8_t code : of_unit) largest = code > largest ? code : largest;
        const unsigned width = width_of_tile(columns, tile);
        if (weights.trellis && (tables || width < kTileColumns)) {
          convert_trellis(of_unit, given_bits, width, tables.get());
        }
        for (unsigned slot = 0; slot < kSlots; ++slot) {
          for (unsigned lane = 0; lane < kWarp; ++lane) slots[slot][lane] = of_unit[positions[slot][lane]] ^ codec.flips;
        }
        for (unsigned i = 0; i < fields[unit].count; ++i) {
          const Field& field = fields[unit].entries[i];
          const uint32_t mask = (1u << field.count) - 1;
          for (unsigned lane = 0; lane < kWarp; ++lane) {
            words[field.word][lane] |= (slots[field.slot][lane] >> field.bit & mask) << field.at;
          }
        }
      }
      for (unsigned word = 0; word < 2 * bits; ++word) {
        for (unsigned lane = 0; lane < kWarp; ++lane) {
          std::memcpy(to + block * of_block + byte_of_word(bits, lane, word), &words[word][lane], sizeof(uint32_t));
        }
      }
    }
    return largest;
  };
  const unsigned largest = largest_of_parts(tiles * blocks, pack_blocks);
  uint8_t* const tail = to + tiles * blocks * of_block;
  if (weights.trellis && !becomes_bytes) {
    std::memset(tail, 0, kTableWords * sizeof(uint32_t));
    return largest;
  }
  const ByteTable of_bytes(becomes_bytes ? tables->table.step : 1);
  const float* const values = becomes_bytes ? of_bytes.values : weights.table;
  const size_t entries = becomes_bytes ? 256 : static_cast<size_t>(weights.entries);
  Table table;
  table.make(values, entries, static_cast<int>(bits));
  for (unsigned i = 0; i < kTableWords; ++i) {
    const unsigned code = i % (1u << bits);
    const uint32_t entry = entry_of(codec, table, values[code < entries ? code : 0], code < entries ? code : 0);
    std::memcpy(tail + i * sizeof entry, &entry, sizeof entry);
  }
  return largest;
}

}  // namespace graphopt

extern "C" {

size_t graphopt_cuda_matmul_codec(const GraphoptMatMulWeights* weights, int32_t operands, GraphoptMatMulCodec* codec) {
  *codec = graphopt::codec_of(static_cast<graphopt::Operands>(operands), *weights);
  return graphopt::packed_bytes(*codec, weights->rows, weights->columns);
}

int32_t graphopt_cuda_matmul_pack(const GraphoptMatMulWeights* weights, const GraphoptMatMulCodec* codec, void* to) {
  return static_cast<int32_t>(graphopt::pack_codes(*codec, *weights, static_cast<uint8_t*>(to)));
}

}  // extern "C"
