// SPDX-License-Identifier: Apache-2.0
//
// What csrc/device calls by address, against the headers of CUDA's runtime and of NCCL: compiles if each function is
// declared with the same number of arguments, passed in the same way, and each constant is the headers'.
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <type_traits>

#include "transfers.hpp"

template <typename T>
using Passed = std::conditional_t<std::is_pointer_v<T>, void*, std::conditional_t<std::is_enum_v<T>, int, T>>;

template <typename T>
struct Call;
template <typename Result, typename... Arguments>
struct Call<Result (*)(Arguments...)> {
    using type = Passed<Result> (*)(Passed<Arguments>...);
    static_assert(((!std::is_enum_v<Arguments> || sizeof(Arguments) == sizeof(int)) && ...));
    static_assert(!std::is_enum_v<Result> || sizeof(Result) == sizeof(int));
};

template <typename Declared, typename Called>
constexpr bool same = std::is_same_v<typename Call<Declared>::type, typename Call<Called>::type>;

#define SAME(function, member) static_assert(same<decltype(&function), decltype(adaptra::Functions::member)>, #function)

SAME(cudaGetDevice, get_device);
SAME(cudaSetDevice, set_device);
SAME(cudaEventCreateWithFlags, event_create);
SAME(cudaEventRecord, event_record);
SAME(cudaEventQuery, event_query);
SAME(cudaEventDestroy, event_destroy);
SAME(cudaStreamWaitEvent, stream_wait);
SAME(cudaGetErrorString, cuda_error);
SAME(ncclSend, send);
SAME(ncclRecv, receive);
SAME(ncclCommGetAsyncError, async_error);
SAME(ncclGetErrorString, nccl_error);
SAME(ncclGetLastError, nccl_last_error);

// csrc/device/transfers.cpp
static_assert(cudaSuccess == 0 && cudaErrorNotReady == 600 && cudaEventDisableTiming == 2);
static_assert(ncclSuccess == 0 && ncclInProgress == 7 && ncclUint8 == 1);
// transport/gpu/cuda_device.py
static_assert(cudaHostRegisterPortable == 1 && cudaStreamNonBlocking == 1 && cudaStreamCaptureModeThreadLocal == 1);
static_assert(std::is_same_v<decltype(&cudaStreamCreateWithPriority), cudaError_t (*)(cudaStream_t*, unsigned, int)>);
static_assert(std::is_same_v<decltype(&cudaThreadExchangeStreamCaptureMode), cudaError_t (*)(cudaStreamCaptureMode*)>);
