// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "pipeline.hpp"
#include "replay.hpp"

namespace adaptra {

// [stage][position]: the place of each action in one order of all actions of a pipeline.
using Ranks = std::vector<std::vector<int>>;

// Replays fixed orders as GPUs run them over rendezvous links. Each stage has a stream for its computation, and one for
// either end of each such link. Its host issues, far ahead, before each action the receives of what comes earlier in the
// order of all actions, then the action, then its send. A receive waits for the computation issued before it, an action
// for its message, a send for its action. A transfer starts when its send and its receive have, and ends for both at
// once. With a shared queue, what a stage issues also starts in the order of issue: behind what its stream or its message
// holds up, everything waits. A serial one starts nothing before what was issued in front of it has ended. Messages over other links are not in the queue: the host waits for them.
class DeviceReplay {
public:
    explicit DeviceReplay(const Problem& problem) : problem_(problem) {}

    // Returns the makespan. The orders must not deadlock, and the ranks must respect what actions need of each other.
    double run(const Orders& orders, const Ranks& ranks);

    Replay::Times& start() { return start_; }
    Replay::Times& end() { return end_; }

private:
    // A rendezvous link: its n-th send meets its n-th receive.
    struct Channel {
        int source = -1, target = -1;
        std::vector<int> made_at;          // [message]: position of its action in the source's order
        std::vector<double> sent, posted;  // [message]: when its ends started
        std::vector<double> arrived;       // [message]: when both ended
        std::size_t carried = 0;
        double free = 0.0;  // when the latest of them arrived
    };
    struct Stage {
        int position = 0;
        int owed = 0;            // actions right before whose sends are not issued yet
        double free = 0.0;       // end of its latest action
        double sent = 0.0;       // when that one's messages leave
        double queue = 0.0;      // from when on its queue can start what comes next
        const Channel* last = nullptr;  // of a serial queue: the transfer that it issued last,
        std::size_t last_index = 0;     // and which of that link's it is
    };

    void reset(const Orders& orders);
    void advance(int stage);
    double arrival(Code code, int stage) const;
    bool post_receives(int stage);
    bool send(int stage);
    bool clear(Stage& state) const;
    bool begin(Channel& channel, std::vector<double>& starts, double ready, Stage& state);
    void carry(Channel& channel);
    void wake(int stage);

    const Problem& problem_;
    const Orders* orders_ = nullptr;
    const Ranks* ranks_ = nullptr;
    Messages messages_;
    std::vector<Channel> channels_;  // [link]
    std::vector<Stage> stages_;
    std::vector<int> pending_;
    std::vector<char> is_pending_;
    Replay::Times start_, end_;
};

}  // namespace adaptra
