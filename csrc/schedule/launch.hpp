// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device.hpp"
#include "replay.hpp"

namespace adaptra {

// Finds the order of all actions by which stages post receives (see launch_order.py), and what orders take then.
//
// Actions are ordered by their expected ends (combined ones by when their messages leave). Then every receive is posted
// before the action during which its message is made, if not earlier, so no transfer waits for its receive, and with
// separate queues the device replay is the ordinary one, unless messages of combined actions leave before their ends.
// In a shared queue a receive holds up the action behind it until the link's previous message has arrived. So there an
// action that makes a message comes later, behind the one that its receiver runs meanwhile, if posting the receive
// before that would hold it up for longer than posting it afterwards delays the transfer. Ends are expected as if
// nothing were held up at first, then as replayed with the order so found, while that helps.
class Launch {
public:
    explicit Launch(const Problem& problem);

    // Returns the makespan, or kNever when the orders deadlock: then `position(stage)` is the action that waits.
    double run(const Orders& orders);

    const Ranks& ranks() const { return ranks_; }
    int position(int stage) const { return expected_.position(stage); }
    Replay::Times& start() { return device_.start(); }
    Replay::Times& end() { return device_.end(); }

private:
    Replay::Times made(const Orders& orders, const Replay::Times& start, Replay::Times end) const;
    void order(const Orders& orders, const Replay::Times& start, const Replay::Times& end, Ranks& ranks);
    int held_up(const Orders& orders, const Replay::Times& start, const Replay::Times& end, int stage) const;
    void append_unit(const Orders& orders, const Replay::Times& end, int stage, Ranks& ranks);
    void append(const Orders& orders, const Replay::Times& end, int stage, Ranks& ranks);

    const Problem& problem_;
    const Problem lasting_;  // where no action takes no time, so that what needs another ends later
    Replay expected_;
    DeviceReplay device_, lasting_device_;
    Ranks ranks_, found_;
    std::vector<int> position_;
    int next_rank_ = 0;
    std::vector<double> link_free_;  // [link]: when it has carried what was appended
    std::vector<char> activation_made_, gradient_made_;
};

}  // namespace adaptra
