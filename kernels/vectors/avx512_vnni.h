// The vector operations of AVX-512 with its dot products of bytes and shorts (VNNI).
#pragma once

#include "vectors/avx512.h"

struct Avx512Vnni : Avx512 {
    // --- bytes ---

    // Sums of products of bytes: four unsigned codes of each lane times the four signed bytes of a
    // word. They are exact and do not overflow 32 bits.
    using Sums = Ints;
    static constexpr bool has_dot_product = true;  // vpdpbusd
    static constexpr bool needs_unsigned_codes = true;
    static Sums start_sums(Ints total) { return total; }
    // GCC 12 would load the word with a separate instruction. With the memory operand spelt out, a
    // tile of 8 columns of Q4_K takes 6.0 instead of 10.1 ns for 64 bytes in the cache.
    static Sums add_products(Sums sums, Ints codes, const int32_t *words, int i) {
        asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(codes), "m"(words[i]));
        return sums;
    }
    // Signed weights are packed with 128 added. A sum of the column's bytes takes that away again.
    static Sums add_signed_products(Sums sums, Ints codes, const int32_t *words, int i) {
        return add_products(sums, codes, words, i);
    }
    // The total with the products since `start_sums(total)`.
    static Ints new_total(Sums sums, Ints) { return sums; }
    // total + scale * sums, where the scale is a short. Without the barrier, GCC 12 multiplies
    // later and keeps too many sums: 12 columns of Q6_K take 1.11 times as long.
    static Ints add_scaled(Sums sums, Ints scale, Ints total) {
        return in_order(add(total, multiply(sums, scale)));
    }

    // --- shorts ---

    // Whether one instruction adds two products of shorts to a 32-bit sum, and enough registers
    // are there to gain by it. (AVX-VNNI has 16: 4 columns of Q4_K would take 1.16 of the time.)
    static constexpr bool adds_pairs = true;  // vpdpwssd
    // sums + the dot product of two signed shorts in each lane. (Around the intrinsic, GCC 12 moves
    // the sums of a tile to memory and back: 1.5 instead of 2.9 products per ns.)
    static Ints dot_shorts(Ints sums, Ints a, Ints b) {
        asm("vpdpwssd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
        return sums;
    }
    static Ints add_pair_products(Ints sums, Ints pairs, const int32_t *word) {
        return _mm512_dpwssd_epi32(sums, pairs, broadcast_word(word));
    }
};
