#include "interpreter/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#if defined(__x86_64__)
// Saves what the ABI says a function keeps, changes stacks and returns to where the other one was: some ten
// instructions, where swapcontext makes a system call for signals each time.
extern "C" void graphopt_change_stack(void** from, void* to);
asm(R"(
.text
.hidden graphopt_change_stack
.globl graphopt_change_stack
.type graphopt_change_stack, @function
graphopt_change_stack:
  endbr64
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size graphopt_change_stack, .-graphopt_change_stack
)");
#endif

namespace graphopt {
namespace host {
namespace {

constexpr size_t kStack = 256 * 1024;  // address space; memory is taken for what is touched

thread_local char* stacks = nullptr;
thread_local unsigned stack_count = 0;
thread_local Fiber *left = nullptr, *entered = nullptr;  // of the last change

}  // namespace

bool Fiber::reserve(unsigned fibers) {
  if (fibers <= stack_count) return true;
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  if (stacks) munmap(stacks, stack_count * kStack);
  stack_count = 0;
  void* const memory = mmap(nullptr, fibers * kStack, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  stacks = memory == MAP_FAILED ? nullptr : static_cast<char*>(memory);
  if (!stacks) return false;
  stack_count = fibers;
  // A stack grows down, into a page that stops it.
  for (unsigned i = 0; i < fibers; ++i) {
    if (mprotect(stacks + i * kStack, page, PROT_NONE)) return false;
  }
  return true;
}

void Fiber::start(unsigned stack, void (*main)()) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  char* const low = stacks + stack * kStack + page;
  bytes_ = kStack - page;
  bottom_ = low;
  main_ = main;
  fake_stack_ = nullptr;
  unpoison_region(low, bytes_);
#if defined(__x86_64__)
  // What graphopt_change_stack takes off: six registers and the address to return to, which must lie at a multiple of
  // 16.
  void** const top = reinterpret_cast<void**>(low + bytes_ - 16);
  top[1] = nullptr;
  top[0] = reinterpret_cast<void*>(&Fiber::begin);
  for (int i = 1; i <= 6; ++i) top[-i] = nullptr;
  stack_pointer_ = top - 6;
#else
  getcontext(&context_);
  context_.uc_stack.ss_sp = low;
  context_.uc_stack.ss_size = bytes_;
  makecontext(&context_, &Fiber::begin, 0);
#endif
}

void Fiber::arrive() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack_, &left->bottom_, &left->bytes_);
#endif
}

void Fiber::begin() {
  Fiber& self = *entered;
  self.arrive();
  self.main_();
  __builtin_unreachable();  // it leaves
}

void Fiber::change(Fiber& from, Fiber& to, bool for_good) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(for_good ? nullptr : &from.fake_stack_, to.bottom_, to.bytes_);
#else
  (void)for_good;
#endif
  left = &from;
  entered = &to;
#if defined(__x86_64__)
  graphopt_change_stack(&from.stack_pointer_, to.stack_pointer_);
#else
  swapcontext(&from.context_, &to.context_);
#endif
  from.arrive();
}

void Fiber::change(Fiber& from, Fiber& to) { change(from, to, false); }

void Fiber::leave(Fiber& from, Fiber& to) {
  change(from, to, true);
  __builtin_unreachable();
}

}  // namespace host
}  // namespace graphopt
