// The host interpreter: device.h without a GPU, so that tests run the kernels themselves. It proves results, never
// speed.
//
// Blocks run one after another, and the threads of a block as fibers: each runs until it has to wait for others, and
// which one resumes is drawn from a seed, as is the order of the blocks. So a kernel that lacks a synchronization gives
// other bits for another seed. Shared memory starts out as NaN; an asynchronous copy turns its destination to NaN until
// a wait covers it. Errors that a GPU would report or silently misread end the launch with a message: a lane that does
// not reach its warp's meeting point, a misaligned address or one beyond shared memory, more of a resource than every
// GPU from sm_80 on has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace graphopt {
namespace host {

// Ends the launch, which returns the text; the first one counts.
[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...);

unsigned thread_index();
unsigned thread_count();
Index3 block_index();
Index3 block_count();
char* shared_memory();
void check_shared(const void* address, size_t bytes);
void check_global(const void* address, size_t bytes);

void sync_block();
// Waits for all lanes of the warp, passes what each brings to `meet`, once, in the order of the lanes, and continues.
using Meeting = void (*)(void* const* lanes);
void meet(const char* what, Meeting meeting, void* mine);

void copy_async16(void* shared, const void* global, bool valid);
void commit_copies();
void wait_copies(int newest);

uint16_t half_fma(uint32_t a, uint32_t b, uint32_t c);
uint16_t bfloat16_fma(uint32_t a, uint32_t b, uint32_t c);

// Matrix products and loads of a warp; see matrix.h.
void multiply_f16(float* d, const uint32_t* a, const uint32_t* b);
void multiply_bf16(float* d, const uint32_t* a, const uint32_t* b);
void multiply_s8(int32_t* d, const uint32_t* a, const uint32_t* b);
void multiply_u8s8(int32_t* d, const uint32_t* a, const uint32_t* b);
void load_matrices(uint32_t* to, int count, const void* row, bool transposed);

void store_matrices_transposed(void* row, const uint32_t* r);

// What only sm_90a has, see cuda/wgmma.h. A product's sums are NaN from its start until a wait covers it.
// Whether it reads its operand in shared memory when it starts or when it is waited for is drawn; until then nothing
// may write to its operand in registers. What copies brought is not seen by products before show_shared().
bool runs_sm90a();
void multiply_64x128(float* d, const uint32_t* a, uint64_t b);
void multiply_64x128(int32_t* d, const uint32_t* a, uint64_t b);
void multiply_64x128_transposed(float* d, const uint32_t* a, uint64_t b, bool adds);
void begin_products();
void commit_products();
void wait_products(int newest);
void show_shared();
void make_barrier(uint64_t* barrier, unsigned arrivals);
void arrive(uint64_t* barrier);
void wait_barrier(uint64_t* barrier, unsigned parity);

// Runs body(arguments) as every thread of the grid; returns null or an error.
const char* run(void (*body)(const void*), const void* arguments, Index3 grid, unsigned threads, size_t shared_bytes);

inline void sync_warp() {
  meet("sync_warp", [](void* const*) {}, nullptr);
}

template <typename T>
inline T shuffle(T value, int from) {
  struct Lane {
    T value, result;
    int from;
  } mine{value, value, from};
  meet(sizeof(T) == 4 ? "shuffle of 4 bytes" : "shuffle of 8 bytes", [](void* const* lanes) {
    for (int i = 0; i < kWarp; ++i) {
      Lane& lane = *static_cast<Lane*>(lanes[i]);
      lane.result = static_cast<const Lane*>(lanes[lane.from])->value;
    }
  }, &mine);
  return mine.result;
}

inline uint32_t ballot(bool value) {
  struct Lane {
    bool value;
    uint32_t result;
  } mine{value, 0};
  meet("ballot", [](void* const* lanes) {
    uint32_t all = 0;
    for (int i = 0; i < kWarp; ++i) all |= static_cast<uint32_t>(static_cast<const Lane*>(lanes[i])->value) << i;
    for (int i = 0; i < kWarp; ++i) static_cast<Lane*>(lanes[i])->result = all;
  }, &mine);
  return mine.result;
}

template <typename T>
inline T atomic_add(T* at, T value) {
  const T before = *at;
  *at = static_cast<T>(static_cast<uint32_t>(before) + static_cast<uint32_t>(value));
  return before;
}

}  // namespace host
}  // namespace graphopt
