#include "matmul_table/cuda/pack.h"

#include <cmath>
#include <cstring>

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

void choose_for_halves(GraphoptMatMulCodec* codec, const Analysis& of) {
  const float of_signed = of.signed_step(), step = of_signed != 0 ? of_signed : of.unsigned_step();
  if (step != 0 && (of.bits == 4 || of.bits == 8)) {
    // packed as what a signed code exceeds the least one by, which is put behind the 1024 of a float16 and taken off
    codec->flips = of_signed != 0 ? 1u << (of.bits - 1) : 0;
    const float bias = static_cast<float>(codec->flips);
    codec->lookup[0] = twice(-1024 - bias);
    codec->lookup[1] = twice(-64 - bias);
    return choose(codec, of.bits == 4 ? Decoder::kInt4 : Decoder::kInt8, Order::kHalves, step);
  }
  if (of.bits == 6) {
    // the exponents of a float16 are biased by 15
    const float e3m2 = multiple_of(of.values, of.entries, 6, as_floating<3, 2>);
    if (e3m2 != 0) return choose(codec, Decoder::kE3M2, Order::kHalves, std::ldexp(e3m2, 15 - 3));
    const float e2m3 = multiple_of(of.values, of.entries, 6, as_floating<2, 3>);
    if (e2m3 != 0) return choose(codec, Decoder::kE2M3, Order::kHalves, std::ldexp(e2m3, 15 - 1));
  }
  const bool four = of.bits == 4;
  choose(codec, four ? Decoder::kTable4 : Decoder::kTable, four ? Order::kNeighbours16 : Order::kHalves,
         step_for_halves(of.values, of.entries));
}

void choose_for_bytes(GraphoptMatMulCodec* codec, const Analysis& of, const Table& table) {
  const float of_signed = of.signed_step(), of_unsigned = of.unsigned_step();
  if (of.bits == 4 && (of_signed != 0 || of_unsigned != 0)) {
    // a signed code as the upper half of a byte is 16 times its value: shifts and a mask
    codec->lookup[0] = of_signed != 0 ? 4 : 0;
    codec->lookup[1] = of_signed != 0 ? 0xf0f0f0f0u : 0x0f0f0f0fu;
    return choose(codec, Decoder::kInt4, Order::kBytes, of_signed != 0 ? of_signed / 16 : of_unsigned);
  }
  if (of.bits == 8 && (of_signed != 0 || of_unsigned != 0)) {
    codec->flips = of_signed != 0 ? 0 : 128;
    codec->offset = of_signed != 0 ? 0 : 128;
    return choose(codec, Decoder::kInt8, Order::kBytes, of_signed != 0 ? of_signed : of_unsigned);
  }
  const float step = static_cast<float>(table.step);
  if (table.wide) {
    codec->offset = 128;
    return choose(codec, Decoder::kWide, Order::kBytes, step);
  }
  int least = 0, greatest = 0;
  for (unsigned code = 0; code < of.entries; ++code) {
    const int integer = integer_of(table, code);
    least = integer < least || !code ? integer : least;
    greatest = integer > greatest || !code ? integer : greatest;
  }
  codec->offset = least < -128 || greatest > 127 ? least + 128 : 0;
  if (of.bits == 4) return choose(codec, Decoder::kTable4, Order::kNeighbours8, step);
  choose(codec, Decoder::kTable, Order::kBytes, step);
}

}  // namespace

GraphoptMatMulCodec codec_of(Operands operands, unsigned bits, const float* values, size_t entries) {
  GraphoptMatMulCodec codec = {};
  codec.operands = static_cast<int32_t>(operands);
  codec.bits = static_cast<int32_t>(bits);
  Table table;
  table.make(values, entries, static_cast<int>(bits));
  const Analysis of = {bits, values, entries};
  choose(&codec, Decoder::kTable, Order::kHalves, 1.0f);
  if (operands == Operands::kFloat16) choose_for_halves(&codec, of);
  if (operands == Operands::kInt8) choose_for_bytes(&codec, of, table);
  if (decoder_of(codec) != Decoder::kTable4) return codec;
  // byte k of entry i is byte i of the four words from 4 k on
  for (unsigned code = 0; code < 16; ++code) {
    const uint32_t entry = entry_of(codec, table, of.value(code), code);
    for (unsigned k = 0; k < 2; ++k) codec.lookup[4 * k + code / 4] |= (entry >> 8 * k & 255) << 8 * (code % 4);
  }
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
  Field all[kSlots * 8];
  unsigned count = 0;

  void make(const GraphoptMatMulCodec& codec, unsigned unit) {
    const unsigned bits = static_cast<unsigned>(codec.bits);
    count = 0;
    for (unsigned slot = 0; slot < kSlots; ++slot) {
      for (unsigned bit = 0; bit < bits; ++bit) {
        const Place place = place_of(decoder_of(codec), bits, unit, slot, bit);
        Field* const last = bit ? &all[count - 1] : nullptr;
        if (last && last->word == place.word && last->at + last->count == place.bit) {
          ++last->count;
        } else {
          all[count++] = {slot, bit, 1, place.word, place.bit};
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

}  // namespace

unsigned pack_codes(const GraphoptMatMulCodec& codec, const uint8_t* codes, const float* values, size_t entries,
                    size_t rows, size_t columns, uint8_t* to) {
  const unsigned bits = static_cast<unsigned>(codec.bits);
  const size_t tiles = (columns + kTileColumns - 1) / kTileColumns, units = (rows + kUnitRows - 1) / kUnitRows;
  const size_t blocks = blocks_of(rows), of_block = block_bytes(bits);
  Fields fields[kBlockUnits];
  for (unsigned unit = 0; unit < kBlockUnits; ++unit) fields[unit].make(codec, unit);
  // which position of a unit a slot of a lane holds
  uint8_t positions[kSlots][kWarp];
  for (unsigned position = 0; position < 256; ++position) {
    const unsigned t = position / 64, column = position / 4 % 16, lane = 4 * (column % 8) + t;
    const unsigned slot = slot_of(static_cast<Order>(codec.order), column / 8, position % 4);
    positions[slot][lane] = static_cast<uint8_t>(position);
  }
  unsigned largest = 0;
  for (size_t block = 0; block < tiles * blocks; ++block) {
    const size_t tile = block / blocks, first = block % blocks * kBlockUnits;
    uint32_t words[16][kWarp] = {}, slots[kSlots][kWarp];
    for (unsigned unit = 0; unit < kBlockUnits; ++unit) {
      uint8_t of_unit[256] = {};
      if (first + unit < units) unpack_unit(codes + (tile * units + first + unit) * 32 * bits, bits, of_unit);
      for (unsigned slot = 0; slot < kSlots; ++slot) {
        for (unsigned lane = 0; lane < kWarp; ++lane) {
          const unsigned code = of_unit[positions[slot][lane]];
          largest = code > largest ? code : largest;
          slots[slot][lane] = code ^ codec.flips;
        }
      }
      for (unsigned i = 0; i < fields[unit].count; ++i) {
        const Field& field = fields[unit].all[i];
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
  Table table;
  table.make(values, entries, static_cast<int>(bits));
  uint8_t* const behind = to + tiles * blocks * of_block;
  for (unsigned i = 0; i < kTableWords; ++i) {
    const unsigned code = i % (1u << bits);
    const uint32_t entry = entry_of(codec, table, values[code < entries ? code : 0], code < entries ? code : 0);
    std::memcpy(behind + i * sizeof entry, &entry, sizeof entry);
  }
  return largest;
}

}  // namespace graphopt

extern "C" {

size_t graphopt_cuda_matmul_codec(const GraphoptMatMulWeights* weights, int32_t operands, GraphoptMatMulCodec* codec) {
  *codec = graphopt::codec_of(static_cast<graphopt::Operands>(operands), static_cast<unsigned>(weights->bits),
                              weights->table, static_cast<size_t>(weights->entries));
  return graphopt::packed_bytes(*codec, weights->rows, weights->columns);
}

int32_t graphopt_cuda_matmul_pack(const GraphoptMatMulWeights* weights, const GraphoptMatMulCodec* codec, void* to) {
  return static_cast<int32_t>(graphopt::pack_codes(*codec, weights->codes, weights->table,
                                                   static_cast<size_t>(weights->entries), weights->rows,
                                                   weights->columns, static_cast<uint8_t*>(to)));
}

}  // extern "C"
