#include "packed/weight_stream.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <system_error>

#include "packed/packed_weights.h"
#include "packed/pages.h"

namespace {

// The readers take pieces of this size: large enough for the disk, small enough to share a part and
// to notice soon that something else is needed.
constexpr size_t piece_bytes = 4 << 20;
// The window has room for at least this many of the largest matrices, and for at least this many
// bytes. A larger one would only take memory from the weights that are kept.
constexpr size_t window_matrices = 2;
constexpr size_t min_window_bytes = 64 << 20;
// Matrices up to this size are kept as a whole if there is memory for all of them: a disk is slow
// if it reads little at a time.
constexpr size_t small_bytes = 1 << 20;
// How long a product waits for the readers if they make no progress.
constexpr std::chrono::milliseconds patience{500};

// Whether a tensor is kept as a whole, if there is memory for all of these: a small one, or one
// outside the layers, such as the output matrix.
bool is_kept_first(const WeightStream::Tensor &each) {
    const std::string_view name(each.tensor->name,
                                strnlen(each.tensor->name, sizeof each.tensor->name));
    const bool is_of_layer =
        name.substr(0, 4) == "blk." || name.find(".blk.") != std::string_view::npos;
    return !is_of_layer || each.packed_bytes <= small_bytes;
}

StreamedMatrix *streamed_matrix(const ggml_tensor *weights) {
    if (!is_packed(weights)) return nullptr;
    const ggml_tensor *whole = weights->view_src != nullptr ? weights->view_src : weights;
    return static_cast<StreamedMatrix *>(whole->extra);
}

// Memory for a copy of a part; null if there is none. Its huge pages are aligned as those of the
// part's place, so that they are moved there as a whole: that takes less time, and so does filling
// them.
char *new_memory(const StreamedPart &part) {
    constexpr size_t huge_page = 2 << 20;
    const size_t more_bytes = part.bytes + huge_page;
    void *memory =
        mmap(nullptr, more_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    auto *all = static_cast<char *>(memory);
    const size_t before =
        (reinterpret_cast<uintptr_t>(part.start) - reinterpret_cast<uintptr_t>(all)) % huge_page;
    char *copy = all + before;
    if (before > 0) munmap(all, before);
    munmap(copy + part.bytes, huge_page - before);
    madvise(copy, part.bytes, MADV_HUGEPAGE);
    return copy;
}

// Open the file of a descriptor again, such that reading it leaves nothing in the system's cache.
int open_direct(int file) {
    const std::string path = "/proc/self/fd/" + std::to_string(file);
    return open(path.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
}

}  // namespace

WeightStream::WeightStream(int file, size_t data_start, char *memory,
                           const std::vector<Tensor> &tensors, size_t max_bytes)
    : file_(file), direct_file_(open_direct(file)), data_start_(data_start), memory_(memory),
      process_(getpid()) {
    divide(tensors, max_bytes);
    if (const char *delay = std::getenv("SPECGEN_KERNELS_READ_DELAY_MS")) {
        delay_ms_ = static_cast<unsigned>(std::atoi(delay));
    }
    // Loading has read the first and the last page of each tensor, and what the system read ahead.
    for (StreamedMatrix &matrix : matrices_) {
        let_go(matrix.kept);
        let_go(matrix.streamed);
    }
    for (std::thread &reader : readers_) {
        try {
            reader = std::thread([this] { run(); });
        } catch (const std::system_error &) {
            break;  // no more threads: one reader, or page faults, do the work
        }
    }
}

WeightStream::~WeightStream() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        is_ending_ = true;
    }
    wanted_.notify_all();
    for (std::thread &reader : readers_) {
        if (reader.joinable()) reader.join();
    }
    for (const StreamedMatrix &matrix : matrices_) {
        if (matrix.kept.copy != nullptr) munmap(matrix.kept.copy, matrix.kept.bytes);
        if (matrix.streamed.copy != nullptr) munmap(matrix.streamed.copy, matrix.streamed.bytes);
    }
    if (direct_file_ >= 0) close(direct_file_);
}

// Decide what is kept: all other matrices, and an equal share of each large matrix of a layer. (If
// some layers were kept as a whole, the disk would be idle while they are computed.)
void WeightStream::divide(const std::vector<Tensor> &tensors, size_t max_bytes) {
    size_t first_bytes = 0;
    size_t other_bytes = 0;
    size_t largest = 0;
    for (const Tensor &each : tensors) {
        (is_kept_first(each) ? first_bytes : other_bytes) += each.packed_bytes;
        if (!is_kept_first(each)) largest = std::max(largest, each.packed_bytes);
    }

    // Besides the window, there is a matrix that was used and is about to be dropped.
    window_bytes_ = std::max(min_window_bytes, window_matrices * largest);
    window_bytes_ = std::min(window_bytes_, max_bytes / 4) / page_bytes() * page_bytes();
    const size_t kept_bytes = max_bytes - std::min(window_bytes_ + largest, max_bytes / 2);
    const bool keeps_first = first_bytes <= kept_bytes;
    const size_t shared_bytes = keeps_first ? kept_bytes - first_bytes : kept_bytes;
    const size_t sharing_bytes = keeps_first ? other_bytes : first_bytes + other_bytes;
    const double share =
        std::min(1.0, static_cast<double>(shared_bytes) / std::max<size_t>(1, sharing_bytes));

    matrices_.reserve(tensors.size());
    for (const Tensor &each : tensors) {
        const Pages pages =
            Pages::within(static_cast<const char *>(each.tensor->data), each.packed_bytes);
        const double kept_share = keeps_first && is_kept_first(each) ? 1.0 : share;
        const size_t kept =
            static_cast<size_t>(kept_share * pages.bytes) / page_bytes() * page_bytes();
        StreamedMatrix &matrix = matrices_.emplace_back();
        matrix.stream = this;
        matrix.kept = {pages.start, kept};
        matrix.streamed = {pages.start + kept, pages.bytes - kept};
        each.tensor->extra = &matrix;
    }
}

size_t WeightStream::streamed_bytes() const {
    size_t total = 0;
    for (const StreamedMatrix &matrix : matrices_) total += matrix.streamed.bytes;
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
    const bool has_readers = readers_[0].joinable();
    if (is_forked() || !has_readers) return;
    std::unique_lock<std::mutex> lock(mutex_);
    current_ = &matrix;
    wanted_.notify_all();
    // Page faults would read it, too, but in small pieces. They have to if the readers get no
    // further with this matrix: graphs of several threads may take turns, or the disk may be stuck.
    size_t before = 0;
    do {
        before = matrix.read_bytes();
        const bool is_complete = arrived_.wait_for(
            lock, patience, [&] { return matrix.is_complete() || is_ending_; });
        if (is_complete) return;
    } while (matrix.read_bytes() > before);
}

void expect_weights(const ggml_tensor *weights) {
    StreamedMatrix *matrix = streamed_matrix(weights);
    if (matrix != nullptr) matrix->stream->expect(*matrix);
}

void begin_weights(const ggml_tensor *weights) {
    StreamedMatrix *matrix = streamed_matrix(weights);
    if (matrix != nullptr) matrix->stream->begin(*matrix);
}

// --- the readers ---

// Only the readers change what is in memory, and they do so without the lock. They sleep while the
// window is full: between passes.
void WeightStream::run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!is_ending_) {
        const Step step = next_step();
        if (step.kind == Step::wait) {
            wanted_.wait(lock);
            continue;
        }
        StreamedPart &part = *step.part;
        part.n_busy++;
        if (step.kind == Step::read) {
            part.claimed_bytes += step.n_bytes;
            read(step, lock);
        } else {
            part.claimed_bytes = part.bytes;  // so that the other reader does not begin to read it
            lock.unlock();
            drop(part);
            lock.lock();
            part.claimed_bytes = 0;
            part.read_bytes = 0;
            part.has_failed = false;
        }
        part.n_busy--;
        arrived_.notify_all();
    }
}

// The next step of a reader. The window is the matrices that are used next, as many as fit. First,
// what is outside the window is dropped; then the first piece in it that nobody reads is read.
WeightStream::Step WeightStream::next_step() {
    Step step = {Step::wait, nullptr, 0, 0};
    const auto want = [&](StreamedPart &part, size_t end) {
        if (step.kind != Step::wait || part.claimed_bytes >= end) return;
        const size_t n = std::min(piece_bytes, end - part.claimed_bytes);
        step = {Step::read, &part, part.claimed_bytes, n};
    };
    size_t room = window_bytes_;
    n_looks_++;
    for (StreamedMatrix *next = current_; next != nullptr && next->last_look != n_looks_;
         next = next->next) {
        next->last_look = n_looks_;
        want(next->kept, next->kept.bytes);
        // The matrix in use is read even if it is larger than the window.
        const size_t bytes = next->streamed.bytes;
        want(next->streamed, next == current_ ? bytes : std::min(bytes, room));
        room -= std::min(room, bytes);
        if (room == 0) break;
    }
    for (StreamedMatrix &matrix : matrices_) {
        StreamedPart &part = matrix.streamed;
        if (part.claimed_bytes > 0 && part.n_busy == 0 && matrix.last_look != n_looks_) {
            return {Step::drop, &part, 0, part.claimed_bytes};
        }
    }
    return step;
}

// Read a piece of a part, and move the part to its place if it is the last one. Without memory, or
// if the file cannot be read, the part is left to page faults.
void WeightStream::read(const Step &step, std::unique_lock<std::mutex> &lock) {
    StreamedPart &part = *step.part;
    if (step.first_byte == 0) part.copy = new_memory(part);
    char *copy = part.copy;
    lock.unlock();
    if (delay_ms_ > 0) usleep(delay_ms_ * 1000);
    const bool is_read =
        copy != nullptr &&
        read_file(copy + step.first_byte, part.start + step.first_byte, step.n_bytes);
    lock.lock();
    if (!is_read) part.has_failed = true;
    part.read_bytes += step.n_bytes;
    if (part.read_bytes < part.bytes) return;

    part.copy = nullptr;
    const bool is_whole = !part.has_failed;
    lock.unlock();
    if (!is_whole || mremap(copy, part.bytes, part.bytes, MREMAP_MAYMOVE | MREMAP_FIXED,
                            part.start) == MAP_FAILED) {
        if (copy != nullptr) munmap(copy, part.bytes);
    }
    lock.lock();
}

// Read what the file has at a place of the buffer.
bool WeightStream::read_file(char *into, const char *place, size_t bytes) {
    while (bytes > 0) {
        const auto from = static_cast<off_t>(offset(place));
        ssize_t n = -1;
        if (direct_file_ >= 0) n = pread(direct_file_, into, bytes, from);
        // Not every file system can read past the cache.
        if (n < 0) {
            n = pread(file_, into, bytes, from);
            posix_fadvise(file_, from, static_cast<off_t>(bytes), POSIX_FADV_DONTNEED);
        }
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        into += n;
        place += n;
        bytes -= n;
    }
    return true;
}

// Map the file at a part's place again, which frees the memory that it was read into.
void WeightStream::drop(StreamedPart &part) {
    if (part.copy != nullptr) munmap(part.copy, part.bytes);
    part.copy = nullptr;
    mmap(part.start, part.bytes, PROT_READ, MAP_PRIVATE | MAP_FIXED, file_,
         static_cast<off_t>(offset(part.start)));
}

// Let the system forget what it has read of the mapped file.
void WeightStream::let_go(StreamedPart &part) {
    if (part.bytes == 0) return;
    madvise(part.start, part.bytes, MADV_DONTNEED);
    posix_fadvise(file_, static_cast<off_t>(offset(part.start)), static_cast<off_t>(part.bytes),
                  POSIX_FADV_DONTNEED);
}
