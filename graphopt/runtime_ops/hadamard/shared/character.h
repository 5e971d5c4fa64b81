// Which integers are squares modulo a prime: what Paley's Hadamard matrices are made of.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace graphopt {

// 1 where i is a square modulo the prime q, -1 where not, 0 for 0.
template <size_t q>
struct Character {
  int8_t of[q] = {};

  constexpr Character() {
    for (size_t i = 1; i < q; ++i) of[i] = -1;
    for (size_t i = 1; i < q; ++i) of[i * i % q] = 1;
  }
};

template <size_t q>
inline constexpr Character<q> kCharacter;

// The first primes q = 1 mod 4 for which 2 (q + 1) is no order of Paley's first construction: 36, 76, 124 and 148.
#if defined(__SANITIZE_ADDRESS__)
using PaleyPrimes = std::index_sequence<17>;  // the same code; with checks in it, larger ones take the compiler minutes
#else
using PaleyPrimes = std::index_sequence<17, 37, 61, 73>;
#endif

}  // namespace graphopt
