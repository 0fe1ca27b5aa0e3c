// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "search.hpp"

namespace adaptra {

// `search` that also finds which stages had better not split their backwards. With `may_split` false, none does.
SearchResult search_any_split(const Problem& problem, bool may_split, const std::vector<Orders>& known,
                              const Goal& goal);

}  // namespace adaptra
