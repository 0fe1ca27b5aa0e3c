// SPDX-License-Identifier: Apache-2.0
// The part of CUDA's driver, and of the library that describes devices (NVML), which NCCL's host code calls.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>

#include "made_up_cuda.hpp"

namespace made_up {
namespace {

constexpr std::size_t kArguments = 4096;
struct alignas(16) Arguments {
    char bytes[kArguments];
};
// What stands for a kernel takes its arguments by value, as the kernel does, and runs all of its blocks.
using Kernel = void (*)(Arguments);

CUresult error_text(CUresult error, const char** text) {
    static thread_local std::string made;
    made = "made-up driver's error " + std::to_string(static_cast<int>(error));
    return *text = made.c_str(), CUDA_SUCCESS;
}

CUresult device_get(CUdevice* found, int number) { return *found = number, CUDA_SUCCESS; }
CUresult device_attribute(int* value, CUdevice_attribute number, CUdevice) { return *value = attribute(number), CUDA_SUCCESS; }

CUresult context_get(CUcontext* context) { return *context = reinterpret_cast<CUcontext>(device() + 1L), CUDA_SUCCESS; }
CUresult context_device(CUdevice* found) { return *found = device(), CUDA_SUCCESS; }
CUresult context_set(CUcontext context) {
    return cudaSetDevice(static_cast<int>(reinterpret_cast<long>(context)) - 1) == cudaSuccess ? CUDA_SUCCESS
                                                                                               : CUDA_ERROR_INVALID_VALUE;
}

CUresult launch(CUfunction function, CUstream stream, void** extra) {
    auto arguments = std::make_shared<Arguments>();
    const void* given = nullptr;
    std::size_t nbytes = 0;
    for (; *extra != CU_LAUNCH_PARAM_END; extra += 2) {
        if (*extra == CU_LAUNCH_PARAM_BUFFER_POINTER) given = extra[1];
        if (*extra == CU_LAUNCH_PARAM_BUFFER_SIZE) nbytes = *static_cast<std::size_t*>(extra[1]);
    }
    if (given == nullptr || nbytes > kArguments) return CUDA_ERROR_INVALID_VALUE;
    std::memcpy(arguments->bytes, given, nbytes);
    const auto kernel = reinterpret_cast<Kernel>(function);
    stream_at(stream)->put('k', [=] { kernel(*arguments); });
    return CUDA_SUCCESS;
}

CUresult launch_kernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                       CUstream stream, void**, void** extra) {
    return launch(function, stream, extra);
}

CUresult launch_kernel_ex(const CUlaunchConfig* config, CUfunction function, void**, void** extra) {
    return launch(function, config->hStream, extra);
}

}  // namespace

int attribute(int number) {
    switch (number) {  // of an H100
        case cudaDevAttrComputeCapabilityMajor: return 9;
        case cudaDevAttrComputeCapabilityMinor: return 0;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
        case cudaDevAttrMultiProcessorCount: return 132;
        default: return 0;  // no access of peers, no virtual memory management, no multicast
    }
}

void* driver_function(const char* name) {
    static const std::map<std::string, void*> functions = {
        {"cuGetErrorString", reinterpret_cast<void*>(error_text)},
        {"cuGetErrorName", reinterpret_cast<void*>(error_text)},
        {"cuDeviceGet", reinterpret_cast<void*>(device_get)},
        {"cuDeviceGetAttribute", reinterpret_cast<void*>(device_attribute)},
        {"cuCtxGetCurrent", reinterpret_cast<void*>(context_get)},
        {"cuCtxSetCurrent", reinterpret_cast<void*>(context_set)},
        {"cuCtxGetDevice", reinterpret_cast<void*>(context_device)},
        {"cuLaunchKernel", reinterpret_cast<void*>(launch_kernel)},
        {"cuLaunchKernelEx", reinterpret_cast<void*>(launch_kernel_ex)},
    };
    const auto found = functions.find(name);
    return found == functions.end() ? nullptr : found->second;
}

}  // namespace made_up

// NVML, which NCCL opens by its name

using Device = void*;  // the device's number, and one
constexpr int kNotSupported = 3, kInvalid = 2;

extern "C" {

int nvmlInit_v2() { return 0; }
int nvmlInit() { return 0; }
int nvmlShutdown() { return 0; }
const char* nvmlErrorString(int) { return "made-up NVML's error"; }
int nvmlDeviceGetCount_v2(unsigned* count) { return *count = made_up::kDevices, 0; }
int nvmlDeviceGetCount(unsigned* count) { return nvmlDeviceGetCount_v2(count); }
int nvmlDeviceGetHandleByIndex(unsigned number, Device* found) { return *found = reinterpret_cast<Device>(number + 1L), 0; }

int nvmlDeviceGetHandleByPciBusId(const char* bus, Device* found) {
    const char* const colon = std::strchr(bus, ':');
    if (colon == nullptr) return kInvalid;
    return nvmlDeviceGetHandleByIndex(std::strtoul(colon + 1, nullptr, 16) - made_up::kFirstBus, found);
}

int nvmlDeviceGetIndex(Device device, unsigned* number) {
    return *number = static_cast<unsigned>(reinterpret_cast<long>(device) - 1), 0;
}

int nvmlDeviceGetCudaComputeCapability(Device, int* major, int* minor) {
    *major = made_up::attribute(cudaDevAttrComputeCapabilityMajor);
    *minor = made_up::attribute(cudaDevAttrComputeCapabilityMinor);
    return 0;
}

int nvmlDeviceGetP2PStatus(Device, Device, int, int* status) { return *status = 4 /* not supported */, 0; }
int nvmlDeviceGetNvLinkState(Device, unsigned, int*) { return kNotSupported; }
int nvmlDeviceGetNvLinkRemotePciInfo(Device, unsigned, void*) { return kNotSupported; }
int nvmlDeviceGetNvLinkCapability(Device, unsigned, int, unsigned*) { return kNotSupported; }
int nvmlDeviceGetFieldValues(Device, int, void*) { return kNotSupported; }

}  // extern "C"
