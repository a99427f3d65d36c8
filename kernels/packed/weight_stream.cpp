#include "packed/weight_stream.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "packed/packed_weights.h"
#include "packed/pages.h"

namespace {

// The reader takes pieces of this size: large enough for the disk, small enough to notice soon
// that something else is needed.
constexpr size_t piece_bytes = 4 << 20;
// The window has room for so many of the largest matrices, and for so many bytes at least. More
// would only take memory from what is kept.
constexpr size_t window_matrices = 2;
constexpr size_t min_window_bytes = 64 << 20;
// For so long a product waits for the reader without any progress.
constexpr std::chrono::milliseconds patience{500};

// Whether a tensor belongs to a layer of the model. The output matrix does not.
bool is_of_layer(const ggml_tensor *tensor) {
    const std::string_view name(tensor->name, strnlen(tensor->name, sizeof tensor->name));
    return name.substr(0, 4) == "blk." || name.find(".blk.") != std::string_view::npos;
}

// The whole pages of a tensor's packed form.
StreamedMatrix whole_pages(WeightStream *stream, const WeightStream::Tensor &each) {
    const Pages pages =
        Pages::within(static_cast<const char *>(each.tensor->data), each.packed_bytes);
    StreamedMatrix matrix = {};
    matrix.stream = stream;
    matrix.start = pages.start;
    matrix.streamed_bytes = pages.bytes;
    return matrix;
}

StreamedMatrix *streamed_matrix(const ggml_tensor *weights) {
    if (!is_packed(weights)) return nullptr;
    const ggml_tensor *whole = weights->view_src != nullptr ? weights->view_src : weights;
    return static_cast<StreamedMatrix *>(whole->extra);
}

}  // namespace

WeightStream::WeightStream(int file, size_t data_start, char *memory,
                           const std::vector<Tensor> &tensors, size_t max_bytes)
    : file_(file), data_start_(data_start), memory_(memory), process_(getpid()) {
    divide(tensors, max_bytes);
    if (const char *delay = std::getenv("SPECGEN_KERNELS_READ_DELAY_MS")) {
        delay_ms_ = static_cast<unsigned>(std::atoi(delay));
    }
    // Loading has read the first and the last page of each tensor, and what the system read ahead.
    for (const StreamedMatrix &matrix : matrices_) {
        drop(matrix.start, matrix.kept_bytes + matrix.streamed_bytes);
    }
    reader_ = std::thread([this] { run(); });
}

WeightStream::~WeightStream() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        is_ending_ = true;
    }
    wanted_.notify_all();
    reader_.join();
    for (const StreamedMatrix &matrix : matrices_) {
        if (matrix.copy != nullptr) munmap(matrix.copy, matrix.kept_bytes);
    }
}

// Decide which part of each matrix is kept: an equal share of each matrix of a layer, so that the
// disk is never idle while layers are computed whose weights are in memory; and all of the others,
// whose products follow each other without much else to compute.
void WeightStream::divide(const std::vector<Tensor> &tensors, size_t max_bytes) {
    size_t layer_bytes = 0;
    size_t other_bytes = 0;
    size_t largest = 0;
    matrices_.reserve(tensors.size());
    for (const Tensor &each : tensors) {
        const StreamedMatrix &matrix = matrices_.emplace_back(whole_pages(this, each));
        (is_of_layer(each.tensor) ? layer_bytes : other_bytes) += matrix.streamed_bytes;
        if (is_of_layer(each.tensor)) largest = std::max(largest, matrix.streamed_bytes);
        each.tensor->extra = &matrices_.back();
    }

    // Besides the window, there is a matrix that was used and is about to be dropped.
    window_bytes_ = std::max(min_window_bytes, window_matrices * largest);
    window_bytes_ = std::min(window_bytes_, max_bytes / 4) / page_bytes() * page_bytes();
    const size_t not_kept = std::min(window_bytes_ + largest, max_bytes / 2);
    const size_t kept_bytes = max_bytes - not_kept;
    const bool keeps_others = other_bytes <= kept_bytes;
    const auto share =
        keeps_others
            ? static_cast<double>(kept_bytes - other_bytes) / std::max<size_t>(layer_bytes, 1)
            : static_cast<double>(kept_bytes) / std::max<size_t>(layer_bytes + other_bytes, 1);
    for (size_t i = 0; i < tensors.size(); i++) {
        StreamedMatrix &matrix = matrices_[i];
        const size_t bytes = matrix.streamed_bytes;
        const bool is_kept = keeps_others && !is_of_layer(tensors[i].tensor);
        const double kept = is_kept ? 1.0 : std::min(share, 1.0);
        matrix.kept_bytes = static_cast<size_t>(kept * bytes) / page_bytes() * page_bytes();
        matrix.streamed_bytes = bytes - matrix.kept_bytes;
    }
}

size_t WeightStream::streamed_bytes() const {
    size_t total = 0;
    for (const StreamedMatrix &matrix : matrices_) total += matrix.streamed_bytes;
    return total;
}

bool WeightStream::is_forked() const { return getpid() != process_; }

// --- what the products say ---

void WeightStream::expect(StreamedMatrix &matrix) {
    if (is_forked()) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    // After the last matrix of a graph comes the first of the next one: most graphs are alike.
    if (planned_ != nullptr) planned_->next = &matrix;
    planned_ = &matrix;
}

void WeightStream::begin(StreamedMatrix &matrix) {
    if (is_forked()) return;
    std::unique_lock<std::mutex> lock(mutex_);
    current_ = &matrix;
    wanted_.notify_one();
    // Page faults would read it, too, but in small pieces. They have to if the reader gets no
    // further with this matrix: graphs of several threads may take turns, or the disk be stuck.
    size_t before = 0;
    do {
        before = matrix.copied_bytes + matrix.read_bytes;
        const bool is_read =
            arrived_.wait_for(lock, patience, [&] { return matrix.is_read() || is_ending_; });
        if (is_read) return;
    } while (matrix.copied_bytes + matrix.read_bytes > before);
}

void expect_weights(const ggml_tensor *weights) {
    StreamedMatrix *matrix = streamed_matrix(weights);
    if (matrix != nullptr) matrix->stream->expect(*matrix);
}

void begin_weights(const ggml_tensor *weights) {
    StreamedMatrix *matrix = streamed_matrix(weights);
    if (matrix != nullptr) matrix->stream->begin(*matrix);
}

// --- the reader ---

// Only this thread changes what is in memory, and it does so without the lock. It sleeps while the
// window is full: between passes.
void WeightStream::run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!is_ending_) {
        const Step step = next_step();
        if (step.kind == Step::wait) {
            wanted_.wait(lock);
            continue;
        }
        lock.unlock();
        const size_t in_memory = take(step);
        lock.lock();
        StreamedMatrix &matrix = *step.matrix;
        size_t &so_far = step.kind == Step::keep ? matrix.copied_bytes : matrix.read_bytes;
        so_far = in_memory;
        arrived_.notify_all();
    }
    arrived_.notify_all();
}

// Look at the matrices that are used next, as many as fit into the window: the first one that was
// not read is read, and whatever is outside of the window is dropped before.
WeightStream::Step WeightStream::next_step() {
    Step step = {Step::wait, nullptr, 0, 0};
    size_t room = window_bytes_;
    n_looks_++;
    for (StreamedMatrix *next = current_; next != nullptr && next->last_look != n_looks_;
         next = next->next) {
        next->last_look = n_looks_;
        // The matrix in use is read even if it is larger than the window.
        const size_t wanted =
            next == current_ ? next->streamed_bytes : std::min(next->streamed_bytes, room);
        if (step.kind == Step::wait && !next->is_kept()) {
            const size_t n = std::min(piece_bytes, next->kept_bytes - next->copied_bytes);
            step = {Step::keep, next, next->copied_bytes, n};
        } else if (step.kind == Step::wait && next->read_bytes < wanted) {
            const size_t n = std::min(piece_bytes, wanted - next->read_bytes);
            step = {Step::read, next, next->read_bytes, n};
        }
        room -= std::min(room, next->streamed_bytes);
        if (room == 0) break;
    }
    for (StreamedMatrix &matrix : matrices_) {
        if (matrix.read_bytes > 0 && matrix.last_look != n_looks_) {
            return {Step::drop, &matrix, 0, matrix.read_bytes};
        }
    }
    return step;
}

// Take a step. Returns how much of the part that it is about is in memory afterwards.
size_t WeightStream::take(const Step &step) {
    char *start = step.matrix->start + step.matrix->kept_bytes + step.first_byte;
    if (step.kind == Step::drop) {
        drop(start, step.n_bytes);
        return 0;
    }
    if (delay_ms_ > 0) usleep(delay_ms_ * 1000);
    if (step.kind == Step::keep) return keep(step);
    if (!populate({start, step.n_bytes})) {
        // An older Linux reads ahead without mapping. Without memory, page faults have to do.
        posix_fadvise(file_, offset(start), step.n_bytes, POSIX_FADV_WILLNEED);
    }
    return step.first_byte + step.n_bytes;
}

// Read a piece of a kept part into memory of the process, and move that to its place after the
// last piece. Without memory, or if the file cannot be read, the part is left to the system.
size_t WeightStream::keep(const Step &step) {
    StreamedMatrix &matrix = *step.matrix;
    const size_t bytes = matrix.kept_bytes;
    if (matrix.copy == nullptr) {
        void *memory =
            mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) return bytes;
        matrix.copy = static_cast<char *>(memory);
    }
    const uint64_t from = offset(matrix.start) + step.first_byte;
    ssize_t n = 0;
    do {
        n = pread(file_, matrix.copy + step.first_byte, step.n_bytes, from);
    } while (n < 0 && errno == EINTR);
    posix_fadvise(file_, from, step.n_bytes, POSIX_FADV_DONTNEED);
    if (n > 0 && step.first_byte + n < bytes) return step.first_byte + n;

    // The system replaces the mapping at once: whoever reads there sees the same bytes as before.
    const bool is_moved =
        n > 0 && mremap(matrix.copy, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, matrix.start) !=
                     MAP_FAILED;
    if (!is_moved) munmap(matrix.copy, bytes);
    matrix.copy = nullptr;
    posix_fadvise(file_, offset(matrix.start), bytes, POSIX_FADV_DONTNEED);
    return bytes;
}

// Let go of a part of the mapping, and of its pages in the system's cache.
void WeightStream::drop(char *start, size_t bytes) {
    madvise(start, bytes, MADV_DONTNEED);
    posix_fadvise(file_, offset(start), bytes, POSIX_FADV_DONTNEED);
}
