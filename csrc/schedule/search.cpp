// SPDX-License-Identifier: Apache-2.0
#include "search.hpp"

#include "dispatch.hpp"

namespace adaptra {

SearchResult search(const Problem& problem, bool split, double bound, std::int64_t budget) {
    SearchResult best;
    const int group = largest_group(problem);
    if (group == 0) return best;
    Dispatcher dispatcher(problem);
    for (double patience : {0.0, 1.0, 0.5}) {
        Policy policy;
        policy.split = split;
        policy.cap = problem.cap;
        policy.group = group;
        policy.weight_patience = patience;
        policy.forward_patience = patience;
        const double makespan = dispatcher.run(policy);
        best.simulated_actions += problem.slots() * 3;
        if (makespan < best.makespan) {
            best.makespan = makespan;
            best.orders = dispatcher.orders();
        }
        if (best.makespan <= bound || best.simulated_actions >= budget) break;
    }
    return best;
}

}  // namespace adaptra
