// SPDX-License-Identifier: Apache-2.0
// Python face of single slots, for wires whose hardware moves the bytes: where slots are, claiming and taking them.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "ring.hpp"

namespace adaptra {

// Adds the methods to `ring`; those that wait do so without the GIL.
void define_slot_access(pybind11::class_<Ring, std::shared_ptr<Ring>>& ring);

}  // namespace adaptra
