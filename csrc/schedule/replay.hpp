// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "pipeline.hpp"

namespace adaptra {

// One number per action, by virtual stage and micro-batch. B and I share a place: no schedule has both.
struct Urgency {
    std::vector<double> forward, backward, weight;
};

// Replays fixed orders with sends that never block. One object keeps its memory from run to run.
class Replay {
public:
    using Times = std::vector<std::vector<double>>;  // [stage][position]

    explicit Replay(const Problem& problem) : problem_(&problem) {}

    // Returns the makespan, or kNever when the orders deadlock: then `position(stage)` is the action that waits.
    double run(const Orders& orders);

    // Longest time from the start of each action to the end of the iteration when these (deadlock-free, complete) orders
    // run: an action's slack is the makespan less this, less its start.
    void remaining(const Orders& orders, Urgency& left);

    // When the last run had what the action of `stage` waits for.
    double arrival(Code code, int stage) const {
        const int virtual_stage = problem_->virtual_stage(stage, problem_->chunk_in(code));
        return messages_.ready(*problem_, kind_of(code), virtual_stage, problem_->micro_batch_in(code));
    }

    int position(int stage) const { return position_[stage]; }
    Times& start() { return start_; }
    Times& end() { return end_; }

private:
    // Runs `stage` until it must wait.
    void advance(const Order& order, int stage);
    void advance_backwards(const Order& order, int stage, Urgency& left);

    const Problem* problem_;
    Messages messages_;
    std::vector<int> position_;
    std::vector<double> free_;
    Times start_, end_;
    std::vector<int> pending_;
    std::vector<char> is_pending_;
};

}  // namespace adaptra
