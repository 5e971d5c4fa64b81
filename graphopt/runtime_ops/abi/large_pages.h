// Memory that is read from end to end, in large pages of the system.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace graphopt {

// Asks the system for pages of 2 MiB under memory that every call reads from end to end: each page costs a look into
// the page tables. Where the system refuses, nothing changes. kLater: only under what has no memory yet, once it is
// written; else all of it gets memory now.
enum class LargePages { kNow, kLater };
inline void prefer_large_pages(const void* memory, size_t bytes, LargePages when = LargePages::kNow) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = uintptr_t{2} << 20;
  constexpr int kCollapse = 25;  // MADV_COLLAPSE, since Linux 6.1; headers of older systems do not have it
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + kPage - 1) / kPage * kPage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) / kPage * kPage;
  if (begin >= end) return;
  if (!madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE) && when == LargePages::kNow) {
    madvise(reinterpret_cast<void*>(begin), end - begin, kCollapse);
  }
#else
  (void)memory, (void)bytes, (void)when;
#endif
}

// Room in memory of large pages for a copy of a file's data, since a mapped file has small ones. It lives as long as
// this object.
class LargeCopy {
 public:
  LargeCopy() = default;
  LargeCopy(const LargeCopy&) = delete;
  LargeCopy& operator=(const LargeCopy&) = delete;
  ~LargeCopy();

  // The address of the room, a multiple of 64; null where the system has no large pages. Nothing is written yet, and no
  // page has memory. Called once.
  void* reserve(size_t bytes);

 private:
  struct Block;
  static void release(Block* block);
  Block* block_ = nullptr;
};

}  // namespace graphopt
