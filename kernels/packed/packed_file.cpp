#include "packed/packed_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "packed/allowance.h"
#include "packed/packed_weights.h"
#include "packed/pages.h"

thread_local PackedFile *packed_file = nullptr;

namespace {

std::string name_of(const ggml_tensor *tensor) {
    return {tensor->name, strnlen(tensor->name, sizeof tensor->name)};
}

}  // namespace

PackedFile::PackedFile(const char *path) {
    file_ = open(path, O_RDONLY | O_CLOEXEC);
    if (file_ < 0) return;
    PackedContents contents;
    if (!read_contents(file_, contents)) {
        forget_file();
        return;
    }
    is_whole_ = true;
    size_ = contents.data_bytes;
    entries_ = std::move(contents.entries);
}

PackedFile::~PackedFile() {
    // A fork has no reader to stop.
    if (stream_ && stream_->is_forked()) static_cast<void>(stream_.release());
    stream_.reset();
    is_ending_ = true;
    if (reader_.joinable()) reader_.join();
    if (file_ >= 0) close(file_);
}

void PackedFile::limit(size_t max_bytes, const char *new_path) {
    max_bytes_ = max_bytes;
    if (!is_whole_) file_ = open(new_path, O_RDWR | O_CLOEXEC);
}

// --- the buffer ---

void *PackedFile::take_memory(size_t size) {
    const bool is_streamed = max_bytes_ > 0 && size > max_bytes_;
    if (n_buffers_ > 0) {
        if (is_streamed) problem_ = EBADMSG;
        return nullptr;
    }
    const bool has_other = is_whole_ && size != size_;
    const bool needs_no_new = !is_whole_ && !is_streamed;
    if (has_other || needs_no_new) forget_file();
    if (is_streamed && !is_whole_) problem_ = file_ < 0 ? EBADMSG : extend_file(size);
    if (file_ < 0 || problem_ != 0) return nullptr;

    // A private mapping: tensors that turn out to differ are packed into pages of our own. A
    // streamed buffer is read-only: the system refuses to map more bytes for writing than it has
    // memory.
    const int access = is_streamed ? PROT_READ : PROT_READ | PROT_WRITE;
    void *memory = mmap(nullptr, size, access, MAP_PRIVATE, file_,
                        static_cast<off_t>(packed_data_start));
    if (memory == MAP_FAILED) {
        if (is_streamed) problem_ = errno;
        forget_file();
        return nullptr;
    }
    n_buffers_++;
    memory_ = static_cast<char *>(memory);
    size_ = size;
    if (!is_whole_) writer_ = std::make_unique<TensorWriter>(file_);
    // Of a streamed buffer, only the first and the last page of each tensor are read while it is
    // loaded. The system would read more around each of them: up to the whole file.
    if (is_streamed) madvise(memory_, size_, MADV_RANDOM);
    if (!is_streamed) read_ahead();
    return memory;
}

void PackedFile::remember(void *memory, size_t size) {
    if (size == 0) return;
    n_buffers_++;
    if (is_mapped()) return;
    memory_ = static_cast<char *>(memory);
    size_ = size;
}

void PackedFile::forget_file() {
    close(file_);
    file_ = -1;
    is_whole_ = false;
    entries_.clear();
}

// Reserve the space of the whole file, so that a full disk is noticed before anything is packed.
// Returns 0 or errno.
int PackedFile::extend_file(size_t size) const {
    const auto end = static_cast<off_t>(packed_data_start + size);
    if (fallocate(file_, 0, 0, end) == 0) return 0;
    // Not every file system can reserve space.
    if (errno != EOPNOTSUPP) return errno;
    return ftruncate(file_, end) == 0 ? 0 : errno;
}

// Map the pages in a thread while the vocabulary is read and contexts are made. Otherwise the first
// batch waits for a page fault every 64 KB, which takes 0.2 s for 4 GB. It is done piece by piece,
// because meanwhile the process cannot map anything else.
void PackedFile::read_ahead() {
    double usable_bytes = static_cast<double>(allowance.memory_bytes);
    if (usable_bytes == 0) {
        usable_bytes = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
    }
    if (static_cast<double>(size_) > 0.75 * usable_bytes) return;
    static constexpr size_t piece = 8 << 20;
    const auto read = [this] {
        for (size_t start = 0; start < size_ && !is_ending_; start += piece) {
            if (!populate({memory_ + start, std::min(piece, size_ - start)})) return;
        }
    };
    try {
        reader_ = std::thread(read);
    } catch (const std::system_error &) {
        // No more threads: page faults map the pages later.
    }
}

// --- its tensors ---

void PackedFile::load(ggml_tensor *tensor, const char *rows) {
    auto *packed = static_cast<char *>(tensor->data);
    const size_t bytes = packed_size(tensor);
    const size_t rows_bytes = ggml_api.nbytes(tensor);
    const bool is_in_file = is_mapped() && packed >= memory_ && packed < memory_ + size_;
    if (is_in_file) tensors_.push_back({tensor, bytes});
    if (!has(tensor, rows, bytes)) {
        rows_.read(rows, rows_bytes);
        n_packed_++;
        if (!is_in_file || !must_stream()) {
            pack(tensor, rows, packed);
            note_packed(tensor, rows, packed, bytes);
        } else if (problem_ == 0) {
            problem_ = is_whole_ ? EBADMSG : pack_into_file(tensor, rows, bytes);
        }
    }
    rows_.release(rows, rows_bytes, must_stream());
}

// Whether the tensor is in the mapped file as it would be packed from `rows`.
bool PackedFile::has(const ggml_tensor *tensor, const char *rows, size_t packed_bytes) const {
    if (!is_mapped() || !is_whole_) return false;
    const auto found = entries_.find(name_of(tensor));
    const auto *data = static_cast<const char *>(tensor->data);
    return found != entries_.end() && found->second.bytes == packed_bytes &&
           memory_ + found->second.offset == data &&
           found->second.rows_check == check_of(rows, ggml_api.nbytes(tensor)) &&
           found->second.packed_check == check_of(data, packed_bytes);
}

// Note that a tensor was packed.
void PackedFile::note_packed(const ggml_tensor *tensor, const char *rows, const char *packed,
                             size_t packed_bytes) {
    if (is_whole_ || n_buffers_ != 1) return;
    const auto *data = static_cast<const char *>(tensor->data);
    entries_[name_of(tensor)] = {static_cast<uint64_t>(data - memory_), packed_bytes,
                                 check_of(rows, ggml_api.nbytes(tensor)),
                                 check_of(packed, packed_bytes)};
}

// Returns 0 or errno.
int PackedFile::pack_into_file(const ggml_tensor *tensor, const char *rows, size_t packed_bytes) {
    char *packed = writer_->memory(packed_bytes);
    if (packed == nullptr) return ENOMEM;
    pack(tensor, rows, packed);
    note_packed(tensor, rows, packed, packed_bytes);
    const auto offset = static_cast<uint64_t>(static_cast<const char *>(tensor->data) - memory_);
    return writer_->write(packed_bytes, packed_data_start + offset);
}

// --- afterwards ---

int PackedFile::finish() {
    int problem = 0;
    if (writer_) {
        problem = writer_->finish();
        if (problem == 0) problem = write_contents(file_, {size_, entries_});
        writer_.reset();
    }
    if (is_mapped() && must_stream()) {
        madvise(memory_, size_, MADV_NORMAL);
        stream_ = std::make_unique<WeightStream>(file_, packed_data_start, memory_, tensors_,
                                                 max_bytes_);
    }
    return problem;
}

size_t PackedFile::bytes() const {
    const bool is_kept = n_buffers_ == 1 && !is_whole_ && !entries_.empty();
    return is_kept ? size_ : 0;
}

int PackedFile::write(const char *path) const {
    const int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (file < 0) return errno;
    int problem = write_at(file, memory_, size_, packed_data_start);
    // The contents come last: if the power fails before all weights are on the disk, the file has
    // none, and will not be used.
    if (problem == 0 && fdatasync(file) != 0) problem = errno;
    if (problem == 0) problem = write_contents(file, {size_, entries_});
    const bool is_closed = close(file) == 0;
    return is_closed || problem != 0 ? problem : errno;
}
