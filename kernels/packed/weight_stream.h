// Packed weights that exceed the memory that they may use: a part of each matrix is kept in memory,
// and the rest is read from the packed file for every pass over the model.
//
// The packed buffer stays one mapping of the file, so the kernels notice nothing, and a page that
// was not read in time is read by the page fault of the thread that needs it: late, but right. One
// thread reads the matrices that are used next into the page cache and maps them, and drops those
// that were used. Left to itself, the system would keep what was used last, of which nothing is
// left when the next pass comes to it.
//
// Kept parts are memory of the process, moved to their places in the mapping: the system may not
// take them back, as it may with pages of a file. (`mlock` would serve, too, but containers refuse
// it.)
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "ggml/ggml_internals.h"

class WeightStream;

// A packed matrix, or a stack of matrices. Only its whole pages count: a page that it shares with a
// neighbour is left to the system.
struct StreamedMatrix {
    WeightStream *stream;
    // In memory: first the bytes that are kept, then those that are streamed.
    char *start;
    size_t kept_bytes;
    size_t streamed_bytes;

    // The matrix that is used after it, as far as is known; null: unknown.
    StreamedMatrix *next = nullptr;
    // Memory that the kept part is read into; and how much of it was read, of both parts.
    char *copy = nullptr;
    size_t copied_bytes = 0;
    size_t read_bytes = 0;
    // The last of the reader's looks at what is used next in which it found this matrix.
    uint64_t last_look = 0;

    bool is_kept() const { return copied_bytes == kept_bytes; }
    bool is_read() const { return is_kept() && read_bytes == streamed_bytes; }
};

class WeightStream {
  public:
    // A tensor of the packed buffer, and the size of its packed form.
    struct Tensor {
        ggml_tensor *tensor;
        size_t packed_bytes;
    };

    // Stream a packed buffer. From now on, `extra` of its tensors is their StreamedMatrix.
    //
    // `file` is the packed file, open, in which the buffer begins at `data_start`; `memory` is the
    // buffer, a private mapping of it; `max_bytes` is how much of it may be in memory.
    WeightStream(int file, size_t data_start, char *memory, const std::vector<Tensor> &tensors,
                 size_t max_bytes);
    // Stop reading. The tensors must not be used any more.
    ~WeightStream();
    WeightStream(const WeightStream &) = delete;

    // Whether this process is a fork of the one that reads: it has only a copy of the memory, and
    // must not destroy the object.
    bool is_forked() const;
    // How many bytes each pass reads from the file.
    size_t streamed_bytes() const;

    // The graph that is about to be computed uses this matrix next. Called for all of its
    // matrices, in their order.
    void expect(StreamedMatrix &matrix);
    // A product with this matrix begins. Waits until the matrix was read.
    void begin(StreamedMatrix &matrix);

  private:
    // What the reader does next.
    struct Step {
        enum { wait, drop, keep, read } kind;
        StreamedMatrix *matrix;
        // Of its kept or its streamed part.
        size_t first_byte;
        size_t n_bytes;
    };

    void divide(const std::vector<Tensor> &tensors, size_t max_bytes);
    void run();
    Step next_step();
    size_t take(const Step &step);
    size_t keep(const Step &step);
    void drop(char *start, size_t bytes);
    uint64_t offset(const char *place) const { return data_start_ + (place - memory_); }

    int file_;
    size_t data_start_;
    char *memory_;
    std::vector<StreamedMatrix> matrices_;
    // How many streamed bytes may be in memory, from the matrix that is in use on.
    size_t window_bytes_ = 0;
    // A pause before each piece is read, for tests of late pages.
    unsigned delay_ms_ = 0;

    // Guards what follows, and the matrices.
    std::mutex mutex_;
    // Something has changed for the reader; for those who wait for it.
    std::condition_variable wanted_;
    std::condition_variable arrived_;
    // The matrix in use, and the one that was planned last.
    StreamedMatrix *current_ = nullptr;
    StreamedMatrix *planned_ = nullptr;
    uint64_t n_looks_ = 0;
    bool is_ending_ = false;

    int process_;
    std::thread reader_;
};

// What the products of packed weights call. Both do nothing unless the weights are streamed.
void expect_weights(const ggml_tensor *weights);
void begin_weights(const ggml_tensor *weights);
