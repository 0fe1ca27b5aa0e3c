// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "pipeline.hpp"

namespace adaptra {

// What a stage runs when sends and receives block: codes of actions and, below 0, calls. ~call has these bits set for
// what the call sends and receives at once.
enum CallBits : int { kSendNext = 1, kSendPrevious = 2, kReceiveNext = 4, kReceivePrevious = 8 };

// Replays such programs. A transfer completes, for both sides, at max(sent + occupancy + latency, receive posted), and
// a call returns when all its transfers have; the n-th receive from a link takes the n-th message sent on it.
class BlockingReplay {
public:
    explicit BlockingReplay(const Problem& problem) : problem_(problem) {}

    // Returns the makespan, or kNever if the programs wait on each other for ever.
    double run(const Orders& programs);

    int position(int stage) const { return static_cast<int>(position_[stage]); }
    std::vector<std::vector<double>>& start() { return start_; }
    std::vector<std::vector<double>>& end() { return end_; }

private:
    struct Transfer {
        double delivered = kNever;
        double posted = kNever;
        double completed() const { return std::max(delivered, posted); }
    };
    // Messages from one stage in one direction of travel: activations to the next, gradients to the previous one.
    struct Channel {
        std::vector<Transfer> transfers;
        std::size_t sent = 0, received = 0;
    };
    struct Waited {
        int channel;
        std::size_t index;
    };

    bool advance(const Order& program, int stage);
    void post(int stage, int call);
    void send(int stage, bool next);
    void receive(int stage, bool from_next);
    static Transfer& at(Channel& channel, std::size_t index);

    const Problem& problem_;
    std::vector<Channel> channels_;  // [2 * stage]: to the next stage, [2 * stage + 1]: to the previous one
    std::vector<double> link_free_, now_;
    std::vector<std::size_t> position_;
    std::vector<std::vector<Waited>> waiting_;  // [stage]: transfers of the call at hand
    std::vector<std::vector<double>> start_, end_;
};

}  // namespace adaptra
