#pragma once

#include "arch/vector.h"

namespace graphopt {
namespace {

// Sets bit `At` of each byte of line J where the plane of one bit has a 1; the bit was 0.
template <int At, size_t J>
GRAPHOPT_FORCE_INLINE Bytes with_single_bit(const Bytes& line, const uint8_t* plane) {
  const __m512i twice = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(plane)));
  const __m512i lower = _mm512_set1_epi8(1 << 2 * J), upper = _mm512_set1_epi8(static_cast<char>(2 << 2 * J));
  const __mmask64 set = _mm512_test_epi8_mask(twice, _mm512_mask_blend_epi8(~uint64_t{0} << 32, lower, upper));
  const __m512i bits = _mm512_maskz_set1_epi8(set, static_cast<char>(1 << At));
  return {{reinterpret_cast<Bytes::Part>(_mm512_or_si512(reinterpret_cast<__m512i>(line.part[0]), bits))}};
}

// Every second bit of a plane of one bit: bit 2 j of each byte is that of line J, the others are left over.
GRAPHOPT_FORCE_INLINE Bytes spread_single_bits(const uint8_t* plane) {
  const __m512i twice = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(plane)));
  const __m512i counts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(1), 1);
  return {{reinterpret_cast<Bytes::Part>(_mm512_srlv_epi16(twice, counts))}};
}

}  // namespace
}  // namespace graphopt
