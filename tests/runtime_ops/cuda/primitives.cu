// Kernels of one primitive each, and of errors that the host interpreter must refuse; test_primitives.py runs them.
#include "cuda/device.h"
#include "cuda/launch.h"
#include "cuda/matrix.h"

#define PUBLIC extern "C" __attribute__((visibility("default")))

namespace graphopt {
namespace {

// One value of each kind for each thread, in and out.
struct Words {
  const uint32_t *a, *b, *c;
  uint32_t* d;
};

GRAPHOPT_KERNEL(32, 1) void product_f16(Words x) {
  uint32_t a[4], b[2];
  float d[4];
  for (int i = 0; i < 4; ++i) a[i] = x.a[4 * lane() + i], d[i] = float_of_bits(x.c[4 * lane() + i]);
  for (int i = 0; i < 2; ++i) b[i] = x.b[2 * lane() + i];
  multiply_f16(d, a, b);
  for (int i = 0; i < 4; ++i) x.d[4 * lane() + i] = bits_of_float(d[i]);
}
GRAPHOPT_KERNEL(32, 1) void product_bf16(Words x) {
  uint32_t a[4], b[2];
  float d[4];
  for (int i = 0; i < 4; ++i) a[i] = x.a[4 * lane() + i], d[i] = float_of_bits(x.c[4 * lane() + i]);
  for (int i = 0; i < 2; ++i) b[i] = x.b[2 * lane() + i];
  multiply_bf16(d, a, b);
  for (int i = 0; i < 4; ++i) x.d[4 * lane() + i] = bits_of_float(d[i]);
}
GRAPHOPT_KERNEL(32, 1) void product_s8(Words x) {
  uint32_t a[4], b[2];
  int32_t d[4];
  for (int i = 0; i < 4; ++i) a[i] = x.a[4 * lane() + i], d[i] = static_cast<int32_t>(x.c[4 * lane() + i]);
  for (int i = 0; i < 2; ++i) b[i] = x.b[2 * lane() + i];
  multiply_s8(d, a, b);
  for (int i = 0; i < 4; ++i) x.d[4 * lane() + i] = static_cast<uint32_t>(d[i]);
}
GRAPHOPT_KERNEL(32, 1) void product_u8s8(Words x) {
  uint32_t a[4], b[2];
  int32_t d[4];
  for (int i = 0; i < 4; ++i) a[i] = x.a[4 * lane() + i], d[i] = static_cast<int32_t>(x.c[4 * lane() + i]);
  for (int i = 0; i < 2; ++i) b[i] = x.b[2 * lane() + i];
  multiply_u8s8(d, a, b);
  for (int i = 0; i < 4; ++i) x.d[4 * lane() + i] = static_cast<uint32_t>(d[i]);
}

// Four matrices [8, 8] of 16-bit numbers, one behind the other, through shared memory.
template <bool Transposed>
GRAPHOPT_KERNEL(32, 1) void matrices(Words x) {
  char* const shared = shared_memory();
  store16(shared + 16 * lane(), load16(x.a + 4 * lane()));
  sync_warp();
  uint32_t r[4];
  if constexpr (Transposed) load_matrices_transposed(r, shared + 16 * lane());
  else load_matrices(r, shared + 16 * lane());
  for (int i = 0; i < 4; ++i) x.d[4 * lane() + i] = r[i];
}

GRAPHOPT_KERNEL(64, 1) void shuffles(Words x) {
  const unsigned i = thread_index().x;
  const uint32_t value = x.a[i];
  const double wide = value + 0.25;
  x.d[6 * i] = shuffle(value, static_cast<int>(x.b[i]));
  x.d[6 * i + 1] = shuffle_xor(value, 5);
  x.d[6 * i + 2] = static_cast<uint32_t>(4 * shuffle(wide, static_cast<int>(x.b[i])));
  x.d[6 * i + 3] = ballot(value & 1);
  x.d[6 * i + 4] = reduce_sum<8>(value);
  x.d[6 * i + 5] = static_cast<uint32_t>(reduce_max(static_cast<int32_t>(value)));
}

GRAPHOPT_KERNEL(32, 1) void packed(Words x) {
  const unsigned i = thread_index().x + 32 * block_index().x;
  const uint32_t a = x.a[i], b = x.b[i], c = x.c[i];
  uint32_t* const d = x.d + 20 * i;
  d[0] = half2_fma(a, b, c);
  d[1] = half2_multiply(a, b);
  d[2] = half2_add(a, b);
  d[3] = bfloat162_fma(a, b, c);
  d[4] = bfloat162_multiply(a, b);
  d[5] = bfloat162_add(a, b);
  d[6] = half2_of(float_of_bits(a), float_of_bits(b));
  d[7] = bfloat162_of(float_of_bits(a), float_of_bits(b));
  d[8] = bits_of_float(to_float(half_low(a)));
  d[9] = bits_of_float(to_float(bfloat16_high(a)));
  d[10] = lop3<0xea>(a, b, c);
  d[11] = byte_permute(a, b, c);
  d[12] = funnel_right(a, b, c);
  d[13] = static_cast<uint32_t>(dot4(static_cast<int32_t>(a), static_cast<int32_t>(b), static_cast<int32_t>(c)));
  d[14] = bits_of_float(multiply_add(float_of_bits(a), float_of_bits(b), float_of_bits(c)));
  d[15] = bits_of_float(exp2_of(float_of_bits(a)));
  d[16] = static_cast<uint32_t>(round_to_int(float_of_bits(a)));
  d[17] = lop3<0x1b>(a, b, c);
}

// d[4 i]: what the copy's destination holds at once, and behind a wait that does not cover it; d[4 i + 2]: behind one
// that does; d[4 i + 3]: of a copy that is not valid. A second group goes unwaited.
GRAPHOPT_KERNEL(32, 1) void copies(Words x) {
  char* const shared = shared_memory() + 48 * thread_index().x;
  const auto word = [&](int i) { return *reinterpret_cast<volatile uint32_t*>(shared + 16 * i); };
  uint32_t* const d = x.d + 5 * thread_index().x;
  copy_async16(shared, x.a + 4 * lane(), true);
  copy_async16(shared + 16, nullptr, false);
  commit_copies();
  copy_async16(shared + 32, x.b + 4 * lane(), true);
  commit_copies();
  d[0] = word(0);
  wait_copies<2>();
  d[1] = word(0);
  wait_copies<1>();
  d[2] = word(0);
  d[3] = word(1);
  d[4] = word(2);
}

// Sums what other threads wrote, with the synchronization that this takes, or with none.
template <bool Synchronized>
GRAPHOPT_KERNEL(128, 1) void exchange(Words x) {
  auto* const shared = reinterpret_cast<uint32_t*>(shared_memory());
  const unsigned i = thread_index().x;
  shared[i] = x.a[i];
  if (Synchronized) sync_block();
  x.d[128 * block_index().x + i] = shared[(i + 77) % 128] + block_index().x;
}

// d[block]: which block it is, by the order in which they take a number.
GRAPHOPT_KERNEL(32, 1) void order(Words x) {
  if (thread_index().x == 0) x.d[atomic_add(x.d + block_count().x, 1u)] = block_index().x;
}

#if !defined(__CUDACC__)  // kernels that a GPU would misread or never finish
GRAPHOPT_KERNEL(32, 1) void few_lanes(Words x) {
  if (lane() < 31) x.d[lane()] = ballot(true);
}
GRAPHOPT_KERNEL(32, 1) void two_places(Words x) {
  if (lane() < 16) x.d[lane()] = ballot(true);
  else sync_warp();
}
GRAPHOPT_KERNEL(64, 1) void no_barrier(Words x) {
  if (warp() == 0) return;
  sync_block();
  x.d[0] = 1;
}
GRAPHOPT_KERNEL(32, 1) void not_aligned(Words x) { store16(x.d, load16(x.a + 1)); }
GRAPHOPT_KERNEL(32, 1) void beyond(Words x) { shared_memory()[512 + lane()] = static_cast<char>(x.a[0]); }
GRAPHOPT_KERNEL(32, 1) void copy_beyond(Words x) { copy_async16(shared_memory() + 512, x.a, true); }
GRAPHOPT_KERNEL(32, 1) void wrong_space(Words x) { store16(x.d, load16_once(shared_memory())); }
#endif
GRAPHOPT_KERNEL(32, 1) void nothing(Words) {}

}  // namespace
}  // namespace graphopt

#define RUN(name, kernel, blocks, threads)                                                                     \
  PUBLIC const char* name(const uint32_t* a, const uint32_t* b, const uint32_t* c, uint32_t* d, size_t shared) { \
    using namespace graphopt;                                                                                  \
    return launch(kernel, Index3{blocks, 1, 1}, threads, shared, nullptr, Words{a, b, c, d});                  \
  }

RUN(run_product_f16, product_f16, 1, 32)
RUN(run_product_bf16, product_bf16, 1, 32)
RUN(run_product_s8, product_s8, 1, 32)
RUN(run_product_u8s8, product_u8s8, 1, 32)
RUN(run_matrices, matrices<false>, 1, 32)
RUN(run_matrices_transposed, matrices<true>, 1, 32)
RUN(run_shuffles, shuffles, 1, 64)
RUN(run_packed, packed, 64, 32)
RUN(run_copies, copies, 1, 32)
RUN(run_exchange, exchange<true>, 3, 128)
RUN(run_race, exchange<false>, 3, 128)
RUN(run_order, order, 100, 32)
#if !defined(__CUDACC__)
RUN(run_few_lanes, few_lanes, 1, 32)
RUN(run_two_places, two_places, 1, 32)
RUN(run_no_barrier, no_barrier, 1, 64)
RUN(run_not_aligned, not_aligned, 1, 32)
RUN(run_beyond, beyond, 1, 32)
RUN(run_copy_beyond, copy_beyond, 1, 32)
RUN(run_wrong_space, wrong_space, 1, 32)
#endif
RUN(run_odd_threads, nothing, 1, 33)
RUN(run_no_threads, nothing, 1, 0)
RUN(run_no_blocks, nothing, 0, 32)
RUN(run_nothing, nothing, 1, 32)
