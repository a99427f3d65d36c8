#include "packed/model_rows.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>

#include "packed/pages.h"

namespace {

// Read a line of /proc/self/maps. Returns false if it is not a part that is shared with a file.
bool read_part(const std::string &line, MappedPart &part) {
    unsigned long start;
    unsigned long end;
    char permissions[5];
    unsigned long offset;
    int path_at = 0;
    const int n_found = std::sscanf(line.c_str(), "%lx-%lx %4s %lx %*s %*u %n", &start, &end,
                                    permissions, &offset, &path_at);
    if (n_found != 4 || permissions[3] != 's' || line[path_at] != '/') return false;
    part.start = reinterpret_cast<const char *>(start);
    part.end = reinterpret_cast<const char *>(end);
    part.offset = offset;
    part.path = line.substr(path_at);
    return true;
}

}  // namespace

ModelRows::~ModelRows() {
    if (file_ >= 0) close(file_);
}

// Find the part that contains the rows. Returns false if there is none.
bool ModelRows::find(const char *rows) {
    if (part_.contains(rows)) return true;
    part_ = {};
    if (file_ >= 0) close(file_);
    file_ = -1;
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
        MappedPart part;
        if (!read_part(line, part) || !part.contains(rows)) continue;
        part_ = part;
        file_ = open(part.path.c_str(), O_RDONLY | O_CLOEXEC);
        return true;
    }
    return false;
}

void ModelRows::read(const char *rows, size_t bytes) {
    if (!find(rows)) return;
    // llama.cpp has said that it reads in random order, so the system would not read ahead.
    Pages pages = Pages::around(rows, bytes);
    madvise(pages.start, pages.bytes, MADV_NORMAL);
    populate(pages);
}

void ModelRows::release(const char *rows, size_t bytes, bool from_cache) {
    if (!find(rows)) return;
    const Pages pages = Pages::within(rows, bytes);
    if (pages.bytes == 0) return;
    madvise(pages.start, pages.bytes, MADV_DONTNEED);
    if (from_cache && file_ >= 0) {
        posix_fadvise(file_, part_.offset + (pages.start - part_.start), pages.bytes,
                      POSIX_FADV_DONTNEED);
    }
}
