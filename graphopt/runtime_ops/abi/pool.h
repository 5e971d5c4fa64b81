// Memory that tasks reuse one after another.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdlib>

namespace graphopt {

class Pool {
 public:
  static constexpr size_t kAlignment = 64;

  Pool() = default;
  Pool(const Pool&) = delete;
  ~Pool() {
    for (std::atomic<Piece*>& slot : left_) std::free(slot.load());
  }

 private:
  struct Piece {
    size_t bytes;
  };

 public:
  // Bytes at a multiple of 64, valid for the loan's lifetime; null where out of memory.
  class Loan {
   public:
    Loan(Pool& pool, size_t bytes) : pool_(pool), piece_(pool.take(bytes)) {
      memory = piece_ ? reinterpret_cast<char*>(piece_) + kAlignment : nullptr;
    }
    Loan(const Loan&) = delete;
    ~Loan() {
      if (piece_) pool_.give_back(piece_);
    }
    char* memory;

   private:
    Pool& pool_;
    Piece* piece_;
  };

 private:
  static constexpr size_t kPieces = 16;  // pieces beyond that many are freed

  Piece* take(size_t bytes) {
    for (std::atomic<Piece*>& slot : left_) {
      Piece* const piece = slot.load(std::memory_order_relaxed) ? slot.exchange(nullptr) : nullptr;
      if (piece && piece->bytes >= bytes) return piece;
      std::free(piece);  // sizes grow with a cache, so a piece that is too small will not fit later either
    }
    void* memory = nullptr;
    if (bytes > SIZE_MAX / 2 || posix_memalign(&memory, kAlignment, bytes + kAlignment)) return nullptr;
    Piece* const piece = static_cast<Piece*>(memory);
    piece->bytes = bytes;
    return piece;
  }

  void give_back(Piece* piece) {
    for (std::atomic<Piece*>& slot : left_) {
      Piece* empty = nullptr;
      if (slot.compare_exchange_strong(empty, piece)) return;
    }
    std::free(piece);
  }

  std::atomic<Piece*> left_[kPieces] = {};
};

}  // namespace graphopt
