// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "pipeline.hpp"

namespace adaptra {

// When the actions of a schedule run, and how long the longest path from each to the end of the iteration is: what
// Replay finds, kept up to date while single actions move. Sends never block.
class Timing {
public:
    using Times = std::vector<std::vector<double>>;  // [stage][position]

    // What is known of an action before any order is. A slot is a place for a forward, a backward (whole or of the
    // input) or a weight gradient; no schedule has two actions for one.
    struct Node {
        double seconds = 0.0, taken = 0.0;       // activations taken; below 0: given back
        double occupancy = 0.0, latency = 0.0;   // of its message
        int slot = -1, successor = -1;           // slot that the message is for; -1: none
        int link = -1, target = -1, source = -1;  // stages of the successor and of what the action waits for
    };

    explicit Timing(const Problem& problem);

    // The makespan of complete orders; kNever if they deadlock: then nothing else is known.
    double run(const Orders& orders);
    // The same once one stage's actions at `low` to `high` have changed places since the last run: of the others, those
    // that start before or are over after any of them stay as they were. To take a deadlock back, the same again with the
    // orders as they were.
    double run_moved(const Orders& orders, int stage, int low, int high);

    const Node& node(Code code, int stage) const {
        return nodes_[static_cast<std::size_t>(stage) * codes_ + (code >> kCodeShift) * 4 + kind_of(code)];
    }
    const Times& start() const { return start_; }
    const Times& end() const { return end_; }
    const Times& left() const { return left_; }  // from the start of an action to the end of the iteration
    // Seconds of what runs as one from this code on; `behind`: the code after it.
    double unit_seconds(int stage, Code code, Code behind) const {
        return unit_size(code) == 2 ? problem_->combined_seconds(stage, code, behind) : node(code, stage).seconds;
    }
    // Part of those after which messages leave.
    double share_sent(Code code) const { return unit_size(code) == 2 ? problem_->combined_sends_at : 1.0; }
    // When its message is there; 0 where none is sent for it.
    double arrival(const Node& node) const { return arrival_[node.slot]; }
    // What remains after the action on the way through its message.
    double left_after(const Node& node) const {
        return node.successor < 0 ? 0.0 : node.occupancy + node.latency + left_of_[node.successor];
    }
    std::int64_t simulated_actions() const { return simulated_; }

private:
    double run_from_here(const Orders& orders);
    void advance(const Order& order, int stage);
    void advance_backwards(const Order& order, int stage);
    bool recall(const Node& sender, const std::vector<double>& found);
    void wake(int stage);

    const Problem* problem_;
    std::vector<Node> nodes_;  // [stage][code]
    std::size_t codes_ = 0;
    Times start_, end_, left_;
    std::vector<double> arrival_, left_of_;          // [slot]
    std::vector<double> link_free_, sent_, sent_left_;  // the link's after a message: at the moment, and [slot]
    std::vector<int> links_out_;                     // [stage]: how many lead from it
    std::vector<int> first_, last_;                  // [stage]: positions to run again: from, and up to before
    std::vector<int> position_, pending_;
    std::vector<char> is_pending_;
    std::int64_t simulated_ = 0, looked_at_ = 0;  // looked_at_: before each move, counted as simulated
};

}  // namespace adaptra
