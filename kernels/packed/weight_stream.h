// Packed weights that exceed the memory that they may use: a part of each matrix is kept in memory,
// and the rest is read from the packed file for every pass over the model.
//
// Two threads read the matrices that are used next, and drop those that were used: one takes memory
// while the other one waits for the disk. Left to itself, the system would keep what was used last,
// and drop it just before the next pass needs it.
//
// The packed buffer stays one mapping of the file. A part of it is read into other memory of the
// process, which is then moved to its place; to drop the part, the file is mapped there again. The
// system does both at once, so the kernels see the same bytes at any time. What was not read in
// time is read by the page fault of the thread that needs it: late, but right.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "ggml/ggml_internals.h"

class WeightStream;

// Some pages of the packed buffer.
struct StreamedPart {
    char *start;
    size_t bytes;
    // How much of it is read or being read, and how much was.
    size_t claimed_bytes = 0;
    size_t read_bytes = 0;
    // The memory that it is read into until it is moved; null: there is none.
    char *copy = nullptr;
    // Whether a piece could not be read.
    bool has_failed = false;
    // How many readers are busy with it.
    int n_busy = 0;

    bool is_complete() const { return read_bytes == bytes && n_busy == 0; }
};

// A packed matrix, or a stack of matrices. Only its whole pages count: a page that it shares with a
// neighbour is left to the system.
struct StreamedMatrix {
    WeightStream *stream;
    // The part that stays in memory once it was read, and the other one.
    StreamedPart kept;
    StreamedPart streamed;
    // The matrix that is used after it, as far as is known; null: unknown.
    StreamedMatrix *next = nullptr;
    // The number of the readers' last look ahead that found this matrix (see `n_looks_`).
    uint64_t last_look = 0;

    bool is_complete() const { return kept.is_complete() && streamed.is_complete(); }
    size_t read_bytes() const { return kept.read_bytes + streamed.read_bytes; }
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
    // What a reader does next: nothing, to drop a part, or to read a piece of it.
    struct Step {
        enum { wait, drop, read } kind;
        StreamedPart *part;
        size_t first_byte;
        size_t n_bytes;
    };

    void divide(const std::vector<Tensor> &tensors, size_t max_bytes);
    void run();
    Step next_step();
    void drop(StreamedPart &part);
    void read(const Step &step, std::unique_lock<std::mutex> &lock);
    bool read_file(char *into, const char *place, size_t bytes);
    void let_go(StreamedPart &part);
    uint64_t offset(const char *place) const { return data_start_ + (place - memory_); }

    // The file, and the same file open for reading past the system's cache (-1 if that is
    // impossible).
    int file_;
    int direct_file_;
    size_t data_start_;
    char *memory_;
    std::vector<StreamedMatrix> matrices_;
    // How many streamed bytes may be in memory, from the matrix that is in use on.
    size_t window_bytes_ = 0;
    // A pause before each piece is read, for tests of late pages.
    unsigned delay_ms_ = 0;

    // Guards what follows, and what was read of the matrices.
    std::mutex mutex_;
    // Wake the readers, and the products that wait for them.
    std::condition_variable wanted_;
    std::condition_variable arrived_;
    // The matrix in use, and the one that was planned last.
    StreamedMatrix *current_ = nullptr;
    StreamedMatrix *planned_ = nullptr;
    // How often the readers have looked ahead at what is used next.
    uint64_t n_looks_ = 0;
    bool is_ending_ = false;

    int process_;
    // Those that could be started.
    std::thread readers_[2];
};

// What the products of packed weights call. Both do nothing unless the weights are streamed.
void expect_weights(const ggml_tensor *weights);
void begin_weights(const ggml_tensor *weights);
