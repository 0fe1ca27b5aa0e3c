// SPDX-License-Identifier: Apache-2.0
// The part of CUDA's runtime that NCCL's host code and csrc/device call, on a machine without a GPU: two devices whose
// memory is the host's, with streams that are threads. Calls that a real device is waited for in wait here, too: to free
// memory, or a launch while the queue of a stream is full. MADE_UP_CUDA_QUEUE_DEPTH says how much that holds.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "made_up_cuda.hpp"

namespace made_up {
namespace {

thread_local int current_device = 0;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

std::mutex memory_mutex;
std::map<std::uintptr_t, std::pair<std::size_t, cudaMemoryType>> memory;  // by address: size and kind

std::mutex works_mutex;
std::string works;  // a letter for what was put on a stream, and the stream's address

void note(char kind, const Stream* stream) {
    const std::lock_guard<std::mutex> lock(works_mutex);
    works += kind + std::to_string(reinterpret_cast<std::uintptr_t>(stream)) + ' ';
}

std::mutex streams_mutex;
std::map<Stream*, std::shared_ptr<Stream>> streams;  // kept while anything waits for them

cudaMemoryType kind_of(const void* address) {
    const auto number = reinterpret_cast<std::uintptr_t>(address);
    const std::lock_guard<std::mutex> lock(memory_mutex);
    auto after = memory.upper_bound(number);
    if (after == memory.begin()) return cudaMemoryTypeUnregistered;
    --after;
    return number < after->first + after->second.first ? after->second.second : cudaMemoryTypeUnregistered;
}

cudaError_t allocate(void** address, std::size_t nbytes, cudaMemoryType kind) {
    const std::size_t whole = (std::max<std::size_t>(nbytes, 1) + 4095) / 4096 * 4096;
    *address = std::aligned_alloc(4096, whole);
    if (*address == nullptr) return cudaErrorMemoryAllocation;
    std::memset(*address, kind == cudaMemoryTypeDevice ? 0xA5 : 0, whole);
    const std::lock_guard<std::mutex> lock(memory_mutex);
    memory[reinterpret_cast<std::uintptr_t>(*address)] = {whole, kind};
    return cudaSuccess;
}

cudaError_t release(void* address) {
    if (address == nullptr) return cudaSuccess;
    const std::lock_guard<std::mutex> lock(memory_mutex);
    if (memory.erase(reinterpret_cast<std::uintptr_t>(address)) == 0) return cudaErrorInvalidValue;
    std::free(address);
    return cudaSuccess;
}

// As cudaFree and cudaHostUnregister do: nothing of the device's may go on with what is freed.
void wait_for_device() {
    std::vector<std::shared_ptr<Stream>> all;
    {
        const std::lock_guard<std::mutex> lock(streams_mutex);
        for (const auto& each : streams)
            if (each.first->device == current_device) all.push_back(each.second);
    }
    for (const auto& stream : all) stream->wait_until_idle();
}

std::size_t launch_queue_depth() {
    const char* named = std::getenv("MADE_UP_CUDA_QUEUE_DEPTH");
    return named == nullptr ? 1024 : std::strtoul(named, nullptr, 10);
}

Stream* new_stream() {
    auto made = std::make_shared<Stream>(current_device);
    const std::lock_guard<std::mutex> lock(streams_mutex);
    streams[made.get()] = made;
    return made.get();
}

}  // namespace

int device() { return current_device; }

Stream::Stream(int of_device) : device(of_device), depth_(launch_queue_depth()), worker_([this] { run(); }) {}

Stream::~Stream() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        ends_ = true;
    }
    changed_.notify_all();
    worker_.join();
}

void Stream::put(char kind, std::function<void()> work) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return works_.size() < depth_; });
    note(kind, this);
    works_.push_back(std::move(work));
    changed_.notify_all();
}

void Stream::run() {
    while (true) {
        std::function<void()> work;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            changed_.wait(lock, [this] { return ends_ || !works_.empty(); });
            if (works_.empty()) return;
            work = works_.front();  // it holds its place in the queue until it is done
        }
        work();
        const std::lock_guard<std::mutex> lock(mutex_);
        works_.pop_front();
        changed_.notify_all();
    }
}

bool Stream::idle() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return works_.empty();
}

void Stream::wait_until_idle() {
    auto reached = std::make_shared<Point>();
    put('i', [reached] { reached->set(); });
    reached->wait();
}

void Point::set() {
    const std::lock_guard<std::mutex> lock(mutex_);
    reached_ = true;
    changed_.notify_all();
}

bool Point::reached() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return reached_;
}

void Point::wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return reached_; });
}

Stream* stream_at(cudaStream_t handle) {
    if (handle != nullptr && handle != cudaStreamLegacy && handle != cudaStreamPerThread)
        return reinterpret_cast<Stream*>(handle);
    static std::mutex mutex;
    static std::map<int, Stream*> defaults;  // for ever: threads of NCCL's still run after static destructors
    const std::lock_guard<std::mutex> lock(mutex);
    Stream*& found = defaults[current_device];
    if (found == nullptr) found = new_stream();
    return found;
}

}  // namespace made_up

namespace {

using made_up::stream_at;

struct Event {
    explicit Event(bool timed) : tells_time(timed) {}

    const bool tells_time;
    std::mutex mutex;
    std::shared_ptr<made_up::Point> last;  // none: never recorded, which counts as reached

    std::shared_ptr<made_up::Point> point() {
        const std::lock_guard<std::mutex> lock(mutex);
        return last;
    }
};

Event* event_at(cudaEvent_t handle) { return reinterpret_cast<Event*>(handle); }

void copy(void* target, const void* source, std::size_t nbytes, cudaStream_t stream) {
    if (made_up::kind_of(source) != cudaMemoryTypeUnregistered) {
        stream_at(stream)->put('c', [=] { std::memcpy(target, source, nbytes); });
    } else {  // pageable memory has been read when the call returns
        auto staged = std::make_shared<std::vector<char>>(nbytes);
        std::memcpy(staged->data(), source, nbytes);
        stream_at(stream)->put('c', [=] { std::memcpy(target, staged->data(), nbytes); });
    }
    if (made_up::kind_of(target) == cudaMemoryTypeUnregistered) stream_at(stream)->wait_until_idle();
}

}  // namespace

extern "C" {

// Devices

cudaError_t cudaGetDevice(int* device) { return *device = made_up::current_device, cudaSuccess; }

cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= made_up::kDevices) return cudaErrorInvalidDevice;
    made_up::current_device = device;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) { return *count = made_up::kDevices, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaDeviceSetLimit(cudaLimit, size_t) { return cudaSuccess; }

const char* cudaGetErrorString(cudaError_t error) {
    static thread_local std::string text;
    text = "made-up CUDA's error " + std::to_string(static_cast<int>(error));
    return text.c_str();
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    return *value = made_up::attribute(attribute), cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
    *properties = {};
    properties->major = made_up::attribute(cudaDevAttrComputeCapabilityMajor);
    properties->totalGlobalMem = 80LL << 30;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
    std::snprintf(text, length, "0000:%02x:00.0", made_up::kFirstBus + device);
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }

cudaError_t cudaDeviceSynchronize() { return made_up::wait_for_device(), cudaSuccess; }

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    return std::swap(*mode, made_up::capture_mode), cudaSuccess;
}

// Memory

cudaError_t cudaMalloc(void** address, size_t nbytes) { return made_up::allocate(address, nbytes, cudaMemoryTypeDevice); }
cudaError_t cudaMallocAsync(void** address, size_t nbytes, cudaStream_t) { return cudaMalloc(address, nbytes); }

cudaError_t cudaHostAlloc(void** address, size_t nbytes, unsigned) {
    return made_up::allocate(address, nbytes, cudaMemoryTypeHost);
}

cudaError_t cudaFree(void* address) {
    if (address != nullptr) made_up::wait_for_device();
    return made_up::release(address);
}

cudaError_t cudaFreeHost(void* address) { return cudaFree(address); }

cudaError_t cudaFreeAsync(void* address, cudaStream_t stream) {
    return stream_at(stream)->put('f', [=] { made_up::release(address); }), cudaSuccess;
}

cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps*) { return *pool = nullptr, cudaSuccess; }
cudaError_t cudaMemPoolDestroy(cudaMemPool_t) { return cudaSuccess; }
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
cudaError_t cudaMallocFromPoolAsync(void** address, size_t nbytes, cudaMemPool_t, cudaStream_t) {
    return cudaMalloc(address, nbytes);
}

cudaError_t cudaHostRegister(void* address, size_t nbytes, unsigned) {
    const std::lock_guard<std::mutex> lock(made_up::memory_mutex);
    made_up::memory[reinterpret_cast<std::uintptr_t>(address)] = {nbytes, cudaMemoryTypeHost};
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* address) {
    made_up::wait_for_device();
    const std::lock_guard<std::mutex> lock(made_up::memory_mutex);
    made_up::memory.erase(reinterpret_cast<std::uintptr_t>(address));
    return cudaSuccess;
}

cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) { return *device = host, cudaSuccess; }

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
    *attributes = {};
    attributes->type = made_up::kind_of(address);
    attributes->device = made_up::current_device;
    attributes->devicePointer = attributes->hostPointer = const_cast<void*>(address);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t nbytes, cudaMemcpyKind, cudaStream_t stream) {
    return copy(target, source, nbytes, stream), cudaSuccess;
}

cudaError_t cudaMemcpy(void* target, const void* source, size_t nbytes, cudaMemcpyKind) {
    copy(target, source, nbytes, nullptr);
    stream_at(nullptr)->wait_until_idle();
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* target, int value, size_t nbytes, cudaStream_t stream) {
    return stream_at(stream)->put('m', [=] { std::memset(target, value, nbytes); }), cudaSuccess;
}

cudaError_t cudaMemset(void* target, int value, size_t nbytes) {
    cudaMemsetAsync(target, value, nbytes, nullptr);
    stream_at(nullptr)->wait_until_idle();
    return cudaSuccess;
}

// Streams and events

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
    return *stream = reinterpret_cast<cudaStream_t>(made_up::new_stream()), cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    std::shared_ptr<made_up::Stream> stream;
    {
        const std::lock_guard<std::mutex> lock(made_up::streams_mutex);
        stream = std::move(made_up::streams[stream_at(handle)]);
        made_up::streams.erase(stream.get());
    }
    std::thread([stream = std::move(stream)] {}).detach();  // its works go on to the end, and nobody waits for them
    return cudaSuccess;
}

cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* number) {
    return *number = reinterpret_cast<std::uintptr_t>(stream_at(stream)), cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return stream_at(stream)->wait_until_idle(), cudaSuccess; }

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    return stream_at(stream)->idle() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    auto point = event_at(event)->point();
    if (point) stream_at(stream)->put('w', [point] { point->wait(); });
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo_v3(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long*, cudaGraph_t*,
                                        const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
    return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long*, cudaGraph_t*,
                                        const cudaGraphNode_t**, size_t*) {
    return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
    return stream_at(stream)->put('h', [=] { function(data); }), cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
    return *event = reinterpret_cast<cudaEvent_t>(new Event(!(flags & cudaEventDisableTiming))), cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete event_at(event), cudaSuccess; }

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    auto point = std::make_shared<made_up::Point>();
    {
        const std::lock_guard<std::mutex> lock(event_at(event)->mutex);
        event_at(event)->last = point;
    }
    return stream_at(stream)->put(event_at(event)->tells_time ? 'T' : 'r', [point] { point->set(); }), cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    const auto point = event_at(event)->point();
    return !point || point->reached() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    if (const auto point = event_at(event)->point()) point->wait();
    return cudaSuccess;
}

// What was put on streams since the last call, in this order: k a kernel, w a wait for an event, r a record of one, T of one
// that tells the time, each with its stream; and what else there is.
const char* madeUpCudaWorks() {
    static thread_local std::string text;
    const std::lock_guard<std::mutex> lock(made_up::works_mutex);
    text = std::move(made_up::works);
    made_up::works.clear();
    return text.c_str();
}

// Kernels

cudaError_t cudaGetFuncBySymbol(cudaFunction_t* function, const void* symbol) {
    return *function = reinterpret_cast<cudaFunction_t>(const_cast<void*>(symbol)), cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
    *attributes = {};
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

cudaError_t cudaGetDriverEntryPoint(const char* symbol, void** function, unsigned long long,
                                    cudaDriverEntryPointQueryResult* found) {
    *function = made_up::driver_function(symbol);
    *found = *function != nullptr ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return *function != nullptr ? cudaSuccess : cudaErrorSymbolNotFound;
}

// What a run without captures, peer access, memory pools and collectives never comes to

#define NEVER(name, ...) \
    cudaError_t name(__VA_ARGS__) { return cudaErrorNotSupported; }

NEVER(cudaDeviceEnablePeerAccess, int, unsigned)
NEVER(cudaIpcGetMemHandle, cudaIpcMemHandle_t*, void*)
NEVER(cudaIpcOpenMemHandle, void**, cudaIpcMemHandle_t, unsigned)
NEVER(cudaIpcCloseMemHandle, void*)
NEVER(cudaMemcpyBatchAsync, void**, void**, size_t*, size_t, cudaMemcpyAttributes*, size_t*, size_t, size_t*, cudaStream_t)
NEVER(cudaStreamUpdateCaptureDependencies_v2, cudaStream_t, cudaGraphNode_t*, const cudaGraphEdgeData*, size_t, unsigned)
NEVER(cudaDeviceGetByPCIBusId, int*, const char*)
NEVER(cudaStreamUpdateCaptureDependencies, cudaStream_t, cudaGraphNode_t*, size_t, unsigned)
NEVER(cudaGraphAddDependencies, cudaGraph_t, const cudaGraphNode_t*, const cudaGraphNode_t*, size_t)
NEVER(cudaUserObjectCreate, cudaUserObject_t*, void*, cudaHostFn_t, unsigned, unsigned)
NEVER(cudaGraphRetainUserObject, cudaGraph_t, cudaUserObject_t, unsigned, unsigned)
NEVER(cudaGraphAddEventRecordNode, cudaGraphNode_t*, cudaGraph_t, const cudaGraphNode_t*, size_t, cudaEvent_t)
NEVER(cudaGraphAddDependencies_v2, cudaGraph_t, const cudaGraphNode_t*, const cudaGraphNode_t*, const cudaGraphEdgeData*,
      size_t)
NEVER(cudaArrayGetInfo, cudaChannelFormatDesc*, cudaExtent*, unsigned*, cudaArray_t)

}  // extern "C"
