// Checks packed/weight_stream.h without ggml: the weights have the right bytes at any moment, while
// several threads use matrices in different orders, so that one drops what another one needs.
//
//   cd kernels
//   g++ -O1 -std=c++17 -pthread -I. tests/stream_test.cpp packed/weight_stream.cpp -o stream_test
//   SPECGEN_KERNELS_READ_DELAY_MS=1 ./stream_test FILE
//
// It writes a file of 100 MB. With `--without-readers`, no thread of the stream can be started.
// tests/llama/test_native_kernels.py runs it both ways, with -fsanitize=thread to find races of the
// readers.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "packed/packed_weights.h"
#include "packed/weight_stream.h"

// All tensors of this test are packed.
bool is_packed(const ggml_tensor *) { return true; }

namespace {

constexpr size_t data_start = 64 << 10;
// Each part of a matrix takes several pieces.
constexpr int n_matrices = 4;
constexpr size_t matrix_bytes = (24 << 20) + 4096;
constexpr size_t max_bytes = 30 << 20;
constexpr int n_threads = 8;
constexpr int n_products = 40;  // of each thread

uint64_t word_at(size_t offset) { return (offset + 1) * 0x9e3779b97f4a7c15; }

// Write the file; returns -1 if that fails.
int write_file(const char *path) {
    const int file = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    std::vector<uint64_t> words(matrix_bytes / sizeof(uint64_t));
    for (size_t start = 0; start < n_matrices * matrix_bytes; start += matrix_bytes) {
        for (size_t i = 0; i < words.size(); i++) words[i] = word_at(start + 8 * i);
        const auto at = static_cast<off_t>(data_start + start);
        if (pwrite(file, words.data(), matrix_bytes, at) != ssize_t{matrix_bytes}) return -1;
    }
    return file;
}

// Whether a matrix has its bytes; a sample of them is enough. (The sanitizer takes memory that is
// mapped while it is read for a race, but the system does both at once.)
[[gnu::no_sanitize("thread"), gnu::noinline]]
bool is_right(const char *memory, size_t start) {
    for (size_t offset = start; offset < start + matrix_bytes; offset += 1024) {
        uint64_t word;
        __builtin_memcpy(&word, memory + offset, sizeof word);
        if (word != word_at(offset)) return false;
    }
    return true;
}

// Use matrices in their order, with some leaps.
void use(const std::vector<ggml_tensor> &tensors, const char *memory, unsigned seed,
         std::atomic<int> &n_wrong) {
    std::mt19937 random(seed);
    size_t matrix = random() % n_matrices;
    for (int i = 0; i < n_products; i++) {
        begin_weights(&tensors[matrix]);
        if (!is_right(memory, matrix * matrix_bytes)) n_wrong++;
        matrix = random() % 3 == 0 ? random() % n_matrices : (matrix + 1) % n_matrices;
    }
}

// While an object of this type is alive, there is no memory for the stack of another thread.
struct NoMoreThreads {
    rlimit before;

    NoMoreThreads() {
        getrlimit(RLIMIT_AS, &before);
        size_t n_pages = 0;
        std::ifstream("/proc/self/statm") >> n_pages;
        const rlim_t bytes = n_pages * sysconf(_SC_PAGESIZE) + (1 << 20);
        const rlimit limit = {bytes, before.rlim_max};
        setrlimit(RLIMIT_AS, &limit);
    }
    ~NoMoreThreads() { setrlimit(RLIMIT_AS, &before); }
};

}  // namespace

int main(int n_arguments, char **arguments) {
    if (n_arguments < 2) return 2;
    const bool has_readers = n_arguments == 2;
    const int file = write_file(arguments[1]);
    if (file < 0) {
        std::perror(arguments[1]);
        return 2;
    }
    void *mapped = mmap(nullptr, n_matrices * matrix_bytes, PROT_READ, MAP_PRIVATE, file,
                        data_start);
    if (mapped == MAP_FAILED) return 2;
    auto *memory = static_cast<char *>(mapped);
    std::vector<ggml_tensor> tensors(n_matrices);
    std::vector<WeightStream::Tensor> packed;
    for (int i = 0; i < n_matrices; i++) {
        std::snprintf(tensors[i].name, sizeof tensors[i].name, "blk.%d.ffn_up.weight", i);
        tensors[i].data = memory + i * matrix_bytes;
        packed.push_back({&tensors[i], matrix_bytes});
    }
    std::atomic<int> n_wrong{0};
    {
        std::unique_ptr<NoMoreThreads> limit;
        if (!has_readers) limit = std::make_unique<NoMoreThreads>();
        WeightStream stream(file, data_start, memory, packed, max_bytes);
        limit.reset();
        for (const ggml_tensor &tensor : tensors) expect_weights(&tensor);
        std::vector<std::thread> threads;
        for (unsigned i = 0; i < n_threads; i++) {
            threads.emplace_back([&, i] { use(tensors, memory, i, n_wrong); });
        }
        for (std::thread &thread : threads) thread.join();
    }
    std::printf("%d of %d matrices were wrong\n", n_wrong.load(), n_threads * n_products);
    return n_wrong == 0 ? 0 : 1;
}
