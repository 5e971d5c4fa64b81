// How the two sides talk: numbers and bytes through a socket, one command at a time. A command is answered by any number
// of questions, each with its answer, and then kDone with the result. Both sides have 64 bits, lowest byte first.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <type_traits>
#include <vector>

namespace emulated {

// What the process of onnxruntime wants.
enum class Command : uint32_t { kRegister, kCreate, kCompute, kDestroy, kInstructions, kRound };

// What the emulated kernel asks onnxruntime on its way.
enum class Question : uint32_t {
  kDone,
  kAttributeInt,
  kAttributeFloat,
  kAttributeString,
  kAttributeInts,
  kNodeName,
  kConstant,
  kInput,
  kOutput,
  kShape,
  kData
};

class Wire {
 public:
  explicit Wire(int in, int out) : in_(in), out_(out) {}

  template <typename T>
  Wire& put(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    return put(&value, sizeof value);
  }
  Wire& put(const void* from, size_t bytes) {
    const auto* const first = static_cast<const char*>(from);
    waiting_.insert(waiting_.end(), first, first + bytes);
    return *this;
  }
  Wire& put(const std::string& text) { return put(text.size()).put(text.data(), text.size()); }

  void send() {
    for (size_t done = 0; done < waiting_.size();) {
      const ssize_t written = write(out_, waiting_.data() + done, waiting_.size() - done);
      if (written <= 0) gone();
      done += static_cast<size_t>(written);
    }
    waiting_.clear();
  }

  template <typename T>
  T get() {
    static_assert(std::is_trivially_copyable_v<T>);
    T value;
    get(&value, sizeof value);
    return value;
  }
  void get(void* to, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
      const ssize_t found = read(in_, static_cast<char*>(to) + done, bytes - done);
      if (found <= 0) gone();
      done += static_cast<size_t>(found);
    }
  }
  std::string text() {
    std::string text(get<size_t>(), 0);
    get(text.data(), text.size());
    return text;
  }

  void (*gone)() = [] { std::exit(0); };  // called where the other side has ended

 private:
  int in_, out_;
  std::vector<char> waiting_;
};

}  // namespace emulated
