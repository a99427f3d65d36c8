// The vector operations that the kernels are written in, for AVX2.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

struct Avx2 {
    static constexpr int lanes = 8;
    using Ints = __m256i;
    using Floats = __m256;

    static Ints load(const void *p) { return _mm256_loadu_si256(static_cast<const __m256i *>(p)); }
    static Ints zero_ints() { return _mm256_setzero_si256(); }
    static Floats zero() { return _mm256_setzero_ps(); }
    static Floats load_floats(const float *p) { return _mm256_loadu_ps(p); }
    static void store(float *p, Floats v) { _mm256_storeu_ps(p, v); }
    static Floats all(float value) { return _mm256_set1_ps(value); }
    // a * b + c and c - a * b, rounded once.
    static Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
    static Floats subtract_product(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }
    static Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
    static Ints multiply(Ints a, Ints b) { return _mm256_mullo_epi32(a, b); }
    static Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
    static Floats to_floats(Ints v) { return _mm256_cvtepi32_ps(v); }
    // One float16 for each lane.
    static Floats load_halves(const void *p) {
        return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i *>(p)));
    }

    // --- for products ---

    // Sums of products of bytes: 4 unsigned of `codes` times 4 signed of a column's word. In each
    // lane are two 16-bit sums, of two products each: `add_products` may be called so many times
    // before `widen` that 2 * 127 * the largest code * times < 32768.
    using Sums = Ints;
    static constexpr bool has_dot_product = false;
    static constexpr bool needs_unsigned_codes = false;
    static Sums no_sums() { return zero_ints(); }
    static Sums add_products(Sums sums, Ints codes, const int32_t *words, int i) {
        return in_order(_mm256_add_epi16(sums, _mm256_maddubs_epi16(codes, all_words(words + i))));
    }
    // Without this GCC computes all products of a sub-block before it adds them, and runs out of
    // registers: a tile of 4 columns of Q4_K then takes half as long again.
    static Ints in_order(Ints sums) {
        asm("" : "+x"(sums));
        return sums;
    }
    // The first factor of maddubs is unsigned: the sign of the weight goes to the other one.
    static Sums add_signed_products(Sums sums, Ints codes, const int32_t *words, int i) {
        const Ints signed_word = _mm256_sign_epi8(all_words(words + i), codes);
        return in_order(
            _mm256_add_epi16(sums, _mm256_maddubs_epi16(_mm256_abs_epi8(codes), signed_word)));
    }
    static Ints widen(Sums sums, Ints total) {
        return _mm256_add_epi32(total, _mm256_madd_epi16(sums, _mm256_set1_epi16(1)));
    }

    // 2 signed 16-bit numbers of `pairs` times 2 of the word, added in each lane.
    static Ints add_pair_products(Ints sums, Ints pairs, const int32_t *word) {
        return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, all_words(word)));
    }
    static Ints all_words(const int32_t *word) { return _mm256_set1_epi32(*word); }
    static Ints all_bytes(int value) { return _mm256_set1_epi8(static_cast<char>(value)); }
    static Ints bits(Ints a, Ints mask) { return _mm256_and_si256(a, mask); }
    static Ints either(Ints a, Ints b) { return _mm256_or_si256(a, b); }
    template <int n> static Ints shift_right(Ints a) { return _mm256_srli_epi16(a, n); }
    template <int n> static Ints shift_left(Ints a) { return _mm256_slli_epi16(a, n); }
    // Look up each byte (0 to 15) in a table of 16.
    static Ints look_up(const int8_t *table, Ints indices) {
        const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i *>(table));
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(entries), indices);
    }
    // Two bytes for each lane, as 16-bit numbers; and the first and second of each lane.
    static Ints load_byte_pairs(const void *p) {
        return _mm256_cvtepu8_epi16(_mm_loadu_si128(static_cast<const __m128i *>(p)));
    }
    static Ints load_signed_pairs(const void *p) {
        return _mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i *>(p)));
    }
    static Ints first_of_pairs(Ints a) {
        return _mm256_srai_epi32(_mm256_slli_epi32(a, 16), 16);
    }
    static Ints second_of_pairs(Ints a) { return _mm256_srai_epi32(a, 16); }
    // One number for each lane.
    static Floats load_bfloats(const void *p) {
        const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i *>(p)));
        return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
    }
    // Powers of two from their biased exponents, one byte for each lane.
    static Floats load_exponents(const void *p) {
        const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i *>(p)));
        return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 23));
    }
    static void store_first(float *p, Floats v, int n) {
        alignas(32) float lane[lanes];
        _mm256_store_ps(lane, v);
        std::memcpy(p, lane, sizeof(float) * n);
    }

    // --- for attention ---

    using Mask = __m256i;
    // Sums that a tile keeps in registers; the others are for operands.
    static constexpr int accumulators = 12;
    static Floats subtract(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
    static Floats divide(Floats a, Floats b) { return _mm256_div_ps(a, b); }
    static Floats round(Floats a) {
        return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    }
    // The larger one; `b` where either is NaN.
    static Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
    // a * 2^n for whole n between -126 and 127.
    static Floats times_power(Floats a, Floats n) {
        const Ints biased = _mm256_add_epi32(to_ints(n), all_ints(127));
        return multiply(a, _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)));
    }
    // Lanes that are not equal (a NaN equals nothing); how many; `a` in these and 0 elsewhere.
    static Mask differ(Floats a, Floats b) { return bits_of(_mm256_cmp_ps(a, b, _CMP_NEQ_UQ)); }
    static int count(Mask lanes_of) {
        return __builtin_popcount(_mm256_movemask_ps(_mm256_castsi256_ps(lanes_of)));
    }
    static Floats only(Mask lanes_of, Floats a) {
        return _mm256_and_ps(_mm256_castsi256_ps(lanes_of), a);
    }
    static Ints only(Mask lanes_of, Ints a) { return _mm256_and_si256(lanes_of, a); }
    // The largest and the sum of the lanes.
    static float largest_lane(Floats a) {
        const __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
        return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
    }
    static int largest_lane(Ints a) {
        const __m128i b = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
        const __m128i c = _mm_max_epi32(b, _mm_shuffle_epi32(b, 0x4e));
        return _mm_cvtsi128_si32(_mm_max_epi32(c, _mm_shuffle_epi32(c, 0xb1)));
    }
    static int sum_of_lanes(Ints a) {
        const __m128i b = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
        const __m128i c = _mm_add_epi32(b, _mm_shuffle_epi32(b, 0x4e));
        return _mm_cvtsi128_si32(_mm_add_epi32(c, _mm_shuffle_epi32(c, 0xb1)));
    }
    static float first_lane(Floats a) { return _mm256_cvtss_f32(a); }

    // 2 signed 16-bit numbers of each lane of `a` times those of `b`, added to the sums.
    static Ints dot_shorts(Ints sums, Ints a, Ints b) {
        return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
    }
    static Ints all_ints(int value) { return _mm256_set1_epi32(value); }
    static Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
    static Ints subtract(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
    static Ints larger(Ints a, Ints b) { return _mm256_max_epi32(a, b); }
    static Ints absolute(Ints a) { return _mm256_abs_epi32(a); }
    static Mask reach(Ints a, Ints b) { return _mm256_cmpgt_epi32(a, subtract(b, all_ints(1))); }
    template <int n> static Ints shift_lanes_left(Ints a) { return _mm256_slli_epi32(a, n); }
    template <int n> static Ints shift_lanes_right(Ints a) { return _mm256_srai_epi32(a, n); }
    template <int n> static Ints unsigned_lanes_right(Ints a) { return _mm256_srli_epi32(a, n); }
    // The nearest integer, and the bits of a float as an integer.
    static Ints to_ints(Floats a) { return _mm256_cvtps_epi32(a); }
    static Ints bits_of(Floats a) { return _mm256_castps_si256(a); }
    static void store(void *p, Ints a) { _mm256_storeu_si256(static_cast<__m256i *>(p), a); }
    // The low 16 bits of each lane, side by side.
    static void store_shorts(int16_t *p, Ints a) {
        const __m256i low = _mm256_and_si256(a, all_ints(0xffff));
        const __m128i packed =
            _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(p), packed);
    }
    // The low 16 bits of `first` below those of `second` in each lane.
    static Ints pair(Ints first, Ints second) {
        return _mm256_blend_epi16(first, _mm256_slli_epi32(second, 16), 0xaa);
    }
    // A bit for each lane that is not 0.
    static unsigned nonzero_lanes(Ints a) {
        const __m256i zero_lanes = _mm256_cmpeq_epi32(a, zero_ints());
        return 0xff ^ _mm256_movemask_ps(_mm256_castsi256_ps(zero_lanes));
    }
    // Whether two 16-bit numbers for each lane all equal `value`.
    static bool shorts_equal(const void *p, int16_t value) {
        return _mm256_movemask_epi8(_mm256_cmpeq_epi16(load(p), _mm256_set1_epi16(value))) == -1;
    }
    // The largest of |float16| among two for each lane, as bits of float16 (NaN is the largest).
    static Ints larger_halves(Ints halves, Ints largest) {
        const Ints size = _mm256_and_si256(halves, _mm256_set1_epi16(0x7fff));
        return _mm256_max_epu16(size, largest);
    }
    static int largest_short(Ints a) {
        const __m128i half =
            _mm_max_epu16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
        // The only horizontal instruction of this kind finds the smallest one.
        const __m128i ones = _mm_set1_epi16(-1);
        return 0xffff ^ _mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(half, ones)), 0);
    }
    static float half(const void *p) {
        uint16_t bits_of_half;
        std::memcpy(&bits_of_half, p, 2);
        return _cvtsh_ss(bits_of_half);
    }
    // The lanes in double precision, in two halves.
    struct Doubles {
        __m256d low, high;
    };
    static Doubles to_doubles(Floats a) {
        return {_mm256_cvtps_pd(_mm256_castps256_ps128(a)),
                _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1))};
    }
    static Doubles all_doubles(double value) { return {_mm256_set1_pd(value), _mm256_set1_pd(value)}; }
    // a * b + c, rounded once, downwards while a RoundingDown is alive.
    struct RoundingDown {
        const unsigned before = _mm_getcsr();
        RoundingDown() { _mm_setcsr((before & ~unsigned{_MM_ROUND_MASK}) | _MM_ROUND_DOWN); }
        ~RoundingDown() { _mm_setcsr(before); }
    };
    static Doubles multiply_add_down(Doubles a, Doubles b, Doubles c) {
        return {_mm256_fmadd_pd(a.low, b.low, c.low), _mm256_fmadd_pd(a.high, b.high, c.high)};
    }
    static Doubles subtract(Doubles a, Doubles b) {
        return {_mm256_sub_pd(a.low, b.low), _mm256_sub_pd(a.high, b.high)};
    }
    static double sum(Doubles sums) {
        double lanes_of[4];
        _mm256_storeu_pd(lanes_of, _mm256_add_pd(sums.low, sums.high));
        return lanes_of[0] + lanes_of[1] + lanes_of[2] + lanes_of[3];
    }

    // A signed byte for each lane.
    static Floats load_signed_bytes(const void *p) {
        return to_floats(_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i *>(p))));
    }
    // Transpose a square of 8 vectors: first within quads of 4 x 4, then the quads.
    static void transpose(Floats (&v)[lanes]) {
        __m256 t[lanes];
#pragma GCC unroll 2
        for (int i = 0; i < 8; i += 4) {
            const __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(v[i], v[i + 1]));
            const __m256d b = _mm256_castps_pd(_mm256_unpackhi_ps(v[i], v[i + 1]));
            const __m256d c = _mm256_castps_pd(_mm256_unpacklo_ps(v[i + 2], v[i + 3]));
            const __m256d d = _mm256_castps_pd(_mm256_unpackhi_ps(v[i + 2], v[i + 3]));
            t[i] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, c));
            t[i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, c));
            t[i + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(b, d));
            t[i + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(b, d));
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            v[i] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x20);
            v[i + 4] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x31);
        }
    }
    // (high * 2^16 + low + heavy * 2^12) * scale in double precision, where the sum is exact.
    static Floats join(Ints high, Ints low, Ints heavy, double scale) {
        const __m128 first = join_half(_mm256_castsi256_si128(high), _mm256_castsi256_si128(low),
                                       _mm256_castsi256_si128(heavy), scale);
        const __m128 second =
            join_half(_mm256_extracti128_si256(high, 1), _mm256_extracti128_si256(low, 1),
                      _mm256_extracti128_si256(heavy, 1), scale);
        return _mm256_insertf128_ps(_mm256_castps128_ps256(first), second, 1);
    }
    static __m128 join_half(__m128i high, __m128i low, __m128i heavy, double scale) {
        const __m256d sum = _mm256_fmadd_pd(_mm256_cvtepi32_pd(high), _mm256_set1_pd(65536),
                                            _mm256_cvtepi32_pd(low));
        const __m256d all =
            _mm256_fmadd_pd(_mm256_cvtepi32_pd(heavy), _mm256_set1_pd(4096), sum);
        return _mm256_cvtpd_ps(_mm256_mul_pd(all, _mm256_set1_pd(scale)));
    }
};
