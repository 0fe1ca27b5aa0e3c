// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "routed.hpp"

namespace adaptra {

struct RoutedBound {
    double seconds = 0.0;
    int stage = 0;
};

// No choice of cells and orders takes less, in or out of the caps. With `split` false: none of whole backwards.
RoutedBound routed_bound(const RoutedProblem& problem, bool split);

}  // namespace adaptra
