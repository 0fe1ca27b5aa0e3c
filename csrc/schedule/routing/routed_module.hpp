// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace adaptra {

// Adds what routes micro-batches between replicas to the Python face of the native core.
void add_routing(pybind11::module_& module);

}  // namespace adaptra
