// The record, and how the worker configures and asks the stand-in.
#include "record.h"

#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <unistd.h>

namespace rehearsal {

Device device;
bool configured = false;

namespace {
std::mutex mutex;
FILE* file = nullptr;
int (*where)() = nullptr;
std::atomic<uint64_t> next{0x1000};
Record launches{KERNEL, -1, 0, 0, 0, 0, 0};

void flush_launches() {
    if (launches.amount) fwrite(&launches, sizeof launches, 1, file);
    launches.amount = 0;
}
}  // namespace

uint64_t handle() { return next += 16; }

void record(Kind kind, const void* stream, uint64_t object, uint64_t amount, int type, int peer, bool asks) {
    if (!file) return;
    int line = asks && where ? where() : -1;
    std::lock_guard<std::mutex> lock(mutex);
    auto on = reinterpret_cast<uint64_t>(stream);
    if (kind == KERNEL) {  // neighbours on a stream are one record
        if (launches.stream != on) flush_launches();
        launches.stream = on;
        launches.amount++;
        return;
    }
    flush_launches();
    Record entry{kind, line, on, object, amount, type, peer};
    fwrite(&entry, sizeof entry, 1, file);
}

}  // namespace rehearsal

using namespace rehearsal;

extern "C" {
// No handlers of forks: torch's would refuse CUDA in a fork, where nothing but these libraries would have to survive.
int __register_atfork(void (*)(), void (*)(), void (*)(), void*) { return 0; }

// Makes the device appear.
void rehearsal_configure(const char* name, uint64_t bytes, int major, int minor, int processors, int shared, int l2) {
    device = {name, bytes, major, minor, processors, shared, l2};
    configured = true;
}

// Begins to write down. `log`: file of records. `asked` returns the index of the calling source line.
void rehearsal_begin(const char* log, int (*asked)()) {
    where = asked;
    file = fopen(log, "wb");
    if (file) setvbuf(file, nullptr, _IOFBF, 1 << 20);
}

void rehearsal_mark() { record(MARK, nullptr, 0, 0); }

void rehearsal_end() {
    where = nullptr;
    std::lock_guard<std::mutex> lock(mutex);
    flush_launches();
    fflush(file);
}

// A function of CUDA or NCCL that torch calls and nothing stands in for.
int rehearsal_missing(const char* name) {
    fprintf(stderr, "rehearsal: %s is called, and nothing stands in for it; report it with torch's version\n", name);
    fflush(nullptr);
    _exit(86);
}
}
