// The arithmetic of the host interpreter that takes more than a line: products of small matrices, pairs rounded once.
#include <algorithm>

#include <vector>

#include "cuda/device.h"
#include "interpreter/products.h"

namespace graphopt {
namespace host {
namespace {

// A fragment of each lane, as the PTX ISA lays it out; see matrix.h.
template <typename Sum>
struct Product {
  Sum* d;
  const uint32_t *a, *b;
};

// Entry [row][k] of A and [k][column] of B, where a register holds `Pack` of them.
template <int Pack>
uint32_t entry(uint32_t word, int k) {
  return Pack == 2 ? word >> 16 * (k % 2) & 0xffff : word >> 8 * (k % 4) & 0xff;
}
template <int Pack, typename Sum>
uint32_t entry_of_a(void* const* lanes, int row, int k) {
  const auto* lane = static_cast<const Product<Sum>*>(lanes[row % 8 * 4 + k / Pack % 4]);
  return entry<Pack>(lane->a[row / 8 + 2 * (k / (4 * Pack))], k);
}
template <int Pack, typename Sum>
uint32_t entry_of_b(void* const* lanes, int k, int column) {
  const auto* lane = static_cast<const Product<Sum>*>(lanes[column * 4 + k / Pack % 4]);
  return entry<Pack>(lane->b[k / (4 * Pack)], k);
}
template <typename Sum>
Sum& entry_of_d(void* const* lanes, int row, int column) {
  return static_cast<Product<Sum>*>(lanes[row % 8 * 4 + column / 2])->d[row / 8 * 2 + column % 2];
}

// The sum of numbers as sm_80 makes it: each is cut to 25 bits below the exponent of the largest, they add up exactly,
// and the sum is cut to a float (M. Fasi et al., "Numerical behavior of NVIDIA tensor cores", 2021; sm_90 keeps a bit
// more).
float cut_sum(const double* terms, int count) {
  constexpr uint64_t kExponent = uint64_t{0x7ff} << 52;
  constexpr uint64_t kBits = uint64_t{24} << 52;
  uint64_t largest = uint64_t{30} << 52;  // of a power of two that is far below every product
  double plain = 0;
  for (int i = 0; i < count; ++i) {
    uint64_t bits;
    std::memcpy(&bits, terms + i, sizeof bits);
    plain += terms[i];
    largest = std::max(largest, bits & kExponent);
  }
  if (largest == kExponent) return static_cast<float>(plain);
  double unit, units_in_one;  // the last place that stays, and its inverse
  const uint64_t unit_bits = largest - kBits, inverse_bits = (uint64_t{2046} << 52) - unit_bits;
  std::memcpy(&unit, &unit_bits, sizeof unit);
  std::memcpy(&units_in_one, &inverse_bits, sizeof units_in_one);
  int64_t units = 0;
  for (int i = 0; i < count; ++i) units += static_cast<int64_t>(terms[i] * units_in_one);
  const double sum = static_cast<double>(units) * unit;
  const float nearest = static_cast<float>(sum);
  // A number one place nearer to 0 has bits that are one less.
  const bool beyond = std::fabs(static_cast<double>(nearest)) > std::fabs(sum);
  return beyond ? float_of_bits(bits_of_float(nearest) - 1) : nearest;
}

template <typename Number>
void multiply_floats(void* const* lanes) {
  constexpr int kTogether = 8;
  double a[16][16], b[8][16];  // of A [row][k] and B [column][k]
  for (int k = 0; k < 16; ++k) {
    for (int row = 0; row < 16; ++row) {
      a[row][k] = to_float(Number{static_cast<uint16_t>(entry_of_a<2, float>(lanes, row, k))});
    }
    for (int column = 0; column < 8; ++column) {
      b[column][k] = to_float(Number{static_cast<uint16_t>(entry_of_b<2, float>(lanes, k, column))});
    }
  }
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      float& d = entry_of_d<float>(lanes, row, column);
      for (int first = 0; first < 16; first += kTogether) {
        double terms[kTogether + 1] = {d};
        for (int k = 0; k < kTogether; ++k) terms[1 + k] = a[row][first + k] * b[column][first + k];
        d = cut_sum(terms, kTogether + 1);
      }
    }
  }
}

template <typename A>
void multiply_bytes(void* const* lanes) {
  int a[16][32], b[8][32];
  for (int k = 0; k < 32; ++k) {
    for (int row = 0; row < 16; ++row) a[row][k] = static_cast<A>(entry_of_a<4, int32_t>(lanes, row, k));
    for (int column = 0; column < 8; ++column) {
      b[column][k] = static_cast<int8_t>(entry_of_b<4, int32_t>(lanes, k, column));
    }
  }
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      int32_t& d = entry_of_d<int32_t>(lanes, row, column);
      uint32_t sum = static_cast<uint32_t>(d);
      for (int k = 0; k < 32; ++k) sum += static_cast<uint32_t>(a[row][k] * b[column][k]);
      d = static_cast<int32_t>(sum);
    }
  }
}

constexpr int kSums = 64, kColumns = 128, kRowBytes = 32;  // of a product on sm_90a: of a lane, and of an operand

// One that is under way, of a lane. Its operand in shared memory is [128][32] bytes.
struct Started {
  void* d;
  const uint32_t* a;
  uint32_t a_then[4];
  uint64_t b;
  bool bytes, transposed, adds, early;
  unsigned group;
};
// Sums that products under way add to: a lane's numbers, which are NaN meanwhile where they belong.
struct Held {
  void* d;
  uint32_t numbers[kSums];
  unsigned products;
};
struct Lane {
  std::vector<Started> started;
  std::vector<Held> held;
  std::vector<std::vector<uint8_t>> operands;  // of the first lane: those that were read early, or nothing
  unsigned groups = 0;
  bool begun = false;
};
thread_local std::vector<Lane> lanes_of_block;

Lane& own() {
  if (lanes_of_block.size() < thread_count()) lanes_of_block.resize(thread_count());
  return lanes_of_block[thread_index()];
}

// Rows of 128 bytes whose pieces of 16 are swizzled by the three bits above: matrix_at() of wgmma.h gives the address.
const uint8_t* piece_at(uint64_t line) {
  const auto* const at = reinterpret_cast<const uint8_t*>(line ^ (line >> 7 & 7) << 4);
  check_shared(at, 16);
  check_shown(at);
  return at;
}
// A transposed one has 64 columns in a row of those.
std::vector<uint8_t> read_transposed(uint64_t b) {
  constexpr uint64_t kHalf = 16384;
  std::vector<uint8_t> bytes(kColumns * kRowBytes);
  for (uint64_t k = 0; k < kRowBytes / 2; ++k) {
    for (uint64_t column = 0; column < kColumns; column += 8) {
      const uint8_t* const at = piece_at((b << 4) + column / 64 * kHalf + k * 128 + column % 64 * 2);
      for (uint64_t i = 0; i < 8; ++i) std::memcpy(bytes.data() + (column + i) * kRowBytes + 2 * k, at + 2 * i, 2);
    }
  }
  return bytes;
}
std::vector<uint8_t> read_operand(uint64_t b) {
  std::vector<uint8_t> bytes(kColumns * kRowBytes);
  for (uint64_t row = 0; row < kColumns; ++row) {
    for (uint64_t piece = 0; piece < 2; ++piece) {
      std::memcpy(bytes.data() + row * kRowBytes + piece * 16, piece_at((b << 4) + row * 128 + piece * 16), 16);
    }
  }
  return bytes;
}
std::vector<uint8_t> read_operand(const Started& started) {
  return started.transposed ? read_transposed(started.b) : read_operand(started.b);
}

Held& held_of(Lane& lane, const void* d) {
  for (Held& held : lane.held) {
    if (held.d == d) return held;
  }
  fail("a product whose sums are not held");
}

// Entry [row][k] of A [16, 16] or [16, 32], which the lanes have; see matrix.h.
template <int Pack>
uint32_t entry_of_started(Lane* const* lanes, size_t index, int row, int k) {
  const Started& of_lane = lanes[row % 8 * 4 + k / Pack % 4]->started[index];
  return entry<Pack>(of_lane.a_then[row / 8 + 2 * (k / (4 * Pack))], k);
}
uint32_t& entry_of_sums(Lane* const* lanes, size_t index, int row, int column) {
  Lane& lane = *lanes[row % 8 * 4 + column % 8 / 2];
  return held_of(lane, lane.started[index].d).numbers[4 * (column / 8) + row / 8 * 2 + column % 2];
}

void multiply_started_halves(Lane* const* lanes, size_t index, const uint8_t* operand) {
  constexpr int kTogether = 8, kDepth = 16;
  const bool adds = lanes[0]->started[index].adds;
  double a[16][kDepth], b[kColumns][kDepth];
  for (int k = 0; k < kDepth; ++k) {
    for (int row = 0; row < 16; ++row) {
      a[row][k] = to_float(Half{static_cast<uint16_t>(entry_of_started<2>(lanes, index, row, k))});
    }
    for (int column = 0; column < kColumns; ++column) {
      uint16_t bits;
      std::memcpy(&bits, operand + column * kRowBytes + 2 * k, sizeof bits);
      b[column][k] = to_float(Half{bits});
    }
  }
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < kColumns; ++column) {
      uint32_t& bits = entry_of_sums(lanes, index, row, column);
      float d = adds ? float_of_bits(bits) : 0;
      for (int first = 0; first < kDepth; first += kTogether) {
        double terms[kTogether + 1] = {d};
        for (int k = 0; k < kTogether; ++k) terms[1 + k] = a[row][first + k] * b[column][first + k];
        d = cut_sum(terms, kTogether + 1);
      }
      bits = bits_of_float(d);
    }
  }
}

void multiply_started_bytes(Lane* const* lanes, size_t index, const uint8_t* operand) {
  constexpr int kDepth = 32;
  for (int row = 0; row < 16; ++row) {
    int a[kDepth];
    for (int k = 0; k < kDepth; ++k) a[k] = static_cast<int8_t>(entry_of_started<4>(lanes, index, row, k));
    for (int column = 0; column < kColumns; ++column) {
      uint32_t& sum = entry_of_sums(lanes, index, row, column);
      for (int k = 0; k < kDepth; ++k) {
        sum += static_cast<uint32_t>(a[k] * static_cast<int8_t>(operand[column * kRowBytes + k]));
      }
    }
  }
}

struct Start {
  Lane* lane;
  Started started;
};

void start_products(void* const* given) {
  const auto start = [&](int i) -> Start& { return *static_cast<Start*>(given[i]); };
  const uint64_t b = start(0).started.b;
  const bool early = draw(2) == 0;
  for (int i = 0; i < kWarp; ++i) {
    Start& of_lane = start(i);
    if (of_lane.started.b != b) fail("lanes of a warp name different operands in shared memory");
    of_lane.started.early = early;
    of_lane.lane->started.push_back(of_lane.started);
  }
  std::vector<uint8_t> operand = read_operand(start(0).started);
  if (!early) operand.clear();
  start(0).lane->operands.push_back(std::move(operand));
}

struct Wait {
  Lane* lane;
  int newest;
};

void land_products(void* const* given) {
  Lane* lanes[kWarp];
  for (int i = 0; i < kWarp; ++i) lanes[i] = static_cast<Wait*>(given[i])->lane;
  const unsigned newest = static_cast<unsigned>(static_cast<Wait*>(given[0])->newest);
  size_t index = 0;
  for (; index < lanes[0]->started.size(); ++index) {
    const Started& first = lanes[0]->started[index];
    if (first.group + newest >= lanes[0]->groups) break;
    const std::vector<uint8_t>& early = lanes[0]->operands[index];
    const std::vector<uint8_t> operand = first.early ? early : read_operand(first);
    for (const Lane* lane : lanes) {
      const Started& started = lane->started[index];
      if (std::memcmp(started.a, started.a_then, sizeof started.a_then)) {
        fail("the registers of a product changed before it was waited for");
      }
    }
    if (first.bytes) multiply_started_bytes(lanes, index, operand.data());
    else multiply_started_halves(lanes, index, operand.data());
    for (Lane* lane : lanes) {
      Held& held = held_of(*lane, lane->started[index].d);
      if (--held.products) continue;
      std::memcpy(held.d, held.numbers, sizeof held.numbers);
      held = lane->held.back();
      lane->held.pop_back();
    }
  }
  for (Lane* lane : lanes) {
    lane->started.erase(lane->started.begin(), lane->started.begin() + static_cast<std::ptrdiff_t>(index));
  }
  lanes[0]->operands.erase(lanes[0]->operands.begin(),
                           lanes[0]->operands.begin() + static_cast<std::ptrdiff_t>(index));
}

void start_product(void* d, const uint32_t* a, uint64_t b, bool bytes, bool transposed = false, bool adds = true) {
  Lane& lane = own();
  if (!lane.begun) fail("a product without begin_products() since the last commit");
  bool known = false;
  for (Held& held : lane.held) {
    if (held.d == d) ++held.products, known = true;
  }
  if (!known) {
    Held held = {d, {}, 1};
    std::memcpy(held.numbers, d, sizeof held.numbers);
    std::memset(d, 0xff, sizeof held.numbers);
    lane.held.push_back(held);
  }
  Start mine = {&lane, {d, a, {a[0], a[1], a[2], a[3]}, b, bytes, transposed, adds, false, lane.groups}};
  meet("multiply_64x128", start_products, &mine);
}

struct Load {
  uint32_t* to;
  const void* row;
  int count;
  bool transposed;
};

void load(void* const* lanes) {
  const auto lane = [&](int i) { return static_cast<const Load*>(lanes[i]); };
  const int count = lane(0)->count;
  for (int matrix = 0; matrix < count; ++matrix) {
    const auto at = [&](int row, int column) {
      return static_cast<const uint16_t*>(lane(8 * matrix + row)->row)[column];
    };
    for (int i = 0; i < kWarp; ++i) {
      const int g = i / 4, t = 2 * (i % 4);
      lane(i)->to[matrix] = lane(i)->transposed ? pair_of(at(t, g), at(t + 1, g)) : pair_of(at(g, t), at(g, t + 1));
    }
  }
}

// a * b + c as a float that rounds to 16 bits as the exact number does: bits that a float cannot hold set its last bit.
float fma_to_odd(float a, float b, float c) {
  const double product = static_cast<double>(a) * b;  // exact: 22 bits at most
  const double sum = product + c, big = std::fabs(product) > std::fabs(c) ? product : c;
  const double rest = (big == c ? product : c) - (sum - big);
  float value = static_cast<float>(sum);
  const double below = sum - static_cast<double>(value) + rest;
  if (!std::isfinite(value) || below == 0) return value;
  if (value == 0) return std::copysign(0x1p-149f, static_cast<float>(below > 0) - 0.5f);
  // Towards zero, and then the last bit.
  if ((below > 0) != (value > 0)) value = std::nextafterf(value, 0.0f);
  return float_of_bits(bits_of_float(value) | 1);
}

}  // namespace

void multiply_f16(float* d, const uint32_t* a, const uint32_t* b) {
  Product<float> mine{d, a, b};
  meet("multiply_f16", multiply_floats<Half>, &mine);
}
void multiply_bf16(float* d, const uint32_t* a, const uint32_t* b) {
  Product<float> mine{d, a, b};
  meet("multiply_bf16", multiply_floats<BFloat16>, &mine);
}
void multiply_s8(int32_t* d, const uint32_t* a, const uint32_t* b) {
  Product<int32_t> mine{d, a, b};
  meet("multiply_s8", multiply_bytes<int8_t>, &mine);
}
void multiply_u8s8(int32_t* d, const uint32_t* a, const uint32_t* b) {
  Product<int32_t> mine{d, a, b};
  meet("multiply_u8s8", multiply_bytes<uint8_t>, &mine);
}

void forget_products() { lanes_of_block.clear(); }

void multiply_64x128(float* d, const uint32_t* a, uint64_t b) { start_product(d, a, b, false); }
void multiply_64x128(int32_t* d, const uint32_t* a, uint64_t b) { start_product(d, a, b, true); }
void multiply_64x128_transposed(float* d, const uint32_t* a, uint64_t b, bool adds) {
  start_product(d, a, b, false, true, adds);
}
void begin_products() { own().begun = true; }
void commit_products() {
  ++own().groups;
  own().begun = false;
}
void wait_products(int newest) {
  Wait mine = {&own(), newest};
  meet("wait_products", land_products, &mine);
}

void store_matrices_transposed(void* row, const uint32_t* r) {
  check_shared(row, 16);
  if (reinterpret_cast<uintptr_t>(row) % 16) fail("a row of a matrix at no multiple of 16 bytes");
  struct Store {
    void* row;
    const uint32_t* r;
  } mine{row, r};
  meet("store_matrices_transposed", [](void* const* lanes) {
    const auto lane = [&](int i) { return static_cast<const Store*>(lanes[i]); };
    for (int matrix = 0; matrix < 4; ++matrix) {
      for (int i = 0; i < kWarp; ++i) {
        for (int j = 0; j < 2; ++j) {
          static_cast<uint16_t*>(lane(8 * matrix + 2 * (i % 4) + j)->row)[i / 4] =
              static_cast<uint16_t>(lane(i)->r[matrix] >> 16 * j);
        }
      }
    }
  }, &mine);
}

void load_matrices(uint32_t* to, int count, const void* row, bool transposed) {
  if (lane() < 8 * count) {
    check_shared(row, 16);
    if (reinterpret_cast<uintptr_t>(row) % 16) fail("a row of a matrix at no multiple of 16 bytes");
  }
  Load mine{to, row, count, transposed};
  meet(transposed ? "load_matrices_transposed" : "load_matrices", load, &mine);
}

uint16_t half_fma(uint32_t a, uint32_t b, uint32_t c) {
  const auto wide = [](uint32_t bits) { return to_float(Half{static_cast<uint16_t>(bits)}); };
  return half_of(fma_to_odd(wide(a), wide(b), wide(c))).bits;
}
uint16_t bfloat16_fma(uint32_t a, uint32_t b, uint32_t c) {
  const auto wide = [](uint32_t bits) { return to_float(BFloat16{static_cast<uint16_t>(bits)}); };
  return bfloat16_of(fma_to_odd(wide(a), wide(b), wide(c))).bits;
}

}  // namespace host
}  // namespace graphopt
