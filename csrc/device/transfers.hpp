// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
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
    bool query() const;
    void synchronize() const;  // looks again and again, with pauses

private:
    const std::shared_ptr<EventPool> pool_;
    const Handle handle_;
};

// Sends or receives of one end of a link, over a communicator that does not block.
class Transfers {
public:
    Transfers(const Functions& functions, int device, Handle communicator, Handle stream, int peer)
        : pool_(std::make_shared<EventPool>(functions, device)), communicator_(communicator), stream_(stream), peer_(peer) {}

    // Puts a transfer on the stream, behind what is on `after` by now if `waits`, and waits until NCCL has launched it:
    // at most `limit` seconds, or until `end`. Returns the event behind it. One thread at a time.
    std::unique_ptr<StreamEvent> begin(bool sends, std::uintptr_t address, std::size_t nbytes, bool waits, Handle after,
                                 double limit);
    void end() { ended_ = true; }

private:
    void await_launch(double limit) const;
    void check_nccl(const char* what, int result) const;

    const std::shared_ptr<EventPool> pool_;
    const Handle communicator_, stream_;
    const int peer_;
    std::atomic<bool> ended_{false};
};

}  // namespace adaptra
