// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../replay.hpp"
#include "routed.hpp"

namespace adaptra {

// Replays fixed orders of cells with sends that never block.
class RoutedReplay {
public:
    explicit RoutedReplay(const RoutedProblem& problem) : problem_(problem) {}

    // Returns the makespan, or kNever when the orders deadlock: then `position(cell)` is the action that waits.
    double run(const Hosts& hosts, const Orders& orders);

    // Longest time from the start of each action to the end of the iteration, by `slot`; the orders are complete.
    void remaining(const Hosts& hosts, const Orders& orders, Urgency& left) const;

    int position(int cell) const { return position_[cell]; }
    const Times& start() const { return start_; }
    const Times& end() const { return end_; }

private:
    const RoutedProblem& problem_;
    std::vector<int> position_;
    Times start_, end_;
};

}  // namespace adaptra
