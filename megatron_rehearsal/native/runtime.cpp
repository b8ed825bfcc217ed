// The CUDA runtime and driver without a GPU: memory is address space up to the card's size, kernels do nothing.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "record.h"

// The names that these headers hide behind macros.
#undef cuDevicePrimaryCtxGetState
#undef cuDevicePrimaryCtxRelease
#undef cudaGetDeviceProperties
#undef cudaGetDriverEntryPointByVersion
#undef cudaStreamGetCaptureInfo

using namespace rehearsal;

namespace {

std::mutex mutex;
size_t used = 0;
std::map<uintptr_t, size_t> on_device, pinned;             // ranges by their begin
std::unordered_map<unsigned long long, size_t> physical;   // of the driver's virtual memory management
thread_local int current = 0;

// Larger copies move nothing: their values are never looked at. Those to the device have the rows of micro-batches.
constexpr size_t COPIED = 1 << 16, COPIED_TO_DEVICE = 1 << 24;

void* reserve(size_t bytes) {
    void* p = mmap(nullptr, std::max<size_t>(bytes, 4096), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? nullptr : p;
}

void release(std::map<uintptr_t, size_t>& ranges, std::map<uintptr_t, size_t>::iterator range) {
    munmap(reinterpret_cast<void*>(range->first), std::max<size_t>(range->second, 4096));
    ranges.erase(range);
}

bool inside(const std::map<uintptr_t, size_t>& ranges, const void* p) {
    auto at = reinterpret_cast<uintptr_t>(p);
    auto after = ranges.upper_bound(at);
    return after != ranges.begin() && at < std::prev(after)->first + std::prev(after)->second;
}

bool take(size_t bytes) {  // of the card's memory; under the lock
    if (used + bytes > device.bytes) return false;
    used += bytes;
    return true;
}

cudaError_t copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, const void* stream) {
    if (kind == cudaMemcpyDefault) {
        std::lock_guard<std::mutex> lock(mutex);
        kind = !inside(on_device, from) ? cudaMemcpyHostToDevice
               : inside(on_device, to)  ? cudaMemcpyDeviceToDevice
                                        : cudaMemcpyDeviceToHost;
    }
    if (kind == cudaMemcpyDeviceToHost) record(COPY_TO_HOST, stream, 0, bytes, 0, 0, true);
    size_t copied = kind == cudaMemcpyHostToDevice ? COPIED_TO_DEVICE : COPIED;
    if (bytes <= copied || kind == cudaMemcpyHostToHost) memmove(to, from, bytes);
    else if (kind == cudaMemcpyDeviceToHost) memset(to, 0, bytes);
    return cudaSuccess;
}

cudaError_t launch(const void* stream) {
    record(KERNEL, stream, 0, 1);
    return cudaSuccess;
}

int place = 0;  // what stands for a context, a module

// Torch asks for more than it calls: each other name gets a function that ends the process with it.
constexpr size_t MOST_ABSENT = 128;
std::string absent_names[MOST_ABSENT];
template <size_t N>
int absent() { return rehearsal_missing(absent_names[N].c_str()); }
template <size_t... N>
void* absent_of(size_t i, std::index_sequence<N...>) {
    static int (*const functions[])() = {absent<N>...};
    return reinterpret_cast<void*>(functions[i]);
}

void* driver_function(const std::string& name) {
    if (void* known = dlsym(RTLD_DEFAULT, name.c_str())) return known;
    std::lock_guard<std::mutex> lock(mutex);
    size_t i = 0;
    while (i < MOST_ABSENT - 1 && !absent_names[i].empty() && absent_names[i] != name) i++;
    absent_names[i] = name;
    return absent_of(i, std::make_index_sequence<MOST_ABSENT>());
}

}  // namespace

extern "C" {

// The driver, whose functions torch looks up by name -----------------------------------------------------------------

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext* c) { *c = reinterpret_cast<CUcontext>(&place); return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* d, int i) { *d = i; return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute name, CUdevice) {
    *value = name == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR   ? device.major
             : name == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR ? device.minor
             : name == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED ? 1 : 0;
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* c, CUdevice) { return cuCtxGetCurrent(c); }
CUresult cuDevicePrimaryCtxRelease(CUdevice) { return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult, const char** text) { *text = "not rehearsed"; return CUDA_SUCCESS; }
CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
    *bytes = 2 << 20;
    return CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr* p, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
    void* begin = reserve(bytes);
    if (!begin) return CUDA_ERROR_OUT_OF_MEMORY;
    std::lock_guard<std::mutex> lock(mutex);
    *p = reinterpret_cast<CUdeviceptr>(begin);
    on_device[static_cast<uintptr_t>(*p)] = bytes;
    return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr p, size_t) {
    std::lock_guard<std::mutex> lock(mutex);
    auto range = on_device.find(static_cast<uintptr_t>(p));
    if (range != on_device.end()) release(on_device, range);
    return CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle* made, size_t bytes, const CUmemAllocationProp*, unsigned long long) {
    std::lock_guard<std::mutex> lock(mutex);
    if (!take(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    physical[*made = handle()] = bytes;
    return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle made) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = physical.find(made);
    if (found == physical.end()) return CUDA_ERROR_INVALID_VALUE;
    used -= found->second;
    physical.erase(found);
    return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long) { return CUDA_SUCCESS; }
CUresult cuMemUnmap(CUdeviceptr p, size_t bytes) {  // gives pages back that small copies wrote to
    madvise(reinterpret_cast<void*>(p), bytes, MADV_DONTNEED);
    return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }

// Devices ------------------------------------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* count) {
    *count = configured ? 1 : 0;
    return configured ? cudaSuccess : cudaErrorNoDevice;
}
cudaError_t cudaGetDevice(int* d) { *d = current; return cudaSuccess; }
cudaError_t cudaSetDevice(int d) {
    if (d) return cudaErrorInvalidDevice;
    current = d;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) { *version = CUDA_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { *version = CUDA_VERSION; return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "%s", device.name.c_str());
    p->totalGlobalMem = device.bytes;
    p->major = device.major;
    p->minor = device.minor;
    p->multiProcessorCount = device.processors;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsPerMultiProcessor = 2048;
    p->sharedMemPerBlock = 48 << 10;
    p->sharedMemPerBlockOptin = device.shared_bytes;
    p->sharedMemPerMultiprocessor = device.shared_bytes + 1024;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->l2CacheSize = device.l2_bytes;
    for (int i = 0; i < 3; i++) {
        p->maxThreadsDim[i] = i < 2 ? 1024 : 64;
        p->maxGridSize[i] = i ? 65535 : 2147483647;
    }
    p->unifiedAddressing = p->concurrentKernels = 1;
    p->maxBlocksPerMultiProcessor = 32;
    p->textureAlignment = 512;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr name, int) {
    cudaDeviceProp p;
    cudaGetDeviceProperties(&p, 0);
    switch (name) {
        case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
        case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
        case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = static_cast<int>(p.sharedMemPerBlock); break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = static_cast<int>(p.sharedMemPerBlockOptin); break;
        case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
        case cudaDevAttrWarpSize: *value = p.warpSize; break;
        case cudaDevAttrMaxGridDimX: *value = p.maxGridSize[0]; break;
        case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = p.maxGridSize[1]; break;
        case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
        default: *value = 0;
    }
    return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { *least = 0; *greatest = -5; return cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int) { snprintf(text, size, "0000:01:00.0"); return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { *can = 1; return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t e) {
    return e == cudaErrorMemoryAllocation ? "out of memory" : e == cudaErrorNoDevice ? "no device" : "not rehearsed";
}
const char* cudaGetErrorName(cudaError_t e) { return cudaGetErrorString(e); }
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** f, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
    *f = driver_function(name);
    if (found) *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

// Memory -------------------------------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** p, size_t bytes) {
    bytes = (bytes + 511) / 512 * 512;
    std::lock_guard<std::mutex> lock(mutex);
    *p = take(bytes) ? reserve(bytes) : nullptr;
    if (!*p) return cudaErrorMemoryAllocation;
    on_device[reinterpret_cast<uintptr_t>(*p)] = bytes;
    return cudaSuccess;
}
cudaError_t cudaFree(void* p) {
    if (!p) return cudaSuccess;
    std::lock_guard<std::mutex> lock(mutex);
    auto range = on_device.find(reinterpret_cast<uintptr_t>(p));
    if (range == on_device.end()) return cudaErrorInvalidValue;
    used -= range->second;
    release(on_device, range);
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    std::lock_guard<std::mutex> lock(mutex);
    *total = device.bytes;
    *free = device.bytes - used;
    return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) {
    std::lock_guard<std::mutex> lock(mutex);
    if (!(*p = reserve(bytes))) return cudaErrorMemoryAllocation;
    pinned[reinterpret_cast<uintptr_t>(*p)] = bytes;
    return cudaSuccess;
}
cudaError_t cudaMallocHost(void** p, size_t bytes) { return cudaHostAlloc(p, bytes, 0); }
cudaError_t cudaFreeHost(void* p) {
    std::lock_guard<std::mutex> lock(mutex);
    auto range = pinned.find(reinterpret_cast<uintptr_t>(p));
    if (range == pinned.end()) return cudaErrorInvalidValue;
    release(pinned, range);
    return cudaSuccess;
}
// Memory of another rank, of which only the address is there; nobody says its size.
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void*) { memset(handle, 0, sizeof *handle); return cudaSuccess; }
cudaError_t cudaIpcOpenMemHandle(void** p, cudaIpcMemHandle_t, unsigned) {
    *p = reserve(size_t{1} << 33);
    return *p ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
    std::lock_guard<std::mutex> lock(mutex);
    memset(a, 0, sizeof *a);
    a->devicePointer = a->hostPointer = const_cast<void*>(p);
    a->type = inside(on_device, p) ? cudaMemoryTypeDevice : inside(pinned, p) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    record(SYNC_STREAM, nullptr, 0, 0, 0, 0, true);
    return copy(to, from, bytes, kind, nullptr);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t s) {
    return copy(to, from, bytes, kind, s);
}
cudaError_t cudaMemset(void* p, int value, size_t bytes) {
    if (bytes <= COPIED) memset(p, value, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t) { return cudaMemset(p, value, bytes); }
cudaError_t cudaGetSymbolAddress(void** p, const void*) {
    static char memory[COPIED];
    *p = memory;
    return cudaSuccess;
}

// Streams and events -------------------------------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int) { *s = reinterpret_cast<cudaStream_t>(handle()); return cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) { return cudaStreamCreateWithPriority(s, 0, 0); }
cudaError_t cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithPriority(s, 0, 0); }
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { *priority = 0; return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* s) { *s = cudaStreamCaptureStatusNone; return cudaSuccess; }
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* s, unsigned long long*, cudaGraph_t*,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
    *s = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t s) { record(SYNC_STREAM, s, 0, 0, 0, 0, true); return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { record(SYNC_DEVICE, nullptr, 0, 0, 0, 0, true); return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
    record(WAIT, s, reinterpret_cast<uint64_t>(e), 0);
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) { *e = reinterpret_cast<cudaEvent_t>(handle()); return cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    record(RECORD, s, reinterpret_cast<uint64_t>(e), 0);
    return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) { return cudaEventRecord(e, s); }
cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    record(SYNC_EVENT, nullptr, reinterpret_cast<uint64_t>(e), 0, 0, 0, true);
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) { *ms = 1; return cudaSuccess; }  // not a time

// Kernels ------------------------------------------------------------------------------------------------------------

void** __cudaRegisterFatBinary(void*) {
    static void* binary = &place;
    return &binary;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* f) { *kernel = (cudaKernel_t)f; return cudaSuccess; }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t s) { return launch(s); }
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    grid->x = grid->y = grid->z = block->x = block->y = block->z = 1;
    *shared = 0;
    *static_cast<void**>(stream) = nullptr;
    return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t s) { return launch(s); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void*, void**) { return launch(c->stream); }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024;
    a->numRegs = 64;
    a->binaryVersion = a->ptxVersion = 10 * device.major + device.minor;
    a->maxDynamicSharedSizeBytes = 48 << 10;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
    *blocks = 2;
    return cudaSuccess;
}

// Kernels that are compiled at run time: nothing is compiled.
int nvrtcCreateProgram(void** program, ...) { *program = &place; return 0; }
int nvrtcGetLoweredName(void*, const char* name, const char** lowered) { *lowered = name; return 0; }
int nvrtcGetCUBINSize(void*, size_t* bytes) { *bytes = 0; return 0; }
int nvrtcGetNumSupportedArchs(int* count) { *count = 1; return 0; }
int nvrtcGetSupportedArchs(int* architecture) { *architecture = 10 * device.major + device.minor; return 0; }
CUresult cuModuleLoadDataEx(CUmodule* m, const void*, unsigned, CUjit_option*, void**) {
    *m = reinterpret_cast<CUmodule>(&place);
    return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction* f, CUmodule, const char*) {
    *f = reinterpret_cast<CUfunction>(&place);
    return CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, size_t) { *blocks = 2; return CUDA_SUCCESS; }
CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream s, void**,
                        void**) {
    launch(s);
    return CUDA_SUCCESS;
}
CUresult cuLaunchCooperativeKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                   CUstream s, void**) {
    launch(s);
    return CUDA_SUCCESS;
}

}  // extern "C"
