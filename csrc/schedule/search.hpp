// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "dispatch.hpp"

namespace adaptra {

struct SearchResult {
    double makespan = kNever;  // kNever: no schedule fits the caps
    Orders orders;
    std::int64_t simulated_actions = 0;
};

// Looks for the orders of least makespan within the caps, among equals those of least memory. Stops when `budget`
// actions have been simulated or `bound` is reached; the same problem and budget always give the same orders. `known`:
// complete orders to start from, besides stock's; their backwards are split or joined as `split` says.
SearchResult search(const Problem& problem, const Split& split, const std::vector<Orders>& known, double bound,
                    std::int64_t budget);

}  // namespace adaptra
