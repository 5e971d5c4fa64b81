// A fiber of the host interpreter: a stack of its own, and the place where it resumes.
#pragma once

#include <cstddef>
#include <cstdint>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace graphopt {
namespace host {

inline void poison_region(const void* at, size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_poison_memory_region(at, bytes);
#else
  (void)at, (void)bytes;
#endif
}
inline void unpoison_region(const void* at, size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(at, bytes);
#else
  (void)at, (void)bytes;
#endif
}

class Fiber {
 public:
  // Allocates stacks for so many fibers, kept for later launches; false if out of memory.
  static bool reserve(unsigned fibers);

  // The next change to it runs `main`, on the stack of that number; the stack's content is lost.
  void start(unsigned stack, void (*main)());

  static void change(Fiber& from, Fiber& to);
  // The same, never to return.
  [[noreturn]] static void leave(Fiber& from, Fiber& to);

 private:
  static void change(Fiber& from, Fiber& to, bool for_good);
  static void begin();
  void arrive();

  void (*main_)() = nullptr;
  // Where its stack is, for the sanitizer; the sanitizer fills it in for the scheduler's fiber.
  const void* bottom_ = nullptr;
  size_t bytes_ = 0;
  void* fake_stack_ = nullptr;
#if defined(__x86_64__)
  void* stack_pointer_ = nullptr;
#else
  ucontext_t context_ = {};
#endif
};

}  // namespace host
}  // namespace graphopt
