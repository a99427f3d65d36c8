// Small functions that several kernels use.
//
// They stand in for std::min and others: the files of an instruction set use no functions of the
// standard library (see instruction_sets/instruction_set.h).
#pragma once

#include <cstdint>

// If all registers are in use, GCC 12 also stores each sum to the stack in every step of a loop,
// unless it is told not to share them among variables: on AVX2, sums of weighted values took 1.5
// times as long.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define SUMS_IN_REGISTERS [[gnu::optimize("no-tree-coalesce-vars")]]
#else
#define SUMS_IN_REGISTERS
#endif

namespace {

constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t larger(int64_t a, int64_t b) { return a < b ? b : a; }
// The smallest multiple of `step` that is not below n.
constexpr int64_t rounded_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// e^x * 2^power
//
// for x up to 60, with an error of less than one unit in the last place. An x below -87 counts as
// -87; a NaN stays one. With n the integer nearest to x / ln 2, and r = x - n * ln 2,
//
//     e^x = 2^n * e^r        e^r = 1 + r + r^2 * polynomial(r)        |r| <= ln 2 / 2
//
// where the polynomial has the smallest error (at most 3e-9 of e^r).
template <class V>
typename V::Floats exponential(typename V::Floats x, int power) {
    using Floats = typename V::Floats;
    constexpr float smallest = -87.0f;
    constexpr float inverse_ln_2 = 1.44269504f;
    // ln 2 in two parts, so that n times the first one is exact.
    constexpr float ln_2_high = 0.693359375f;
    constexpr float ln_2_low = -2.12194440e-4f;

    const Floats bounded = V::larger(V::all(smallest), x);
    // The last bits of the sum are n + power + 127, which is the biased exponent of 2^(n + power).
    const Floats magic = V::all(0x1.8p23f + static_cast<float>(power + 127));
    const Floats sum = V::multiply_add(bounded, V::all(inverse_ln_2), magic);
    const Floats power_of_two =
        V::floats_of_bits(V::template shift_ints_left<23>(V::float_bits(sum)));
    const Floats n = V::subtract(sum, magic);
    const Floats first_difference = V::subtract_product(n, V::all(ln_2_high), bounded);
    const Floats r = V::subtract_product(n, V::all(ln_2_low), first_difference);

    constexpr float coefficients[] = {8.36874545e-3f, 4.16683890e-2f, 1.66665211e-1f,
                                      4.99999940e-1f, 1.0f,           1.0f};
    Floats e_to_r = V::all(1.38145405e-3f);
    for (const float coefficient : coefficients) {
        e_to_r = V::multiply_add(e_to_r, r, V::all(coefficient));
    }
    return V::multiply(e_to_r, power_of_two);
}

}  // namespace
