// The vector operations that the kernels are written in, for AVX2 with 256-bit dot products of
// bytes. A CPU has them as AVX-VNNI (client CPUs without AVX-512) or as a part of AVX-512.
#pragma once

#include "vectors/avx2.h"

struct AvxVnni : Avx2 {
    using Sums = Ints;
    static constexpr bool has_dot_product = true;
    static constexpr bool needs_unsigned_codes = true;
#ifdef __AVXVNNI__
    static Ints dot_bytes(Ints s, Ints a, Ints b) { return _mm256_dpbusd_avx_epi32(s, a, b); }
    static Ints dot_shorts(Ints s, Ints a, Ints b) { return _mm256_dpwssd_avx_epi32(s, a, b); }
#else
    static Ints dot_bytes(Ints s, Ints a, Ints b) { return _mm256_dpbusd_epi32(s, a, b); }
    static Ints dot_shorts(Ints s, Ints a, Ints b) { return _mm256_dpwssd_epi32(s, a, b); }
#endif
    // Sums of products of bytes are exact, and never overflow 32 bits.
    static Sums add_products(Sums sums, Ints codes, const int32_t *words, int i) {
        return dot_bytes(sums, codes, all_words(words + i));
    }
    static Sums add_signed_products(Sums sums, Ints codes, const int32_t *words, int i) {
        return add_products(sums, codes, words, i);
    }
    static Ints widen(Sums sums, Ints total) { return _mm256_add_epi32(total, sums); }
    static Ints add_pair_products(Ints sums, Ints pairs, const int32_t *word) {
        return dot_shorts(sums, pairs, all_words(word));
    }
};
