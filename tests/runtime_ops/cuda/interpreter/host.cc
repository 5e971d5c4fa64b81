// Fibers, barriers and shared memory of the host interpreter; see host.h.
#include "cuda/device.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "interpreter/fiber.h"
#include "interpreter/products.h"

namespace graphopt {
namespace host {
namespace {

constexpr size_t kGuard = 256;  // guard bytes behind shared memory
constexpr unsigned char kNan = 0xff;

// A copy in flight; with `global` null it writes zeros.
struct Copy {
  void* shared;
  const void* global;
  unsigned group;
};

struct Thread {
  Fiber fiber;
  bool returned = false;
  const char* waits = nullptr;  // at what
  void* brings = nullptr;       // to a meeting of its warp
  std::vector<Copy> copies;
  unsigned groups = 0;          // that were closed
  std::vector<size_t> unshown;  // pieces of 16 bytes that its copies brought and products do not see yet
};

// Threads that wait for a phase of a barrier in shared memory.
struct Sleeper {
  unsigned thread;
  const uint64_t* barrier;
  unsigned parity;
};
// What a barrier in shared memory holds.
struct Barrier {
  uint16_t arrivals, missing;  // of a phase, and of this one
  uint32_t phase;
};
static_assert(sizeof(Barrier) == sizeof(uint64_t), "a barrier has 8 bytes");

struct Warp {
  unsigned arrived = 0;
  Meeting meeting = nullptr;
  const char* what = nullptr;
};

uint64_t seed = 0;
bool sm90a = false;
char message[512];

// One launch. The stacks of abandoned threads hold nothing with a destructor; all such members are in here.
struct Launch {
  void (*body)(const void*);
  const void* arguments;
  Index3 grid, block{0, 0, 0};
  unsigned threads;
  size_t shared_bytes;
  char* shared = nullptr;
  std::vector<Thread> all;
  std::vector<Warp> warps;
  std::vector<unsigned> ready;
  std::vector<Sleeper> sleepers;
  std::vector<bool> unshown;  // of each 16 bytes of shared memory
  unsigned at_barrier = 0, current = 0;
  uint64_t random = 0;
  Fiber scheduler;
  bool failed = false;

  uint64_t draw(uint64_t below) {  // splitmix64
    uint64_t z = random += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (z ^ z >> 31) % below;
  }

  Thread& self() { return all[current]; }
  void wait(const char* what) {
    self().waits = what;
    Fiber::change(self().fiber, scheduler);
  }
  void run_block();
  void report_those_who_wait();
};

thread_local Launch* launch = nullptr;

void thread_main() {
  launch->body(launch->arguments);
  launch->self().returned = true;
  Fiber::leave(launch->self().fiber, launch->scheduler);
}

void Launch::report_those_who_wait() {
  unsigned first = 0, gone = 0, waiting = 0;
  for (unsigned i = threads; i-- > 0;) {
    if (all[i].returned) ++gone;
    else first = i, ++waiting;
  }
  std::snprintf(message, sizeof message,
                "block (%u, %u, %u): thread %u waits at %s for ever; %u threads wait somewhere, %u have returned",
                block.x, block.y, block.z, first, all[first].waits, waiting, gone);
  failed = true;
}

void Launch::run_block() {
  std::memset(shared, kNan, shared_bytes);
  poison_region(shared + shared_bytes, kGuard);
  ready.clear();
  sleepers.clear();
  unshown.assign(shared_bytes / 16 + 1, false);
  forget_products();
  at_barrier = 0;
  for (Warp& warp : warps) warp = Warp();
  for (unsigned i = 0; i < threads; ++i) {
    all[i].returned = false;
    all[i].copies.clear();
    all[i].unshown.clear();
    all[i].groups = 0;
    all[i].fiber.start(i, thread_main);
    ready.push_back(i);
  }
  unsigned returned = 0;
  while (!failed && !ready.empty()) {
    const size_t drawn = draw(ready.size());
    current = ready[drawn];
    ready[drawn] = ready.back();
    ready.pop_back();
    Fiber::change(scheduler, self().fiber);
    returned += self().returned;
  }
  if (!failed && returned < threads) report_those_who_wait();
  unpoison_region(shared + shared_bytes, kGuard);
  for (size_t i = 0; i < kGuard && !failed; ++i) {
    if (static_cast<unsigned char>(shared[shared_bytes + i]) == kNan) continue;
    std::snprintf(message, sizeof message, "block (%u, %u, %u) wrote behind its %zu bytes of shared memory", block.x,
                  block.y, block.z, shared_bytes);
    failed = true;
  }
}

void land(const Copy& copy) {
  const size_t piece = static_cast<size_t>(static_cast<char*>(copy.shared) - launch->shared) / 16;
  launch->unshown[piece] = true;
  launch->self().unshown.push_back(piece);
  if (copy.global) std::memcpy(copy.shared, copy.global, 16);
  else std::memset(copy.shared, 0, 16);
}

}  // namespace

void fail(const char* format, ...) {
  char what[256];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(what, sizeof what, format, arguments);
  va_end(arguments);
  const Index3 block = launch->block;
  std::snprintf(message, sizeof message, "block (%u, %u, %u), thread %u: %s", block.x, block.y, block.z,
                launch->current, what);
  launch->failed = true;
  Fiber::leave(launch->self().fiber, launch->scheduler);
}

bool runs_sm90a() { return sm90a; }

uint64_t draw(uint64_t below) { return launch->draw(below); }

void show_shared() {
  std::vector<size_t>& pieces = launch->self().unshown;
  for (const size_t piece : pieces) launch->unshown[piece] = false;
  pieces.clear();
}
void check_shown(const void* address) {
  const size_t piece = static_cast<size_t>(static_cast<const char*>(address) - launch->shared) / 16;
  if (launch->unshown[piece]) fail("a product reads what a copy brought and show_shared() did not show");
}

void make_barrier(uint64_t* barrier, unsigned arrivals) {
  check_shared(barrier, sizeof *barrier);
  const Barrier made = {static_cast<uint16_t>(arrivals), static_cast<uint16_t>(arrivals), 0};
  std::memcpy(barrier, &made, sizeof made);
}
void arrive(uint64_t* barrier) {
  check_shared(barrier, sizeof *barrier);
  Barrier now;
  std::memcpy(&now, barrier, sizeof now);
  if (!now.missing) fail("it arrives at a barrier that expects nobody");
  if (!--now.missing) {
    now.missing = now.arrivals;
    ++now.phase;
    size_t kept = 0;
    for (const Sleeper& sleeper : launch->sleepers) {
      if (sleeper.barrier == barrier && now.phase % 2 != sleeper.parity) launch->ready.push_back(sleeper.thread);
      else launch->sleepers[kept++] = sleeper;
    }
    launch->sleepers.resize(kept);
  }
  std::memcpy(barrier, &now, sizeof now);
}
void wait_barrier(uint64_t* barrier, unsigned parity) {
  check_shared(barrier, sizeof *barrier);
  Barrier now;
  std::memcpy(&now, barrier, sizeof now);
  if (now.phase % 2 != parity) return;
  launch->sleepers.push_back({launch->current, barrier, parity});
  launch->wait("wait_barrier");
}

unsigned thread_index() { return launch->current; }
unsigned thread_count() { return launch->threads; }
Index3 block_index() { return launch->block; }
Index3 block_count() { return launch->grid; }
char* shared_memory() { return launch->shared; }

void check_shared(const void* address, size_t bytes) {
  const char* const at = static_cast<const char*>(address);
  if (at < launch->shared || at + bytes > launch->shared + launch->shared_bytes) {
    fail("%zu bytes that are not in the block's %zu of shared memory", bytes, launch->shared_bytes);
  }
}
void check_global(const void* address, size_t bytes) {
  const char* const at = static_cast<const char*>(address);
  if (at + bytes > launch->shared && at < launch->shared + launch->shared_bytes) {
    fail("%zu bytes that must be in global memory are in shared memory", bytes);
  }
}

void sync_block() {
  Launch& l = *launch;
  if (++l.at_barrier == l.threads) {
    l.at_barrier = 0;
    for (unsigned i = 0; i < l.threads; ++i) l.ready.push_back(i);
  }
  l.wait("sync_block");
}

void meet(const char* what, Meeting meeting, void* mine) {
  Launch& l = *launch;
  const unsigned first = l.current / kWarp * kWarp;
  Warp& warp = l.warps[l.current / kWarp];
  if (warp.arrived && warp.meeting != meeting) {
    fail("it came to %s while others of its warp wait at %s", what, warp.what);
  }
  warp.meeting = meeting;
  warp.what = what;
  l.self().brings = mine;
  if (++warp.arrived == kWarp) {
    void* lanes[kWarp];
    for (unsigned i = 0; i < kWarp; ++i) lanes[i] = l.all[first + i].brings;
    warp.arrived = 0;
    meeting(lanes);
    for (unsigned i = 0; i < kWarp; ++i) l.ready.push_back(first + i);
  }
  l.wait(what);
}

void copy_async16(void* shared, const void* global, bool valid) {
  check_shared(shared, 16);
  if (reinterpret_cast<uintptr_t>(shared) % 16) fail("a copy to no multiple of 16 bytes");
  if (valid) {
    check_global(global, 16);
    if (reinterpret_cast<uintptr_t>(global) % 16) fail("a copy from no multiple of 16 bytes");
  }
  std::memset(shared, kNan, 16);
  Thread& self = launch->self();
  self.copies.push_back({shared, valid ? global : nullptr, self.groups});
}

void commit_copies() { ++launch->self().groups; }

void wait_copies(int newest) {
  Thread& self = launch->self();
  size_t kept = 0;
  for (const Copy& copy : self.copies) {
    if (copy.group + static_cast<unsigned>(newest) < self.groups) land(copy);
    else self.copies[kept++] = copy;
  }
  self.copies.resize(kept);
}

const char* run(void (*body)(const void*), const void* arguments, Index3 grid, unsigned threads, size_t shared_bytes) {
  const size_t bytes = (shared_bytes + kGuard + 127) / 128 * 128;
  const std::unique_ptr<void, void (*)(void*)> memory(std::aligned_alloc(128, bytes), std::free);
  if (!memory || !Fiber::reserve(threads)) return "the host interpreter has no memory";
  std::memset(memory.get(), kNan, bytes);
  Launch one;
  one.body = body;
  one.arguments = arguments;
  one.grid = grid;
  one.threads = threads;
  one.shared_bytes = shared_bytes;
  one.shared = static_cast<char*>(memory.get());
  one.all.resize(threads);
  one.warps.resize(threads / kWarp);
  one.random = seed;
  // Blocks in an order that is drawn: a step of a size that has no factor in common with their number.
  const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
  const auto common = [&](uint64_t a) {
    for (uint64_t b = blocks; b;) {
      const uint64_t rest = a % b;
      a = b;
      b = rest;
    }
    return a;
  };
  uint64_t at = seed ? one.draw(blocks) : 0, step = seed ? 1 + one.draw(blocks) : 1;
  while (common(step) != 1) ++step;
  Launch* const outer = launch;
  launch = &one;
  for (uint64_t i = 0; i < blocks && !one.failed; ++i, at = (at + step) % blocks) {
    one.block = {static_cast<unsigned>(at % grid.x), static_cast<unsigned>(at / grid.x % grid.y),
                 static_cast<unsigned>(at / grid.x / grid.y)};
    one.run_block();
  }
  launch = outer;
  return one.failed ? message : nullptr;
}

}  // namespace host
}  // namespace graphopt

// Whether launches from the next one on run as on sm_90a.
extern "C" __attribute__((visibility("default"))) void graphopt_interpreter_sm90a(bool given) {
  graphopt::host::sm90a = given;
}

// What decides the order of threads and blocks from the next launch on; 0 takes the blocks in their order.
extern "C" __attribute__((visibility("default"))) void graphopt_interpreter_seed(uint64_t seed) {
  graphopt::host::seed = seed;
}
