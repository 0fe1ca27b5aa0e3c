// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace made_up {

constexpr int kDevices = 2;   // of one host
constexpr int kFirstBus = 1;  // PCI bus of the first

// A point in a stream.
class Point {
public:
    void set();
    bool reached();
    void wait();

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool reached_ = false;
};

// Works in order, each begun when that before it is done, by a thread of the stream's own: as many hardware queues as
// streams.
class Stream {
public:
    explicit Stream(int of_device);
    ~Stream();

    // Blocks while as many works as the launch queue holds are not done. `kind`: a letter, for `madeUpCudaWorks`.
    void put(char kind, std::function<void()> work);
    bool idle();
    void wait_until_idle();

    const int device;

private:
    void run();

    const std::size_t depth_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> works_;
    bool ends_ = false;
    std::thread worker_;
};

Stream* stream_at(cudaStream_t handle);
int device();

// Of a device, by the number that the driver and the runtime have for it in common.
int attribute(int number);

// Null where there is none of that name.
void* driver_function(const char* name);

}  // namespace made_up
