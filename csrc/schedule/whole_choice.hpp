// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "search.hpp"

namespace adaptra {

// `search` that also finds how many backwards each stage had better run whole. With `may_split` false, all of them.
SearchResult search_any_split(const Problem& problem, bool may_split, double bound, std::int64_t budget);

}  // namespace adaptra
