// Times products: how much a further column costs. Not a test; build and run by hand:
//
//     g++ -O3 -std=c++17 -ffp-contract=off -fno-strict-aliasing -march=native
//         -Ikernels kernels/tests/products_bench.cpp -o products_bench -pthread
//     ./products_bench [q4_k] [1536]       one type, one number of inputs
//
// It multiplies 600 MB of packed weights, which fit in no cache, on two threads.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#ifdef __AVX512VNNI__
#include "vector_avx512.h"
using Vector = Avx512;
constexpr int columns = 16;
#else
#include "vector_avx2.h"
using Vector = Avx2;
constexpr int columns = 8;
#endif
#include "products.h"

using Kernels = Products<Vector, columns>;
constexpr const char *names[] = {"none", "q4_0", "q4_1", "q5_0", "q5_1",   "q8_0",   "q2_k",  "q3_k",
                                 "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs", "mxfp4", "f16",
                                 "bf16", "f32"};

template <class Work> double seconds(Work work) {
    const auto start = std::chrono::steady_clock::now();
    std::thread other(work, 1);
    work(0);
    other.join();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void bench(WeightType type, int64_t n_inputs) {
    const size_t group_bytes = Kernels::group_bytes(type, n_inputs);
    const int64_t n_groups = 600'000'000 / group_bytes;
    const size_t bytes = n_groups * group_bytes;
    auto *weights = static_cast<char *>(mmap(nullptr, bytes + 8192, PROT_READ | PROT_WRITE,
                                             MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    madvise(weights, bytes, MADV_HUGEPAGE);
    seconds([&](int t) {
        for (int64_t i = bytes / 2 * t; i < static_cast<int64_t>(bytes / 2 * (t + 1)); i++) {
            weights[i] = static_cast<char>((i * 2654435761U) >> 13 & 0x3b);
        }
    });
    std::vector<float> values(n_inputs);
    for (auto &v : values) v = static_cast<float>(rand()) / static_cast<float>(RAND_MAX) - 0.5f;
    std::vector<char> tile(Kernels::column_bytes(type, n_inputs) * columns + 64);
    std::vector<float> outputs(n_groups * Vector::lanes * columns);
    double one = 0;
    std::printf("%-7s %5ld inputs:", names[static_cast<int>(type)], static_cast<long>(n_inputs));
    for (int n : {1, 2, 4, 6, 8, 12, 16}) {
        if (n > columns) break;
        for (int c = 0; c < n; c++) {
            Kernels::prepare(type, values.data(), n_inputs, tile.data(), n, c);
        }
        std::vector<double> times;
        for (int repeat = 0; repeat < 7; repeat++) {
            times.push_back(seconds([&](int t) {
                for (int64_t g = n_groups * t / 2; g < n_groups * (t + 1) / 2; g++) {
                    Kernels::multiply(type, weights + g * group_bytes, tile.data(), n_inputs, n,
                                      Vector::lanes, outputs.data() + g * Vector::lanes,
                                      n_groups * Vector::lanes);
                }
            }));
        }
        const double best = *std::min_element(times.begin(), times.end());
        if (n == 1) {
            one = best;
            std::printf(" %5.1f GB/s ", bytes / one / 1e9);
        }
        std::printf(" %d: %.2f (%.0f)", n, best / one,
                    n_groups * Vector::lanes * n_inputs * n / best / 1e9);
        std::fflush(stdout);
    }
    std::printf("   (GMAC/s)\n");
    munmap(weights, bytes);
}

int main(int argc, char **argv) {
    const int64_t n_inputs = argc > 2 ? atoi(argv[2]) : 1536;
    for (int t = 1; t < static_cast<int>(WeightType::count); t++) {
        if (argc > 1 && std::strcmp(argv[1], names[t]) != 0) continue;
        bench(static_cast<WeightType>(t), n_inputs);
    }
}
