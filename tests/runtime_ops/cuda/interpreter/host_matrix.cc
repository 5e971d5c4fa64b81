// The arithmetic of the host interpreter that takes more than a line: products of small matrices, pairs rounded once.
#include <algorithm>

#include "cuda/device.h"

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
