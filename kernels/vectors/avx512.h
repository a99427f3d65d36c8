// The vector operations of AVX-512 (F, BW, DQ and VL). vectors/avx2.h explains the names.
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
    // How many vectors a loop may keep in registers as sums. The other registers are for operands.
    static constexpr int accumulators = 24;
    // From how many rows on attention takes half of the multiplications (see
    // attention/halved_products.h); 0 means never.
    static constexpr int least_halved_rows = 0;
    using Ints = __m512i;
    using Floats = __m512;
    // Which lanes a comparison holds for: a bit for each lane.
    using Mask = __mmask16;
    // The lanes of a vector of floats in double precision.
    struct Doubles {
        __m512d low, high;
    };

    // --- constants: the same number in all lanes ---

    static Floats zero() { return _mm512_setzero_ps(); }
    // Zeros that GCC does not recognise: to store known zeros, it calls memset, which takes 5% more
    // time for 96 columns of Q4_K with tiles.
    static Floats opaque_zero() {
        Floats zeros = zero();
        asm("" : "+v"(zeros));
        return zeros;
    }
    static Ints zero_ints() { return _mm512_setzero_si512(); }
    static Floats all(float value) { return _mm512_set1_ps(value); }
    static Ints all_ints(int value) { return _mm512_set1_epi32(value); }
    static Ints all_shorts(int value) { return _mm512_set1_epi16(static_cast<short>(value)); }
    static Ints all_bytes(int value) { return _mm512_set1_epi8(static_cast<char>(value)); }
    static Ints broadcast_word(const int32_t *word) { return _mm512_set1_epi32(*word); }

    // --- loads ---

    static Ints load(const void *p) { return _mm512_loadu_si512(p); }
    static Floats load_floats(const float *p) { return _mm512_loadu_ps(p); }
    static __m256i load_256_bits(const void *p) {
        return _mm256_loadu_si256(static_cast<const __m256i *>(p));
    }
    static __m128i load_128_bits(const void *p) {
        return _mm_loadu_si128(static_cast<const __m128i *>(p));
    }
    // A float16 for each lane, as floats.
    static Floats load_halves(const void *p) { return _mm512_cvtph_ps(load_256_bits(p)); }
    // A bfloat16 for each lane, as floats.
    static Floats load_bfloats(const void *p) {
        const __m512i wide = _mm512_cvtepu16_epi32(load_256_bits(p));
        return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
    }
    // A signed byte for each lane, as floats.
    static Floats load_signed_bytes(const void *p) {
        return to_floats(_mm512_cvtepi8_epi32(load_128_bits(p)));
    }
    // A byte for each lane: the biased exponent of a power of two.
    static Floats load_powers_of_two(const void *p) {
        const __m512i wide = _mm512_cvtepu8_epi32(load_128_bits(p));
        return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 23));
    }
    // Two bytes for each lane, widened to two shorts.
    static Ints load_byte_pairs(const void *p) { return _mm512_cvtepu8_epi16(load_256_bits(p)); }
    static Ints load_signed_pairs(const void *p) { return _mm512_cvtepi8_epi16(load_256_bits(p)); }
    // One float16.
    static float load_half(const void *p) {
        uint16_t bits;
        std::memcpy(&bits, p, 2);
        return _cvtsh_ss(bits);
    }

    // --- stores ---

    static void store(float *p, Floats v) { _mm512_storeu_ps(p, v); }
    static void store(void *p, Ints a) { _mm512_storeu_si512(p, a); }
    // The first n lanes.
    static void store_first(float *p, Floats v, int n) {
        _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1U << n) - 1), v);
    }
    // The low short of each lane, without gaps.
    static void store_shorts(int16_t *p, Ints a) {
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_cvtepi32_epi16(a));
    }

    // --- arithmetic of floats ---

    static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
    static Floats subtract(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
    static Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
    static Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
    // a * b + c and c - a * b, rounded once.
    static Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
    static Floats subtract_product(Floats a, Floats b, Floats c) {
        return _mm512_fnmadd_ps(a, b, c);
    }
    // The larger number; `b` if either is NaN.
    static Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }

    // --- arithmetic of ints ---

    static Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
    static Ints subtract(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
    static Ints multiply(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
    static Ints absolute(Ints a) { return _mm512_abs_epi32(a); }
    static Ints larger(Ints a, Ints b) { return _mm512_max_epi32(a, b); }
    // The larger of two numbers from 0 to 2^32 - 1.
    static Ints larger_unsigned(Ints a, Ints b) { return _mm512_max_epu32(a, b); }

    // --- bits ---

    static Ints bit_and(Ints a, Ints mask) { return _mm512_and_si512(a, mask); }
    static Ints bit_or(Ints a, Ints b) { return _mm512_or_si512(a, b); }
    static Ints bit_xor(Ints a, Ints b) { return _mm512_xor_si512(a, b); }
    template <int n> static Ints shift_ints_left(Ints a) { return _mm512_slli_epi32(a, n); }
    template <int n> static Ints shift_ints_right(Ints a) { return _mm512_srai_epi32(a, n); }
    template <int n> static Ints shift_ints_right_unsigned(Ints a) {
        return _mm512_srli_epi32(a, n);
    }
    template <int n> static Ints shift_shorts_left(Ints a) { return _mm512_slli_epi16(a, n); }
    // Shifts in zeros.
    template <int n> static Ints shift_shorts_right(Ints a) { return _mm512_srli_epi16(a, n); }

    // --- conversions ---

    static Floats to_floats(Ints v) { return _mm512_cvtepi32_ps(v); }
    static Ints round_to_ints(Floats a) { return _mm512_cvtps_epi32(a); }
    // The bits of a float as an integer.
    static Ints float_bits(Floats a) { return _mm512_castps_si512(a); }
    // The float that has these bits.
    static Floats floats_of_bits(Ints a) { return _mm512_castsi512_ps(a); }

    // --- comparisons ---

    // A NaN is not equal to anything.
    static Mask not_equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ); }
    // a >= b
    static Mask at_least(Ints a, Ints b) { return _mm512_cmpge_epi32_mask(a, b); }
    // `a` where the mask holds, 0 elsewhere.
    static Floats keep_where(Mask mask, Floats a) { return _mm512_maskz_mov_ps(mask, a); }
    static Ints keep_where(Mask mask, Ints a) { return _mm512_maskz_mov_epi32(mask, a); }
    // In how many lanes the mask holds.
    static int count_lanes(Mask mask) { return __builtin_popcount(mask); }
    // A bit for each lane that is not 0.
    static unsigned nonzero_lane_bits(Ints a) { return _mm512_test_epi32_mask(a, a); }
    // Whether a vector of shorts in memory has the same value everywhere.
    static bool all_shorts_equal(const void *p, int16_t value) {
        return _mm512_cmpneq_epi16_mask(load(p), _mm512_set1_epi16(value)) == 0;
    }

    // --- across lanes ---

    static float first_lane(Floats a) { return _mm512_cvtss_f32(a); }
    static float largest_lane(Floats a) { return _mm512_reduce_max_ps(a); }
    static int largest_lane(Ints a) { return _mm512_reduce_max_epi32(a); }
    static int sum_of_lanes(Ints a) { return _mm512_reduce_add_epi32(a); }
    // The largest unsigned short.
    static int largest_short(Ints a) {
        const __m256i half =
            _mm256_max_epu16(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
        const __m128i quarter =
            _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
        // The only horizontal instruction of this kind finds the smallest number: complement twice.
        const __m128i ones = _mm_set1_epi16(-1);
        return 0xffff ^ _mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(quarter, ones)), 0);
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

    // --- bytes: unpacking codes, and their products with activations ---

    // Replace each byte (0 to 15) by an entry of a table of 16.
    static Ints look_up(const int8_t *table, Ints indices) {
        const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i *>(table));
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(entries), indices);
    }
    static Ints subtract_bytes(Ints a, Ints b) { return _mm512_sub_epi8(a, b); }
    // Bytes 0, 2, 4, ... of `even` and bytes 1, 3, 5, ... of `odd`.
    static Ints alternate_bytes(Ints even, Ints odd) {
        return _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaaU, even, odd);
    }

    // Sums of products of bytes. vectors/avx2.h explains their limits.
    using Sums = Ints;
    static constexpr bool has_dot_product = false;
    static constexpr bool needs_unsigned_codes = false;
    static Sums start_sums(Ints) { return zero_ints(); }
    static Sums add_products(Sums sums, Ints codes, const int32_t *words, int i) {
        const Ints products = _mm512_maddubs_epi16(codes, broadcast_word(words + i));
        return in_order(add_shorts(sums, products));
    }
    // AVX-512 has no instruction that moves the sign of a code to the other factor, as AVX2 has. So
    // activations are negated where codes are negative.
    static Sums add_signed_products(Sums sums, Ints codes, const int32_t *words, int i) {
        const Ints word = broadcast_word(words + i);
        const __mmask64 is_negative = _mm512_movepi8_mask(codes);
        const Ints signed_word = _mm512_mask_sub_epi8(word, is_negative, zero_ints(), word);
        const Ints products = _mm512_maddubs_epi16(_mm512_abs_epi8(codes), signed_word);
        return in_order(add_shorts(sums, products));
    }
    static Ints new_total(Sums sums, Ints total) {
        return add(total, _mm512_madd_epi16(sums, all_shorts(1)));
    }
    static Ints add_scaled(Sums sums, Ints scale, Ints total) {
        return in_order(add(total, _mm512_madd_epi16(sums, pair_shorts(scale, scale))));
    }
    // See vectors/avx2.h.
    static Ints in_order(Ints sums) {
        asm("" : "+v"(sums));
        return sums;
    }

    // --- shorts ---

    // See vectors/avx512_vnni.h.
    static constexpr bool adds_pairs = false;
    // The low shorts of two vectors: `first` in the low half of each lane, `second` in the high
    // one.
    static Ints pair_shorts(Ints first, Ints second) {
        return _mm512_mask_blend_epi16(0xaaaaaaaaU, first, _mm512_slli_epi32(second, 16));
    }
    // The low or the high short of each lane, sign-extended.
    static Ints first_of_pairs(Ints a) {
        return _mm512_srai_epi32(_mm512_slli_epi32(a, 16), 16);
    }
    static Ints second_of_pairs(Ints a) { return _mm512_srai_epi32(a, 16); }
    static Ints add_shorts(Ints a, Ints b) { return _mm512_add_epi16(a, b); }
    // The shorts of lanes 1, 3, 5, ... in lanes 0, 2, 4, ..., and 0 in the others.
    static Ints odd_lanes_moved_down(Ints a) { return _mm512_srli_epi64(a, 32); }
    // The low 16 bits of each product.
    static Ints multiply_shorts(Ints a, Ints b) { return _mm512_mullo_epi16(a, b); }
    // Sums of products of pairs of shorts.
    using PairSums = Ints;
    static constexpr int pair_accumulators = accumulators;
    static PairSums zero_pair_sums() { return zero_ints(); }
    static Ints sum_of_pairs(PairSums sums) { return sums; }
    // sums + the dot product of two signed shorts in each lane.
    static Ints dot_shorts(Ints sums, Ints a, Ints b) {
        return add(sums, _mm512_madd_epi16(a, b));
    }
    static Ints add_pair_products(Ints sums, Ints pairs, const int32_t *word) {
        return dot_shorts(sums, pairs, broadcast_word(word));
    }
    // The larger of |float16| and `largest`, two for each lane, as the bits of a float16. (NaN is
    // larger than all numbers.)
    static Ints larger_half_magnitudes(Ints halves, Ints largest) {
        const Ints magnitudes = _mm512_and_si512(halves, _mm512_set1_epi16(0x7fff));
        return _mm512_max_epu16(magnitudes, largest);
    }

    // --- double precision ---

    static Doubles to_doubles(Floats a) {
        return {_mm512_cvtps_pd(_mm512_castps512_ps256(a)),
                _mm512_cvtps_pd(_mm512_extractf32x8_ps(a, 1))};
    }
    static Doubles all_doubles(double value) {
        return {_mm512_set1_pd(value), _mm512_set1_pd(value)};
    }
    // Nothing to set: the rounding mode is part of the instruction.
    struct RoundingDown {
        ~RoundingDown() {}
    };
    // a * b + c, rounded once, downwards.
    static Doubles multiply_add_down(Doubles a, Doubles b, Doubles c) {
        constexpr int down = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
        return {_mm512_fmadd_round_pd(a.low, b.low, c.low, down),
                _mm512_fmadd_round_pd(a.high, b.high, c.high, down)};
    }
    static Doubles subtract(Doubles a, Doubles b) {
        return {_mm512_sub_pd(a.low, b.low), _mm512_sub_pd(a.high, b.high)};
    }
    static double sum(Doubles sums) {
        return _mm512_reduce_add_pd(_mm512_add_pd(sums.low, sums.high));
    }
    // (high * 2^16 + low + heavy * 2^12) * scale: the sum is exact in double precision.
    static Floats join_sums(Ints high, Ints low, Ints heavy, double scale) {
        const __m256 first =
            join_half(_mm512_castsi512_si256(high), _mm512_castsi512_si256(low),
                      _mm512_castsi512_si256(heavy), scale);
        const __m256 second =
            join_half(_mm512_extracti64x4_epi64(high, 1), _mm512_extracti64x4_epi64(low, 1),
                      _mm512_extracti64x4_epi64(heavy, 1), scale);
        return _mm512_insertf32x8(_mm512_castps256_ps512(first), second, 1);
    }
    static __m256 join_half(__m256i high, __m256i low, __m256i heavy, double scale) {
        const __m512d high_and_low = _mm512_fmadd_pd(
            _mm512_cvtepi32_pd(high), _mm512_set1_pd(65536), _mm512_cvtepi32_pd(low));
        const __m512d all =
            _mm512_fmadd_pd(_mm512_cvtepi32_pd(heavy), _mm512_set1_pd(4096), high_and_low);
        return _mm512_cvtpd_ps(_mm512_mul_pd(all, _mm512_set1_pd(scale)));
    }
};
