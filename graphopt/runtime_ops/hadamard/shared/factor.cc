#include "hadamard/shared/factor.h"

#include <new>

#include "hadamard/shared/character.h"

namespace graphopt {
namespace {

// Every `step`-th row and column of a larger matrix, from the first on.
struct View {
  const int8_t* entries;
  size_t width;  // of the larger matrix
  size_t order, step;

  int operator()(size_t i, size_t j) const { return entries[i * step * width + j * step]; }
};

// Is it [[B, B], [B, -B]]?
bool doubles_outside(const View& m) {
  const size_t half = m.order / 2;
  for (size_t i = 0; i < half; ++i) {
    for (size_t j = 0; j < half; ++j) {
      const int b = m(i, j);
      if (m(i, j + half) != b || m(i + half, j) != b || m(i + half, j + half) != -b) return false;
    }
  }
  return true;
}

// Is every block of 2 x 2 one of b * [[1, 1], [1, -1]]?
bool doubles_inside(const View& m) {
  for (size_t i = 0; i < m.order; i += 2) {
    for (size_t j = 0; j < m.order; j += 2) {
      const int b = m(i, j);
      if (m(i, j + 1) != b || m(i + 1, j) != b || m(i + 1, j + 1) != -b) return false;
    }
  }
  return true;
}

// Is it B (x) S(2) + D? A block of 2 x 2 on the diagonal then is b * [[., 1], [1, .]], and any signs may stand there.
bool doubles_inside_but_for_the_diagonal(const View& m) {
  for (size_t i = 0; i < m.order; i += 2) {
    for (size_t j = 0; j < m.order; j += 2) {
      const int b = m(i, j + 1);
      if (m(i + 1, j) != b || (i != j && (m(i, j) != b || m(i + 1, j + 1) != -b))) return false;
    }
  }
  return true;
}

// Is it C (x) S(2) + I (x) [[1, -1], [-1, -1]] for the C of paley.h, entry by entry?
template <size_t q>
bool is_paley(const View& m) {
  if (m.order != 2 * (q + 1)) return false;
  for (size_t i = 0; i <= q; ++i) {
    for (size_t j = 0; j <= q; ++j) {
      const bool diagonal = i == j;
      const int entry = !i || !j ? 1 : kCharacter<q>.of[(i + q - j) % q];
      const int first = diagonal ? 1 : entry, others = diagonal ? -1 : entry;
      if (m(2 * i, 2 * j) != first || m(2 * i, 2 * j + 1) != others || m(2 * i + 1, 2 * j) != others ||
          m(2 * i + 1, 2 * j + 1) != (diagonal ? -1 : -entry)) {
        return false;
      }
    }
  }
  return true;
}

// The prime for which it is, or 0.
template <size_t... q>
size_t paley_prime(const View& m, std::index_sequence<q...>) {
  size_t prime = 0;
  ((prime = is_paley<q>(m) ? q : prime), ...);
  return prime;
}

}  // namespace

OwnedFactor::Outcome OwnedFactor::read(const int8_t* matrix, size_t order) {
  for (size_t i = 0; i < order * order; ++i) {
    if (matrix[i] != 1 && matrix[i] != -1) return Outcome::kOtherEntries;
  }
  View m{matrix, order, order, 1};
  for (outer = 1; m.order % 2 == 0 && doubles_outside(m); m.order /= 2) outer *= 2;
  for (inner = 1; m.order % 2 == 0 && doubles_inside(m); m.order /= 2, m.step *= 2) inner *= 2;
  core = m.order;
  codes = nullptr;
  diagonal = nullptr;
  paley = paley_prime(m, PaleyPrimes());
  if (core == 1 && m(0, 0) == 1) return Outcome::kDone;
  if (core % 2 == 0 && doubles_inside_but_for_the_diagonal(m)) {
    diagonal_memory.reset(new (std::nothrow) int8_t[core]);
    if (!diagonal_memory) return Outcome::kNoMemory;
    for (size_t i = 0; i < core; i += 2) {
      diagonal_memory[i] = static_cast<int8_t>(m(i, i) - m(i, i + 1));
      diagonal_memory[i + 1] = static_cast<int8_t>(m(i + 1, i + 1) + m(i, i + 1));
    }
    diagonal = diagonal_memory.get();
  }
  const size_t count = groups(coded()), step = diagonal ? 2 : 1;
  memory.reset(new (std::nothrow) uint8_t[coded() * count]());
  if (!memory) return Outcome::kNoMemory;
  for (size_t k = 0; k < coded(); ++k) {
    for (size_t i = 0; i < coded(); ++i) {
      // B's entries are those beside the diagonal
      if (m(step * i, step * k + step - 1) < 0) memory[k * count + i / kGroup] |= static_cast<uint8_t>(1 << i % kGroup);
    }
  }
  codes = memory.get();
  return Outcome::kDone;
}

}  // namespace graphopt
