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

// When a search ends: once a schedule takes at most `gap` more than `bound` (0.01: 1%), or `budget` actions have been
// simulated.
struct Goal {
    double bound = 0.0, gap = 0.0;
    std::int64_t budget = 0;
};

// Looks for the orders of least makespan within the caps, among equals those of least memory; the same problem and goal
// always give the same orders. `known`: complete orders to start from, besides stock's; their backwards are split or
// joined as `split` says. A long search with combined actions and several chunks tries other groups of micro-batches, too,
// than the largest of at most one per stage that the caps have room for.
SearchResult search(const Problem& problem, const Split& split, const std::vector<Orders>& known, const Goal& goal);

}  // namespace adaptra
