// The vector operations of AVX2 with 256-bit dot products of bytes. A CPU has these as AVX-VNNI
// (client CPUs without AVX-512) or as a part of AVX-512.
#pragma once

#include "vectors/avx2.h"

struct AvxVnni : Avx2 {
    // --- bytes ---

    // Sums are exact and do not overflow 32 bits.
    using Sums = Ints;
    static constexpr bool has_dot_product = true;  // vpdpbusd
    static constexpr bool needs_unsigned_codes = true;
    static Sums add_products(Sums sums, Ints codes, const int32_t *words, int i) {
        return dot_bytes(sums, codes, broadcast_word(words + i));
    }
    // Signed weights are packed with 128 added. A sum of the column's bytes takes that away again.
    static Sums add_signed_products(Sums sums, Ints codes, const int32_t *words, int i) {
        return add_products(sums, codes, words, i);
    }
    static Sums start_sums(Ints total) { return total; }
    static Ints new_total(Sums sums, Ints) { return sums; }
    static Ints add_scaled(Sums sums, Ints scale, Ints total) {
        return in_order(add(total, multiply(sums, scale)));
    }

    // --- shorts ---

    static Ints add_pair_products(Ints sums, Ints pairs, const int32_t *word) {
        return dot_shorts(sums, pairs, broadcast_word(word));
    }

#ifdef __AVXVNNI__
    static Ints dot_bytes(Ints sums, Ints a, Ints b) { return _mm256_dpbusd_avx_epi32(sums, a, b); }
    static Ints dot_shorts(Ints sums, Ints a, Ints b) {
        return _mm256_dpwssd_avx_epi32(sums, a, b);
    }
#else
    static Ints dot_bytes(Ints sums, Ints a, Ints b) { return _mm256_dpbusd_epi32(sums, a, b); }
    static Ints dot_shorts(Ints sums, Ints a, Ints b) { return _mm256_dpwssd_epi32(sums, a, b); }
#endif
};
