// NCCL, cuBLAS and cuDNN: communicators of any size at once, every call written down, nothing sent, nothing computed.
#include <cstdint>
#include <cstring>

#include "record.h"

using namespace rehearsal;

namespace {

struct Id {
    char bytes[128];
};
struct Communicator {
    uint64_t id;
    int rank, size;
};

int place = 0;  // what stands for a handle of cuBLAS

int begin(Communicator** made, int size, const Id& id, int rank) {
    auto* c = new Communicator{0, rank, size};
    memcpy(&c->id, id.bytes, sizeof c->id);
    record(COMMUNICATOR, nullptr, c->id, 0, size, rank, true);
    *made = c;
    return 0;
}

int call(Kind kind, size_t count, int type, int peer, const Communicator* c, const void* stream) {
    record(kind, stream, c->id, count, type, peer, true);
    return 0;
}

int handed(void** p) {
    *p = &place;
    return 0;
}

}  // namespace

extern "C" {

using C = Communicator*;

int ncclGetVersion(int* version) { *version = NCCL_VERSION; return 0; }
const char* ncclGetErrorString(int) { return "not rehearsed"; }
const char* ncclGetLastError(void*) { return ""; }
int ncclGetUniqueId(Id* id) {
    memset(id, 0, sizeof *id);
    uint64_t number = handle();
    memcpy(id->bytes, &number, sizeof number);
    return 0;
}
int ncclCommInitRank(C* c, int size, Id id, int rank) { return begin(c, size, id, rank); }
int ncclCommInitRankConfig(C* c, int size, Id id, int rank, void*) { return begin(c, size, id, rank); }
int ncclCommInitRankScalable(C* c, int size, int rank, int, Id* ids, void*) { return begin(c, size, *ids, rank); }
int ncclCommGetAsyncError(C, int* error) { *error = 0; return 0; }
int ncclCommCount(C c, int* count) { *count = c->size; return 0; }
int ncclCommUserRank(C c, int* rank) { *rank = c->rank; return 0; }
int ncclGroupStart() { record(GROUP_BEGIN, nullptr, 0, 0); return 0; }
int ncclGroupEnd() { record(GROUP_END, nullptr, 0, 0); return 0; }
int ncclAllReduce(const void*, void*, size_t n, int type, int op, C c, void* s) { return call(ALL_REDUCE, n, type, op, c, s); }
int ncclBroadcast(const void*, void*, size_t n, int type, int root, C c, void* s) { return call(BROADCAST, n, type, root, c, s); }
int ncclBcast(void*, size_t n, int type, int root, C c, void* s) { return call(BROADCAST, n, type, root, c, s); }
int ncclReduce(const void*, void*, size_t n, int type, int, int root, C c, void* s) { return call(REDUCE, n, type, root, c, s); }
int ncclAllGather(const void*, void*, size_t n, int type, C c, void* s) { return call(ALL_GATHER, n, type, 0, c, s); }
int ncclReduceScatter(const void*, void*, size_t n, int type, int op, C c, void* s) { return call(REDUCE_SCATTER, n, type, op, c, s); }
int ncclAlltoAll(const void*, void*, size_t n, int type, C c, void* s) { return call(ALL_TO_ALL, n, type, 0, c, s); }
int ncclSend(const void*, size_t n, int type, int peer, C c, void* s) { return call(SEND, n, type, peer, c, s); }
int ncclRecv(void*, size_t n, int type, int peer, C c, void* s) { return call(RECEIVE, n, type, peer, c, s); }
int ncclRedOpCreatePreMulSum(int* op, void*, int, int, C) { *op = 5; return 0; }

int cublasCreate_v2(void** handle) { return handed(handle); }
int cublasGetMathMode(void*, int* mode) { *mode = 0; return 0; }
int cublasGetPointerMode_v2(void*, int* mode) { *mode = 0; return 0; }
size_t cublasLtGetVersion() { return 130000; }
int cublasLtCreate(void** handle) { return handed(handle); }
int cublasLtMatmulDescCreate(void** p, int, int) { return handed(p); }
int cublasLtMatmulPreferenceCreate(void** p) { return handed(p); }
int cublasLtMatrixLayoutCreate(void** p, int, uint64_t, uint64_t, int64_t) { return handed(p); }
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, char* result, int* found) {
    memset(result, 0, 96);  // cublasLtMatmulHeuristicResult_t: an algorithm without workspace
    *found = 1;
    return 0;
}

// cuDNN's graphs, of which TransformerEngine's attention is made: a graph has one engine, which needs no workspace.
struct Cudnn {
    const void* stream;
};
int cudnnCreate(Cudnn** made) { *made = new Cudnn{}; return 0; }
int cudnnSetStream(Cudnn* made, const void* stream) { made->stream = stream; return 0; }
int cudnnBackendCreateDescriptor(int, void** p) { return handed(p); }
int cudnnBackendDestroyDescriptor(void*) { return 0; }
int cudnnBackendFinalize(void*) { return 0; }
int cudnnBackendSetAttribute(void*, int, int, int64_t, const void*) { return 0; }
int cudnnBackendGetAttribute(void*, int, int type, int64_t wanted, int64_t* count, void* value) {
    int bytes = type == 3 ? 8 : type == 23 ? 4 : 0;  // CUDNN_TYPE_INT64, CUDNN_TYPE_INT32
    if (wanted) memset(value, 0, bytes);
    if (count) *count = bytes || type == 15;  // CUDNN_TYPE_BACKEND_DESCRIPTOR, which stays as it is
    return 0;
}
int cudnnBackendExecute(const Cudnn* made, void*, void*) { record(KERNEL, made->stream, 0, 1); return 0; }

// NVML, which torch opens by name.
int nvmlInit_v2() { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) { return handed(device); }
int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return 3; }  // NVML_ERROR_NOT_SUPPORTED
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return 3; }
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) { *count = 0; return 0; }
int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return 0; }  // what was there says: not supported
int nvmlSystemGetCudaDriverVersion_v2(int*) { return 3; }

}  // extern "C"
