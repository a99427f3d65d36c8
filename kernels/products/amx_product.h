// Products of packed weights with many columns in the tile registers of AMX: for large batches and
// prompts.
//
// The formulas are those of block_product.h and super_block_product.h, and so are the bits: sums
// of integers are exact in both, and the same code processes them further. A tile of up to 16
// columns is multiplied with 64 weights of 16 rows at once, where VNNI multiplies one column with
// 4 weights. So what takes time is everything else: unpacking weights, and storing sums and
// loading them again. Therefore
//
//  - weights of K types are multiplied with their sub-scales while they are unpacked, so that 256
//    of them have one sum instead of 8 or 16. (With a sum for each sub-block, tiles were no
//    faster than VNNI.) Such a product has up to 15 bits: it is split into two bytes, which have
//    a sum each;
//  - weights are unpacked once for up to 96 columns.
//
// Nanoseconds for 256 weights of 16 rows and 16 columns, on a Xeon that has both (weights in the
// cache):
//
//                        Q4_K   Q6_K   Q8_0
//     VNNI                232    369    230
//     tiles, 16 columns   151    235    199
//     tiles, 96 columns   112    139    156
#pragma once

#include "vectors/avx512_vnni.h"  // first: it includes <immintrin.h> without GCC's false warnings

#include <type_traits>

#include "products/amx_tiles.h"
#include "products/product_table.h"

namespace {

constexpr int tile_columns = 16;
constexpr int most_columns = 6 * tile_columns;

// The sums of a tile of columns: [column][row of the weight matrix].
using TileSums = int32_t[tile_columns][16];

// n columns as the fewest tiles, all with the same number of columns. (The last one may
// read beyond the last column: its sums there are not used.)
struct EqualTiles {
    int n_columns;
    // How many tiles there are, and the columns of each.
    int count;
    int columns;

    explicit EqualTiles(int n_columns)
        : n_columns(n_columns), count((n_columns + tile_columns - 1) / tile_columns),
          columns((n_columns + count - 1) / count) {}
    int first(int tile) const { return tile * columns; }
    int end(int tile) const {
        return first(tile) + columns < n_columns ? first(tile) + columns : n_columns;
    }
};

// --- formats with sub-scales ---

// The codes of a block times their sub-scales, as bytes. There are three cases:
//  - the products fit into a byte (Q2_K);
//  - the sub-scale has 6 bits and is split into two parts of 3 bits, whose products fit into a
//    byte. Since nothing is carried from byte to byte, a 16-bit multiplication multiplies two
//    codes at once;
//  - the product is computed with 16 bits and split into two bytes.
template <class F>
struct ScaledCodes {
    using V = Avx512Vnni;
    using Layout = PackedLayout<F, V::lanes>;
    using Ints = V::Ints;
    static constexpr int largest_code = F::largest_code;
    static constexpr bool is_signed = F::sub_scales == SubScales::signed_with_offset;
    static constexpr bool one_part = !is_signed && largest_code * F::largest_sub_scale < 256;
    static constexpr bool parts_of_scale =
        !is_signed && !one_part && F::largest_sub_scale < 64 && largest_code * 7 < 256;
    static constexpr int parts = one_part ? 1 : 2;
    // total = sum of the first part + (sum of the second one << shift)
    static constexpr int shift = parts_of_scale ? 3 : 8;
    static constexpr bool second_is_signed = !parts_of_scale;

    // [part][word]
    alignas(64) uint8_t bytes[parts][64][64];

    // Unpack and scale the words of one sub-block. `scale` is the sub-scale, in both halves of each
    // lane.
    template <int first>
    void unpack_sub(const uint8_t *codes_at, int first_word, Ints scale) {
        const Ints low_scale = V::bit_and(scale, V::all_shorts(7));
        const Ints high_scale = V::template shift_shorts_right<3>(scale);
#pragma GCC unroll 16
        for (int w = 0; w < F::sub / 4; w++) {
            const Ints codes = Codes<V, F>::unpack(codes_at, first + w);
            uint8_t *to = bytes[0][first_word + first + w];
            uint8_t *to_second = bytes[parts - 1][first_word + first + w];
            if constexpr (one_part) {
                V::store(to, V::multiply_shorts(codes, scale));
            } else if constexpr (parts_of_scale) {
                V::store(to, V::multiply_shorts(codes, low_scale));
                V::store(to_second, V::multiply_shorts(codes, high_scale));
            } else {
                const Ints even_codes = V::bit_and(codes, V::all_shorts(255));
                const Ints odd_codes = V::template shift_shorts_right<8>(codes);
                const Ints even = V::multiply_shorts(even_codes, scale);
                const Ints odd = V::multiply_shorts(odd_codes, scale);
                V::store(to, V::alternate_bytes(even, V::template shift_shorts_left<8>(odd)));
                V::store(to_second,
                         V::alternate_bytes(V::template shift_shorts_right<8>(even), odd));
            }
        }
    }

    void unpack(const uint8_t *block) {
        for (int step = 0; step < Layout::n_steps; step++) {
            const uint8_t *codes = block + Layout::codes_at + step * Layout::step_bytes;
            const Ints firsts = SuperBlockScales<V, F>::sub_scales(block, step);
            const Ints seconds = V::template shift_ints_right_unsigned<16>(firsts);
            unpack_sub<0>(codes, step * Layout::words, V::pair_shorts(firsts, firsts));
            unpack_sub<F::sub / 4>(codes, step * Layout::words, V::pair_shorts(seconds, seconds));
        }
    }

    // Multiply with `tiles` (1 or 2) tiles of columns, the second one `stride` words after the
    // first.
    template <int tiles>
    void multiply(const int32_t *words, size_t stride, TileSums (*sums)[parts]) const {
        // Registers of sums: 0 and 1 for the parts of the first tile, 2 and 3 for the second one.
        zero_tile<0>();
        if constexpr (parts == 2) zero_tile<1>();
        if constexpr (tiles == 2) zero_tile<2>();
        if constexpr (tiles == 2 && parts == 2) zero_tile<3>();
        for (int w = 0; w < 64; w += 16) {
            load_tile<first_columns>(words + w, 256);
            load_tile<first_weights>(bytes[0][w], 64);
            multiply_tiles<0, first_columns, first_weights>();
            if constexpr (parts == 2) {
                load_tile<first_weights + 1>(bytes[1][w], 64);
                multiply_tiles<1, first_columns, first_weights + 1, second_is_signed>();
            }
            if constexpr (tiles == 2) {
                load_tile<first_columns + 1>(words + stride + w, 256);
                multiply_tiles<2, first_columns + 1, first_weights>();
                if constexpr (parts == 2) {
                    multiply_tiles<3, first_columns + 1, first_weights + 1, second_is_signed>();
                }
            }
        }
        store_tile<0>(sums[0][0], 64);
        if constexpr (parts == 2) store_tile<1>(sums[0][1], 64);
        if constexpr (tiles == 2) store_tile<2>(sums[1][0], 64);
        if constexpr (tiles == 2 && parts == 2) store_tile<3>(sums[1][1], 64);
    }

    static Ints total(const TileSums (&sums)[parts], int column) {
        const Ints first = V::load(sums[0][column]);
        if constexpr (parts == 1) return first;
        const Ints second = V::load(sums[1][column]);
        return V::add(first, V::template shift_ints_left<shift>(second));
    }
};

// The product of a group of rows with up to 96 columns, for formats with 256 weights to a block.
template <class F>
struct SuperBlockTiles {
    using V = Avx512Vnni;
    using Layout = PackedLayout<F, V::lanes>;
    using Words = SuperBlockWords;
    using Scaled = ScaledCodes<F>;
    using Ints = V::Ints;
    using Floats = V::Floats;
    // Words of weights that one instruction multiplies.
    static constexpr int words_of_tile = 16;

    static void run(const uint8_t *block, const int32_t *words, int64_t n_inputs,
                    const EqualTiles &tiles, float (*outputs)[16]) {
        Scaled scaled;
        TileSums sums[2][Scaled::parts];
        for (int64_t i = 0; i < n_inputs; i += 256, block += Layout::bytes) {
            for (int at = 0; at < Layout::codes_at; at += 64) prefetch_weights(block + at);
            scaled.unpack(block);
            const SuperBlockScales<V, F> scales(block);
            for (int t = 0; t < tiles.count; t += 2) {
                const int32_t *first = words + tiles.first(t) * 64;
                const int n_tiles = t + 1 < tiles.count ? 2 : 1;
                if (n_tiles == 2) {
                    scaled.template multiply<2>(first, tiles.columns * 64, sums);
                } else {
                    scaled.template multiply<1>(first, 0, sums);
                }
                for (int j = 0; j < n_tiles; j++) {
                    for (int n = tiles.first(t + j); n < tiles.end(t + j); n++) {
                        const Ints total = Scaled::total(sums[j], n - tiles.first(t + j));
                        const Floats output = V::load_floats(outputs[n]);
                        V::store(outputs[n], scales.add(V::to_floats(total), words,
                                                        tiles.n_columns, n, output));
                    }
                }
            }
            words += Words::count * tiles.n_columns;
        }
    }
};

// --- formats with one scale for 32 weights ---

// The product of a group of rows with up to 96 columns.
template <class F>
struct BlockTiles {
    using V = Avx512Vnni;
    using Layout = PackedLayout<F, V::lanes>;
    using Words = BlockWords;
    using Ints = V::Ints;
    using Floats = V::Floats;
    // Words of weights that one instruction multiplies.
    static constexpr int words_of_tile = 8;
    // How many blocks are multiplied together: the sums of each have a register.
    static constexpr int at_once = 4;

    // Tiles can multiply signed codes too. So an offset is subtracted here, once for all columns,
    // instead of from each column's sum.
    static constexpr bool is_signed = BlockScales<V, F>::has_offset;
    static constexpr int offset = F::offset == Offset::eight     ? 8
                                  : F::offset == Offset::sixteen ? 16
                                                                 : 128;

    static void unpack(const uint8_t *packed, uint8_t (&codes)[words_of_tile][64]) {
#pragma GCC unroll 8
        for (int w = 0; w < words_of_tile; w++) {
            const Ints word = Codes<V, F>::unpack(packed, w);
            V::store(codes[w], is_signed ? V::subtract_bytes(word, V::all_bytes(offset)) : word);
        }
    }

    // The sums of block i of those that are multiplied together, for one tile of columns.
    template <int i>
    static void multiply(const uint8_t (&codes)[words_of_tile][64], const int32_t *words,
                         TileSums &sums) {
        zero_tile<i>();
        load_tile<first_weights + i % 2>(codes, 64);
        load_tile<first_columns + i % 2>(words, 32);
        multiply_tiles<i, first_columns + i % 2, first_weights + i % 2, is_signed>();
        store_tile<i>(sums, 64);
    }

    // outputs += the products of `count` blocks.
    template <int count>
    static void add(const uint8_t *block, const int32_t *words, const EqualTiles &tiles,
                    float (*outputs)[16]) {
        alignas(64) uint8_t codes[count][words_of_tile][64];
        BlockScales<V, F> scales[count];
        for (int i = 0; i < count; i++, block += Layout::bytes) {
            for (int at = 0; at < Layout::codes_at; at += 64) prefetch_weights(block + at);
            unpack(block + Layout::codes_at, codes[i]);
            scales[i] = BlockScales<V, F>(block);
        }
        const int block_words = Words::count * tiles.n_columns;
        for (int t = 0; t < tiles.count; t++) {
            TileSums sums[count];
            const int32_t *first = words + tiles.first(t) * words_of_tile;
            multiply<0>(codes[0], first, sums[0]);
            if constexpr (count > 1) multiply<1>(codes[1], first + block_words, sums[1]);
            if constexpr (count > 2) multiply<2>(codes[2], first + 2 * block_words, sums[2]);
            if constexpr (count > 3) multiply<3>(codes[3], first + 3 * block_words, sums[3]);
            for (int n = tiles.first(t); n < tiles.end(t); n++) {
                Floats output = V::load_floats(outputs[n]);
#pragma GCC unroll 4
                for (int i = 0; i < count; i++) {
                    const Ints total = V::load(sums[i][n - tiles.first(t)]);
                    output = scales[i].add(total, words + i * block_words, tiles.n_columns, n,
                                           output);
                }
                V::store(outputs[n], output);
            }
        }
    }

    static void run(const uint8_t *block, const int32_t *words, int64_t n_inputs,
                    const EqualTiles &tiles, float (*outputs)[16]) {
        int64_t left = n_inputs / 32;
        for (; left >= at_once; left -= at_once) {
            add<at_once>(block, words, tiles, outputs);
            block += at_once * Layout::bytes;
            words += at_once * Words::count * tiles.n_columns;
        }
        for (; left > 0; left--) {
            add<1>(block, words, tiles, outputs);
            block += Layout::bytes;
            words += Words::count * tiles.n_columns;
        }
    }
};

// --- the functions of an InstructionSet ---

// For quantised weights and numbers of columns with which tiles are faster than VNNI.
struct AmxProducts {
    template <class F>
    using Product =
        std::conditional_t<F::weights == 256, SuperBlockTiles<F>, BlockTiles<F>>;

    // Fewer columns are faster with VNNI, which unpacks anew for every 12 columns but is better
    // hidden by the reading of weights: 12 columns of a 1.5B model in Q4_K_M take 86 ms, and took
    // 95 with tiles.
    template <class F> static constexpr int least_columns() {
        if (F::weights == 32) return F::has_min ? 24 : 13;
        return ScaledCodes<F>::one_part ? 10 : 13;
    }

    template <class Weights> static bool takes(Weights, int64_t n_columns) {
        if constexpr (Weights::is_quantized) {
            return n_columns >= least_columns<typename Weights::Format>();
        }
        return false;
    }
    static bool takes(WeightType type, int64_t n_columns) {
        return with_weights<Avx512Vnni>(
            type, [=](auto weights) { return takes(weights, n_columns); });
    }

    static void prepare(WeightType type, const float *values, int64_t n_inputs, void *tile,
                        int n_columns, int column) {
        with_weights<Avx512Vnni>(type, [=](auto weights) {
            if constexpr (weights.is_quantized) {
                weights.prepare(values, n_inputs, static_cast<int32_t *>(tile), n_columns, column,
                                /*for_amx=*/true);
            }
        });
    }

    static void multiply(WeightType type, const void *group, const void *tile, int64_t n_inputs,
                         int n_columns, int n_rows, float *outputs, size_t output_stride,
                         TileState &tile_state) {
        with_weights<Avx512Vnni>(type, [&](auto weights) {
            if constexpr (weights.is_quantized) {
                using Tiles = Product<typename decltype(weights)::Format>;
                const EqualTiles tiles(n_columns);
                tile_state.use(tiles.columns, Tiles::words_of_tile);
                float results[most_columns][16];
                const auto zero = Avx512Vnni::opaque_zero();
                for (int n = 0; n < n_columns; n++) Avx512Vnni::store(results[n], zero);
                Tiles::run(static_cast<const uint8_t *>(group), static_cast<const int32_t *>(tile),
                           n_inputs, tiles, results);
                for (int n = 0; n < n_columns; n++) {
                    Avx512Vnni::store_first(outputs + n * output_stride,
                                            Avx512Vnni::load_floats(results[n]), n_rows);
                }
            }
        });
    }
};

}  // namespace
