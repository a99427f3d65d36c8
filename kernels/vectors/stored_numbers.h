// Rows of numbers as they are stored: keys and values in a cache, rows of matrices. The kernels
// load them as floats.
#pragma once

#include <cstdint>
#include <cstring>

enum class NumberType { f32, f16, bf16, q8_0, unsupported };

namespace {

// A block of Q8_0: a float16 scale and 32 signed bytes.
constexpr int64_t q8_0_numbers = 32;
constexpr int64_t q8_0_bytes = 34;

constexpr int64_t bytes_of_numbers(NumberType type, int64_t n) {
    if (type == NumberType::q8_0) return n / q8_0_numbers * q8_0_bytes;
    return (type == NumberType::f32 ? 4 : 2) * n;
}

// Call a function with a type as `type()`, which the compiler knows as a constant.
template <NumberType type>
struct ConstantType {
    constexpr NumberType operator()() const { return type; }
};
template <class Function>
void with_type(NumberType type, const Function &function) {
    switch (type) {
        case NumberType::f32: return function(ConstantType<NumberType::f32>());
        case NumberType::f16: return function(ConstantType<NumberType::f16>());
        case NumberType::bf16: return function(ConstantType<NumberType::bf16>());
        default: return function(ConstantType<NumberType::q8_0>());
    }
}

// Numbers i, i + 1, ... of a row: one for each lane. i is a multiple of the lanes.
template <class V, NumberType type>
typename V::Floats load_numbers(const char *row, int64_t i) {
    if constexpr (type == NumberType::f32) {
        return V::load_floats(reinterpret_cast<const float *>(row) + i);
    } else if constexpr (type == NumberType::f16) {
        return V::load_halves(row + 2 * i);
    } else if constexpr (type == NumberType::bf16) {
        return V::load_bfloats(row + 2 * i);
    } else {
        const char *block = row + i / q8_0_numbers * q8_0_bytes;
        const char *bytes = block + 2 + i % q8_0_numbers;
        return V::multiply(V::all(V::load_half(block)), V::load_signed_bytes(bytes));
    }
}

// The numbers of a row of `size` from i on, fewer than there are lanes, followed by zeros.
template <class V, NumberType type>
[[gnu::noinline]] typename V::Floats load_last_numbers(const char *row, int64_t i, int64_t size) {
    constexpr int64_t bytes = type == NumberType::f32 ? 4 : 2;
    char copy[V::lanes * 4] = {};
    std::memcpy(copy, row + i * bytes, (size - i) * bytes);
    return load_numbers<V, type>(copy, 0);
}

// Numbers i, i + 1, ... of a row of `size`, followed by zeros. (Blocks of Q8_0 are always whole.)
template <class V, NumberType type>
typename V::Floats load_padded(const char *row, int64_t i, int64_t size) {
    if (type == NumberType::q8_0 || i + V::lanes <= size) return load_numbers<V, type>(row, i);
    return load_last_numbers<V, type>(row, i, size);
}

}  // namespace
