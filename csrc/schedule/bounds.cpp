// SPDX-License-Identifier: Apache-2.0
#include "bounds.hpp"

namespace adaptra {

Bound lower_bound(const Problem& problem) {
    Bound best{0.0, "stage", 0};
    double head = 0.0;
    for (int stage = 0; stage < problem.stages; ++stage) {
        double work = 0.0;
        for (int chunk = 0; chunk < problem.chunks; ++chunk) {
            const int row = stage * problem.chunks + chunk;
            work += problem.forward[row] + problem.backward[row];
        }
        const double seconds = head + problem.micro_batches * work;
        if (seconds > best.seconds) best = {seconds, "stage", stage};
        head += problem.forward[stage * problem.chunks] + problem.to_next[stage].latency + problem.to_next[stage].occupancy;
    }
    return best;
}

}  // namespace adaptra
