// SPDX-License-Identifier: Apache-2.0
// Kernels that stay on the GPU until the host sets a flag in page-locked memory, as a receive of NCCL does until its
// message comes. None stays for longer than LIMIT_NS: a check that dies leaves no GPU behind that never gets free.
#include <cuda_runtime.h>

namespace {

constexpr long long LIMIT_NS = 30'000'000'000;
// What a block of NCCL takes: NCCL_MAX_NTHREADS threads (src/include/device.h), -maxrregcount (makefiles/common.mk).
constexpr int THREADS = 640;
constexpr int REGISTERS = 96;
constexpr int HELD = REGISTERS - 20;

__device__ void stay(const volatile unsigned* flag) {
    long long begun, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begun));
    do {
        __nanosleep(1000);
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (*flag == 0 && now - begun < LIMIT_NS);
}

__global__ void stand(const volatile unsigned* flag) { stay(flag); }

// All of its registers are in use while it stays: what was read before is needed after.
__global__ void __launch_bounds__(THREADS) take_multiprocessor(const volatile unsigned* flag, volatile unsigned* words) {
    unsigned held[HELD];
#pragma unroll
    for (int index = 0; index < HELD; ++index) held[index] = words[index];
    stay(flag);
#pragma unroll
    for (int index = 0; index < HELD; ++index) words[HELD + index] = held[index];
}

}  // namespace

extern "C" {

// A kernel of one thread.
int stand_until_set(const volatile unsigned* flag, cudaStream_t stream) {
    stand<<<1, 1, 0, stream>>>(flag);
    return cudaGetLastError();
}

// `blocks` of NCCL's size, in clusters of `cluster`. `words`: 2 * held_words() of them, of the GPU.
int take_multiprocessors(const volatile unsigned* flag, unsigned* words, int blocks, int cluster, cudaStream_t stream) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(THREADS);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = cluster > 1 ? 1 : 0;
    return cudaLaunchKernelEx(&config, take_multiprocessor, flag, static_cast<volatile unsigned*>(words));
}

int held_words() { return HELD; }

}  // extern "C"
