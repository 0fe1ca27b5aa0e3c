// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "routed_bound.hpp"
#include "routed.hpp"

namespace adaptra {

// How a routing is dispatched.
struct Manner {
    double ahead = 0.0;  // forwards beyond 1F1B's that a cell may hold; kNever: as many as its cap allows
    bool own_first = false;      // all its own micro-batches before others', not only among those of one number
    bool forward_first = false;  // as many forwards as it may hold before a backward, as 1F1B
    bool split = true;
};

struct RoutedResult {
    double period = kNever;
    Hosts hosts;
    Orders orders;
    Times start, end;
    int moved = 0;
    Manner manner;
};

struct RoutedPlan {
    RoutedResult best;
    double present = kNever;  // period of the present routing, planned with as much care as the others at first
    bool kept = false;        // whether the best is the present routing, for none gains enough
    std::int64_t simulated_actions = 0;
};

// The best routing and orders found within `budget` simulated actions, or after one dispatch. `present`, where it is not
// empty, is kept unless another routing takes less than its period by a share of `least_gain`.
RoutedPlan plan_routed(const RoutedProblem& problem, bool split, const Hosts& present, double least_gain, double bound,
                       std::int64_t budget);

}  // namespace adaptra
