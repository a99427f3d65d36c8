// The vector operations that the kernels are written in, for AVX-512 with VNNI.
#pragma once

// GCC 12 takes the operand that its own headers leave undefined for an uninitialised variable.
#ifndef __clang__
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#ifndef __clang__
#pragma GCC diagnostic pop
#endif

#include <cstdint>
#include <cstring>

struct Avx512 {
    static constexpr int lanes = 16;
    using Ints = __m512i;
    using Floats = __m512;

    static Ints load(const void *p) { return _mm512_loadu_si512(p); }
    static Ints zero_ints() { return _mm512_setzero_si512(); }
    static Floats zero() { return _mm512_setzero_ps(); }
    static Floats load_floats(const float *p) { return _mm512_loadu_ps(p); }
    static void store(float *p, Floats v) { _mm512_storeu_ps(p, v); }
    static Floats all(float value) { return _mm512_set1_ps(value); }
    // a * b + c and c - a * b, rounded once.
    static Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
    static Floats subtract_product(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
    static Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
    static Ints multiply(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
    static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
    static Floats to_floats(Ints v) { return _mm512_cvtepi32_ps(v); }
    // One float16 for each lane.
    static Floats load_halves(const void *p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i *>(p)));
    }

    // --- for products ---

    // Sums of products of bytes: 4 unsigned of `codes` times 4 signed of a column's word in each
    // lane. They are exact, and never overflow 32 bits.
    using Sums = Ints;
    static constexpr bool has_dot_product = true;  // vpdpbusd
    static constexpr bool needs_unsigned_codes = true;
    static Sums no_sums() { return zero_ints(); }
    // GCC 12 loads the word by an instruction of its own; with the memory operand spelt out a
    // tile of 8 columns of Q4_K in the cache takes 6.0 instead of 10.1 ns for 64 bytes.
    static Sums add_products(Sums sums, Ints codes, const int32_t *words, int i) {
        asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(codes), "m"(words[i]));
        return sums;
    }
    // Signed weights are packed with 128 added, which the column's sum takes away again.
    static Sums add_signed_products(Sums sums, Ints codes, const int32_t *words, int i) {
        return add_products(sums, codes, words, i);
    }
    static Ints widen(Sums sums, Ints total) { return _mm512_add_epi32(total, sums); }

    // 2 signed 16-bit numbers of `pairs` times 2 of the word, added in each lane.
    static Ints add_pair_products(Ints sums, Ints pairs, const int32_t *word) {
        return _mm512_dpwssd_epi32(sums, pairs, all_words(word));
    }
    static Ints all_words(const int32_t *word) { return _mm512_set1_epi32(*word); }
    static Ints all_bytes(int value) { return _mm512_set1_epi8(static_cast<char>(value)); }
    static Ints bits(Ints a, Ints mask) { return _mm512_and_si512(a, mask); }
    static Ints either(Ints a, Ints b) { return _mm512_or_si512(a, b); }
    template <int n> static Ints shift_right(Ints a) { return _mm512_srli_epi16(a, n); }
    template <int n> static Ints shift_left(Ints a) { return _mm512_slli_epi16(a, n); }
    // Look up each byte (0 to 15) in a table of 16.
    static Ints look_up(const int8_t *table, Ints indices) {
        const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i *>(table));
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(entries), indices);
    }
    // Two bytes for each lane, as 16-bit numbers; and the first and second of each lane.
    static Ints load_byte_pairs(const void *p) {
        return _mm512_cvtepu8_epi16(_mm256_loadu_si256(static_cast<const __m256i *>(p)));
    }
    static Ints load_signed_pairs(const void *p) {
        return _mm512_cvtepi8_epi16(_mm256_loadu_si256(static_cast<const __m256i *>(p)));
    }
    static Ints first_of_pairs(Ints a) {
        return _mm512_srai_epi32(_mm512_slli_epi32(a, 16), 16);
    }
    static Ints second_of_pairs(Ints a) { return _mm512_srai_epi32(a, 16); }
    // One number for each lane.
    static Floats load_bfloats(const void *p) {
        const __m512i wide =
            _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i *>(p)));
        return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
    }
    // Powers of two from their biased exponents, one byte for each lane.
    static Floats load_exponents(const void *p) {
        const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i *>(p)));
        return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 23));
    }
    static Ints subtract_bytes(Ints a, Ints b) { return _mm512_sub_epi8(a, b); }
    // 16-bit numbers, two to a lane; the bytes 0, 2, 4, ... of `even` and 1, 3, 5, ... of `odd`.
    static Ints all_shorts(int value) { return _mm512_set1_epi16(static_cast<short>(value)); }
    static Ints multiply_shorts(Ints a, Ints b) { return _mm512_mullo_epi16(a, b); }
    static Ints alternate_bytes(Ints even, Ints odd) {
        return _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaaU, even, odd);
    }
    static void store_first(float *p, Floats v, int n) {
        _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1U << n) - 1), v);
    }

    // --- for attention ---

    using Mask = __mmask16;
    // Sums that a tile keeps in registers; the others are for operands.
    static constexpr int accumulators = 24;
    static Floats subtract(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
    static Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
    static Floats round(Floats a) { return _mm512_roundscale_ps(a, 0); }
    // The larger one; `b` where either is NaN.
    static Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
    // a * 2^n for whole n between -126 and 127.
    static Floats times_power(Floats a, Floats n) { return _mm512_scalef_ps(a, n); }
    // Lanes that are not equal (a NaN equals nothing); how many; `a` in these and 0 elsewhere.
    static Mask differ(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ); }
    static int count(Mask lanes_of) { return __builtin_popcount(lanes_of); }
    static Floats only(Mask lanes_of, Floats a) { return _mm512_maskz_mov_ps(lanes_of, a); }
    static Ints only(Mask lanes_of, Ints a) { return _mm512_maskz_mov_epi32(lanes_of, a); }
    // The largest and the sum of the lanes.
    static float largest_lane(Floats a) { return _mm512_reduce_max_ps(a); }
    static int largest_lane(Ints a) { return _mm512_reduce_max_epi32(a); }
    static int sum_of_lanes(Ints a) { return _mm512_reduce_add_epi32(a); }
    static float first_lane(Floats a) { return _mm512_cvtss_f32(a); }

    // 2 signed 16-bit numbers of each lane of `a` times those of `b`, added to the sums. (GCC 12
    // moves the sums of a tile to memory and back around the intrinsic: 1.5 instead of 2.9 a ns.)
    static Ints dot_shorts(Ints sums, Ints a, Ints b) {
        asm("vpdpwssd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
        return sums;
    }
    static Ints all_ints(int value) { return _mm512_set1_epi32(value); }
    static Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
    static Ints subtract(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
    static Ints larger(Ints a, Ints b) { return _mm512_max_epi32(a, b); }
    static Ints absolute(Ints a) { return _mm512_abs_epi32(a); }
    static Mask reach(Ints a, Ints b) { return _mm512_cmpge_epi32_mask(a, b); }
    template <int n> static Ints shift_lanes_left(Ints a) { return _mm512_slli_epi32(a, n); }
    template <int n> static Ints shift_lanes_right(Ints a) { return _mm512_srai_epi32(a, n); }
    template <int n> static Ints unsigned_lanes_right(Ints a) { return _mm512_srli_epi32(a, n); }
    // The nearest integer, and the bits of a float as an integer.
    static Ints to_ints(Floats a) { return _mm512_cvtps_epi32(a); }
    static Ints bits_of(Floats a) { return _mm512_castps_si512(a); }
    static void store(void *p, Ints a) { _mm512_storeu_si512(p, a); }
    // The low 16 bits of each lane, side by side.
    static void store_shorts(int16_t *p, Ints a) {
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_cvtepi32_epi16(a));
    }
    // The low 16 bits of `first` below those of `second` in each lane.
    static Ints pair(Ints first, Ints second) {
        return _mm512_mask_blend_epi16(0xaaaaaaaaU, first, _mm512_slli_epi32(second, 16));
    }
    // A bit for each lane that is not 0.
    static unsigned nonzero_lanes(Ints a) { return _mm512_test_epi32_mask(a, a); }
    // Whether two 16-bit numbers for each lane all equal `value`.
    static bool shorts_equal(const void *p, int16_t value) {
        return _mm512_cmpneq_epi16_mask(load(p), _mm512_set1_epi16(value)) == 0;
    }
    // The largest of |float16| among two for each lane, as bits of float16 (NaN is the largest).
    static Ints larger_halves(Ints halves, Ints largest) {
        const Ints size = _mm512_and_si512(halves, _mm512_set1_epi16(0x7fff));
        return _mm512_max_epu16(size, largest);
    }
    static int largest_short(Ints a) {
        const __m256i half =
            _mm256_max_epu16(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
        const __m128i quarter =
            _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
        // The only horizontal instruction of this kind finds the smallest one.
        const __m128i ones = _mm_set1_epi16(-1);
        return 0xffff ^ _mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(quarter, ones)), 0);
    }
    static float half(const void *p) {
        uint16_t bits_of_half;
        std::memcpy(&bits_of_half, p, 2);
        return _cvtsh_ss(bits_of_half);
    }
    // The lanes in double precision, in two halves.
    struct Doubles {
        __m512d low, high;
    };
    static Doubles to_doubles(Floats a) {
        return {_mm512_cvtps_pd(_mm512_castps512_ps256(a)),
                _mm512_cvtps_pd(_mm512_extractf32x8_ps(a, 1))};
    }
    static Doubles all_doubles(double value) { return {_mm512_set1_pd(value), _mm512_set1_pd(value)}; }
    // a * b + c, rounded once, downwards while a RoundingDown is alive.
    struct RoundingDown {
        ~RoundingDown() {}
    };
    static Doubles multiply_add_down(Doubles a, Doubles b, Doubles c) {
        constexpr int down = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
        return {_mm512_fmadd_round_pd(a.low, b.low, c.low, down),
                _mm512_fmadd_round_pd(a.high, b.high, c.high, down)};
    }
    static Doubles subtract(Doubles a, Doubles b) {
        return {_mm512_sub_pd(a.low, b.low), _mm512_sub_pd(a.high, b.high)};
    }
    static double sum(Doubles sums) { return _mm512_reduce_add_pd(_mm512_add_pd(sums.low, sums.high)); }

    // A signed byte for each lane.
    static Floats load_signed_bytes(const void *p) {
        return to_floats(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i *>(p))));
    }
    // Transpose a square of 16 vectors: first within quads of 4 x 4, then the quads.
    static void transpose(Floats (&v)[lanes]) {
        __m512 t[lanes];
#pragma GCC unroll 4
        for (int i = 0; i < 16; i += 4) {
            const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(v[i], v[i + 1]));
            const __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(v[i], v[i + 1]));
            const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(v[i + 2], v[i + 3]));
            const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(v[i + 2], v[i + 3]));
            t[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
            t[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
            t[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
            t[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const __m512 a = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x88);
            const __m512 b = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xdd);
            const __m512 c = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0x88);
            const __m512 d = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0xdd);
            v[i] = _mm512_shuffle_f32x4(a, c, 0x88);
            v[i + 4] = _mm512_shuffle_f32x4(b, d, 0x88);
            v[i + 8] = _mm512_shuffle_f32x4(a, c, 0xdd);
            v[i + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
        }
    }
    // (high * 2^16 + low + heavy * 2^12) * scale in double precision, where the sum is exact.
    static Floats join(Ints high, Ints low, Ints heavy, double scale) {
        const __m256 first = join_half(_mm512_castsi512_si256(high), _mm512_castsi512_si256(low),
                                       _mm512_castsi512_si256(heavy), scale);
        const __m256 second =
            join_half(_mm512_extracti64x4_epi64(high, 1), _mm512_extracti64x4_epi64(low, 1),
                      _mm512_extracti64x4_epi64(heavy, 1), scale);
        return _mm512_insertf32x8(_mm512_castps256_ps512(first), second, 1);
    }
    static __m256 join_half(__m256i high, __m256i low, __m256i heavy, double scale) {
        const __m512d sum = _mm512_fmadd_pd(_mm512_cvtepi32_pd(high), _mm512_set1_pd(65536),
                                            _mm512_cvtepi32_pd(low));
        const __m512d all =
            _mm512_fmadd_pd(_mm512_cvtepi32_pd(heavy), _mm512_set1_pd(4096), sum);
        return _mm512_cvtpd_ps(_mm512_mul_pd(all, _mm512_set1_pd(scale)));
    }
};
