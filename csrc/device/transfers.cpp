// SPDX-License-Identifier: Apache-2.0
#include "transfers.hpp"

#include <algorithm>
#include <chrono>
#include <thread>

namespace adaptra {
namespace {

constexpr unsigned kDisableTiming = 2;  // cudaEventDisableTiming
constexpr int kCudaNotReady = 600;      // cudaErrorNotReady
constexpr int kNcclInProgress = 7;      // ncclInProgress
constexpr int kUint8 = 1;               // ncclUint8
using Clock = std::chrono::steady_clock;
constexpr std::chrono::microseconds kSpin{2000};  // a launch takes tens of microseconds; to connect takes much longer
constexpr std::chrono::microseconds kPause{1000};
constexpr std::chrono::microseconds kShortest{20}, kLongest{200};  // between two looks for an event

}  // namespace

EventPool::~EventPool() {
    for (Handle event : unused_) functions_.event_destroy(event);
}

Handle EventPool::take() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!unused_.empty()) {
            const Handle event = unused_.back();
            unused_.pop_back();
            return event;
        }
    }
    // An event is of the device that is current, which in a thread that has chosen none is the first of the host.
    int current = device_;
    check("cudaGetDevice", functions_.get_device(&current));
    if (current != device_) check("cudaSetDevice", functions_.set_device(device_));
    Handle made = nullptr;
    const int status = functions_.event_create(&made, kDisableTiming);
    if (current != device_) check("cudaSetDevice", functions_.set_device(current));
    check("cudaEventCreateWithFlags", status);
    return made;
}

void EventPool::give_back(Handle event) {
    const std::lock_guard<std::mutex> lock(mutex_);
    unused_.push_back(event);
}

void EventPool::check(const char* what, int status) const {
    if (status != 0) throw DeviceCallError(std::string(what) + " failed: " + functions_.cuda_error(status));
}

void StreamEvent::record(Handle stream) const {
    pool_->check("cudaEventRecord", pool_->functions().event_record(handle_, stream));
}

void StreamEvent::make_wait(Handle stream) const {
    pool_->check("cudaStreamWaitEvent", pool_->functions().stream_wait(stream, handle_, 0));
}

bool StreamEvent::query() const {
    const int status = pool_->functions().event_query(handle_);
    if (status != kCudaNotReady) pool_->check("cudaEventQuery", status);
    return status == 0;
}

bool StreamEvent::reached() const noexcept { return pool_->functions().event_query(handle_) == 0; }

void StreamEvent::synchronize() const {
    for (auto pause = kShortest; !query(); pause = std::min(2 * pause, kLongest)) std::this_thread::sleep_for(pause);
}

WorkPointer Transfers::begin(bool sends, pybind11::object tensor, std::uintptr_t address, std::size_t nbytes, bool waits,
                             Handle after, double limit) {
    auto work = std::make_shared<Work>(pool_, std::move(tensor));
    std::vector<WorkPointer> done;  // let go of once the GIL is held again
    {
        const pybind11::gil_scoped_release released;
        launch(work->ended, sends, address, nbytes, waits, after, limit);
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            under_way_.push_back(work);
        }
        take_done(done);
    }
    return work;
}

void Transfers::launch(const StreamEvent& behind, bool sends, std::uintptr_t address, std::size_t nbytes, bool waits,
                       Handle after, double limit) const {
    const Functions& functions = pool_->functions();
    if (waits) {
        const StreamEvent computed(pool_);  // what waits for it has seen this recording, and will see no other
        computed.record(after);
        computed.make_wait(stream_);
    }
    void* const memory = reinterpret_cast<void*>(address);
    if (sends) {
        check_nccl("ncclSend", functions.send(memory, nbytes, kUint8, peer_, communicator_, stream_));
    } else {
        check_nccl("ncclRecv", functions.receive(memory, nbytes, kUint8, peer_, communicator_, stream_));
    }
    await_launch(limit);
    behind.record(stream_);
}

void Transfers::free_done() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (under_way_.empty()) return;
    }
    std::vector<WorkPointer> done;
    const pybind11::gil_scoped_release released;
    take_done(done);
}

std::vector<WorkPointer> Transfers::under_way() {
    free_done();
    const std::lock_guard<std::mutex> lock(mutex_);
    return {under_way_.begin(), under_way_.end()};
}

// The device is asked without the lock: a question that it does not answer keeps the thread that asks, no other.
void Transfers::take_done(std::vector<WorkPointer>& done) {
    while (true) {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            if (under_way_.empty()) return;
            done.push_back(under_way_.front());  // its last owner must hold the GIL to drop it
        }
        if (!done.back()->ended.reached()) return;
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!under_way_.empty() && under_way_.front() == done.back()) under_way_.pop_front();  // else another thread has
    }
}

void Transfers::await_launch(double limit) const {
    const auto began = Clock::now();
    while (true) {
        int state = 0;
        check_nccl("ncclCommGetAsyncError", pool_->functions().async_error(communicator_, &state));
        check_nccl("what was begun with NCCL", state);
        if (state != kNcclInProgress) return;
        const auto waited = Clock::now() - began;
        if (ended_) throw DeviceCallError("the session was ended while NCCL launched a transfer");
        const double seconds = std::chrono::duration<double>(waited).count();
        if (seconds >= limit) {
            throw DeviceCallError("NCCL did not launch a transfer, for which it may have to wait for the device, within " +
                                  std::to_string(static_cast<long>(seconds)) + " s");
        }
        if (waited > kSpin) std::this_thread::sleep_for(kPause);
    }
}

void Transfers::check_nccl(const char* what, int result) const {
    if (result == 0 || result == kNcclInProgress) return;
    const std::string last = pool_->functions().nccl_last_error(communicator_);
    throw DeviceCallError(std::string(what) + " failed: " + pool_->functions().nccl_error(result) +
                          (last.empty() ? "" : " (" + last + ")"));
}

}  // namespace adaptra
