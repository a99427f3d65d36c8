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
// for x up to 60, with an error of at most 1.5 units in the last place. An x below -87 counts as
// -87; a NaN stays one. With n the integer nearest to x / ln 2, and r = x - n * ln 2,
//
//     e^x = 2^n * e^r        e^r = 1 + r + r^2 * polynomial(r)        |r| <= ln 2 / 2
//
// with the polynomial of Cephes' expf.
template <class V>
typename V::Floats exponential(typename V::Floats x, float power) {
    using Floats = typename V::Floats;
    constexpr float smallest = -87.0f;
    constexpr float inverse_ln_2 = 1.44269504f;
    // ln 2 in two parts, so that n times the first one is exact.
    constexpr float ln_2_high = 0.693359375f;
    constexpr float ln_2_low = -2.12194440e-4f;

    const Floats bounded = V::larger(V::all(smallest), x);
    const Floats n = V::round(V::multiply(bounded, V::all(inverse_ln_2)));
    const Floats first_difference = V::subtract_product(n, V::all(ln_2_high), bounded);
    const Floats r = V::subtract_product(n, V::all(ln_2_low), first_difference);

    constexpr float coefficients[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f,
                                      1.6666665459e-1f, 5.0000001201e-1f};
    Floats polynomial = V::all(1.9875691500e-4f);
    for (const float coefficient : coefficients) {
        polynomial = V::multiply_add(polynomial, r, V::all(coefficient));
    }
    const Floats e_to_r =
        V::multiply_add(polynomial, V::multiply(r, r), V::add(r, V::all(1.0f)));
    return V::times_power_of_two(e_to_r, V::add(n, V::all(power)));
}

}  // namespace
