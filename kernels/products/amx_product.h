// Products of packed weights with many columns by tiles (AMX), for large batches and prompts.
//
// The formulas are those of product.h, and so are the bits: the sums of whole numbers are exact in
// both, and what is done with them is the same code. A tile of up to 16 columns is multiplied with
// 64 weights of 16 rows at once, where VNNI multiplies one column with 4. So what takes the time is
// everything else: to unpack weights, and to store the sums and load them again. Hence
//
//  - weights of K types are multiplied with their sub-scales while they are unpacked, so that 256 of
//    them have one sum and not 8 or 16 (with a sum for each sub-block, tiles were no quicker than
//    VNNI). Such a product has up to 15 bits: it becomes two bytes, which have a sum each;
//  - weights are unpacked once for up to 96 columns.
//
// Nanoseconds for 256 weights of 16 rows and 16 columns, of a Xeon that has both (weights in cache):
//
//                        Q4_K   Q6_K   Q8_0
//     VNNI                232    369    230
//     tiles, 16 columns   151    235    199
//     tiles, 96 columns   112    139    156
#pragma once

#include "vectors/avx512.h"  // before the others: it includes <immintrin.h> without GCC's false warnings

#include <type_traits>

#include "products/packed_product.h"
#include "products/product_table.h"
#include "products/amx_tiles.h"

namespace {

constexpr int tile_columns = 16;
constexpr int most_columns = 6 * tile_columns;

// The sums of a tile of columns: [column][row of the weight matrix].
using TileSums = int32_t[tile_columns][16];

// n columns as the fewest tiles, all of which take as many columns. (The last one may reach into
// what follows the last column: nobody looks at these sums.)
struct ColumnTiles {
    explicit ColumnTiles(int n_columns)
        : n_columns(n_columns), count((n_columns + tile_columns - 1) / tile_columns),
          columns((n_columns + count - 1) / count) {}
    int first(int tile) const { return tile * columns; }
    int end(int tile) const {
        return first(tile) + columns < n_columns ? first(tile) + columns : n_columns;
    }
    int n_columns, count, columns;
};

// --- formats with sub-scales ---

// Codes times sub-scales, as bytes. A format has one of three ways:
//  - the products fit a byte (Q2_K);
//  - the sub-scale has 6 bits, and is cut in two parts of 3 bits, whose products fit a byte. As
//    nothing is carried from byte to byte, a 16-bit multiplication multiplies two codes at once;
//  - the product is computed with 16 bits, and cut in bytes.
template <class F>
struct ScaledCodes {
    using V = Avx512;
    using L = Layout<F, V::lanes>;
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

    // Words of one sub-block; `scale` is the sub-scale, in both halves of each lane.
    template <int first>
    void unpack_sub(const uint8_t *codes_at, int first_word, Ints scale) {
        const Ints low = V::bits(scale, V::all_shorts(7)), high = V::template shift_right<3>(scale);
#pragma GCC unroll 16
        for (int w = 0; w < F::sub / 4; w++) {
            const Ints codes = Codes<V, F>::unpack(codes_at, first + w);
            uint8_t *to = bytes[0][first_word + first + w];
            uint8_t *to_second = bytes[parts - 1][first_word + first + w];
            if constexpr (one_part) {
                V::store(to, V::multiply_shorts(codes, scale));
            } else if constexpr (parts_of_scale) {
                V::store(to, V::multiply_shorts(codes, low));
                V::store(to_second, V::multiply_shorts(codes, high));
            } else {
                const Ints even = V::multiply_shorts(V::bits(codes, V::all_shorts(255)), scale);
                const Ints odd = V::multiply_shorts(V::template shift_right<8>(codes), scale);
                V::store(to, V::alternate_bytes(even, V::template shift_left<8>(odd)));
                V::store(to_second, V::alternate_bytes(V::template shift_right<8>(even), odd));
            }
        }
    }

    void unpack(const uint8_t *block) {
        for (int step = 0; step < L::n_steps; step++) {
            const uint8_t *codes = block + L::codes_at + step * L::step_bytes;
            const Ints pairs = SuperBlockScales<V, F>::sub_scales(block, step);
            const Ints seconds = V::template unsigned_lanes_right<16>(pairs);
            unpack_sub<0>(codes, step * L::words, V::pair(pairs, pairs));
            unpack_sub<F::sub / 4>(codes, step * L::words, V::pair(seconds, seconds));
        }
    }

    // Sums of `tiles` (1 or 2) tiles of columns, the second one `apart` words further on.
    template <int tiles>
    void multiply(const int32_t *words, size_t apart, TileSums (*sums)[parts]) const {
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
                load_tile<first_columns + 1>(words + apart + w, 256);
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
        return V::add(first, V::template shift_lanes_left<shift>(V::load(sums[1][column])));
    }
};

template <class F>
struct SuperBlockTiles {
    using V = Avx512;
    using L = Layout<F, V::lanes>;
    using W = SuperBlockWords;
    using Scaled = ScaledCodes<F>;
    using Ints = V::Ints;
    using Floats = V::Floats;
    static constexpr int words_of_tile = 16;

    static void run(const uint8_t *block, const int32_t *words, int64_t n_inputs,
                    const ColumnTiles &tiles, float (*outputs)[16]) {
        Scaled scaled;
        TileSums sums[2][Scaled::parts];
        for (int64_t i = 0; i < n_inputs; i += 256, block += L::bytes) {
            for (int at = 0; at < L::codes_at; at += 64) prefetch(block + at);
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
                        V::store(outputs[n],
                                 scales.add(V::to_floats(total), words, tiles.n_columns, n,
                                            V::load_floats(outputs[n])));
                    }
                }
            }
            words += W::count * tiles.n_columns;
        }
    }
};

// --- formats with one scale for 32 weights ---

template <class F>
struct BlockTiles {
    using V = Avx512;
    using L = Layout<F, V::lanes>;
    using W = BlockWords;
    using Ints = V::Ints;
    using Floats = V::Floats;
    static constexpr int words_of_tile = 8;
    static constexpr int at_once = 4;  // blocks, whose sums have a register each

    // Tiles multiply signed codes as well: so what a code has too much is taken away here, once for
    // all columns, and not from each column's sum.
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
    static void add(const uint8_t *block, const int32_t *words, const ColumnTiles &tiles,
                    float (*outputs)[16]) {
        alignas(64) uint8_t codes[count][words_of_tile][64];
        BlockScales<V, F> scales[count];
        for (int i = 0; i < count; i++, block += L::bytes) {
            for (int at = 0; at < L::codes_at; at += 64) prefetch(block + at);
            unpack(block + L::codes_at, codes[i]);
            scales[i] = BlockScales<V, F>(block);
        }
        const int block_words = W::count * tiles.n_columns;
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
                    output = scales[i].add(V::load(sums[i][n - tiles.first(t)]),
                                           words + i * block_words, tiles.n_columns, n, output);
                }
                V::store(outputs[n], output);
            }
        }
    }

    static void run(const uint8_t *block, const int32_t *words, int64_t n_inputs,
                    const ColumnTiles &tiles, float (*outputs)[16]) {
        int64_t left = n_inputs / 32;
        for (; left >= at_once; left -= at_once) {
            add<at_once>(block, words, tiles, outputs);
            block += at_once * L::bytes;
            words += at_once * W::count * tiles.n_columns;
        }
        for (; left > 0; left--, block += L::bytes, words += W::count * tiles.n_columns) {
            add<1>(block, words, tiles, outputs);
        }
    }
};

// The functions of an InstructionSet, for the columns that tiles are quicker with.
struct TileProducts {
    template <class F>
    using Kernel = std::conditional_t<F::weights == 256, SuperBlockTiles<F>, BlockTiles<F>>;

    // Fewer columns are quicker by VNNI, which unpacks anew for every 12 and hides behind the reading of
    // weights better: 12 columns of a 1.5B model in Q4_K_M, 86 ms, took 95 by tiles.
    template <class F> static constexpr int least_columns() {
        if (F::weights == 32) return F::has_min ? 24 : 13;
        return ScaledCodes<F>::one_part ? 10 : 13;
    }

    template <class K> static bool takes(K, int64_t n_columns) {
        if constexpr (K::is_quantized) return n_columns >= least_columns<typename K::Format>();
        return false;
    }
    static bool takes(WeightType type, int64_t n_columns) {
        return with_kernel<Avx512>(type, [=](auto kernel) { return takes(kernel, n_columns); });
    }

    static void prepare(WeightType type, const float *values, int64_t n_inputs, void *tile,
                        int n_columns, int column) {
        with_kernel<Avx512>(type, [=](auto kernel) {
            if constexpr (kernel.is_quantized) {
                kernel.prepare(values, n_inputs, static_cast<int32_t *>(tile), n_columns, column,
                               true);
            }
        });
    }

    static void multiply(WeightType type, const void *group, const void *tile, int64_t n_inputs,
                         int n_columns, int n_rows, float *outputs, size_t output_stride,
                         ThreadTiles &thread_tiles) {
        with_kernel<Avx512>(type, [&](auto kernel) {
            if constexpr (kernel.is_quantized) {
                using Tiles = Kernel<typename decltype(kernel)::Format>;
                const ColumnTiles tiles(n_columns);
                thread_tiles.use(tiles.columns, Tiles::words_of_tile);
                float results[most_columns][16];
                auto zero = Avx512::zero();
                asm("" : "+v"(zero));  // or GCC calls memset: 5 % more for 96 columns of Q4_K
                for (int n = 0; n < n_columns; n++) Avx512::store(results[n], zero);
                Tiles::run(static_cast<const uint8_t *>(group), static_cast<const int32_t *>(tile),
                           n_inputs, tiles, results);
                for (int n = 0; n < n_columns; n++) {
                    Avx512::store_first(outputs + n * output_stride,
                                        Avx512::load_floats(results[n]), n_rows);
                }
            }
        });
    }
};

}  // namespace
