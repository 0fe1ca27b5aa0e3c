// SPDX-License-Identifier: Apache-2.0
// What Python hands in, checked before it is computed with: sizes and codes become indices that nothing checks again.
#pragma once

#include "pipeline.hpp"

namespace adaptra {

// Throws std::invalid_argument unless all tables have the sizes that the counts say, every action has a code, and the
// seconds of all actions and messages together are a finite number.
void check_problem(const Problem& problem);

// The smallest and the largest code, 0 where there is none.
struct CodeRange {
    Code least = 0, greatest = 0;
};
CodeRange range_of(const Orders& orders);

// Throws std::invalid_argument unless there is one order per stage, and every code is of an action of the problem or
// at least `least`.
void check_orders(const Problem& problem, const Orders& orders, CodeRange range, Code least = 0);

}  // namespace adaptra
