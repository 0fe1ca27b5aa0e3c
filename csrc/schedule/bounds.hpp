// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "pipeline.hpp"
#include "replay.hpp"

namespace adaptra {

struct Bound {
    double seconds = 0.0;
    std::string kind;  // "stage", "link", "memory" or "path"
    int place = 0;     // stage, or index of one of the problem's links
};

// Least time from the start of each action to the end of the iteration, in any schedule within the caps that combines
// nothing.
Urgency remaining_time(const Problem& problem);

// A makespan that no schedule within the caps can beat, whatever its orders, split or not.
Bound lower_bound(const Problem& problem);

}  // namespace adaptra
