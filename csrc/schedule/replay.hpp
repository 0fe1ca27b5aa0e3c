// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "pipeline.hpp"

namespace adaptra {

// Replays fixed orders with sends that never block. One object keeps its memory from run to run.
class Replay {
public:
    explicit Replay(const Problem& problem) : problem_(problem) {}

    // Returns the makespan, or kNever when the orders deadlock: then `position(stage)` is the action that waits.
    double run(const Orders& orders);

    int position(int stage) const { return position_[stage]; }
    const std::vector<std::vector<double>>& start() const { return start_; }
    const std::vector<std::vector<double>>& end() const { return end_; }

private:
    // Runs `stage` until it must wait.
    void advance(const Order& order, int stage);
    double ready(Kind kind, int virtual_stage, int micro_batch) const;

    const Problem& problem_;
    Messages messages_;
    std::vector<int> position_;
    std::vector<double> free_;
    std::vector<std::vector<double>> start_;
    std::vector<std::vector<double>> end_;
    std::vector<int> pending_;
    std::vector<char> is_pending_;
};

}  // namespace adaptra
