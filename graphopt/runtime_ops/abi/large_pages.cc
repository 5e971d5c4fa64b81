#include "abi/large_pages.h"

#include <atomic>
#include <mutex>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace graphopt {

#if defined(__linux__) && defined(MADV_HUGEPAGE)
namespace {

constexpr size_t kPage = size_t{2} << 20, kLine = 64;

constexpr size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

}  // namespace

// Copies smaller than a page share pages, so one block holds several of them.
struct LargeCopy::Block {
  char* mapped;
  size_t mapped_bytes, bytes, used = 0, copies = 0;

  char* begin() const {
    return reinterpret_cast<char*>(round_up(reinterpret_cast<uintptr_t>(mapped), kPage));
  }

  static Block* make(size_t bytes) {
    const size_t size = round_up(bytes, kPage), mapped_size = size + kPage;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* mapping = mmap(nullptr, mapped_size, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (mapping == MAP_FAILED) return nullptr;
    Block* block = new (std::nothrow) Block{static_cast<char*>(mapping), mapped_size, size};
    if (!block || madvise(block->begin(), size, MADV_HUGEPAGE)) {
      munmap(mapping, mapped_size);
      delete block;
      return nullptr;
    }
    return block;
  }
};

namespace {

constexpr size_t kBlock = size_t{32} << 20;
std::mutex mutex;
void* open_block = nullptr;  // that has room for more

}  // namespace

void* LargeCopy::reserve(size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  auto* block = static_cast<Block*>(open_block);
  if (!block || block->bytes - block->used < bytes) {
    block = Block::make(bytes > kBlock ? bytes : kBlock);
    if (!block) return nullptr;
    if (open_block && !static_cast<Block*>(open_block)->copies) release(static_cast<Block*>(open_block));
    open_block = block;
  }
  char* const to = block->begin() + block->used;
  block->used = round_up(block->used + bytes, kLine);
  if (block->used > block->bytes) block->used = block->bytes;
  ++block->copies;
  block_ = block;
  return to;
}

void LargeCopy::release(Block* block) {
  if (open_block == block) open_block = nullptr;
  munmap(block->mapped, block->mapped_bytes);
  delete block;
}

LargeCopy::~LargeCopy() {
  if (!block_) return;
  const std::lock_guard<std::mutex> lock(mutex);
  if (!--block_->copies) release(block_);
}
#else
void* LargeCopy::reserve(size_t) { return nullptr; }
LargeCopy::~LargeCopy() = default;
#endif

}  // namespace graphopt
