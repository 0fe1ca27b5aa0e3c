// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "pipeline.hpp"

namespace adaptra {

struct Bound {
    double seconds = 0.0;
    std::string kind;  // "stage", "link", "memory" or "path"
    int place = 0;     // stage, or Problem link index
};

// A makespan that no schedule within the caps can beat, whatever its orders, split or not.
Bound lower_bound(const Problem& problem);

}  // namespace adaptra
