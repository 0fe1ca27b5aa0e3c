// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "pipeline.hpp"

namespace adaptra {

// From when to when, at least, a micro-batch holds `size` of what a chunk of a stage keeps for it: seconds since the start
// of its F in the last chunk there.
struct Holding {
    double from, until, size;
};

// How many micro-batches the cap of a stage lets through, where more than one chunk holds something of each.
class Waves {
public:
    // `holdings`: of a micro-batch, with the least seconds that any takes.
    Waves(const std::vector<Holding>& holdings, double cap);

    // Least seconds from the start of the first F of the first chunk to that of F number `index` of the last.
    double delay(int index) const;

private:
    // Moments `period` apart: each micro-batch holds at least `held` at them together, if it starts no less than
    // shortfall[i] seconds before the last of n moments, i being n or the last index.
    struct Comb {
        double period = 0.0, held = 0.0;
        std::vector<double> shortfall;
    };

    Comb comb_of(const std::vector<Holding>& holdings, double period) const;

    double cap_, path_;
    std::vector<Comb> combs_;
};

// The waves of a stage, for `elapsed`: least seconds from a gradient's arrival to the end of its I, as tables have them.
Waves waves_of(const Problem& problem, int stage, const std::vector<double>& elapsed);

}  // namespace adaptra
