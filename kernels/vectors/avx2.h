// The vector operations of AVX2 (with FMA and F16C).
//
// All kernels are templates over a vector type `V`: Avx2, AvxVnni, Avx512, Avx512Vnni, Avx512Amd or
// Neon. These types have the same operations by the same names, in the same order of sections.
// Nothing else in the library contains intrinsics, except the rounding of activations
// (products/activation_codes_*.h) and the tile registers of AMX (products/amx_instructions.h).
//
// Words used in names: an "int" is a 32-bit lane, a "short" one of its two 16-bit halves, a
// "half" a float16, a "word" 32 bits in memory that hold four bytes or two shorts.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

struct Avx2 {
    static constexpr int lanes = 8;
    // How many vectors a loop may keep in registers as sums. The other registers are for operands.
    static constexpr int accumulators = 12;
    // From how many rows on attention takes half of the multiplications (see
    // attention/halved_products.h); 0 means never.
    static constexpr int least_halved_rows = 0;
    using Ints = __m256i;
    using Floats = __m256;
    // Which lanes a comparison holds for: all bits of a lane are 1, or 0.
    using Mask = __m256i;
    // The lanes of a vector of floats in double precision.
    struct Doubles {
        __m256d low, high;
    };

    // --- constants: the same number in all lanes ---

    static Floats zero() { return _mm256_setzero_ps(); }
    static Ints zero_ints() { return _mm256_setzero_si256(); }
    static Floats all(float value) { return _mm256_set1_ps(value); }
    static Ints all_ints(int value) { return _mm256_set1_epi32(value); }
    static Ints all_bytes(int value) { return _mm256_set1_epi8(static_cast<char>(value)); }
    static Ints broadcast_word(const int32_t *word) { return _mm256_set1_epi32(*word); }

    // --- loads ---

    static Ints load(const void *p) { return _mm256_loadu_si256(static_cast<const __m256i *>(p)); }
    static Floats load_floats(const float *p) { return _mm256_loadu_ps(p); }
    static __m128i load_128_bits(const void *p) {
        return _mm_loadu_si128(static_cast<const __m128i *>(p));
    }
    static __m128i load_64_bits(const void *p) {
        return _mm_loadl_epi64(static_cast<const __m128i *>(p));
    }
    // A float16 for each lane, as floats.
    static Floats load_halves(const void *p) { return _mm256_cvtph_ps(load_128_bits(p)); }
    // A bfloat16 for each lane, as floats.
    static Floats load_bfloats(const void *p) {
        const __m256i wide = _mm256_cvtepu16_epi32(load_128_bits(p));
        return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
    }
    // A signed byte for each lane, as floats.
    static Floats load_signed_bytes(const void *p) {
        return to_floats(_mm256_cvtepi8_epi32(load_64_bits(p)));
    }
    // A byte for each lane: the biased exponent of a power of two.
    static Floats load_powers_of_two(const void *p) {
        const __m256i wide = _mm256_cvtepu8_epi32(load_64_bits(p));
        return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 23));
    }
    // Two bytes for each lane, widened to two shorts.
    static Ints load_byte_pairs(const void *p) { return _mm256_cvtepu8_epi16(load_128_bits(p)); }
    static Ints load_signed_pairs(const void *p) { return _mm256_cvtepi8_epi16(load_128_bits(p)); }
    // One float16.
    static float load_half(const void *p) {
        uint16_t bits;
        std::memcpy(&bits, p, 2);
        return _cvtsh_ss(bits);
    }

    // --- stores ---

    static void store(float *p, Floats v) { _mm256_storeu_ps(p, v); }
    static void store(void *p, Ints a) { _mm256_storeu_si256(static_cast<__m256i *>(p), a); }
    // The first n lanes.
    static void store_first(float *p, Floats v, int n) {
        alignas(32) float lane[lanes];
        _mm256_store_ps(lane, v);
        std::memcpy(p, lane, sizeof(float) * n);
    }
    // The low short of each lane, without gaps.
    static void store_shorts(int16_t *p, Ints a) {
        const __m256i low = _mm256_and_si256(a, all_ints(0xffff));
        const __m128i packed =
            _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(p), packed);
    }

    // --- arithmetic of floats ---

    static Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
    static Floats subtract(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
    static Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
    static Floats divide(Floats a, Floats b) { return _mm256_div_ps(a, b); }
    // a * b + c and c - a * b, rounded once.
    static Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
    static Floats subtract_product(Floats a, Floats b, Floats c) {
        return _mm256_fnmadd_ps(a, b, c);
    }
    // The larger number; `b` if either is NaN.
    static Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }

    // --- arithmetic of ints ---

    static Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
    static Ints subtract(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
    static Ints multiply(Ints a, Ints b) { return _mm256_mullo_epi32(a, b); }
    static Ints absolute(Ints a) { return _mm256_abs_epi32(a); }
    static Ints larger(Ints a, Ints b) { return _mm256_max_epi32(a, b); }
    // The larger of two numbers from 0 to 2^32 - 1.
    static Ints larger_unsigned(Ints a, Ints b) { return _mm256_max_epu32(a, b); }

    // --- bits ---

    static Ints bit_and(Ints a, Ints mask) { return _mm256_and_si256(a, mask); }
    static Ints bit_or(Ints a, Ints b) { return _mm256_or_si256(a, b); }
    static Ints bit_xor(Ints a, Ints b) { return _mm256_xor_si256(a, b); }
    template <int n> static Ints shift_ints_left(Ints a) { return _mm256_slli_epi32(a, n); }
    template <int n> static Ints shift_ints_right(Ints a) { return _mm256_srai_epi32(a, n); }
    template <int n> static Ints shift_ints_right_unsigned(Ints a) {
        return _mm256_srli_epi32(a, n);
    }
    template <int n> static Ints shift_shorts_left(Ints a) { return _mm256_slli_epi16(a, n); }
    // Shifts in zeros.
    template <int n> static Ints shift_shorts_right(Ints a) { return _mm256_srli_epi16(a, n); }

    // --- conversions ---

    static Floats to_floats(Ints v) { return _mm256_cvtepi32_ps(v); }
    static Ints round_to_ints(Floats a) { return _mm256_cvtps_epi32(a); }
    // The bits of a float as an integer.
    static Ints float_bits(Floats a) { return _mm256_castps_si256(a); }
    // The float that has these bits.
    static Floats floats_of_bits(Ints a) { return _mm256_castsi256_ps(a); }

    // --- comparisons ---

    // A NaN is not equal to anything.
    static Mask not_equal(Floats a, Floats b) {
        return float_bits(_mm256_cmp_ps(a, b, _CMP_NEQ_UQ));
    }
    // a >= b
    static Mask at_least(Ints a, Ints b) { return _mm256_cmpgt_epi32(a, subtract(b, all_ints(1))); }
    // `a` where the mask holds, 0 elsewhere.
    static Floats keep_where(Mask mask, Floats a) {
        return _mm256_and_ps(_mm256_castsi256_ps(mask), a);
    }
    static Ints keep_where(Mask mask, Ints a) { return _mm256_and_si256(mask, a); }
    // In how many lanes the mask holds.
    static int count_lanes(Mask mask) {
        return __builtin_popcount(_mm256_movemask_ps(_mm256_castsi256_ps(mask)));
    }
    // A bit for each lane that is not 0.
    static unsigned nonzero_lane_bits(Ints a) {
        const __m256i zero_lanes = _mm256_cmpeq_epi32(a, zero_ints());
        return 0xff ^ _mm256_movemask_ps(_mm256_castsi256_ps(zero_lanes));
    }
    // Whether a vector of shorts in memory has the same value everywhere.
    static bool all_shorts_equal(const void *p, int16_t value) {
        return _mm256_movemask_epi8(_mm256_cmpeq_epi16(load(p), _mm256_set1_epi16(value))) == -1;
    }

    // --- across lanes ---

    static float first_lane(Floats a) { return _mm256_cvtss_f32(a); }
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
    // The largest unsigned short.
    static int largest_short(Ints a) {
        const __m128i half =
            _mm_max_epu16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
        // The only horizontal instruction of this kind finds the smallest number: complement twice.
        const __m128i ones = _mm_set1_epi16(-1);
        return 0xffff ^ _mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(half, ones)), 0);
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

    // --- bytes: unpacking codes, and their products with activations ---

    // Replace each byte (0 to 15) by an entry of a table of 16.
    static Ints look_up(const int8_t *table, Ints indices) {
        const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i *>(table));
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(entries), indices);
    }

    // Sums of products of bytes: four codes of each lane times the four bytes of a word. Each lane
    // has two 16-bit sums of two products each. So `add_products` may be called only so many times
    // before `new_total` that 2 * 127 * largest code * times < 32768.
    using Sums = Ints;
    // Whether one instruction adds four products of bytes to a 32-bit sum.
    static constexpr bool has_dot_product = false;
    // Whether that instruction takes unsigned codes only.
    static constexpr bool needs_unsigned_codes = false;
    static Sums start_sums(Ints) { return zero_ints(); }
    // sums + products of unsigned codes with the signed bytes of words[i].
    static Sums add_products(Sums sums, Ints codes, const int32_t *words, int i) {
        const Ints products = _mm256_maddubs_epi16(codes, broadcast_word(words + i));
        return in_order(_mm256_add_epi16(sums, products));
    }
    // sums + products of signed codes. The first factor of maddubs must be unsigned: the sign of a
    // code moves to the other factor.
    static Sums add_signed_products(Sums sums, Ints codes, const int32_t *words, int i) {
        const Ints signed_word = _mm256_sign_epi8(broadcast_word(words + i), codes);
        const Ints products = _mm256_maddubs_epi16(_mm256_abs_epi8(codes), signed_word);
        return in_order(_mm256_add_epi16(sums, products));
    }
    // Without this barrier GCC computes all products of a sub-block before it adds them, and runs
    // out of registers: a tile of 4 columns of Q4_K then takes 1.5 times as long.
    static Ints in_order(Ints sums) {
        asm("" : "+x"(sums));
        return sums;
    }
    // The total with the products since `start_sums(total)`.
    static Ints new_total(Sums sums, Ints total) {
        return _mm256_add_epi32(total, _mm256_madd_epi16(sums, _mm256_set1_epi16(1)));
    }
    // total + scale * sums, where the scale is a short: what widens the sums also multiplies them.
    // 8 columns of Q4_K take 0.91 of the time that they take with a multiplication afterwards.
    static Ints add_scaled(Sums sums, Ints scale, Ints total) {
        const Ints scales = pair_shorts(scale, scale);
        return in_order(_mm256_add_epi32(total, _mm256_madd_epi16(sums, scales)));
    }

    // --- shorts ---

    // See vectors/avx512_vnni.h.
    static constexpr bool adds_pairs = false;
    // The low shorts of two vectors: `first` in the low half of each lane, `second` in the high
    // one.
    static Ints pair_shorts(Ints first, Ints second) {
        return _mm256_blend_epi16(first, _mm256_slli_epi32(second, 16), 0xaa);
    }
    // The low or the high short of each lane, sign-extended.
    static Ints first_of_pairs(Ints a) {
        return _mm256_srai_epi32(_mm256_slli_epi32(a, 16), 16);
    }
    static Ints second_of_pairs(Ints a) { return _mm256_srai_epi32(a, 16); }
    // Sums of products of pairs of shorts. (ARM adds the two of a pair only at the end.)
    using PairSums = Ints;
    static constexpr int pair_accumulators = accumulators;
    static PairSums zero_pair_sums() { return zero_ints(); }
    static Ints sum_of_pairs(PairSums sums) { return sums; }
    // sums + the dot product of two signed shorts in each lane.
    static Ints dot_shorts(Ints sums, Ints a, Ints b) {
        return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
    }
    static Ints add_pair_products(Ints sums, Ints pairs, const int32_t *word) {
        return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, broadcast_word(word)));
    }
    // The larger of |float16| and `largest`, two for each lane, as the bits of a float16. (NaN is
    // larger than all numbers.)
    static Ints larger_half_magnitudes(Ints halves, Ints largest) {
        const Ints magnitudes = _mm256_and_si256(halves, _mm256_set1_epi16(0x7fff));
        return _mm256_max_epu16(magnitudes, largest);
    }

    // --- double precision ---

    static Doubles to_doubles(Floats a) {
        return {_mm256_cvtps_pd(_mm256_castps256_ps128(a)),
                _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1))};
    }
    static Doubles all_doubles(double value) {
        return {_mm256_set1_pd(value), _mm256_set1_pd(value)};
    }
    // While an object of this type is alive, this thread rounds downwards.
    struct RoundingDown {
        const unsigned before = _mm_getcsr();
        RoundingDown() { _mm_setcsr((before & ~unsigned{_MM_ROUND_MASK}) | _MM_ROUND_DOWN); }
        ~RoundingDown() { _mm_setcsr(before); }
    };
    // a * b + c, rounded once. Needs a `RoundingDown`, to be rounded downwards.
    static Doubles multiply_add_down(Doubles a, Doubles b, Doubles c) {
        return {_mm256_fmadd_pd(a.low, b.low, c.low), _mm256_fmadd_pd(a.high, b.high, c.high)};
    }
    static Doubles subtract(Doubles a, Doubles b) {
        return {_mm256_sub_pd(a.low, b.low), _mm256_sub_pd(a.high, b.high)};
    }
    static double sum(Doubles sums) {
        double lane[4];
        _mm256_storeu_pd(lane, _mm256_add_pd(sums.low, sums.high));
        return lane[0] + lane[1] + lane[2] + lane[3];
    }
    // (high * 2^16 + low + heavy * 2^12) * scale: the sum is exact in double precision.
    static Floats join_sums(Ints high, Ints low, Ints heavy, double scale) {
        const __m128 first =
            join_half(_mm256_castsi256_si128(high), _mm256_castsi256_si128(low),
                      _mm256_castsi256_si128(heavy), scale);
        const __m128 second =
            join_half(_mm256_extracti128_si256(high, 1), _mm256_extracti128_si256(low, 1),
                      _mm256_extracti128_si256(heavy, 1), scale);
        return _mm256_insertf128_ps(_mm256_castps128_ps256(first), second, 1);
    }
    static __m128 join_half(__m128i high, __m128i low, __m128i heavy, double scale) {
        const __m256d high_and_low = _mm256_fmadd_pd(
            _mm256_cvtepi32_pd(high), _mm256_set1_pd(65536), _mm256_cvtepi32_pd(low));
        const __m256d all =
            _mm256_fmadd_pd(_mm256_cvtepi32_pd(heavy), _mm256_set1_pd(4096), high_and_low);
        return _mm256_cvtpd_ps(_mm256_mul_pd(all, _mm256_set1_pd(scale)));
    }
};
