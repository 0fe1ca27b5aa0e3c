// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace adaptra {

using Handle = void*;  // a cudaStream_t, cudaEvent_t or ncclComm_t

// Functions of the CUDA runtime and of NCCL, found by the caller in the libraries that torch has loaded.
struct Functions {
    int (*get_device)(int*) = nullptr;
    int (*set_device)(int) = nullptr;
    int (*event_create)(Handle*, unsigned) = nullptr;
    int (*event_record)(Handle, Handle) = nullptr;
    int (*event_query)(Handle) = nullptr;
    int (*event_destroy)(Handle) = nullptr;
    int (*stream_wait)(Handle, Handle, unsigned) = nullptr;
    const char* (*cuda_error)(int) = nullptr;
    int (*send)(const void*, std::size_t, int, int, Handle, Handle) = nullptr;
    int (*receive)(void*, std::size_t, int, int, Handle, Handle) = nullptr;
    int (*async_error)(Handle, int*) = nullptr;
    const char* (*nccl_error)(int) = nullptr;
    const char* (*nccl_last_error)(Handle) = nullptr;
};

// What the driver or NCCL refused, in their words; or a launch that took too long, or was given up.
class DeviceCallError : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Events of one link's stream, which are made once and used again. They tell no time and wake no thread: either would
// have the device do more behind a transfer than to set a flag.
class EventPool {
public:
    EventPool(const Functions& functions, int device) : functions_(functions), device_(device) {}
    ~EventPool();
    EventPool(const EventPool&) = delete;
    EventPool& operator=(const EventPool&) = delete;

    Handle take();
    void give_back(Handle event);
    const Functions& functions() const { return functions_; }
    void check(const char* what, int status) const;

private:
    const Functions functions_;
    const int device_;
    std::mutex mutex_;
    std::vector<Handle> unused_;
};

// A point in a stream. Given back to its pool when nobody holds it any more.
class StreamEvent {
public:
    explicit StreamEvent(std::shared_ptr<EventPool> pool) : pool_(std::move(pool)), handle_(pool_->take()) {}
    ~StreamEvent() { pool_->give_back(handle_); }
    StreamEvent(const StreamEvent&) = delete;
    StreamEvent& operator=(const StreamEvent&) = delete;

    void record(Handle stream) const;
    void make_wait(Handle stream) const;
    bool query() const;             // throws where the device has failed
    bool reached() const noexcept;  // says no there
    void synchronize() const;  // looks again and again, with pauses

private:
    const std::shared_ptr<EventPool> pool_;
    const Handle handle_;
};

// A transfer under way. Holding it holds the bytes. Made and destroyed with the GIL.
struct Work {
    Work(std::shared_ptr<EventPool> pool, pybind11::object memory) : ended(std::move(pool)), tensor(std::move(memory)) {}

    const StreamEvent ended;  // behind it on the link's stream
    const pybind11::object tensor;
    std::atomic<double> deadline{std::numeric_limits<double>::infinity()};  // seconds of the monotonic clock
};
using WorkPointer = std::shared_ptr<Work>;

// Sends or receives of one end of a link, over a communicator that does not block.
class Transfers {
public:
    Transfers(const Functions& functions, int device, Handle communicator, Handle stream, int peer)
        : pool_(std::make_shared<EventPool>(functions, device)), communicator_(communicator), stream_(stream), peer_(peer) {}

    // Puts a transfer of `tensor`, which is at `address`, on the stream, behind what is on `after` by now if `waits`, and
    // waits until NCCL has launched it: at most `limit` seconds, or until `end`. What is done by now is let go of. One
    // thread at a time; with the GIL, which is released meanwhile.
    WorkPointer begin(bool sends, pybind11::object tensor, std::uintptr_t address, std::size_t nbytes, bool waits,
                      Handle after, double limit);
    // Lets go of what is done, and returns what is not. A device that failed keeps all. With the GIL, likewise.
    void free_done();
    std::vector<WorkPointer> under_way();
    void end() { ended_ = true; }

private:
    void launch(const StreamEvent& behind, bool sends, std::uintptr_t address, std::size_t nbytes, bool waits, Handle after,
                double limit) const;
    void await_launch(double limit) const;
    void take_done(std::vector<WorkPointer>& done);
    void check_nccl(const char* what, int result) const;

    const std::shared_ptr<EventPool> pool_;
    const Handle communicator_, stream_;
    const int peer_;
    std::atomic<bool> ended_{false};
    std::mutex mutex_;
    std::deque<WorkPointer> under_way_;  // in the order of the stream
};

}  // namespace adaptra
