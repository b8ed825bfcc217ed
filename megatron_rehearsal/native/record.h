// What a rehearsal writes down: one record per event, in the order of the host.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace rehearsal {

enum Kind : int32_t {  // record.py has the same names
    KERNEL, RECORD, WAIT, SYNC_STREAM, SYNC_DEVICE, SYNC_EVENT, COPY_TO_HOST, GROUP_BEGIN, GROUP_END, COMMUNICATOR, MARK,
    ALL_REDUCE, BROADCAST, REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, SEND, RECEIVE,
};

struct Record {
    Kind kind;
    int32_t where;     // index of a source line; -1 where none was asked for
    uint64_t stream;
    uint64_t object;   // an event, or the communicator's id
    uint64_t amount;   // elements, bytes or launches
    int32_t type;      // NCCL's data type, or the size of a new communicator
    int32_t peer;      // rank in the communicator, root, or reduction
};

// Configured by the worker before torch asks for a device; without, there is none.
struct Device {
    std::string name;
    uint64_t bytes;
    int32_t major, minor, processors, shared_bytes, l2_bytes;
};
extern Device device;
extern bool configured;

// Writes a record. With `asks`, the worker is asked for the source line: never while a lock is held here.
void record(Kind kind, const void* stream, uint64_t object, uint64_t amount, int type = 0, int peer = 0,
            bool asks = false);
uint64_t handle();  // of a new stream, event or communicator

}  // namespace rehearsal

extern "C" int rehearsal_missing(const char* name);  // ends the process with the name
