// A tensor as a kernel sees it, and errors that name the node. Nothing here throws: onnxruntime calls us through C.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>

#include "abi/onnxruntime.h"

// Passes a failure on to onnxruntime, which reports it.
#define GRAPHOPT_RETURN_IF_ERROR(expression) \
  if (OrtStatus* failure = (expression)) return failure

namespace graphopt {

// Makes valid UTF-8 of text from a file, possibly truncated, since callers decode error messages as UTF-8: a byte that
// is not part of a whole character becomes a question mark.
inline void make_utf8(char* text) {
  constexpr uint32_t kLeast[] = {0, 0x80, 0x800, 0x10000};
  for (auto* byte = reinterpret_cast<unsigned char*>(text); *byte;) {
    // bytes behind the first one
    const int length = *byte < 0x80 ? 0 : *byte >> 5 == 6 ? 1 : *byte >> 4 == 14 ? 2 : *byte >> 3 == 30 ? 3 : -1;
    uint32_t character = length <= 0 ? *byte : *byte & (0x3fu >> length);
    int count = 0;
    for (; count < length && byte[count + 1] >> 6 == 2; ++count) {
      character = character << 6 | (byte[count + 1] & 0x3f);
    }
    if (length == count && character >= kLeast[length] && character >> 11 != 0x1b && character <= 0x10ffff) {
      byte += length + 1;
    } else {
      *byte++ = '?';
    }
  }
}

struct Tensor {
  void* data = nullptr;
  int type = 0;
  size_t rank = 0;
  std::unique_ptr<int64_t[]> shape;

  OrtStatus* read(const OrtApi* api, const OrtValue* value) {
    OrtTensorTypeAndShapeInfo* info = nullptr;
    GRAPHOPT_RETURN_IF_ERROR(GetTensorTypeAndShape::call(api, value, &info));
    OrtStatus* status = GetTensorElementType::call(api, info, &type);
    if (!status) status = GetDimensionsCount::call(api, info, &rank);
    if (!status) {
      shape.reset(new (std::nothrow) int64_t[rank + 1]);
      status = shape ? GetDimensions::call(api, info, shape.get(), rank)
                     : CreateStatus::call(api, kFail, "no memory for a shape");
    }
    ReleaseTensorTypeAndShapeInfo::call(api, info);
    // The function returns a mutable pointer but accepts any value; inputs are only read.
    return status ? status : GetTensorMutableData::call(api, const_cast<OrtValue*>(value), &data);
  }
};

// An operator's node; lives as long as the session.
struct Node {
  const OrtApi* api = nullptr;
  char name[256] = "?";  // a longer name is truncated

  OrtStatus* read(const OrtApi* ort_api, const OrtKernelInfo* info) {
    api = ort_api;
    size_t size = 0;
    GRAPHOPT_RETURN_IF_ERROR(KernelInfoGetNodeName::call(api, info, nullptr, &size));
    std::unique_ptr<char[]> whole(new (std::nothrow) char[size + 1]);
    if (!whole) return CreateStatus::call(api, kFail, "no memory for a node's name");
    GRAPHOPT_RETURN_IF_ERROR(KernelInfoGetNodeName::call(api, info, whole.get(), &size));
    std::snprintf(name, sizeof name, "%s", whole.get());
    return nullptr;
  }

  // An attribute of the node; `missing` returns our own message where it is absent or of another type.
  OrtStatus* read_attribute(const OrtKernelInfo* info, const char* attribute, int64_t* value) const {
    return missing(KernelInfoGetAttributeInt::call(api, info, attribute, value), attribute, "an integer");
  }
  OrtStatus* read_attribute(const OrtKernelInfo* info, const char* attribute, float* value) const {
    return missing(KernelInfoGetAttributeFloat::call(api, info, attribute, value), attribute, "a float");
  }
  OrtStatus* read_attribute(const OrtKernelInfo* info, const char* attribute, char* text, size_t size) const {
    constexpr const char* kType = "a short string";
    OrtStatus* const status = KernelInfoGetAttributeString::call(api, info, attribute, text, &size);
    GRAPHOPT_RETURN_IF_ERROR(missing(status, attribute, kType));
    // a string may contain a 0
    if (std::strlen(text) + 1 == size) return nullptr;
    return error("its attribute %s must be there, and be %s", attribute, kType);
  }
  // The same for an optional attribute: `value` is unchanged where it is absent.
  template <typename Value>
  OrtStatus* read_optional(const OrtKernelInfo* info, const char* attribute, Value* value) const {
    Value attribute_value{};
    OrtStatus* const failure = read(info, attribute, &attribute_value);
    if (!failure) {
      *value = attribute_value;
      return nullptr;
    }
    return present(failure, attribute);
  }
  OrtStatus* read_optional(const OrtKernelInfo* info, const char* attribute, char* text, size_t size) const {
    if (OrtStatus* const failure = KernelInfoGetAttributeString::call(api, info, attribute, text, &size)) {
      text[0] = 0;
      return present(failure, attribute);
    }
    return std::strlen(text) + 1 == size ? nullptr : error("its attribute %s must be a short string", attribute);
  }
  // An error if an attribute that was not read is there all the same: onnxruntime has one error code for every cause.
  OrtStatus* present(OrtStatus* failure, const char* attribute) const {
    const bool absent = std::strstr(GetErrorMessage::call(api, failure), "No attribute with");
    ReleaseStatus::call(api, failure);
    return absent ? nullptr : error("its attribute %s is of another type than it must be", attribute);
  }
  OrtStatus* read(const OrtKernelInfo* info, const char* attribute, int64_t* value) const {
    return KernelInfoGetAttributeInt::call(api, info, attribute, value);
  }
  OrtStatus* read(const OrtKernelInfo* info, const char* attribute, float* value) const {
    return KernelInfoGetAttributeFloat::call(api, info, attribute, value);
  }
  OrtStatus* missing(OrtStatus* failure, const char* attribute, const char* type) const {
    if (!failure) return nullptr;
    ReleaseStatus::call(api, failure);
    return error("its attribute %s must be there, and be %s", attribute, type);
  }

  OrtStatus* find_constant(const OrtKernelInfo* info, size_t index, bool* is_constant) const {
    int is_initializer = 0;
    const OrtValue* value = nullptr;
    GRAPHOPT_RETURN_IF_ERROR(KernelInfoGetConstantInput::call(api, info, index, &is_initializer, &value));
    *is_constant = is_initializer;
    return nullptr;
  }
  // A constant input, which lives as long as the session.
  OrtStatus* read_constant(const OrtKernelInfo* info, size_t index, const char* input, Tensor* tensor) const {
    int is_initializer = 0;
    const OrtValue* value = nullptr;
    GRAPHOPT_RETURN_IF_ERROR(KernelInfoGetConstantInput::call(api, info, index, &is_initializer, &value));
    if (!is_initializer) return error("%s must be an initializer of the graph", input);
    return read_numbers(value, input, tensor);
  }

  // External data and bound buffers can have any address; kernels need aligned numbers.
  OrtStatus* read_numbers(const OrtValue* value, const char* input, Tensor* tensor) const {
    GRAPHOPT_RETURN_IF_ERROR(tensor->read(api, value));
    const size_t bytes = tensor->type == kDouble ? 8 : tensor->type == kFloat ? 4 : tensor->type == kFloat16 ? 2 : 1;
    if (reinterpret_cast<uintptr_t>(tensor->data) % bytes == 0) return nullptr;
    return error("%s lies at no multiple of %zu bytes; if that is external data, save the file again", input, bytes);
  }

  // An input of a rank, and how many numbers it has, of 8 bytes at multiples of them too.
  OrtStatus* read_dense(const OrtValue* value, const char* input, size_t rank, Tensor* tensor, size_t* count) const {
    GRAPHOPT_RETURN_IF_ERROR(read_numbers(value, input, tensor));
    if (tensor->rank != rank) return error("%s must have %zu axes, and has %zu", input, rank, tensor->rank);
    if (tensor->type == kInt64 && reinterpret_cast<uintptr_t>(tensor->data) % 8) {
      return error("%s lies at no multiple of 8 bytes; if that is external data, save the file again", input);
    }
    *count = 1;
    for (size_t axis = 0; axis < rank; ++axis) {
      const int64_t size = tensor->shape[axis];
      // the tensor fits into memory, but what is beside a 0 may be anything
      if (size < 0 || size > INT32_MAX) return error("%s has a dimension of %lld", input, static_cast<long long>(size));
      *count *= static_cast<size_t>(size);
    }
    return nullptr;
  }

  __attribute__((format(printf, 2, 3))) OrtStatus* error(const char* format, ...) const {
    char detail[512], message[1024];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(detail, sizeof detail, format, arguments);
    va_end(arguments);
    std::snprintf(message, sizeof message, "ai.graphopt node '%s': %s", name, detail);
    make_utf8(message);
    return CreateStatus::call(api, kInvalidArgument, message);
  }
};

}  // namespace graphopt
