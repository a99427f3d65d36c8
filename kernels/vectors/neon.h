// The vector operations of AArch64 with dot products of bytes (ARMv8.2). vectors/avx2.h explains
// the names. The kernels compute the same bits as with AVX2.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

struct Neon {
    static constexpr int lanes = 4;
    // How many vectors a loop may keep in registers as sums. The other registers are for operands.
    static constexpr int accumulators = 24;
    // From how many rows on attention takes half of the multiplications (see
    // attention/halved_products.h); 0 means never.
    static constexpr int least_halved_rows = 0;
    using Ints = int32x4_t;
    using Floats = float32x4_t;
    // Which lanes a comparison holds for: all bits of a lane are 1, or 0.
    using Mask = Ints;
    // The lanes of a vector of floats in double precision.
    struct Doubles {
        float64x2_t low, high;
    };

    // --- constants: the same number in all lanes ---

    static Floats zero() { return vdupq_n_f32(0); }
    static Ints zero_ints() { return vdupq_n_s32(0); }
    static Floats all(float value) { return vdupq_n_f32(value); }
    static Ints all_ints(int value) { return vdupq_n_s32(value); }
    static Ints all_bytes(int value) {
        return vreinterpretq_s32_s8(vdupq_n_s8(static_cast<int8_t>(value)));
    }
    static Ints broadcast_word(const int32_t *word) { return vld1q_dup_s32(word); }

    // --- loads ---

    static Ints load(const void *p) {
        return vreinterpretq_s32_u8(vld1q_u8(static_cast<const uint8_t *>(p)));
    }
    static Floats load_floats(const float *p) { return vld1q_f32(p); }
    static uint8x8_t load_8_bytes(const void *p) {
        return vld1_u8(static_cast<const uint8_t *>(p));
    }
    static uint8x8_t load_4_bytes(const void *p) {
        uint32_t four;
        std::memcpy(&four, p, 4);
        return vreinterpret_u8_u32(vdup_n_u32(four));
    }
    // A float16 for each lane, as floats.
    static Floats load_halves(const void *p) {
        return vcvt_f32_f16(vreinterpret_f16_u8(load_8_bytes(p)));
    }
    // A bfloat16 for each lane, as floats.
    static Floats load_bfloats(const void *p) {
        return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(load_8_bytes(p)), 16));
    }
    // A signed byte for each lane, as floats.
    static Floats load_signed_bytes(const void *p) {
        const int16x8_t wide = vmovl_s8(vreinterpret_s8_u8(load_4_bytes(p)));
        return to_floats(vmovl_s16(vget_low_s16(wide)));
    }
    // A byte for each lane: the biased exponent of a power of two.
    static Floats load_powers_of_two(const void *p) {
        const uint16x4_t wide = vget_low_u16(vmovl_u8(load_4_bytes(p)));
        return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(wide), 23));
    }
    // Two bytes for each lane, widened to two shorts.
    static Ints load_byte_pairs(const void *p) {
        return vreinterpretq_s32_u16(vmovl_u8(load_8_bytes(p)));
    }
    static Ints load_signed_pairs(const void *p) {
        return vreinterpretq_s32_s16(vmovl_s8(vld1_s8(static_cast<const int8_t *>(p))));
    }
    // One float16.
    static float load_half(const void *p) {
        __fp16 half;
        std::memcpy(&half, p, 2);
        return half;
    }

    // --- stores ---

    static void store(float *p, Floats v) { vst1q_f32(p, v); }
    static void store(void *p, Ints a) {
        vst1q_u8(static_cast<uint8_t *>(p), vreinterpretq_u8_s32(a));
    }
    // The first n lanes.
    static void store_first(float *p, Floats v, int n) {
        float lane[lanes];
        vst1q_f32(lane, v);
        std::memcpy(p, lane, sizeof(float) * n);
    }
    // The low short of each lane, without gaps.
    static void store_shorts(int16_t *p, Ints a) { vst1_s16(p, vmovn_s32(a)); }

    // --- arithmetic of floats ---

    static Floats add(Floats a, Floats b) { return vaddq_f32(a, b); }
    static Floats subtract(Floats a, Floats b) { return vsubq_f32(a, b); }
    static Floats multiply(Floats a, Floats b) { return vmulq_f32(a, b); }
    static Floats divide(Floats a, Floats b) { return vdivq_f32(a, b); }
    // a * b + c and c - a * b, rounded once.
    static Floats multiply_add(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
    static Floats subtract_product(Floats a, Floats b, Floats c) { return vfmsq_f32(c, a, b); }
    // The larger number; `b` if either is NaN. (vmaxq_f32 returns NaN.)
    static Floats larger(Floats a, Floats b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }

    // --- arithmetic of ints ---

    static Ints add(Ints a, Ints b) { return vaddq_s32(a, b); }
    static Ints subtract(Ints a, Ints b) { return vsubq_s32(a, b); }
    static Ints multiply(Ints a, Ints b) { return vmulq_s32(a, b); }
    static Ints absolute(Ints a) { return vabsq_s32(a); }
    static Ints larger(Ints a, Ints b) { return vmaxq_s32(a, b); }
    // The larger of two numbers from 0 to 2^32 - 1.
    static Ints larger_unsigned(Ints a, Ints b) {
        return vreinterpretq_s32_u32(
            vmaxq_u32(vreinterpretq_u32_s32(a), vreinterpretq_u32_s32(b)));
    }

    // --- bits ---

    static Ints bit_and(Ints a, Ints mask) { return vandq_s32(a, mask); }
    static Ints bit_or(Ints a, Ints b) { return vorrq_s32(a, b); }
    static Ints bit_xor(Ints a, Ints b) { return veorq_s32(a, b); }
    template <int n> static Ints shift_ints_left(Ints a) { return vshlq_n_s32(a, n); }
    template <int n> static Ints shift_ints_right(Ints a) { return vshrq_n_s32(a, n); }
    template <int n> static Ints shift_ints_right_unsigned(Ints a) {
        return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a), n));
    }
    template <int n> static Ints shift_shorts_left(Ints a) {
        return vreinterpretq_s32_u16(vshlq_n_u16(vreinterpretq_u16_s32(a), n));
    }
    // Shifts in zeros.
    template <int n> static Ints shift_shorts_right(Ints a) {
        return vreinterpretq_s32_u16(vshrq_n_u16(vreinterpretq_u16_s32(a), n));
    }

    // --- conversions ---

    static Floats to_floats(Ints v) { return vcvtq_f32_s32(v); }
    static Ints round_to_ints(Floats a) { return vcvtnq_s32_f32(a); }
    // The bits of a float as an integer.
    static Ints float_bits(Floats a) { return vreinterpretq_s32_f32(a); }
    // The float that has these bits.
    static Floats floats_of_bits(Ints a) { return vreinterpretq_f32_s32(a); }

    // --- comparisons ---

    // A NaN is not equal to anything.
    static Mask not_equal(Floats a, Floats b) {
        return vreinterpretq_s32_u32(vmvnq_u32(vceqq_f32(a, b)));
    }
    // a >= b
    static Mask at_least(Ints a, Ints b) { return vreinterpretq_s32_u32(vcgeq_s32(a, b)); }
    // `a` where the mask holds, 0 elsewhere.
    static Floats keep_where(Mask mask, Floats a) {
        return vreinterpretq_f32_s32(vandq_s32(mask, vreinterpretq_s32_f32(a)));
    }
    static Ints keep_where(Mask mask, Ints a) { return vandq_s32(mask, a); }
    // In how many lanes the mask holds.
    static int count_lanes(Mask mask) { return -vaddvq_s32(mask); }
    // A bit for each lane that is not 0.
    static unsigned nonzero_lane_bits(Ints a) {
        constexpr uint32_t lane_bits[lanes] = {1, 2, 4, 8};
        return vaddvq_u32(vandq_u32(vtstq_s32(a, a), vld1q_u32(lane_bits)));
    }
    // Whether a vector of shorts in memory has the same value everywhere.
    static bool all_shorts_equal(const void *p, int16_t value) {
        return vminvq_u16(vceqq_s16(vreinterpretq_s16_s32(load(p)), vdupq_n_s16(value))) != 0;
    }

    // --- across lanes ---

    static float first_lane(Floats a) { return vgetq_lane_f32(a, 0); }
    static float largest_lane(Floats a) { return vmaxvq_f32(a); }
    static int largest_lane(Ints a) { return vmaxvq_s32(a); }
    static int sum_of_lanes(Ints a) { return vaddvq_s32(a); }
    // The largest unsigned short.
    static int largest_short(Ints a) { return vmaxvq_u16(vreinterpretq_u16_s32(a)); }
    // Transpose a square of 4 vectors.
    static void transpose(Floats (&v)[lanes]) {
        const float32x4x2_t a = vtrnq_f32(v[0], v[1]);
        const float32x4x2_t b = vtrnq_f32(v[2], v[3]);
        v[0] = vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0]));
        v[1] = vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1]));
        v[2] = vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0]));
        v[3] = vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1]));
    }

    // --- bytes: unpacking codes, and their products with activations ---

    // Replace each byte (0 to 15) by an entry of a table of 16.
    static Ints look_up(const int8_t *table, Ints indices) {
        return vreinterpretq_s32_s8(vqtbl1q_s8(vld1q_s8(table), vreinterpretq_u8_s32(indices)));
    }

    // Sums of products of bytes: four signed codes of each lane times the four bytes of a word.
    // They are exact and do not overflow 32 bits.
    using Sums = Ints;
    static constexpr bool has_dot_product = true;  // sdot
    static constexpr bool needs_unsigned_codes = false;
    static Sums start_sums(Ints total) { return total; }
    // sums + products with the bytes of words[i]. One load brings four words, and the instruction
    // selects one of them: to load each word into all lanes would take as many instructions as the
    // products. (The words of a step are a multiple of four. Once loops are unrolled, `i` is a
    // constant.)
    static Sums add_products(Sums sums, Ints codes, const int32_t *words, int i) {
        const int8x16_t bytes = vreinterpretq_s8_s32(codes);
        const int8x16_t four_words = vreinterpretq_s8_s32(load(words + i / 4 * 4));
        switch (i % 4) {
            case 0: return vdotq_laneq_s32(sums, bytes, four_words, 0);
            case 1: return vdotq_laneq_s32(sums, bytes, four_words, 1);
            case 2: return vdotq_laneq_s32(sums, bytes, four_words, 2);
            default: return vdotq_laneq_s32(sums, bytes, four_words, 3);
        }
    }
    static Sums add_signed_products(Sums sums, Ints codes, const int32_t *words, int i) {
        return add_products(sums, codes, words, i);
    }
    // The total with the products since `start_sums(total)`.
    static Ints new_total(Sums sums, Ints) { return sums; }
    // total + scale * sums, where the scale is a short.
    static Ints add_scaled(Sums sums, Ints scale, Ints total) {
        return vmlaq_s32(total, sums, scale);
    }

    // --- shorts ---

    // See vectors/avx512_vnni.h.
    static constexpr bool adds_pairs = false;
    // The low shorts of two vectors: `first` in the low half of each lane, `second` in the high
    // one.
    static Ints pair_shorts(Ints first, Ints second) { return vsliq_n_s32(first, second, 16); }
    // The low or the high short of each lane, sign-extended.
    static Ints first_of_pairs(Ints a) { return vshrq_n_s32(vshlq_n_s32(a, 16), 16); }
    static Ints second_of_pairs(Ints a) { return vshrq_n_s32(a, 16); }
    // Sums of products of shorts, one for each short of a vector: `sum_of_pairs` adds the two of a
    // lane. (Adding them at once takes twice as many instructions.)
    struct PairSums {
        Ints low, high;
    };
    static constexpr int pair_accumulators = accumulators / 2;
    static PairSums zero_pair_sums() { return {zero_ints(), zero_ints()}; }
    static PairSums dot_shorts(PairSums sums, Ints a, Ints b) {
        const int16x8_t x = vreinterpretq_s16_s32(a);
        const int16x8_t y = vreinterpretq_s16_s32(b);
        return {vmlal_s16(sums.low, vget_low_s16(x), vget_low_s16(y)),
                vmlal_high_s16(sums.high, x, y)};
    }
    static Ints sum_of_pairs(PairSums sums) { return vpaddq_s32(sums.low, sums.high); }
    static Ints add_pair_products(Ints sums, Ints pairs, const int32_t *word) {
        const PairSums products = dot_shorts(zero_pair_sums(), pairs, broadcast_word(word));
        return vaddq_s32(sums, sum_of_pairs(products));
    }
    // The larger of |float16| and `largest`, two for each lane, as the bits of a float16. (NaN is
    // larger than all numbers.)
    static Ints larger_half_magnitudes(Ints halves, Ints largest) {
        const uint16x8_t magnitudes = vandq_u16(vreinterpretq_u16_s32(halves), vdupq_n_u16(0x7fff));
        return vreinterpretq_s32_u16(vmaxq_u16(magnitudes, vreinterpretq_u16_s32(largest)));
    }

    // --- double precision ---

    static Doubles to_doubles(Floats a) {
        return {vcvt_f64_f32(vget_low_f32(a)), vcvt_high_f64_f32(a)};
    }
    static Doubles all_doubles(double value) { return {vdupq_n_f64(value), vdupq_n_f64(value)}; }
    // While an object of this type is alive, this thread rounds downwards.
    class RoundingDown {
        uint64_t before;
        static void set(uint64_t control) {
            asm volatile("msr fpcr, %0" ::"r"(control) : "memory");
        }

      public:
        RoundingDown() {
            asm volatile("mrs %0, fpcr" : "=r"(before));
            constexpr uint64_t modes = uint64_t{3} << 22;
            constexpr uint64_t down = uint64_t{2} << 22;
            set((before & ~modes) | down);
        }
        ~RoundingDown() { set(before); }
    };
    // a * b + c, rounded once. Needs a `RoundingDown`, to be rounded downwards.
    static Doubles multiply_add_down(Doubles a, Doubles b, Doubles c) {
        return {vfmaq_f64(c.low, a.low, b.low), vfmaq_f64(c.high, a.high, b.high)};
    }
    static Doubles subtract(Doubles a, Doubles b) {
        return {vsubq_f64(a.low, b.low), vsubq_f64(a.high, b.high)};
    }
    static double sum(Doubles sums) { return vaddvq_f64(vaddq_f64(sums.low, sums.high)); }
    // (high * 2^16 + low + heavy * 2^12) * scale: the sum is exact in double precision.
    static Floats join_sums(Ints high, Ints low, Ints heavy, double scale) {
        return vcombine_f32(
            join_half(vget_low_s32(high), vget_low_s32(low), vget_low_s32(heavy), scale),
            join_half(vget_high_s32(high), vget_high_s32(low), vget_high_s32(heavy), scale));
    }
    static float32x2_t join_half(int32x2_t high, int32x2_t low, int32x2_t heavy, double scale) {
        const auto wide = [](int32x2_t a) { return vcvtq_f64_s64(vmovl_s32(a)); };
        const float64x2_t high_and_low = vfmaq_f64(wide(low), wide(high), vdupq_n_f64(65536));
        const float64x2_t all = vfmaq_f64(high_and_low, wide(heavy), vdupq_n_f64(4096));
        return vcvt_f32_f64(vmulq_f64(all, vdupq_n_f64(scale)));
    }
};
